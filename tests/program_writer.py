"""Writes random programs: a seed determines the source of a function with regions, which runs with and without them.

`source(seed)` is Python source that runs by `exec`, or in the folder of the tests. The functions that it imports, and
calls in its last lines for the comparison, are in `programs.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

DEPTH = 3  # of nested functions, each of which may be a region, and may be called by a transform


def several(table: str) -> list[str]:
    """The entries of a table below."""
    return [text.strip() for line in table.strip().splitlines() for text in line.split(" | ")]


# Expressions of {a} and {b}, matrices of one size, that make a third one. These save tensors for their derivatives.
SAVING = several("""
    {a}.sin() | {a}.tanh() | {a}.sigmoid() | ({a} * 0.3).exp() | {a}.softmax(-1) | {a}.relu() | F.gelu({a}) | {a} * {b}
    {a} @ {b} * 0.3 | {a} @ {b} * 0.3 | torch.einsum("ij,kj->ik", {a}, {b}).tanh() | F.linear({a}, {b}, {a}[0]).tanh()
    torch.bmm({a}[None], {b}[None])[0].tanh() | torch.addmm({a}, {b}, {a}).sin() | torch.where({a} > 0, {a}, {b}.sin())
    {a}.sort(1).values | {a}.max(1).values[:, None] * {b} | {a}.gather(1, {b}.detach().argsort(1)) | {a}[[2, 0, 0]]
    F.layer_norm({a}, (3,), {b}[0]) | F.scaled_dot_product_attention({a}[None], {b}[None], {a}[None])[0]
    F.conv2d({a}[None, None], {b}[None, None], padding=1)[0, 0].tanh() | {a} / ({b}.norm() + 1) | {a}.cumsum(0).tanh()
    torch.cat([{a}, {b}.sin()])[1:4] | (lambda s, c: s * c)(*SineAndCosine.apply({a})) | {a} * {b}.detach().tanh()
    torch.stack([{a}.sin(), {b}]).prod(0).tanh()
    {a} * torch.tensor([1.0, -2.0, 0.5]).double() | {a}.logsumexp(0) * {b}
    {a} * torch.arange(3.0).double() | {a}.split(2)[0].exp().tanh().sum(0) * {b} | {a} * {b}.sum().sin()
    torch.outer({a}[0], {b}[:, 1]).tanh() | F.normalize({a}) | {a}.index_select(1, torch.tensor([2, 0, 1])) * {b}
""")
# These save nothing.
LINEAR = several("""
    {a} + {b} | {a} - {b} * 0.5 | {a} * 0.5 | {a} * 1 | {a}.clone() | {a}.flip(0)
    {a}.roll(1, 0) | {a}.tril() + {b}.triu()
    torch.stack([{a}[0], {b}[1], {a}[2]]) | {a}.sum(0).expand(3, 3) * 0.5
    {a}.mean() + {b} | torch.cat([{a}[1:], {b}[:1]])
    {a}.t().contiguous() | torch.zeros_like({a}) + {b} | -{a} | {a}.detach() * 2
""")
RANDOM = several("""
    F.dropout({a}, 0.4) | {a} * torch.rand(3, 3).double() | {a} + torch.randn_like({b})
    F.dropout({a}, 0.4).sin() * {b}
    {a} * torch.bernoulli(torch.full((3, 3), 0.5).double()) | {a} * torch.empty(3, 3).double().uniform_()
    {a} * torch.rand(3, generator=GENERATOR).double() | {a} * random.random() | {a} * float(np.random.rand())
    F.rrelu({a}, 0.1, 0.3, training=True) * 1.5 | F.alpha_dropout({a}, 0.3, training=True)
""")
VIEWS = several("""
    {a}.t() | {a}.view_as({a}) | {a}[:] | {a}.transpose(0, 1) | {a}.unsqueeze(0)[0] | {a}.reshape(9).reshape(3, 3)
    {a}.detach() | {a}.as_strided((3, 3), (3, 1)) | {a}.flatten().unflatten(0, (3, 3)) | {a}.real | {a}.expand(3, 3)
    {a}.squeeze() | {a}.unbind(0)[0].expand(3, 3) * 1 | {a}.swapaxes(0, 1)[:3]
""")
IN_PLACE = several("""
    {a}.mul_(0.5) | {a}.add_({b}) | {a}[0] = {b}[1] | {a}[:, 1] *= 2 | {a}[1].add_({b}[0])
    {a}.t().mul_(0.5) | {a}.view(-1)[::2].mul_(2) | {a}.copy_({b}) | {a} += {b} | {a}.zero_() | {a}.fill_(0.5)
    {a}.masked_fill_({b} > 0, 0.1) | {a}.index_add_(0, torch.tensor([0, 2]), {b}[:2]) | {a}.detach().add_(0.5)
    {a}.scatter_(0, torch.tensor([[0, 2, 1]]), {b}[:1]) | {a}.fill_diagonal_(0.5) | torch._foreach_add_([{a}], 0.5)
    {a}.sin_() | {a}.tanh_() | {a}.sigmoid_() | {a}.relu_() | {a}.clamp_(max=1).exp_()
    {a}.mul_({b}) | {a}.addcmul_({b}, {b})
    F.dropout({a}, 0.4, inplace=True) | {a}.detach_() | F.relu({a}, inplace=True) | {a}.uniform_() | {a}.t_()
""")
READ_BY_ITS_DERIVATIVE = re.compile(r"(tanh|sigmoid|softmax|relu|exp|clamp|dropout|clone)_?\(|Sine|where|norm")
# Calls of {f}, a function of two matrices: directly or by a transform.
CALLS = {
    "call": "{f}({a}, {b})",
    "grad": "grad(lambda p, q: {f}(p, q).sum())({a}, {b})",
    "grad, captured": "grad(lambda p: {f}(p, {b}).sum())({a})",
    "grad, both": "added(grad(lambda p, q: {f}(p, q).sin().sum(), argnums=(0, 1))({a}, {b}))",
    "grad, aux": "added(grad(lambda p, q: (lambda r: (r.cos().sum(), r))({f}(p, q)), has_aux=True)({a}, {b}))",
    "vjp": "added(vjp({f}, {a}, {b})[1]({a}.cos()))",
    "vjp twice": "(lambda r, pull: pull(r)[0] + pull({b})[1])(*vjp({f}, {a}, {b}))",
    "jvp": "added(jvp({f}, ({a}, {b}), ({b}, {a}.cos())))",
    "jvp, one": "jvp(lambda p: {f}(p, {b}), ({a},), ({b},))[1]",
    "jacrev": "jacrev({f})({a}, {b}).sum((0, 1))",
    "jacfwd": "jacfwd({f}, argnums=1)({a}, {b}).sum((0, 1))",
    "vmap": "vmap({f}, randomness='different')(pair({a}), pair({b})).sum(0)",
    "vmap, one": "vmap({f}, (0, None), randomness='different')(pair({a}), {b}).sum(0)",
    "vmap, last": "vmap({f}, (None, 2), randomness='different')({a}, pair({b}, 2)).sum(0)",
    "vmap, captured": "vmap(lambda p: {f}(p, {b}), randomness='same')(pair({a})).sum(0)",
    "autograd": "differentiated({f}, {a}, {b})",
    "autograd, again": "differentiated_again({f}, {a}, {b})",
    "dual": "dual({f}, {a}, {b})",
}
FUNC = [name for name in CALLS if name.split(",")[0] in ("grad", "vjp", "vjp twice", "jvp", "jacrev", "jacfwd", "vmap")]
POLICIES = several("""
    policies.everything_saveable | policies.everything_saveable | policies.save_matmuls | policies.nothing_saveable
    policies.save_matmuls_without_batch_dims | ~policies.save_matmuls | policies.save_only_these_names("h", "a*")
    policies.save_anything_except_these_names("h") | policies.save_any_names_but_these("h")
    policies.save_ops("aten.sin", "aten.mul", "aten.sigmoid_", "aten.index_select") | policies.save_if(chosen({n}))
    policies.save_if(chosen({n})) | ~policies.save_ops("aten.add", "aten.tanh")
    policies.save_ops("aten.mul_", "aten.copy_", "aten.add_", "aten.native_dropout", "aten.bernoulli_", "aten.clone")
    policies.save_attention | policies.save_convolutions
""")
OFFLOADING = several("""
    policies.save_if(chosen({n}, 5)) | policies.save_if(chosen({n}, 5))
    policies.offload(policies.save_if(chosen({n}))) | policies.offload(policies.save_matmuls)
    policies.save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded=["h"])
""")
OPTIONS = ["early_stop=False", "determinism_check='values'", "determinism_check='none'", "debug=True"]
RUNS = several("""
    no_grad | backward | backward | grad | twice | in parts | two calls | three calls
    double | double | triple | batched
    hooks around
""")


class Function:
    """The signature of a function: the form of its two matrices, and of the one or more that it returns."""

    def __init__(self, name: str, takes: str, gives: str) -> None:
        self.name, self.takes, self.gives = name, takes, gives

    @property
    def parameters(self) -> str:
        return {"two": "a, b", "a keyword": "a, *, b", "a tree": "tree, flag=True"}[self.takes]

    def call(self, a: str, b: str) -> str:
        """The source of a call, with all results of the function."""
        trees = f"{{'a': {a}, 'b': [{b}, None, 2.0, 'text']}}"
        return f"{self.name}({({'two': f'{a}, {b}', 'a keyword': f'{a}, b={b}'}).get(self.takes, trees)})"

    def one(self, a: str, b: str) -> str:
        """The source of a call whose result is one matrix."""
        call = self.call(a, b)
        return {"one": call, "two": f"added({call})", "a tree": f"{call}['h']"}[self.gives]

    @property
    def text(self) -> str:
        """The source of a function of two matrices that returns one."""
        return self.name if (self.takes, self.gives) == ("two", "one") else f"(lambda p, q: {self.one('p', 'q')})"


class Writer:
    """The writer of one program.

    Attributes:
        visible: the expressions that can be read in the current scope, the latest last.
        own: the visible expressions that the current function has made, which it may change in place.
        storage: a number for the storage of each expression; a view has the number of its base.
        needed: the storages that autograd or a region needs unchanged, so that a change in place would be an error.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.func = self.random.random() < 0.6  # otherwise it is plain autograd, and may have state
        self.draws = self.random.random() < 0.4
        self.lines: list[str] = []
        self.indent = 0
        self.left = self.random.randint(1, 14)  # statements
        self.count = 0
        self.storages = 0
        self.visible: list[str] = []
        self.own: list[str] = []
        self.storage: dict[str, int] = {}
        self.needed: set[int] = set()
        self.options = self.random.random() < 0.3

    # --- text -------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(head)
        self.indent += 1
        yield
        self.indent -= 1

    def number(self) -> int:
        self.count += 1
        return self.count

    def fresh(self) -> int:
        """The number of a new storage."""
        self.storages += 1
        return self.storages

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def any(self) -> str:
        """A random matrix, more often a recent one."""
        return self.visible[-1 - min(int(self.random.expovariate(0.4)), len(self.visible) - 1)]

    def two(self, text: str) -> str:
        """Fill matrices into a template. Autograd needs them unchanged from now on."""
        a, b = self.any(), self.any()
        self.needed |= {self.storage[a], self.storage[b]}
        return text.format(a=a, b=b)

    def add(self, name: str) -> None:
        self.visible.append(name)
        self.own.append(name)
        self.storage[name] = self.fresh()

    def new(self) -> str:
        return f"t{self.number()}"

    # --- statements -------------------------------------------------------------------------------------------------

    def saving(self) -> None:
        text = self.two(self.random.choice(RANDOM if self.draws and self.chance(0.25) else SAVING))
        name = self.new()
        self.line(f"{name} = {text}")
        self.add(name)
        if READ_BY_ITS_DERIVATIVE.search(text):
            self.needed.add(self.storage[name])

    def linear(self) -> None:
        name = self.new()
        self.line(f"{name} = " + self.random.choice(LINEAR).format(a=self.any(), b=self.any()))
        self.add(name)

    def view(self) -> None:
        name, base = self.new(), self.any()
        self.line(f"{name} = " + self.random.choice(VIEWS).format(a=base))
        self.visible.append(name)
        if base in self.own:
            self.own.append(name)
        self.storage[name] = self.storage[base]

    def in_place(self) -> None:
        free = [name for name in self.own if self.storage[name] not in self.needed]
        if not free or self.chance(0.1):
            self.linear()
            free = self.own[-1:]
        text = self.random.choice(
            [text for text in IN_PLACE if self.draws or ("uniform" not in text and "dropout" not in text)]
        )
        a, others = self.random.choice(free), self.visible
        text = text.format(a=a, b=self.random.choice([b for b in others if self.storage[b] != self.storage[a]] or [a]))
        self.line(text)
        if READ_BY_ITS_DERIVATIVE.search(text):
            self.needed.add(self.storage[a])

    def name(self) -> None:
        base, text = self.any(), self.random.choice(["h", "h", "a b", "other"])
        if self.chance(0.3):
            self.line(f'checkpoint_name({base}, "{text}")')
            return
        name = self.new()
        self.line(f'{name} = checkpoint_name({base}, "{text}")')
        self.visible.append(name)
        self.storage[name] = self.storage[base]

    def rebinding(self) -> None:
        """Rebind a variable, which earlier functions may have in their closures."""
        names = [name for name in self.own if name.isidentifier()]
        if names:
            name = self.random.choice(names)
            self.line(f"{name} = {name} * 0.5")
            self.storage[name] = self.fresh()

    def hook(self) -> None:
        if self.visible:
            self.line(f"hook({self.random.choice(self.visible)}, {self.random.choice([0.5, 1.5, -1.0])})")

    def without_grad(self) -> None:
        with self.block(
            f"with {self.random.choice(['torch.no_grad()', 'torch.no_grad()', 'torch.enable_grad()', 'packing()'])}:"
        ):
            self.saving()
            self.random.choice([self.saving, self.linear, self.in_place, self.view])()

    def module(self) -> None:
        kind = self.random.choice(
            ["LAYER(%s)", "LAYER(%s)", "REGION(%s)", "functional_call(LAYER, {'weight': %s}, (%s,))"]
        )
        args = [self.any() for _ in range(kind.count("%s"))]
        self.needed |= {self.storage[a] for a in args}
        name = self.new()
        self.line(f"{name} = {kind % tuple(args)}")
        self.add(name)

    def container(self) -> None:
        """A matrix in a list, a dictionary or an object."""
        number, base = self.number(), self.any()
        kind, read = self.random.choice([("[{}]", "[0]"), ("{{'w': {}}}", "['w']"), ("SimpleNamespace(w={})", ".w")])
        self.line(f"box{number} = {kind.format(base)}")
        self.visible.append(f"box{number}{read}")
        self.storage[f"box{number}{read}"] = self.storage[base]

    def loop(self) -> None:
        """A loop that makes a region in each iteration, which captures the loop's variable."""
        name, number = self.new(), self.number()
        a, b, c = self.any(), self.any(), self.any()
        self.needed |= {self.storage[a], self.storage[b], self.storage[c]}
        self.line(f"{name} = {a}")
        with self.block(f"for v{number} in ({b}, {c}):"):
            self.line(f"f{number} = remat(lambda p: (p * v{number}).tanh() @ v{number}{self.policy(', ')})")
            self.line(f"{name} = f{number}({name})")
        self.add(name)

    # --- functions --------------------------------------------------------------------------------------------------

    def policy(self, before: str = "") -> str:
        """The options of a region."""
        found = []
        if self.chance(0.65):
            found.append("policy=" + self.policy_itself())
        if self.options and self.chance(0.4):
            found.append(self.random.choice(OPTIONS))
        return before + ", ".join(found) if found else ""

    def policy_itself(self) -> str:
        """One policy or a combination of policies that save, or sometimes a policy that offloads."""
        tables = [OFFLOADING] if self.chance(0.15) else [POLICIES] * self.random.choice([1, 1, 1, 2])
        chosen = [self.random.choice(table).format(n=self.random.randint(0, 99)) for table in tables]
        return self.random.choice(["({} | {})", "({} & {})", "({} & ~{})"]).format(*chosen) if chosen[1:] else chosen[0]

    def function(self, under: frozenset[str], depth: int, region: bool) -> Function:
        """Write a function, which can read all visible matrices; `under` are the transforms that call it."""
        kinds = (
            self.random.choice(["two", "two", "a keyword", "a tree"]),
            self.random.choice(["one", "one", "two", "a tree"]),
        )
        made = Function(f"f{self.number()}", *kinds)
        outer = list(self.visible), list(self.own)
        if region:
            policy = self.policy()
            self.line(f"@remat({policy})" if policy or self.chance(0.2) else "@remat")
        with self.block(f"def {made.name}({made.parameters}):"):
            a, b = ("tree['a']", "tree['b'][0]") if made.takes == "a tree" else ("a", "b")
            a1, b1 = self.new(), self.new()
            self.line(f"{a1}, {b1} = {a}, {b}")
            self.visible += [a1, b1]
            self.own = []
            for name in (a1, b1):
                self.storage[name] = self.fresh()
                self.needed.add(self.storage[name])
            self.body(under, depth)
            last, other = self.visible[-1], self.any()
            self.line(
                {"one": f"return {last}", "two": f"return {last}, {other}"}.get(
                    made.gives, f"return {{'h': {last}, 'n': [{other}]}}"
                )
            )
        self.visible, self.own = outer
        return made

    def called(self, under: frozenset[str], depth: int) -> None:
        """A function and calls of it, direct or by transforms."""
        hows = [
            "call",
            "call",
            "autograd, again",
            *(FUNC if self.func else ["autograd", *(["dual"] if not under else [])]),
        ]
        if under & {"jacrev", "jacfwd"}:
            hows = [how for how in hows if "jac" not in how]  # nested jacobians take too long
        if "dual" in under:  # a recompute inside the level would enter it again, which torch can't
            hows = [how for how in hows if "autograd" not in how]
        hows = self.random.choices(hows, k=self.random.choice([1, 1, 2]))
        made = self.function(
            under | {word for how in hows for word in how.split(", ") if how != "call"}, depth + 1, self.chance(0.75)
        )
        for how in hows:
            a, b = self.any(), self.any()
            self.needed |= {self.storage[a], self.storage[b]}
            name = self.new()
            if how == "call" and made.gives == "two":
                other = self.new()
                self.line(f"{name}, {other} = {made.call(a, b)}")
                self.visible.append(other)
                self.storage[other] = self.fresh()
                self.needed.add(self.storage[other])
            else:
                self.line(
                    f"{name} = " + (made.one(a, b) if how == "call" else CALLS[how].format(f=made.text, a=a, b=b))
                )
            self.add(name)
            if how == "call" and self.chance(0.7):  # the result may be an argument itself
                self.needed.add(self.storage[name])

    def body(self, under: frozenset[str], depth: int) -> None:
        """Some statements; the last one makes the result."""
        kinds: Sequence = [
            *[self.saving] * 5, *[self.linear] * 3, *[self.view] * 2, *[self.in_place] * 3,
            self.name, self.name, self.hook,
            self.rebinding, self.container, self.loop,
        ]  # fmt: skip
        if not self.func:
            # Updates of statistics with tangents look to autograd like in-place changes of tensors that it saved.
            kinds = [*kinds, self.without_grad, *([self.module, self.module] if "dual" not in under else [])]
        for _ in range(self.random.randint(0, 3)):
            if depth < DEPTH and self.chance(0.3):
                self.called(under, depth)
            self.random.choice(kinds)()
            self.left -= 1
            if self.left < 0:
                break
        if depth < DEPTH and self.left > 0 and self.chance(0.7):
            self.called(under, depth)
        name = self.new()
        self.line(f"{name} = {self.any()} + {self.any()} * 0.5" if self.chance(0.7) else f"{name} = {self.visible[-1]}")
        self.visible.append(name)
        self.storage[name] = self.fresh()

    def program(self) -> str:
        self.lines += ["from programs import *", "", ""]
        with self.block("def make():"):
            for name in ("w1", "w2", "constant"):
                self.line(f"{name} = tensor({len(self.visible) + 2}, grad={name != 'constant'})")
                self.visible.append(name)
                self.storage[name] = self.fresh()
                self.needed.add(self.storage[name])
            leaves = "[w1, w2]"
            if not self.func:
                self.line("LAYER = Layer()")
                self.line(f"REGION = remat(Layer(){self.policy(', ')})")
                leaves = "[w1, w2, *LAYER.parameters(), *REGION.parameters()], [*LAYER.buffers(), *REGION.buffers()]"
            region = self.chance(0.3)
            main = self.function(frozenset(), 0, region)
            self.line(f"return {main.text}, {leaves}")
        run = self.random.choice(RUNS[:-1] if self.func else RUNS)
        # A region with a forward-mode level inside uses the lowering for torch.func, which sums in another order.
        text = "".join(self.lines)
        exact = not (self.func or run in ("double", "triple", "batched") or "dual(" in text)
        self.lines += [
            "",
            "",
            f"compare(make, {run!r}, exact={exact})",
        ]
        if not (self.func or self.draws):
            # With tangents, calls of torch.func are executed without regions. torch never frees a result that a pack
            # hook returns unchanged, so each recompute of such a result would be counted.
            if self.chance(0.3) and "dual(" not in text and "packing(" not in text:
                self.lines.append("keeps_no_more(make)")
            # With `no_grad` parts, dead operations are recomputed too, and a wider policy may recompute more of them.
            if self.chance(0.3) and "no_grad" not in text and "differentiated" not in text:
                two = [self.random.choice(POLICIES).format(n=n) for n in (1, 2)]
                self.lines.append(f"recomputes_no_more(make, {two[0]}, {two[1]})")
        return "\n".join(self.lines) + "\n"


def source(seed: int) -> str:
    """The program of a seed."""
    text = Writer(seed).program()
    # Autograd saves the noise of `rrelu` before it is drawn, with arbitrary values.
    return text.replace("determinism_check='values'", "determinism_check='metadata'") if "rrelu" in text else text
