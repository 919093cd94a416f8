"""Regions inside and around saved-tensor hooks, where hooks are forbidden, and with hooks on gradients.

Each row of the table in ``docs/reference/saved_tensor_hooks.md`` is a check here, which runs under every policy below.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import ROOT, Wrap, assert_same, plain, rand, tensors
from cases import grad as gradients
from side_by_side import Runs
from surroundings import assert_as_before, surroundings
from torch import Tensor
from torch.autograd import grad, graph
from torch.autograd.graph import get_gradient_edge, increment_version, save_on_cpu

from benchmarks.measure import held_bytes
from remat import checkpoint_name, disable_remat, is_recomputing, policies, remat, saved_residuals
from remat._core import private
from remat._region.hooks import hooks_allowed, hooks_hidden
from remat.errors import MutationError, RematError

DOCS = ROOT / "docs" / "reference" / "saved_tensor_hooks.md"
POLICIES = {
    "nothing": None,
    "matmuls": policies.save_matmuls,
    "name": policies.save_only_these_names("hidden"),
    "everything": policies.everything_saveable,
}
DISABLED = r"'not in my house'\. Call them outside .* `remat.disable_remat\(\)`"
Build = Callable[[Wrap], Callable]
Check = Callable[[Wrap], Any]  # its argument makes a region
leaves = tensors((4, 4), (4, 4))


def block(x: Tensor, w: Tensor, inside: Callable = nullcontext) -> Tensor:
    hidden = checkpoint_name(x @ w, "hidden").tanh()
    with inside():
        hidden = (hidden @ w).sin()
    return hidden.exp() @ w


block_with = lambda context: lambda x, w: block(x, w, context)
noisy = lambda x, w: block(x, w) * torch.rand(4, dtype=x.dtype)
calls_func = lambda x, w: torch.func.grad(lambda x: (x @ w).sin().sum())(x.tanh()) @ w


def func_grad(fn: Callable, around: Callable = nullcontext) -> Tensor:
    x, w = leaves()
    with around():
        return torch.func.grad(lambda x: fn(x, w).sum())(x.detach())


class Hooks(graph.saved_tensors_hooks):
    """Copies each tensor; ``there`` and ``back`` can change it. Counts its packs and unpacks."""

    def __init__(self, there: Callable = Tensor.clone, back: Callable = lambda packed: packed) -> None:
        self.packs = self.unpacks = 0

        def pack(tensor: Tensor) -> Any:
            self.packs += 1
            return there(tensor)

        def unpack(packed: Any) -> Tensor:
            self.unpacks += 1
            return back(packed)

        super().__init__(pack, unpack)

    def __call__(self) -> "Hooks":
        return self


rounding = partial(Hooks, Tensor.float, Tensor.double)
pinned = partial(save_on_cpu, pin_memory=True)  # makes all tensors contiguous, also on the CPU
disabled = partial(graph.disable_saved_tensors_hooks, "not in my house")
region: Callable[[Callable], Build] = lambda fn: lambda wrap: wrap(fn)
mapped: Callable[[Callable], Build] = lambda fn: lambda wrap: torch.vmap(wrap(lambda x, w: fn(x[None], w)), (0, None))
same: Callable[[Check], Check] = lambda derive: lambda wrap: assert_same(derive(wrap), derive(plain))


@contextmanager
def hooks_in_hooks() -> Iterator[None]:
    with Hooks(there=pytest.fail), Hooks():
        yield


def region_in_region(fn: Callable, context: Callable = nullcontext) -> Build:
    """The context is around the inner region."""

    def build(wrap: Wrap) -> Callable:
        def outer(x: Tensor, w: Tensor) -> Tensor:
            x = x.cos()
            with context():
                x = inner(x, w)
            return x.exp()

        inner = wrap(fn)
        return wrap(outer)

    return build


def laid_out(lay: Callable[[Tensor], Tensor]) -> Build:
    reads_the_layout = lambda a, w: (a * w[0, :1]).tanh() if a.is_contiguous() else (a * w[0, :1]).sin().exp()
    return lambda wrap: lambda x, w: wrap(reads_the_layout)(lay(x), w)


def derivatives(fn: Callable, around: Callable = nullcontext, backward: Callable = nullcontext) -> tuple:
    """The first derivatives, twice, and the second derivatives."""
    x, w = leaves()
    with around():
        out = fn(x.clone(), w).sum()
    with backward():
        first = [grad(out, (x, w), retain_graph=True) for _ in range(2)]
        (gx,) = grad(out, x, create_graph=True)
        return first, grad(gx.sin().sum(), (x, w))


def agree(*builds: Build, exact: bool = True, **contexts: Callable) -> Check:
    """The derivatives are those without regions, bit for bit unless sums of second order are in another order."""

    def check(wrap: Wrap) -> None:
        for build in builds:
            assert_same(derivatives(build(wrap), **contexts), derivatives(build(plain), **contexts), exact)

    return check


def refuses(error: type[Exception], message: str, *calls: Check) -> Check:
    def check(wrap: Wrap) -> None:
        for call in calls:
            with pytest.raises(error, match=message):
                call(wrap)

    return check


def differentiated(
    fn: Callable = block,
    around: Callable = nullcontext,
    backward: Callable = nullcontext,
    change: Callable = lambda out, argument: out,
    during: Callable = nullcontext,
) -> Check:
    """The gradients of what ``change`` makes of the result and the argument. ``around`` is around the region only."""

    def run(wrap: Wrap) -> tuple:
        x, w = leaves()
        with during():
            argument = x.clone()
            with around():
                out = wrap(fn)(argument, w)
            out = change(out, argument)
            with backward():
                return gradients(out, (x, w))

    return run


mutating = partial(differentiated, during=graph.allow_mutation_on_saved_tensors)


def packed_once(hooks: Hooks, build: Build, kept: Build, around: Callable = nullcontext) -> Check:
    """The hooks get what the region ``kept`` saves, each value once."""

    def check(wrap: Wrap) -> None:
        hooks.packs, (x, w) = 0, leaves()
        with around():
            build(wrap)(x, w)
        assert hooks.packs == len(saved_residuals(kept(wrap), x, w, inputs=True))

    return check


def captured_tensors_with_a_history_are_packed(wrap: Wrap) -> None:
    """Others exist without the region."""
    (x, w), seen = leaves(), []
    h, parameter = (w * 2)[:, :3], rand(3, 2)
    with Hooks(there=lambda t: seen.append(tuple(t.shape)) or t):
        out = wrap(lambda x: ((x @ h).sin() @ parameter).exp())(x)
    assert seen.count((4, 3)) >= 1 and (3, 2) not in seen
    assert_same(gradients(out, (x, w)), gradients(((x @ (w * 2)[:, :3]).sin() @ parameter).exp(), (x, w)))


def unpacked_as_often_as_without_a_region(wrap: Wrap) -> None:
    for each in (wrap, plain):
        packed: list[int] = []  # also in recomputes, while the numbers of objects count first runs
        hooks = Hooks(there=lambda t: packed.append(t.numel()) or t)
        runs, (x, w) = Runs(block_with(lambda: hooks)), leaves()
        out = each(runs)(x, w)
        for _ in range(2):
            grad(out.sum(), (x, w), retain_graph=True)
        assert (len(packed), hooks.unpacks) == (3 * runs.count, 6) and hooks.packs == 3


def raising(turn: int) -> Callable:
    """A hook that raises an error in one of its calls."""
    raises = iter([False] * turn + [True])

    def hook(tensor: Tensor) -> Tensor:
        if next(raises, False):
            raise KeyError
        return tensor.clone()

    return hook


def hooks_that_raise(wrap: Wrap) -> None:
    (x, w), before = leaves(), surroundings()
    for turn in range(2):
        with pytest.raises(KeyError), Hooks(there=raising(turn)):
            wrap(noisy)(x, w)
        assert_as_before(before)
    for turn in range(5):
        torch.manual_seed(0)
        with Hooks(back=raising(turn)):
            out = wrap(noisy)(x, w).sum()
        before = surroundings()
        with pytest.raises(KeyError):
            grad(out, (x, w), retain_graph=True)
        assert_as_before(before)
        torch.manual_seed(0)
        assert_same(grad(out, (x, w)), gradients(noisy(x, w), (x, w)))


def refused_before_anything_runs(wrap: Wrap) -> None:
    (x, w), state = leaves(), torch.get_rng_state()
    calls = wrap(noisy), region_in_region(noisy)(wrap), torch.vmap(wrap(noisy), (0, None), randomness="same")
    with disabled():
        for call in (*calls, partial(saved_residuals, wrap(noisy))):
            with pytest.raises(RematError, match=DISABLED):
                call(x, w)
        assert private.hooks_disabled_message() == "not in my house"
        with disable_remat():
            assert_same(derivatives(wrap(block)), derivatives(block))
    assert torch.equal(torch.get_rng_state(), state)


def plain_calls_without_grad(wrap: Wrap) -> None:
    """A tensor that turns out to need a gradient only when it is read is an error as above."""

    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(0)
        (x, w), norm = (t.detach() for t in leaves()), torch.nn.BatchNorm1d(4).requires_grad_(False).double()
        fn = lambda x, w, more: {"y": norm(noisy(x, w)), "x": x, "more": more["list"].add_(1), "n": 3}
        y = wrap(fn)(x, w, {"list": torch.ones(2)})
        assert y["x"] is x
        with fwAD.dual_level():
            dual = fwAD.unpack_dual(wrap(block)(fwAD.make_dual(x, x.cos()), w)).tangent
        jvp = torch.func.jvp(wrap(lambda x: block(x, w)), (x,), (x,))
        return y, region_in_region(block)(wrap)(x, w), mapped(block)(wrap)(x, w), dual, jvp, [*norm.buffers()]

    expected, (x, w) = run(plain), leaves()
    with disabled():
        assert_same(run(wrap), expected)
        with torch.no_grad():
            assert_same(wrap(block)(x, w), block(x, w))
        for call in (partial(wrap(block), x.detach(), w), partial(wrap(lambda x: block(x, w)), x.detach())):
            with pytest.raises(RematError, match="'not in my house'"):
                call()


def several(x: Tensor, w: Tensor) -> tuple:
    hidden = checkpoint_name(x @ w, "hidden")
    return hidden.sin(), hidden, hidden.exp(), (hidden @ w).tanh_()


def changes(x: Tensor, w: Tensor) -> Tensor:
    hidden = checkpoint_name(x @ w, "hidden")
    sine = hidden.sin()
    hidden.add_(1)
    return sine * hidden


def right_or_refused(run: Check) -> Check:
    def check(wrap: Wrap) -> None:
        try:
            assert_same(run(wrap), run(plain))
        except MutationError as error:
            assert wrap(block)._options.policy is None and "give the region a copy: `.clone()`" in str(error)

    return check


def fire_alike(inside: Callable, outside: Callable | None = None) -> Check:
    """The hooks that these functions register run as often as without regions, and so do those of the first alone."""

    def fired(wrap: Wrap, outside: Callable) -> tuple:
        (x, w), v = leaves(), rand(4, 4, seed=2)
        log: Counter = Counter()

        def fn(x: Tensor, w: Tensor) -> Tensor:
            hidden = checkpoint_name(x @ w, "hidden").tanh()
            inside(log, x, w, v, hidden)
            return (hidden @ w).sin() @ v

        argument = x.clone()
        out = wrap(fn)(argument, w)
        out.retain_grad()
        outside(log, argument, w, v, out)
        for _ in range(2):
            out.sum().backward(retain_graph=True)
        assert log
        return log, x.grad, w.grad, v.grad, out.grad

    return same(lambda wrap: [fired(wrap, after) for after in (outside or inside, lambda *args: None)])


def on_each(log: Counter, *tensors: Tensor) -> None:
    for i, tensor in enumerate(tensors):
        tensor.register_hook(lambda grad, i=i: log.update([i]) or grad * (i + 2))


def hooked(x: Tensor, w: Tensor, on_inputs: bool) -> Tensor:
    hidden = (x @ w).tanh()
    for tensor in (x, w) if on_inputs else (hidden,):
        tensor.register_hook(lambda grad: grad * grad.sum())
    return hidden.exp() @ w


def under_func(on_inputs: bool) -> Check:  # more tests are in `tests/functorch`
    return lambda wrap: func_grad(lambda x, w: wrap(hooked)(x, w.detach() * x, on_inputs) * x)


def on_leaves(log: Counter, x: Tensor, w: Tensor, v: Tensor, out: Tensor) -> None:
    def double(tensor: Tensor) -> None:
        log.update(["w" if tensor is w else "v"])
        tensor.grad.mul_(2)

    for leaf in (w, v):
        leaf.register_post_accumulate_grad_hook(double)


def on_several(mode: Any) -> Callable:
    def register(log: Counter, *tensors: Tensor) -> None:
        note = lambda name: lambda grads: log.update([name, sum(g is not None for g in grads) if mode == "all" else 1])
        graph.register_multi_grad_hook(tensors, note("each"), mode=mode)
        graph.register_multi_grad_hook(tensors[2:3], note("v"), mode=mode)

    return register


def on_nodes(log: Counter, x: Tensor, w: Tensor, v: Tensor, out: Tensor) -> None:
    for t in (x, out):
        t.grad_fn.register_hook(lambda to, of: log.update(["after"]) or tuple(g if g is None else g * 2 for g in to))
        t.grad_fn.register_prehook(lambda of: log.update(["before"]) or tuple(g * 3 for g in of))


def on_nodes_inside(log: Counter, x: Tensor, w: Tensor, v: Tensor, hidden: Tensor) -> None:
    on_nodes(log, hidden, w, v, hidden)
    if not is_recomputing():  # the node of a captured tensor is the same in all runs
        node = get_gradient_edge(v).node
        node.register_prehook(lambda of: log.update(["captured"]))
        log["kept"] += node is not None


def through_edges(wrap: Wrap) -> tuple:
    (x, w), inside = leaves(), []

    def fn(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x @ w).tanh()
        if not is_recomputing():
            inside.append(get_gradient_edge(hidden))
        return (hidden @ w).sin()

    out = get_gradient_edge(wrap(fn)(x.clone(), w).sum())
    edges = (get_gradient_edge(x), get_gradient_edge(w), *inside)
    return grad(out, edges, retain_graph=True), grad(out, edges[1:])


HOOKS, EYE = Hooks(), torch.eye(4).to_sparse()
SCALED = rand(4, 4, seed=2, grad=False)
scaled = lambda x, w: (x @ w * SCALED).sin()
with_a_sparse_argument = lambda wrap: lambda x, w: wrap(lambda x, w, s: (x @ w * s.to_dense()).sin())(x, w, EYE)
LAYOUTS = Tensor.t, lambda x: torch.cat([x, x])[::2], lambda x: x.t().expand(2, 4, 4).transpose(0, 1)
OTHER_KINDS = Tensor.float, Tensor.flatten, partial(Tensor.to, device="meta"), Tensor.tolist
ROWS: dict[str, list[Check]] = {
    "`save_on_cpu` around": [agree(region(block), region_in_region(block), around=save_on_cpu)],
    "`save_on_cpu(pin_memory=True)` around": [
        agree(region(block), region_in_region(block), around=pinned),
        agree(*map(laid_out, LAYOUTS), exact=False, around=pinned),
    ],
    "`saved_tensors_hooks` around": [
        agree(region(block), around=Hooks),
        packed_once(HOOKS, region(block), region(block), around=HOOKS),
        captured_tensors_with_a_history_are_packed, agree(with_a_sparse_argument, around=Hooks),
    ],
    "hooks in hooks around": [agree(region(block), around=hooks_in_hooks)],
    "hooks around an outer region": [
        agree(region_in_region(block), around=hooks_in_hooks),
        packed_once(HOOKS, region_in_region(block), region_in_region(block), around=HOOKS),
    ],
    "hooks inside an outer region, around an inner one": [
        agree(region_in_region(block, Hooks)),
        packed_once(HOOKS, region_in_region(block, HOOKS), region(block)),
    ],
    "`save_on_cpu` inside": [
        agree(region(block_with(save_on_cpu)), region(block_with(pinned)), region_in_region(block_with(pinned)))
    ],
    "`saved_tensors_hooks` inside": [
        agree(region(block_with(Hooks)), region(block_with(hooks_in_hooks))),
        unpacked_as_often_as_without_a_region,
    ],
    "hooks around and inside": [
        *(agree(region(block_with(hooks)), around=hooks) for hooks in (pinned, hooks_in_hooks)),
    ],
    "hooks active only in the backward pass": [
        agree(region(block), region_in_region(block_with(hooks_in_hooks)), backward=Hooks),
        agree(region_in_region(calls_func), exact=False, backward=Hooks),
        same(differentiated(backward=partial(Hooks, pytest.fail))),  # without create_graph
    ],
    "hooks around that round": [
        lambda wrap: torch.testing.assert_close(
            differentiated(around=rounding)(wrap), differentiated()(plain), rtol=1e-4, atol=1e-4),
    ],
    "hooks inside that round": [agree(region(block_with(rounding)))],
    "hooks around that give back another shape, dtype or device": [
        refuses(RematError, r"float64\[4, 4\] and unpacked .* let the unpack hook convert it back",
                *(differentiated(around=partial(Hooks, there)) for there in OTHER_KINDS)),
    ],
    "a pack hook around that changes its input in place": [
        refuses(MutationError, r"pack hook .* changed a tensor, float64\[4, 4\], in place",
                differentiated(around=lambda: Hooks(lambda tensor: tensor.detach().zero_()))),
    ],
    "hooks that raise": [hooks_that_raise],
    "`disable_saved_tensors_hooks` around": [refused_before_anything_runs, agree(region(block))],
    "`disable_saved_tensors_hooks` around, where nothing needs a gradient": [plain_calls_without_grad],
    "`disable_saved_tensors_hooks` around `torch.func.grad`": [same(lambda wrap: func_grad(wrap(block), disabled))],
    "`disable_saved_tensors_hooks` inside": [
        agree(region(block_with(disabled)), region_in_region(block_with(disabled)), exact=False),
        agree(mapped(block_with(disabled)), region(region_in_region(block_with(disabled))(plain)), exact=False),
        same(lambda wrap: func_grad(wrap(block_with(disabled)))),
        refuses(RuntimeError, "^not in my house", differentiated(block_with(disabled), save_on_cpu)),
    ],
    "`disable_saved_tensors_hooks` active only in the backward pass": [
        agree(region(block), region_in_region(block), mapped(block), backward=disabled),
        agree(region_in_region(calls_func), exact=False, backward=disabled),
    ],
    "`allow_mutation_on_saved_tensors`: a change of an argument after the region": [
        same(mutating(change=lambda out, argument: out * argument.mul_(2)))
    ],
    "`allow_mutation_on_saved_tensors`: a change of a result after the region": [
        same(mutating(several, change=lambda outs, argument: sum(out.mul_(2).add_(argument) for out in outs)))
    ],
    "`allow_mutation_on_saved_tensors`: a change inside the region of what it made": [
        right_or_refused(mutating(changes)),
        right_or_refused(differentiated(changes, Hooks)),  # the same holds for any hooks that save a copy
    ],
    "`grad_fn._raw_saved_*.register_hooks` on what a region saved": [
        refuses(RuntimeError, "whose hooks have already been set",
                lambda wrap: wrap(block)(*leaves()).grad_fn._raw_saved_self.register_hooks(torch.clone, torch.clone)),
    ],
    "`allow_mutation_on_saved_tensors`: a change of a captured tensor after the region": [
        refuses(MutationError, "captured global 'SCALED' was changed in place between",
                mutating(scaled, change=lambda out, argument: (SCALED.zero_(), out)[1]),
                mutating(scaled, change=lambda out, argument: (increment_version(SCALED), out)[1])),
    ],
    "hooks around `torch.func.grad`": [
        refuses(RuntimeError, "support saved tensor hooks", lambda wrap: func_grad(wrap(block), Hooks))
    ],
    "hooks around `torch.vmap`": [agree(mapped(block), around=pinned), agree(mapped(block), around=hooks_in_hooks)],
    "hooks inside, under `torch.func.grad`": [
        lambda wrap: assert_same(func_grad(wrap(block_with(Hooks))), differentiated()(plain)[0])
    ],
    "`Tensor.register_hook`": [fire_alike(on_each)],
    "`Tensor.register_hook` under `torch.func`": [
        same(under_func(on_inputs=False)),
        refuses(RematError, "Register it outside of the region", under_func(on_inputs=True)),
    ],
    "`register_post_accumulate_grad_hook`": [fire_alike(on_leaves)],
    '`register_multi_grad_hook(mode="all")`': [fire_alike(on_several("all"))],
    '`register_multi_grad_hook(mode="any")`': [fire_alike(on_several("any"))],
    "`Node.register_hook`, `Node.register_prehook`": [fire_alike(on_nodes_inside, on_nodes)],
    "`get_gradient_edge`": [same(through_edges)],
    "`increment_version`": [
        refuses(MutationError, r"argument x was changed in place between .* `\.clone\(\)`",
                differentiated(change=lambda out, argument: (increment_version(argument), out)[1])),
        agree(region(lambda x, w: (increment_version(x.detach().clone()), block(x, w))[1])),
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("combination", ROWS)
def test_row(combination: str, policy: str) -> None:
    for check in ROWS[combination]:
        check(partial(remat, policy=POLICIES[policy]))


def test_the_table_in_the_docs_has_these_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \|$", DOCS.read_text(), re.MULTILINE)
    assert rows == ["combination", *ROWS]


def packed_smaller(x: Tensor, w: Tensor) -> Tensor:
    with Hooks(there=lambda tensor: (tensor * tensor.abs().sign()).bfloat16(), back=Tensor.double):
        return remat(block)(x.clone(), w)  # nothing else refers to the argument


def test_what_hooks_pack_is_held_and_nothing_else() -> None:
    """Beside the result: not an argument that is packed, nor what hooks compute before they return."""
    x, w = leaves()
    for fn in (block, block_with(disabled)):
        assert held_bytes(remat(fn), x, w) == x.nbytes < held_bytes(fn, x, w)
    assert held_bytes(remat(block_with(Hooks)), x, w) == 4 * x.nbytes
    assert held_bytes(packed_smaller, x, w) == x.nbytes + x.nbytes // 4 + w.nbytes // 4
    gradients(packed_smaller(x, w), (x, w))


def test_hooks_are_hidden_and_lifted_only_within() -> None:
    seen: list[Tensor] = []
    with graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        with hooks_hidden():
            rand(3).exp()
        assert not seen
        rand(3).exp()
        assert len(seen) == 1
    with graph.disable_saved_tensors_hooks("mine"):
        with hooks_allowed():
            assert private.hooks_disabled_message() is None
        assert private.hooks_disabled_message() == "mine"
