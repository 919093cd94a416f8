"""Writes random programs: `source(seed)` is the source of a seed's program, which runs by `exec`."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from . import alphabet
from .alphabet import CALLS, COSTS, DRAWS, FUNC, READ_BY_ITS_DERIVATIVE
from .compare import EXACT, OF_PARAMETERS, RUNS

DEPTH = 3  # of nested functions, each of which may be a region, and may be called by a transform
MOST = 24  # what nested transforms and regions may cost
REGION = 2  # how much longer a program takes with a region around it; nested ones recompute each other
TRANSFORMS = ("grad", "vjp(", "jvp(", "jac", "hessian", "linearize", "vmap", "dual(", "loop(", "differentiated")
HEAD = "".join(f"from random_programs.{name} import *\n" for name in ("toolbox", "compare")) + "\n\n"
# How a function takes two matrices: its parameters, the matrices in its body, and the arguments of a call.
TAKES = {
    "two": ("a, b", "a, b", "{a}, {b}"),
    "a keyword": ("a, *, b", "a, b", "{a}, b={b}"),
    "a tree": ("tree, flag=True", "tree['a'], tree['b'][0]", "{{'a': {a}, 'b': [{b}, None, 2.0, 'text']}}"),
}
# What it returns, made from its last matrix and another one, and how one matrix is made from a call.
GIVES = {
    "one": ("{last}", "{call}"),
    "two": ("{last}, {other}", "added({call})"),
    "a tree": ("{{'h': {last}, 'n': [{other}]}}", "{call}['h']"),
}


def cost(how: str) -> float:
    """How much longer a program takes with this transform."""
    return COSTS.get(how.split(",")[0], 2)


class Function(NamedTuple):
    """The source of a written function."""

    text: str  # as a function of two matrices that returns one
    call: str  # a call with {a} and {b}
    gives: str  # a key of GIVES


class Writer:
    """The writer of one program.

    Attributes:
        visible: the expressions that can be read in the current scope, the latest last.
        own: the visible expressions that the current function has made, which it may change in place.
        storage: a number for the storage of each expression; a view has the number of its base.
        needed: the storages that autograd or a region needs unchanged, so that a change in place would be an error.
        under: the transforms that call the current function.
        cost: how many times the current function runs, about.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.func = self.chance(0.65)  # otherwise the program runs under plain autograd
        self.draws = self.chance(0.3)
        self.options = self.chance(0.3)
        self.lines: list[str] = []
        self.indent = self.count = self.storages = 0
        self.left = self.random.randint(1, 7)  # statements
        self.visible: list[str] = []
        self.own: list[str] = []
        self.modules: list[str] = []
        self.storage: dict[str, int] = {}
        self.needed: set[int] = set()
        self.under: frozenset[str] = frozenset()
        self.cost = 1.0
        self.favorite = self.policy()

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

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def any(self) -> str:
        """A random matrix, more often a recent one."""
        return self.visible[-1 - min(int(self.random.expovariate(0.6)), len(self.visible) - 1)]

    def fill(self, text: str, **more: str) -> str:
        """Fill matrices into a template. Autograd needs them unchanged from now on."""
        a, b = self.any(), self.any()
        self.needed |= {self.storage[a], self.storage[b]}
        return text.format(a=a, b=b, n=self.random.randrange(100), **more)

    def see(self, name: str, base: str | None = None, own: bool = True) -> None:
        """Add a variable, which is a view of another if `base` is given; one that isn't `own` may not change."""
        self.storages += 1
        self.storage[name] = self.storages if base is None else self.storage[base]
        self.visible.append(name)
        if own if base is None else base in self.own:
            self.own.append(name)
        elif base is None:
            self.needed.add(self.storage[name])

    def let(self, text: str, base: str | None = None) -> str:
        """Assign an expression to a new variable."""
        name = f"t{self.number()}"
        self.line(f"{name} = {text}")
        self.see(name, base)
        return name

    @contextmanager
    def scope(self, *names: str, how: str = "call") -> Iterator[None]:
        """A function with these parameters, which a transform calls. What it makes isn't visible outside."""
        outer = list(self.visible), list(self.own), self.under, self.cost
        self.own = []
        for name in names:
            self.see(name, own=False)
        self.under, self.cost = self.under | {how.split(",")[0]}, self.cost * cost(how)
        yield
        self.visible, self.own, self.under, self.cost = outer

    def policy(self) -> str:
        """One policy or a combination of policies that save, or sometimes a policy that offloads."""
        if self.chance(0.4):
            return self.random.choice(alphabet.FEW).format(n=self.random.randrange(100))
        first, second = (self.random.choice(alphabet.POLICIES).format(n=self.random.randrange(100)) for _ in range(2))
        if self.chance(0.85) or any(word in first + second for word in ("offload", "budget", ", 5")):
            return first
        return self.random.choice(["({} | {})", "({} & {})", "({} & ~{})"]).format(first, second)

    def with_options(self, *arguments: str) -> str:
        """The arguments of a call that makes a region, and options."""
        found = list(arguments)
        if self.chance(0.75):
            found.append("policy=" + (self.favorite if self.chance(0.3) else self.policy()))
        if self.options and self.chance(0.4):
            found.append(self.random.choice(alphabet.OPTIONS))
        return ", ".join(found)

    def region(self, function: str) -> str:
        return f"remat({self.with_options(function)})"

    def expression(self, depth: int = 0) -> str:
        """An expression of the visible matrices, which may call transforms of functions written in it."""
        if depth < DEPTH and self.chance(0.2) and (hows := self.transforms()):
            how = self.random.choice(hows)
            return self.fill(CALLS[how], f=self.function_inline(how, depth + 1))
        tables = [alphabet.SAVING] * 6 + [alphabet.PRODUCTS] * 4 + [alphabet.NORMS, alphabet.LINEAR] * 2
        tables += [alphabet.INNER] * ("dual" not in self.under) + [alphabet.RANDOM] * 4 * self.draws
        tables += [alphabet.PLAIN] * 2 * (not self.func and not self.under - {"call"})
        return self.fill(self.random.choice(self.random.choice(tables)))

    def transforms(self) -> list[str]:
        """The transforms that can be called here."""
        hows = ["call", "call", "scan", "compat", "autograd, again", "vmap, captured"]
        if not self.modules:
            hows.append("checkpoint")  # repeats changes of state
        if self.func:
            hows += FUNC
        else:
            hows += ["autograd", "grad, a step", "jvp, one", *([] if self.under else ["dual"])]
        if "dual" in self.under:  # a recompute inside the level would enter it again, which torch can't
            hows = [how for how in hows if "autograd" not in how]
        if self.draws:  # jacobians can't be told that each row draws anew
            hows = [how for how in hows if "jac" not in how and how != "hessian"]
        return [how for how in hows if self.cost * cost(how) <= MOST]

    def function_inline(self, how: str, depth: int) -> str:
        """A function in an expression, which may be a region."""
        p, q = f"p{self.number()}", f"q{self.count}"
        with self.scope(p, q, how=how):
            of_module = self.modules and self.chance(0.4)
            body = f"{self.random.choice(self.modules)}({p})" if of_module else self.expression(depth)
            text = f"(lambda {p}, {q}: {body})"
        if self.cost * REGION > MOST or self.chance(0.7):
            return text
        return self.region(f"build({text})" if self.chance(0.5) else text)

    def assignment(self) -> None:
        text = self.expression()
        name = self.let(text)
        if READ_BY_ITS_DERIVATIVE.search(text):
            self.needed.add(self.storage[name])

    def view(self) -> None:
        base = self.any()
        self.let(self.random.choice(alphabet.VIEWS).format(a=base), base)

    def in_place(self) -> None:
        free = [name for name in self.own if self.storage[name] not in self.needed]
        if not free or self.chance(0.1):
            free = [self.let(self.random.choice(alphabet.LINEAR).format(a=self.any(), b=self.any()))]
        text = self.random.choice([text for text in alphabet.IN_PLACE if self.draws or not DRAWS.search(text)])
        a = self.random.choice(free)
        b = self.random.choice([b for b in self.visible if self.storage[b] != self.storage[a]] or [a])
        self.line(text.format(a=a, b=b))
        if READ_BY_ITS_DERIVATIVE.search(text):
            self.needed.add(self.storage[a])

    def name(self) -> None:
        base = self.any()
        text = f'checkpoint_name({base}, "{self.random.choice(["h", "h", "a b", "other"])}")'
        self.line(text) if self.chance(0.3) else self.let(text, base)

    def rebinding(self) -> None:
        """Rebind a variable, which earlier functions may have in their closures."""
        if names := [name for name in self.own if name.isidentifier()]:  # not an entry of a container
            name = self.random.choice(names)
            self.line(f"{name} = {name} * 0.5")
            self.see(name)

    def hook(self) -> None:
        self.line(f"hook({self.any()}, {self.random.choice([0.5, 1.5, -1.0])})")

    def with_context(self) -> None:
        contexts = ["no_grad()", "no_grad()", "enable_grad()", "autocast('cpu', torch.bfloat16)"]
        contexts = [f"torch.{text}" for text in contexts] + ["packing()"] * (not self.func and not self.modules)
        with self.block(f"with {self.random.choice(contexts)}:"):
            self.assignment()
            self.random.choice([self.assignment, self.in_place, self.view])()

    def container(self) -> None:
        """A matrix in a list, a dictionary or an object."""
        number, base = self.number(), self.any()
        kind, read = self.random.choice([("[{}]", "[0]"), ("{{'w': {}}}", "['w']"), ("SimpleNamespace(w={})", ".w")])
        self.line(f"box{number} = {kind.format(base)}")
        self.see(f"box{number}{read}", base)

    def regions_in_a_loop(self) -> None:
        """A region in each iteration, which captures the loop's variable."""
        number, a, b, c = self.number(), self.any(), self.any(), self.any()
        self.needed |= {self.storage[a], self.storage[b], self.storage[c]}
        name = self.let(a)
        with self.block(f"for v{number} in ({b}, {c}):"):
            self.line(f"f{number} = {self.region(f'lambda p: (p * v{number}).tanh() @ v{number}')}")
            self.line(f"{name} = f{number}({name})")

    def regions_of_one_code(self) -> None:
        """Regions of functions that a factory makes, which share their code."""
        for _ in range(self.random.randint(2, 3)):
            p, q = f"p{self.number()}", f"q{self.count}"
            with self.scope(p, q):
                steps = [f"lambda {p}, {q}: {self.expression(1)}" for _ in range(self.random.randint(1, 2))]
            self.let(self.fill("{f}({a}, {b})", f=self.region(f"build({', '.join(steps)})")))

    def module_call(self) -> None:
        kind = self.random.choice(["{m}({a})", "{m}({a})", "{m}({a})", "functional_call({m}, changed({m}), ({a},))"])
        self.let(self.fill(kind, m=self.random.choice(self.modules)))

    def function(self, how: str, depth: int, region: bool) -> Function:
        """Write a function, which can read all visible matrices."""
        name = f"f{self.number()}"
        takes = self.random.choice(["two", "two", "a keyword", "a tree"])
        gives = self.random.choice(["one", "one", "two", "a tree"])
        parameters, matrices, arguments = TAKES[takes]
        results, result = GIVES[gives]
        before, self.cost = self.cost, self.cost * (REGION if region else 1)
        if region:
            self.line(f"@remat({self.with_options()})")
        with self.block(f"def {name}({parameters}):"):
            a, b = f"t{self.number()}", f"t{self.number()}"
            self.line(f"{a}, {b} = {matrices}")
            with self.scope(a, b, how=how):
                self.body(depth)
                self.line("return " + results.format(last=self.visible[-1], other=self.any()))
        self.cost = before
        call = f"{name}({arguments})"
        text = f"(lambda p, q: {result.format(call=call.format(a='p', b='q'))})"
        return Function(name if (takes, gives) == ("two", "one") else text, call, gives)

    def called(self, depth: int) -> None:
        """A function and calls of it, direct or by transforms."""
        hows = ["call", "call", *self.transforms()]
        hows = self.random.choices(hows, k=self.random.choice([1, 1, 2]))
        made = self.function(max(hows, key=cost), depth + 1, self.chance(0.75))
        for how in hows:
            if how == "call" and made.gives == "two":
                names = [f"t{self.number()}", f"t{self.number()}"]
                self.line(f"{', '.join(names)} = {self.fill(made.call)}")
                for name in names:
                    self.see(name, own=False)
                continue
            name = self.let(self.fill(CALLS[how], f=made.text))
            if how == "call" and self.chance(0.7):  # the result may be an argument itself
                self.needed.add(self.storage[name])

    def body(self, depth: int) -> None:
        """Some statements; the last one makes the result."""
        kinds: Sequence = [
            *[self.assignment] * 8, *[self.view] * 2, *[self.in_place] * 3, self.name, self.name, self.hook,
            self.rebinding, self.container, self.regions_in_a_loop, self.regions_of_one_code, self.with_context,
            *[self.module_call] * 6 * bool(self.modules),
        ]  # fmt: skip
        for _ in range(self.random.randint(0, 3)):
            if self.left > 0:
                self.random.choice(kinds)()
                self.left -= 1
        self.assignment()
        if depth < DEPTH and self.left > 0 and self.cost * REGION < MOST and self.chance(0.6):
            self.called(depth)
        self.let(self.fill("{a} + {b} * 0.5") if self.chance(0.6) else self.visible[-1])

    def module(self, depth: int) -> str:
        """The source of a module."""
        if self.modules and self.chance(0.1):
            return self.random.choice(self.modules)
        if depth == 0 or self.chance(0.3):
            return self.random.choice(alphabet.MODULES).format(n=self.random.randrange(10))
        m, k = self.module(depth - 1), self.module(depth - 1)
        if self.chance(0.25):
            return f"nn.Sequential({m}, {k})"
        hows = [how for how in CALLS if how not in ("checkpoint", "dual") and cost(how) <= 4]
        calls = [CALLS[how].format(f="(lambda p, q: m(p))", a="x", b="x.cos()") for how in hows]
        return f"Apply(lambda x, m, k: {self.random.choice([*alphabet.BODIES, *alphabet.BODIES, *calls])}, {m}, {k})"

    def write_modules(self) -> None:
        for _ in range(self.random.randint(1, 2)):
            name = f"m{self.number()}"
            self.line(f"{name} = {self.module(self.random.choice([0, 1, 1, 2]))}")
            self.modules.append(name)
            if self.chance(0.5):
                numbers = [str(self.random.randrange(10)) for _ in range(self.random.randint(1, 3))]
                self.line(f"apply({self.with_options(name, *numbers)})")
            if self.chance(0.3):
                self.line(f"{name} = {self.region(name)}")
            if self.chance(0.1):
                self.line(f"{name} = copy.deepcopy({name})")
            if self.chance(0.1):
                self.line(f"{name}.eval()")

    def program(self) -> str:
        with self.block("def make():"):
            for name in ("w1", "w2", "constant"):
                self.line(f"{name} = tensor({len(self.visible) + 2}{', False' * (name == 'constant')})")
                self.see(name, own=False)
            if self.chance(0.5):
                self.write_modules()
            of_parameters = self.modules and self.chance(0.3)
            run = self.random.choice([*OF_PARAMETERS] if of_parameters else [*RUNS, *["backward"] * 3])
            self.cost = 4 if of_parameters else 1 if run in ("backward", "constant", "no_grad") else 2
            self.cost *= 2 if "Apply" in "".join(self.lines) else 1
            hows = self.outside()
            main = self.function("call", 0 if len(hows) < 2 else 1, self.chance(0.3)).text
            for how, region in hows:
                text = f"lambda p, q: {CALLS[how].format(f=main, a='p', b='q')}"
                main = f"f{self.number()}"
                self.line(f"{main} = {self.region(text) if region else text}")
            self.line(f"return {main}, [w1, w2], [{', '.join(self.modules)}]")
        return self.finished(run)

    def outside(self) -> list[tuple[str, bool]]:
        """The transforms of the whole function, the innermost first, and whether each is in a region."""
        found: list[tuple[str, bool]] = []
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 3, 4]) if self.func else 0):
            if hows := [how for how in self.transforms() if how in FUNC]:
                found.append((self.random.choice(hows), self.chance(0.35)))
                self.cost *= cost(found[-1][0]) * (REGION if found[-1][1] else 1)
        return found

    def finished(self, run: str) -> str:
        text = "\n".join(self.lines)
        if "rrelu" in text:  # autograd saves its noise before it is drawn, with arbitrary values
            text = text.replace('determinism_check="values"', 'determinism_check="metadata"')
        under = [word for word in TRANSFORMS if word in text]
        if under and run in ("hooks around", "in a direction"):  # torch.func can't run under hooks or in another level
            run = "backward"
        # The lowering for torch.func sums in another order, and so may a checkpoint in a checkpoint.
        exact = run in EXACT and not under
        options = f", exact={exact}"
        if run in OF_PARAMETERS and self.chance(0.4):
            options += f", around=dict({self.with_options()})"
        if DRAWS.search(text):
            text, options = (each.replace("preserve_rng_state=False", "early_stop=False") for each in (text, options))
        text = f"{HEAD}{text}\n\n\ncompare(make, {run!r}{options})\n"
        if exact and not self.modules and not self.draws and "checkpoint(" not in text:
            # A result that a pack hook returns unchanged is never freed by torch, and would be counted.
            if self.chance(0.5) and "packing" not in text:
                text += "keeps_no_more(make)\n"
            # With `no_grad` parts, dead operations are recomputed too, and a wider policy may recompute more of them.
            if self.chance(0.5) and "no_grad" not in text:
                one, other = self.random.sample(alphabet.POLICIES[:15], 2)
                text += f"recomputes_no_more(make, {one}, {other})\n".format(n=self.random.randrange(100))
        return text


def source(seed: int) -> str:
    """The program of a seed."""
    return Writer(seed).program()
