"""Regions inside and around saved-tensor hooks, where hooks are forbidden, and with hooks on gradients.

Each row of the table in ``docs/reference/saved_tensor_hooks.md`` is a check here, which runs under every policy below.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from accelerator import DEVICE, backend
from cases import assert_same, rand
from surroundings import assert_as_before, surroundings
from torch import Tensor
from torch.autograd import grad
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    get_gradient_edge,
    increment_version,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)

from benchmarks.measure import PeakMemory, gc_disabled, held_bytes
from remat import (
    MutationError,
    RecomputeMismatchError,
    RematError,
    checkpoint_name,
    disable_remat,
    is_recomputing,
    policies,
    remat,
    saved_residuals,
)
from remat._core import private

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "saved_tensor_hooks.md"
POLICIES = {
    "nothing": None,
    "matmuls": policies.save_matmuls,
    "name": policies.save_only_these_names("hidden"),
    "everything": policies.everything_saveable,
}
Wrap = Callable[[Callable], Callable]
Build = Callable[[Wrap], Callable]
Check = Callable[[Wrap], Any]
ROWS: dict[str, Check] = {}


def row(name: str, *checks: Check) -> Callable[[Check], Check]:
    """Add a row with these checks, and with the one that it decorates. A check's argument makes a region."""
    assert name not in ROWS
    ROWS[name] = lambda wrap: [check(wrap) for check in found]
    found = [*checks]
    return lambda check: found.append(check) or check


# --- functions, hooks, derivatives ------------------------------------------------------------------------------------


def leaves() -> tuple[Tensor, Tensor]:
    return rand(4, 4), rand(4, 4, seed=1)


def block(x: Tensor, w: Tensor) -> Tensor:
    hidden = checkpoint_name(x @ w, "hidden").tanh()
    return (hidden @ w).sin() @ w


def block_with(context: Callable) -> Callable:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        hidden = checkpoint_name(x @ w, "hidden").tanh()
        with context():
            hidden = (hidden @ w).sin()
        return hidden.exp() @ w

    return fn


def in_place(x: Tensor, w: Tensor) -> Tensor:
    """Values that are not a tensor in its default layout: one modified in place, one transposed."""
    hidden = checkpoint_name(x @ w, "hidden").tanh_()
    return (hidden @ w).t().exp().sin() @ w


def calls_func(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda x: (x @ w).sin().sum())(x.tanh()) @ w


class Hooks(saved_tensors_hooks):
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

    def __call__(self) -> Hooks:
        return self


def rounding() -> Hooks:
    return Hooks(Tensor.float, Tensor.double)


def pinned() -> Any:
    """Makes all tensors contiguous, also on the CPU."""
    return save_on_cpu(pin_memory=True)


@contextmanager
def hooks_in_hooks() -> Iterator[None]:
    around = Hooks(there=pytest.fail)
    with around, Hooks():
        yield


def disabled() -> Any:
    return disable_saved_tensors_hooks("not in my house")


def derivatives(fn: Callable, around: Callable = nullcontext, backward: Callable = nullcontext) -> tuple:
    """The first derivatives, twice, and the second derivatives."""
    x, w = leaves()
    with around():
        out = fn(x.clone(), w).sum()
    with backward():
        first = grad(out, (x, w), retain_graph=True)
        again = grad(out, (x, w), retain_graph=True)
        (gx,) = grad(out, x, create_graph=True)
        return first, again, grad(gx.sin().sum(), (x, w))


def plain(fn: Callable) -> Callable:
    return fn


def region(fn: Callable) -> Build:
    return lambda wrap: wrap(fn)


def region_in_region(fn: Callable) -> Build:
    def build(wrap: Wrap) -> Callable:
        inner = wrap(fn)
        return wrap(lambda x, w: inner(x.cos(), w).sin())

    return build


def mapped(fn: Callable) -> Build:
    return lambda wrap: torch.vmap(wrap(lambda x, w: fn(x[None], w)), (0, None))


def agree(*builds: Build, exact: bool = True, **contexts: Callable) -> Check:
    """The derivatives are those without regions, bit for bit unless sums of second order are in another order."""

    def check(wrap: Wrap) -> None:
        for build in builds:
            assert_same(derivatives(build(wrap), **contexts), derivatives(build(plain), **contexts), exact)

    return check


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return grad(out.sum(), inputs)


# --- hooks that copy --------------------------------------------------------------------------------------------------


row("`save_on_cpu` around", agree(region(block), region_in_region(block), around=save_on_cpu))


def reads_the_layout(lay: Callable[[Tensor], Tensor]) -> Build:
    def fn(a: Tensor, w: Tensor) -> Tensor:
        return (a * w[0, :1]).tanh() if a.is_contiguous() else (a * w[0, :1]).sin().exp()

    return lambda wrap: lambda x, w: wrap(fn)(lay(x), w)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.t(),
    lambda x: torch.cat([x, x])[::2],
    lambda x: x.t().expand(2, 4, 4).transpose(0, 1),
    lambda x: x.unfold(0, 2, 1)[..., :1],
]
row(
    "`save_on_cpu(pin_memory=True)` around",
    agree(region(block), region_in_region(block), around=pinned),
    agree(*map(reads_the_layout, LAYOUTS), exact=False, around=pinned),
)


@row("`saved_tensors_hooks` around", agree(region(block), around=Hooks))
def _(wrap: Wrap) -> None:
    hooks, (x, w) = Hooks(), leaves()
    kept = len(saved_residuals(wrap(block), x, w, inputs=True))
    with hooks:
        out = wrap(block)(x, w)
    assert (hooks.packs, hooks.unpacks) == (kept, 0)
    gradients(out, x, w)
    assert hooks.packs == kept <= hooks.unpacks


row("hooks in hooks around", agree(region(block), around=hooks_in_hooks))


@row("hooks around an outer region", agree(region_in_region(block), around=hooks_in_hooks))
def _(wrap: Wrap) -> None:
    hooks, (x, w) = Hooks(), leaves()
    outer = region_in_region(block)(wrap)
    with hooks:
        outer(x, w)
    assert hooks.packs == len(saved_residuals(outer, x, w, inputs=True))


def around_the_inner_region(context: Callable) -> Build:
    def build(wrap: Wrap) -> Callable:
        inner = wrap(block)

        def outer(x: Tensor, w: Tensor) -> Tensor:
            x = x.cos()
            with context():
                x = inner(x, w)
            return x.exp()

        return wrap(outer)

    return build


@row("hooks inside an outer region, around an inner one", agree(around_the_inner_region(Hooks)))
def _(wrap: Wrap) -> None:
    hooks, (x, w) = Hooks(), leaves()
    around_the_inner_region(hooks)(wrap)(x, w)
    assert hooks.packs == len(saved_residuals(wrap(block), x, w, inputs=True))


row(
    "`save_on_cpu` inside",
    agree(region(block_with(save_on_cpu)), region(block_with(pinned)), region_in_region(block_with(pinned))),
)


@row("`saved_tensors_hooks` inside", agree(region(block_with(Hooks)), region(block_with(hooks_in_hooks))))
def _(wrap: Wrap) -> None:
    counts = []
    for each in (wrap, plain):
        hooks, runs, (x, w) = Hooks(), [], leaves()
        fn = block_with(hooks)
        out = each(lambda x, w: runs.append(is_recomputing()) or fn(x, w))(x, w)
        packs = hooks.packs
        for _ in range(2):
            grad(out.sum(), (x, w), retain_graph=True)
        assert hooks.packs == packs * len(runs)
        counts.append((packs, hooks.unpacks))
    assert counts[0] == counts[1] == (3, 6)


row(
    "hooks around and inside",
    agree(region(block_with(pinned)), around=pinned),
    agree(region(block_with(hooks_in_hooks)), around=hooks_in_hooks),
)


@row(
    "hooks active only in the backward pass",
    agree(region(block), region_in_region(block_with(hooks_in_hooks)), backward=Hooks),
    agree(region_in_region(calls_func), exact=False, backward=Hooks),
)
def _(wrap: Wrap) -> None:
    hooks, (x, w) = Hooks(), leaves()
    out = wrap(block)(x, w)
    with hooks:
        gradients(out, x, w)
    assert hooks.packs == 0


# --- hooks that change what they save ---------------------------------------------------------------------------------


@row("hooks around that round")
def _(wrap: Wrap) -> None:
    for fn in (block, in_place):
        x, w = leaves()
        with rounding():
            out = wrap(fn)(x.clone(), w)
        actual, expected = gradients(out, x, w), gradients(fn(x, w), x, w)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert not torch.equal(actual[0], expected[0])


row("hooks inside that round", agree(region(block_with(rounding))))


@row("hooks around that give back another shape, dtype or device")
def _(wrap: Wrap) -> None:
    for there in (Tensor.float, Tensor.flatten, partial(Tensor.to, device="meta"), Tensor.tolist):
        x, w = leaves()
        with Hooks(there):
            out = wrap(block)(x, w)
        with pytest.raises(RematError, match=r"float64\[4, 4\] and unpacked .* let the unpack hook convert it back"):
            gradients(out, x, w)


@row("a pack hook around that changes its input in place")
def _(wrap: Wrap) -> None:
    x, w = leaves()
    hooks = Hooks(lambda tensor: tensor.detach().zero_())
    with pytest.raises(MutationError, match=r"pack hook .* changed a tensor, float64\[4, 4\], in place"), hooks:
        wrap(block)(x.clone(), w)
    with pytest.raises(RuntimeError, match="in place"), hooks:  # torch raises the same error
        block(x.clone(), w)


class Boom(Exception):
    pass


@row("hooks that raise")
def _(wrap: Wrap) -> None:
    def raises_at(turn: int) -> Callable:
        def hook(tensor: Tensor) -> Tensor:
            if next(turns) == turn:
                raise Boom
            return tensor.clone()

        turns = count()
        return hook

    (x, w), before = leaves(), surroundings()
    noisy = lambda x, w: block(x, w) * torch.rand(4, dtype=x.dtype)
    for turn in range(2):
        with pytest.raises(Boom), Hooks(there=raises_at(turn)):
            wrap(noisy)(x, w)
        assert_as_before(before)
    for turn in range(5):
        with Hooks(back=raises_at(turn)):
            torch.manual_seed(0)
            out = wrap(noisy)(x, w).sum()
        before = surroundings()
        with pytest.raises(Boom):
            grad(out, (x, w), retain_graph=True)
        assert_as_before(before)
        torch.manual_seed(0)
        assert_same(grad(out, (x, w)), gradients(noisy(x, w), x, w))


# --- where hooks are disabled -----------------------------------------------------------------------------------------


@row("`disable_saved_tensors_hooks` around")
def _(wrap: Wrap) -> None:
    x, w = leaves()
    state = torch.get_rng_state()
    fn = lambda x, w: block(x, w) * torch.rand(4)
    calls = wrap(fn), region_in_region(fn)(wrap), torch.vmap(wrap(fn), (0, None), randomness="same")
    with disabled():
        for call in (*calls, partial(saved_residuals, wrap(fn))):
            with pytest.raises(RematError, match=r"'not in my house'\. Call them outside .* `remat.disable_remat\(\)`"):
                call(x, w)
        assert private.hooks_disabled_message() == "not in my house"
        with disable_remat():
            assert_same(derivatives(wrap(block)), derivatives(block))
    assert torch.equal(torch.get_rng_state(), state)


@row("`disable_saved_tensors_hooks` around, where nothing needs a gradient")
def _(wrap: Wrap) -> None:
    """The regions are plain calls. A tensor that turns out to need one only when it is read is an error as above."""

    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(0)
        (x, w), norm = (t.detach() for t in leaves()), torch.nn.BatchNorm1d(4).requires_grad_(False).double()
        fn = lambda x, w, more: {"y": norm(block(x, w)) * torch.rand(4), "x": x, "more": more["list"].add_(1), "n": 3}
        y = wrap(fn)(x, w, {"list": torch.ones(2)})
        assert y["x"] is x
        z = wrap(lambda x: wrap(lambda x: block(x, w))(x.cos()))(x)
        with fwAD.dual_level():
            dual = fwAD.unpack_dual(wrap(block)(fwAD.make_dual(x, x.cos()), w)).tangent
        jvp = torch.func.jvp(wrap(lambda x: block(x, w)), (x,), (x,))
        return y, z, torch.vmap(wrap(block), (0, None))(x, w), dual, jvp, [*norm.buffers()]

    expected, (x, w) = run(plain), leaves()
    with disabled():
        assert_same(run(wrap), expected)
        with torch.no_grad():
            assert_same(wrap(block)(x, w), block(x, w))
        for call in (partial(wrap(block), x.detach(), w), partial(wrap(lambda x: block(x, w)), x.detach())):
            with pytest.raises(RematError, match=r"'not in my house'"):
                call()


@row("`disable_saved_tensors_hooks` around `torch.func.grad`")
def _(wrap: Wrap) -> None:
    x, w = leaves()
    with disabled():
        assert_same(*(torch.func.grad(lambda x: fn(x, w).sum())(x.detach()) for fn in (wrap(block), block)))


def disables(x: Tensor, w: Tensor) -> Tensor:
    hidden = checkpoint_name(x @ w, "hidden").tanh()
    with disabled():
        hidden = (hidden @ w).sin()
    return (hidden.exp() @ w).tanh()


def func_grad(wrap: Wrap) -> Callable:
    inner = wrap(disables)
    return lambda x, w: torch.func.grad(lambda x: inner(x, w).sum())(x)


@row(
    "`disable_saved_tensors_hooks` inside",
    agree(region(disables), region_in_region(disables), func_grad, mapped(disables), exact=False),
    agree(region(region_in_region(disables)(plain)), exact=False),
)
def _(wrap: Wrap) -> None:
    x, w = leaves()
    if wrap(disables)._options.policy is None:
        assert held_bytes(wrap(disables), x, w) == x.nbytes < held_bytes(disables, x, w)
    for fn in (wrap(disables), disables):
        with save_on_cpu(), pytest.raises(RuntimeError, match=r"^not in my house"):
            fn(x, w)


row(
    "`disable_saved_tensors_hooks` active only in the backward pass",
    agree(region(block), region_in_region(block), mapped(block), backward=disabled),
    agree(region_in_region(calls_func), exact=False, backward=disabled),
)


# --- allow_mutation_on_saved_tensors ----------------------------------------------------------------------------------


def with_mutations(fn: Callable, after: Callable = lambda out, argument: out) -> tuple:
    x, w = leaves()
    with allow_mutation_on_saved_tensors():
        argument = x.clone()
        out = after(fn(argument, w), argument)
        return gradients(out, x, w)


@row("`allow_mutation_on_saved_tensors`: a change of an argument after the region")
def _(wrap: Wrap) -> None:
    for fn in (block, in_place):
        change = lambda out, argument: out * argument.mul_(2)
        assert_same(with_mutations(wrap(fn), change), with_mutations(fn, change))


@row("`allow_mutation_on_saved_tensors`: a change of a result after the region")
def _(wrap: Wrap) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple:
        hidden = checkpoint_name(x @ w, "hidden")
        return hidden.sin(), hidden, hidden.exp(), (hidden @ w).tanh_()

    change = lambda outs, argument: sum(out.mul_(2).add_(argument) for out in outs)
    assert_same(with_mutations(wrap(fn), change), with_mutations(fn, change))


@row("`allow_mutation_on_saved_tensors`: a change inside the region of what it made")
def _(wrap: Wrap) -> None:
    """The same holds for any hooks that save a copy."""

    def last(x: Tensor, w: Tensor) -> Tensor:
        hidden = checkpoint_name(x @ w, "hidden").clone()
        sine = (hidden**2).sin()
        hidden.sin_()
        return sine + hidden

    def fn(x: Tensor, w: Tensor) -> Tensor:
        hidden = checkpoint_name(x @ w, "hidden")
        sine = hidden.sin()
        hidden.add_(1)
        return sine * hidden

    def with_copies(fn: Callable) -> tuple:
        x, w = leaves()
        with Hooks():
            out = fn(x.clone(), w)
        return gradients(out, x, w)

    for derive in (with_copies, with_mutations):
        assert_same(derive(wrap(last)), derive(last))  # the recompute ends before the change
        try:
            assert_same(derive(wrap(fn)), derive(fn))
        except MutationError as error:
            assert wrap(fn)._options.policy is None
            assert "give the region a copy: `.clone()`" in str(error)


@row("`grad_fn._raw_saved_*.register_hooks` on what a region saved")
def _(wrap: Wrap) -> None:
    x, w = leaves()
    for call in (wrap(block), partial(torch.utils.checkpoint.checkpoint, block, use_reentrant=False)):
        out = call(x, w)
        with pytest.raises(RuntimeError, match="whose hooks have already been set"):
            out.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: t)  # type: ignore[union-attr]
        assert_same(gradients(out, x, w), gradients(block(x, w), x, w))


@row("`allow_mutation_on_saved_tensors`: a change of a captured tensor after the region")
def _(wrap: Wrap) -> None:
    scale = rand(4, 4, seed=2, grad=False)
    for change in (scale.zero_, partial(increment_version, scale)):
        with pytest.raises(MutationError, match="captured closure variable 'scale' was changed in place between"):
            with_mutations(wrap(lambda x, w: (x @ w * scale).sin()), lambda out, argument: (out, change())[0])


# --- torch.func -------------------------------------------------------------------------------------------------------


@row("hooks around `torch.func.grad`")
def _(wrap: Wrap) -> None:
    x, w = leaves()
    for fn in (wrap(block), block):
        with Hooks(), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            torch.func.grad(lambda x: fn(x, w).sum())(x.detach())
    assert_same(*(torch.func.grad(lambda x: fn(x, w).sum())(x.detach()) for fn in (wrap(block), block)))


row("hooks around `torch.vmap`", agree(mapped(block), around=pinned), agree(mapped(block), around=hooks_in_hooks))


@row("hooks inside, under `torch.func.grad`")
def _(wrap: Wrap) -> None:
    x, w = leaves()
    fn = block_with(Hooks)
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        torch.func.grad(lambda x: fn(x, w).sum())(x.detach())
    actual = torch.func.grad(lambda x: wrap(fn)(x, w).sum())(x.detach())
    assert_same(actual, gradients(fn(x, w), x)[0])


# --- hooks on gradients -----------------------------------------------------------------------------------------------


def fired(wrap: Wrap, inside: Callable, outside: Callable) -> tuple:
    """How often the hooks that ``inside`` and ``outside`` register run, and the resulting gradients."""
    x, w = leaves()
    v = rand(4, 4, seed=2)
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
    return log, x.grad, w.grad, v.grad, out.grad


def fire_alike(inside: Callable, outside: Callable | None = None) -> Check:
    def check(wrap: Wrap) -> None:
        for after in (outside or inside, lambda *args: None):
            actual, expected = fired(wrap, inside, after), fired(plain, inside, after)
            assert_same(actual, expected)
            assert expected[0]

    return check


def on_each(log: Counter, *tensors: Tensor) -> None:
    for i, tensor in enumerate(tensors):
        tensor.register_hook(lambda grad, i=i: log.update([i]) or grad * (i + 2))


row("`Tensor.register_hook`", fire_alike(on_each))


@row("`Tensor.register_hook` under `torch.func`")
def _(wrap: Wrap) -> None:
    """More tests are in ``tests/functorch``."""

    def run(wrap: Wrap, on_inputs: bool) -> Tensor:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            hidden = (x @ w).tanh()
            for tensor in (x, w) if on_inputs else (hidden,):
                tensor.register_hook(lambda grad: grad * grad.sum())
            return hidden.exp() @ w

        x, w = leaves()
        return torch.func.grad(lambda x: (wrap(fn)(x, w.detach() * x) * x).sum())(x.detach())

    torch.testing.assert_close(run(wrap, False), run(plain, False))
    with pytest.raises(RematError, match="Register it outside of the region"):
        run(remat, True)


def on_leaves(log: Counter, x: Tensor, w: Tensor, v: Tensor, out: Tensor) -> None:
    def double(tensor: Tensor) -> None:
        log.update(["w" if tensor is w else "v"])
        tensor.grad.mul_(2)

    w.register_post_accumulate_grad_hook(double)
    v.register_post_accumulate_grad_hook(double)


def on_several(mode: Any) -> Callable:
    def register(log: Counter, *tensors: Tensor) -> None:
        note = lambda name: lambda grads: log.update([name, sum(g is not None for g in grads) if mode == "all" else 1])
        register_multi_grad_hook(tensors, note("each"), mode=mode)
        register_multi_grad_hook(tensors[2:3], note("v"), mode=mode)

    return register


def on_nodes(log: Counter, x: Tensor, w: Tensor, v: Tensor, out: Tensor) -> None:
    for tensor in (x, out):
        tensor.grad_fn.register_hook(
            lambda to, of: log.update(["after"]) or tuple(g if g is None else g * 2 for g in to)
        )
        tensor.grad_fn.register_prehook(lambda of: log.update(["before"]) or tuple(g * 3 for g in of))


def on_nodes_inside(log: Counter, x: Tensor, w: Tensor, v: Tensor, hidden: Tensor) -> None:
    on_nodes(log, hidden, w, v, hidden)
    if not is_recomputing():  # the node of a captured tensor is the same in all runs
        node = get_gradient_edge(v).node
        node.register_prehook(lambda of: log.update(["captured"]))
        log["kept"] += node is not None


row("`register_post_accumulate_grad_hook`", fire_alike(on_leaves))
row('`register_multi_grad_hook(mode="all")`', fire_alike(on_several("all")))
row('`register_multi_grad_hook(mode="any")`', fire_alike(on_several("any")))
row("`Node.register_hook`, `Node.register_prehook`", fire_alike(on_nodes_inside, on_nodes))


@row("`get_gradient_edge`")
def _(wrap: Wrap) -> None:
    def through_edges(wrap: Wrap) -> tuple:
        x, w = leaves()
        inside = []

        def fn(x: Tensor, w: Tensor) -> Tensor:
            hidden = (x @ w).tanh()
            if not is_recomputing():
                inside.append(get_gradient_edge(hidden))
            return (hidden @ w).sin()

        out = get_gradient_edge(wrap(fn)(x.clone(), w).sum())
        edges = (get_gradient_edge(x), get_gradient_edge(w), *inside)
        return grad(out, edges, retain_graph=True), grad(out, edges[1:])

    assert_same(through_edges(wrap), through_edges(plain))


@row("`increment_version`", agree(region(lambda x, w: (increment_version(x.detach().clone()), block(x, w))[1])))
def _(wrap: Wrap) -> None:
    x, w = leaves()
    argument = x.clone()
    out = wrap(block)(argument, w)
    increment_version(argument)
    with pytest.raises(MutationError, match=r"argument x was changed in place between .* `\.clone\(\)`"):
        gradients(out, x)


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("combination", ROWS)
def test_row(combination: str, policy: str) -> None:
    ROWS[combination](partial(remat, policy=POLICIES[policy]))


def test_the_table_in_the_docs_has_these_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \|$", DOCS.read_text(), re.MULTILINE)
    assert rows == ["combination", *ROWS]


# --- tests of no single combination ---------------------------------------------------------------------------------


def test_hooks_that_round_give_the_derivatives_at_the_rounded_inputs() -> None:
    x, w = leaves()
    with rounding():
        out = remat(block)(x.clone(), w)
        checked = remat(block, determinism_check="values")(x.clone(), w)
    rounded = [tensor.float().double().detach().requires_grad_() for tensor in (x, w)]
    assert_same(gradients(out, x, w), gradients(block(*rounded), *rounded))
    with pytest.raises(RecomputeMismatchError, match="saved-tensor hooks around the region that change values"):
        gradients(checked, x, w)


def test_what_hooks_inside_pack_is_saved() -> None:
    fn, (x, w) = block_with(Hooks), leaves()
    assert held_bytes(remat(block), x, w) == x.nbytes
    assert held_bytes(remat(fn), x, w) == 4 * x.nbytes  # and the result


def test_hooks_around_own_what_the_region_saves() -> None:
    """The argument itself can be freed. Tensors that the hooks compute for it are not saved."""
    x, w = leaves()
    with gc_disabled(), PeakMemory() as memory:
        argument = x.clone()
        with Hooks(there=lambda tensor: (tensor * tensor.abs().sign()).bfloat16(), back=Tensor.double):
            out = remat(block)(argument, w)
        del argument
        assert memory.live == x.nbytes + x.nbytes // 4 + w.nbytes // 4
        gradients(out, x, w)


@pytest.mark.parametrize("captured", [False, True])
def test_hooks_in_a_region_that_calls_a_transform(captured: bool) -> None:
    """Its first attempt, under saved-tensor hooks, leaves no hook. In the second a hook on an input is refused."""
    (x, w), log = leaves(), []

    def fn(x: Tensor) -> Tensor:
        hidden = block(x, w)
        (w if captured else hidden).register_hook(lambda grad: log.append(1) or grad * 2)
        return calls_func(x.detach(), w.detach()) * hidden

    if not captured:
        assert_same(gradients(remat(fn)(x), x, w), gradients(fn(x), x, w))
        return
    with pytest.raises(RematError, match="Register it outside of the region"):
        remat(fn)(x)
    gradients(block(x, w), x, w)
    assert not log


@pytest.mark.parametrize("captured", [False, True])
def test_random_numbers_that_hooks_draw_are_not_those_of_the_region(captured: bool) -> None:
    x = rand(6)
    other = x * 2

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(x)
        return (x * (other if captured else y)).sin() * noise.exp(), noise

    with Hooks(there=lambda tensor: (torch.rand(1), tensor)[1]):
        out, noise = remat(fn)(x, other)
    expected = gradients((x * (x * 2)).sin() * noise.exp(), x)
    torch.testing.assert_close(gradients(out, x), expected)


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu_frees_the_device(pin_memory: bool) -> None:
    """With it around a region only the result stays on the device."""
    x = torch.randn(256, 256, device=DEVICE, requires_grad=True)
    w = torch.randn(256, 256, device=DEVICE)
    remat(block)(x, w)  # so that libraries make their one-time allocations
    gc.collect()
    before = backend.memory_allocated()
    argument = x.clone()
    with save_on_cpu(pin_memory=pin_memory):
        out = remat(block)(argument, w)
    del argument
    backend.synchronize()
    assert backend.memory_allocated() == before + out.nbytes
