"""`torch.autograd.forward_ad` levels around, between and in regions, in every order with reverse mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import Case, assert_same, cases, flat, rand, scalar, tensor_leaves, total
from side_by_side import Runs
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from benchmarks.measure import (
    PeakMemory,
    assert_freed_without_gc,
    count_ops,
    held_bytes,
    leaked_bytes,
    peak_bytes,
)
from remat import MutationError, RematError, is_recomputing, policies, remat

Wrap = Callable[..., Callable]
N, KB = 32, 32 * 32 * 8  # a large matrix, and its bytes


def plain(fn: Callable) -> Callable:
    return fn


def block(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() @ w).sin() @ w


def tensors(size: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Two differentiable matrices, and a tangent."""
    return rand(size, size), rand(size, size, seed=1), rand(size, size, seed=2, grad=False)


def pair(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    return tuple(fwAD.unpack_dual(dual))


# --- all functions of the table ---------------------------------------------------------------------------------------


@cases(jvp=True)
def test_tangents_of_every_function_and_their_gradients(case: Case) -> None:
    """The gradients of primal and tangent with respect to both. For some functions torch itself raises."""

    def run(fn: Callable) -> tuple:
        with case.state(), fwAD.dual_level():
            call, primals = flat(case, fn)
            primals = [t.requires_grad_() for t in primals]
            tangents = [torch.ones_like(t).requires_grad_() for t in primals]
            outs = [fwAD.unpack_dual(t) for t in call(*map(fwAD.make_dual, primals, tangents))]
            values = [part for pair in outs for part in pair if part is not None]
            try:
                grads: Any = torch.autograd.grad(total(values), [*primals, *tangents], allow_unused=True)
            except (NotImplementedError, RuntimeError) as error:
                grads = type(error)
            return values, grads

    (values, grads), (expected, expected_grads) = run(remat(case.fn)), run(case.fn)
    assert_same(values, expected)
    if expected_grads is RuntimeError:
        assert case.name in ("attention", "reductions", "loss")  # "modified by an inplace operation", for softmax
        assert grads is MutationError
    else:
        assert_same(grads, expected_grads)


@cases(func=True, jvp=True, double=True)
def test_torch_func_grad_of_every_function_with_tangents(case: Case) -> None:
    def run(fn: Callable) -> list:
        with case.state(), fwAD.dual_level():
            call, primals = scalar(case, fn)
            duals = [fwAD.make_dual(t, t.cos()) for t in primals]
            return [pair(t) for t in grad(call, argnums=tuple(range(len(duals))))(*duals)] if duals else []

    assert_same(run(remat(case.fn)), run(case.fn), exact=False)


# --- every order of the two modes -------------------------------------------------------------------------------------


def under_no_grad(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    with torch.no_grad(), fwAD.dual_level():
        return pair(fn(fwAD.make_dual(x, v), w))


def reverse_over_forward(fn: Callable, x: Tensor, w: Tensor, v: Tensor, after: bool = False, **options: Any) -> Any:
    with fwAD.dual_level():
        out = fwAD.unpack_dual(fn(fwAD.make_dual(x, v), w))
        value = (out.primal * out.tangent).sin().sum()
        if not after:
            return torch.autograd.grad(value, (x, w), **options)
    return torch.autograd.grad(value, (x, w), **options)


def after_the_level(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    return reverse_over_forward(fn, x, w, v, True)


def of_the_primal_after_the_level(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    with fwAD.dual_level():
        out = fn(fwAD.make_dual(x, v), w)
    return torch.autograd.grad(out.sum(), (x, w))


def twice(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    with fwAD.dual_level():
        out = fwAD.unpack_dual(fn(fwAD.make_dual(x, v), w))
    return [torch.autograd.grad(part.sin().sum(), (x, w), retain_graph=True) for part in (*out, *out)]


def third_order(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    found = []
    for after in (False, True):
        g, h = reverse_over_forward(fn, x, w, v, after, create_graph=True)
        found.append(torch.autograd.grad(g.sin().sum() + h.cos().sum(), (x, w)))
    return found


def with_a_tangent_that_is_differentiated(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    tangent = v.clone().requires_grad_()
    with fwAD.dual_level():
        out = fwAD.unpack_dual(fn(fwAD.make_dual(x, tangent), w)).tangent
    return torch.autograd.grad(out.sin().sum(), (x, w, tangent))


def of_an_intermediate_dual(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, v)
        out = fwAD.unpack_dual(fn(fn((dual @ w).sin(), dual.cos()), w))
        return torch.autograd.grad((out.primal + out.tangent).sin().sum(), (x, w))


def forward_over_reverse(fn: Callable, x: Tensor, w: Tensor, v: Tensor, **options: Any) -> Any:
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, v)
        return [pair(g) for g in torch.autograd.grad(fn(dual, w).sin().sum(), (dual, w), **options)]


def with_a_retained_graph(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    return forward_over_reverse(fn, x, w, v, retain_graph=True)


def of_the_tangent_of_the_gradient(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, v)
        (g,) = torch.autograd.grad(fn(dual, w).sin().sum(), dual, create_graph=True)
        tangent = fwAD.unpack_dual(g).tangent
    return torch.autograd.grad(tangent.sin().sum(), (x, w))


def with_a_tangent_of_the_cotangent(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    """The forward has run before the level."""
    out = fn(x, w)
    with fwAD.dual_level():
        return [pair(g) for g in torch.autograd.grad(out, (x, w), fwAD.make_dual(v, v.cos()))]


def in_the_next_level(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    """The old level's tangents no longer exist; the new level has those of the cotangent."""
    with fwAD.dual_level():
        out = fn(fwAD.make_dual(x, v), w)
    with fwAD.dual_level():
        return [pair(g) for g in torch.autograd.grad(out, (x, w), fwAD.make_dual(v, v.cos()))]


def in_and_after_the_level(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    with fwAD.dual_level():
        value = fn(fwAD.make_dual(x, v), w).sin().sum()
        first = pair(torch.autograd.grad(value, w, retain_graph=True)[0])
    return first, torch.autograd.grad(value, (x, w))


ORDERS = [
    under_no_grad, reverse_over_forward, after_the_level, of_the_primal_after_the_level, twice, third_order,
    with_a_tangent_that_is_differentiated, of_an_intermediate_dual, forward_over_reverse, with_a_retained_graph,
    of_the_tangent_of_the_gradient, with_a_tangent_of_the_cotangent, in_the_next_level, in_and_after_the_level,
]  # fmt: skip


def nested(wrap: Wrap) -> Callable:
    inner = wrap(block)
    return wrap(lambda x, w: inner(inner(x, w).cos(), w) * x)


def randomly(x: Tensor, w: Tensor) -> Tensor:
    return (torch.nn.functional.dropout(x.sin(), 0.5) * torch.rand_like(w) @ w).exp()


REGIONS: dict[str, Callable[[Wrap], Callable]] = {
    "region": lambda wrap: wrap(block),
    "no early stop": lambda wrap: wrap(block) if wrap is plain else wrap(block, early_stop=False),
    "no check": lambda wrap: nested(plain) if wrap is plain else nested(remat(determinism_check="none")),
    "nested": nested,
    "random": lambda wrap: wrap(randomly),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_every_order_of_forward_and_reverse_mode(order: Callable, region: str) -> None:
    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(3)
        return order(REGIONS[region](wrap), *tensors()), torch.rand(1)

    assert_same(run(remat), run(plain))


# --- captured duals ---------------------------------------------------------------------------------------------------


def captured(wrap: Wrap, dual: Tensor, w: Tensor) -> Tensor:
    return wrap(lambda w: block(w, dual))(w)


def captured_in_nested_regions(wrap: Wrap, dual: Tensor, w: Tensor) -> Tensor:
    inner = wrap(lambda w: (w @ dual).tanh())
    return wrap(lambda w: inner(inner(w).sin()) @ dual)(w)


def captured_with_a_history(wrap: Wrap, dual: Tensor, w: Tensor) -> Tensor:
    h = (dual @ w).sin()
    return wrap(lambda w: (w @ h).tanh() * h)(w)


def parameter_of_a_module(wrap: Wrap, dual: Tensor, w: Tensor) -> Tensor:
    layer = torch.nn.Linear(3, 3).double()
    del layer._parameters["weight"]
    layer.weight = dual
    return wrap(lambda w: layer(layer(w).tanh()))(w)


@pytest.mark.parametrize("program", [captured, captured_in_nested_regions, captured_with_a_history,
                                     parameter_of_a_module], ids=lambda program: program.__name__)  # fmt: skip
@pytest.mark.parametrize("order", ORDERS[1:], ids=lambda order: order.__name__)
def test_duals_that_a_region_captures(program: Callable, order: Callable) -> None:
    def run(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        return order(lambda x, w: program(wrap, x, w), *tensors())

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("kind", ["updated", "batch norm"])
def test_statistics_with_tangents(kind: str) -> None:
    """A buffer that is updated from a dual tensor has a tangent from then on: a recompute changes a copy of both."""

    def run(wrap: Wrap) -> tuple:
        mean, norm = torch.zeros(3, dtype=torch.double), torch.nn.BatchNorm1d(3).double()

        def update(x: Tensor) -> Tensor:
            if kind == "batch norm":
                return norm(x).tanh() * norm.running_mean.clone()
            mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
            with torch.no_grad():
                mean.add_(x.mean(0) * 0.1)
            return x.tanh() + mean.clone()

        region, x = wrap(update), rand(3, 3)
        with fwAD.dual_level():
            y = region(fwAD.make_dual(x * 1, x.cos()))
            y = region(y) if kind == "batch norm" else y
            out, tangent = fwAD.unpack_dual(y)
        return torch.autograd.grad((out.cos() * tangent).sum(), x), [mean, *norm.buffers()]

    assert_same(run(remat), run(plain), exact=False)


# --- recomputes, bytes and the level itself ---------------------------------------------------------------------------


def test_one_recompute_which_stops_early() -> None:
    runs = Runs(block)
    after_the_level(remat(runs), *tensors())
    assert runs.count == 2
    mms = [
        count_ops(after_the_level, fn, *tensors())["aten.mm"] for fn in (remat(block), remat(block, early_stop=False))
    ]
    assert mms[0] < mms[1] <= count_ops(after_the_level, block, *tensors())["aten.mm"] + 9


def test_a_chain_saves_one_primal_and_one_tangent_for_each_region() -> None:
    x, w, v = tensors(N)

    def forward(fn: Callable, depth: int) -> Tensor | None:
        with fwAD.dual_level():
            h = fwAD.make_dual(x, v)
            for _ in range(depth):
                h = fn(h, w)
            return fwAD.unpack_dual(h).tangent

    held = {depth: held_bytes(forward, remat(block), depth) / KB for depth in (4, 8)}
    assert held[8] - held[4] == 4 * 2
    assert held_bytes(forward, block, 8) / KB > 2 * held[8]
    x, w = x.detach(), w.detach()
    assert held_bytes(forward, remat(block), 1) == KB  # nothing is saved where nothing requires grad


@pytest.mark.parametrize("backward", ["none", "in the level", "after the level"])
def test_everything_is_freed(backward: str) -> None:
    x, w, v = tensors(N)

    def f(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh()
        if not is_recomputing():
            watch(h)
        return (h @ w).sin()

    with assert_freed_without_gc() as watch, PeakMemory() as memory:
        with fwAD.dual_level():
            dual = fwAD.make_dual(x * 1, v * 1)
            out = remat(f)(dual, w)
            tangent = fwAD.unpack_dual(out).tangent
            watch(dual, out, tangent)
            if backward == "in the level":
                torch.autograd.grad(tangent.sum(), (x, w))
        if backward == "after the level":
            torch.autograd.grad(tangent.sum(), (x, w))
        del dual, out, tangent
        assert memory.live == 0


@pytest.mark.parametrize("raises", [False, True])
def test_a_recompute_leaves_no_level(raises: bool) -> None:
    """After the level it needs one of its own."""
    x, w, v = tensors()

    def f(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh()
        if raises and is_recomputing():
            raise KeyError("on purpose")
        return (h @ w).sin()

    with fwAD.dual_level():
        out = fwAD.unpack_dual(remat(f)(fwAD.make_dual(x, v), w)).tangent
    try:
        torch.autograd.grad(out.sum(), x)
    except KeyError:
        assert raises
    with pytest.raises(RuntimeError, match="dual_level"):
        fwAD.make_dual(x, v)
    with fwAD.dual_level():
        assert_same(fwAD.unpack_dual(fwAD.make_dual(x, v).sin()).tangent, v * x.cos())


# --- duals that torch.func transforms are called with -----------------------------------------------------------------

FUNC: dict[str, Callable] = {
    "grad": lambda fn: grad(lambda x, w: fn(x, w).sin().sum(), argnums=(0, 1)),
    "grad_and_value": lambda fn: grad_and_value(lambda x, w: fn(x, w).sin().sum()),
    "grad(grad)": lambda fn: grad(lambda x, w: grad(lambda x: fn(x, w).sin().sum())(x).cos().sum()),
    "vmap": lambda fn: vmap(fn, in_dims=(0, None)),
    "vmap(grad)": lambda fn: vmap(grad(lambda x, w: fn(x, w).sin().sum(), argnums=(0, 1)), in_dims=(0, None)),
    "grad(vmap)": lambda fn: grad(lambda x, w: vmap(fn, in_dims=(0, None))(x, w).sin().sum()),
    "jacrev": jacrev,
    "captured": lambda fn: lambda x, w: grad(lambda x: fn(x, w).sin().sum())(x),
    "unused": lambda fn: lambda x, w: grad(lambda w: fn(w, w).sin().sum() * 2)(w * 1) * x.sin(),
}


@pytest.mark.parametrize("moves", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize(
    "build, policy", [(nested, None), (REGIONS["region"], policies.save_matmuls)], ids=["nested", "a policy"]
)
@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.parametrize("name", FUNC)
def test_transforms_of_duals(name: str, build: Callable, policy: Any, moves: tuple) -> None:
    def run(wrap: Wrap, follows: bool) -> tuple:
        leaves = [t.detach().clone().requires_grad_(follows) for t in tensors()]
        with fwAD.dual_level():
            args = [fwAD.make_dual(t, leaves[2]) if i in moves else t for i, t in enumerate(leaves[:2])]
            found = tensor_leaves(FUNC[name](build(wrap))(*args))
            parts = [part for t in found for part in pair(t) if part is not None]
            assert len(parts) > len(found) and any(t.requires_grad for t in found) is follows
            total = sum(t.sin().sum() for t in parts)
            return parts, torch.autograd.grad(total, leaves, allow_unused=True) if follows else ()

    for follows in (False, True):
        assert_same(run(lambda fn: remat(fn, policy=policy), follows), run(plain, follows), exact=False)


@pytest.mark.parametrize("differentiated", ["primal", "tangent"])
def test_a_dual_made_inside_a_transform_is_an_error(differentiated: str) -> None:
    x, _, v = tensors()

    def product(x: Tensor) -> Tensor:
        dual = (x, v) if differentiated == "primal" else (v, x)
        with fwAD.dual_level():
            return fwAD.unpack_dual(remat(torch.sin)(fwAD.make_dual(*dual))).tangent.sum()

    with pytest.raises(RematError, match="Make the dual tensor outside of that function"):
        grad(product)(x.detach())


def test_transforms_of_duals_save_memory() -> None:
    x, v = (rand(64, 64, seed=i, grad=False) for i in range(2))

    def program(wrap: Wrap) -> Callable:
        run = wrap(lambda x: x.sin().exp().sin().exp().sin())

        def chain(x: Tensor) -> Tensor:
            for _ in range(20):
                x = run(x)
            return x.sum()

        def call() -> Any:
            with fwAD.dual_level():
                return fwAD.unpack_dual(grad(chain)(fwAD.make_dual(x, v))).tangent

        return call

    # The level keeps the tangents of tensors that a backward reads alive until it ends, also without remat.
    assert peak_bytes(program(remat)) < 0.6 * peak_bytes(program(plain))
    assert leaked_bytes(program(remat)) == 0


# --- levels that are entered in a region ------------------------------------------------------------------------------


def moved(fn: Callable, x: Tensor, y: Tensor) -> Tensor:
    """The derivative of `fn` in a direction, by a level of its own."""
    with fwAD.dual_level():
        out, tangent = fwAD.unpack_dual(fn(fwAD.make_dual(x * 1, y.cos()), y))
        return out * 0 if tangent is None else tangent * 1


def forces(x: Tensor, y: Tensor) -> Tensor:
    """Runs a backward pass inside."""
    p = x * 1
    (g,) = torch.autograd.grad((p * y).sin().sum(), p, create_graph=True)
    return g * x


INSIDE: dict[str, Callable[[Wrap], Callable]] = {
    "a level": lambda wrap: wrap(lambda x, y: moved(block, x, y)),
    "around a region": lambda wrap: lambda x, y: moved(wrap(block), x, y),
    "forces": lambda wrap: wrap(lambda x, y: moved(forces, x, y)),
    "after a transform": lambda wrap: wrap(lambda x, y: moved(block, grad(lambda p: block(p, y).sum())(x), y)),
}


@pytest.mark.parametrize("policy", [None, policies.everything_saveable, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("program", INSIDE)
@pytest.mark.filterwarnings("ignore:The policy")
def test_levels_inside_of_regions(program: str, policy: Any) -> None:
    def run(wrap: Wrap) -> list:
        fn, (x, w, _) = INSIDE[program](wrap), tensors()
        first = [torch.autograd.grad(fn(x, w).sum(), (x, w)) for _ in range(2)]  # the second uses records of the first
        found = [fn(x, w)]
        for _ in range(2):
            found += torch.autograd.grad((found[-1] + x * w).sin().sum(), (x, w), create_graph=True)
        return [*found, *first]

    assert_same(run(lambda fn: remat(fn, policy=policy)), run(plain), exact=False)
    assert not fwAD._current_level >= 0


@pytest.mark.parametrize("program", ["a level", "forces"])
def test_levels_inside_of_regions_save_memory(program: str) -> None:
    def chain(wrap: Wrap) -> Callable:
        def call(x: Tensor) -> Any:
            w = torch.eye(32, dtype=x.dtype)
            h = y = x.clone().requires_grad_()
            for _ in range(10):
                h = INSIDE[program](wrap)(h, w)
            return torch.autograd.grad(h.sum(), y)

        return call

    x = rand(32, 32, grad=False)
    chain(remat)(x)
    assert peak_bytes(chain(remat), x) < 0.6 * peak_bytes(chain(plain), x)
    assert leaked_bytes(chain(remat), x) == 0


def test_a_region_that_enters_a_level_around_a_region_raises() -> None:
    """A recompute of the inner region would enter one too, and torch can't nest them."""
    x, w, _ = tensors()
    out = remat(lambda x, y: moved(remat(block), x.sin(), y.sin()))(x, w)
    with pytest.raises(RuntimeError, match="Nested forward mode AD"):
        out.sum().backward()


def test_a_level_in_a_level_raises_as_without_remat() -> None:
    def fn(x: Tensor) -> Tensor:
        with fwAD.dual_level(), fwAD.dual_level():
            return x.sin()

    for each in (fn, remat(fn)):
        with pytest.raises(RuntimeError, match="Nested forward mode AD"):
            each(rand(3))
