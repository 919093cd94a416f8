"""`torch.autograd.forward_ad` levels around, between and in regions, in every order with reverse mode."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import KB, Case, N, Wrap, assert_same, assert_same_results, cases, flat, plain, rand, repeated, total
from side_by_side import Runs
from torch import Tensor
from torch.func import grad

from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes
from remat import MutationError, RematError, is_recomputing, remat


def block(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() @ w).sin() @ w


def tensors(size: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Two differentiable matrices, and a tangent."""
    return rand(size, size), rand(size, size, seed=1), rand(size, size, seed=2, grad=False)


def pair(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    return tuple(fwAD.unpack_dual(dual))


@cases(jvp=True)
def test_tangents_of_every_function_and_their_gradients(case: Case) -> None:
    """The gradients of primal and tangent with respect to both. For some functions torch itself raises."""

    def run(fn: Callable) -> tuple:
        with case.state(), fwAD.dual_level():
            call, primals = flat(case, fn)
            primals = [t.requires_grad_() for t in primals]
            tangents = [torch.ones_like(t).requires_grad_() for t in primals]
            duals = call(*map(fwAD.make_dual, primals, tangents))
            values = [part for dual in duals for part in pair(dual) if part is not None]
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


def reverse_over_forward(fn: Any, x: Tensor, w: Tensor, v: Tensor, after: bool = False, follow: bool = False) -> Any:
    """Gradients of primal, tangent and both, from one graph, and third derivatives."""
    inputs = (x, w, v.requires_grad_()) if follow else (x, w)

    def backward() -> list:
        found = [torch.autograd.grad(t.sin().sum(), inputs, retain_graph=True, allow_unused=True) for t in values]
        grads = torch.autograd.grad(values[2].sin().sum(), inputs, create_graph=True)
        return [*found, torch.autograd.grad(sum(g.sin().sum() for g in grads), inputs)]

    with fwAD.dual_level():
        primal, tangent = pair(fn(fwAD.make_dual(x, v), w))
        values = [primal, tangent, primal * tangent]
        if not after:
            return backward()
    return backward()


def forward_over_reverse(fn: Callable, x: Tensor, w: Tensor, v: Tensor, **options: Any) -> Any:
    """Gradients with tangents in the level, and again after it."""
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, v)
        value = fn(dual, w).sin().sum()
        found = [pair(g) for g in torch.autograd.grad(value, (dual, w), **options)]
    if options:
        found.append(torch.autograd.grad(value, (x, w), retain_graph=True))
    if "create_graph" in options:
        found.append(torch.autograd.grad(found[0][1].sin().sum(), (x, w)))
    return found


def with_a_tangent_of_the_cotangent(fn: Callable, x: Tensor, w: Tensor, v: Tensor, before: bool = False) -> Any:
    """The forward has run in an earlier level, whose tangents no longer exist, or in none."""
    if before:
        with fwAD.dual_level():
            out = fn(fwAD.make_dual(x, v), w)
    else:
        out = fn(x, w)
    with fwAD.dual_level():
        return [pair(g) for g in torch.autograd.grad(out, (x, w), fwAD.make_dual(v, v.cos()))]


ORDERS: dict[str, Callable] = {
    "reverse over forward": reverse_over_forward,
    "reverse over forward, after the level": partial(reverse_over_forward, after=True),
    "reverse over forward, of the tangent": partial(reverse_over_forward, after=True, follow=True),
    "forward over reverse": forward_over_reverse,
    "forward over reverse, retained": partial(forward_over_reverse, retain_graph=True),
    "forward over reverse, then reverse": partial(forward_over_reverse, create_graph=True),
    "cotangent": with_a_tangent_of_the_cotangent,
    "cotangent in the next level": partial(with_a_tangent_of_the_cotangent, before=True),
}


def nested(wrap: Wrap, **options: Any) -> Callable:
    inner = wrap(block, **options)
    return wrap(lambda x, w: inner(inner(x, w).cos(), w) * x, **options)


def captured(wrap: Wrap) -> Callable:
    """The dual is captured, and used in an inner region too."""
    inner = lambda x: wrap(lambda w: (w @ x).tanh())
    return lambda x, w: wrap(lambda w: inner(x)(inner(x)(w).sin()) @ x)(w)


REGIONS: dict[str, Callable[[Wrap], Callable]] = {
    "region": lambda wrap: wrap(block),
    "nested": nested,
    "nested, no early stop": partial(nested, early_stop=False),
    "nested, no check": partial(nested, determinism_check="none"),
    "random": lambda wrap: wrap(lambda x, w: (torch.dropout(x.sin(), 0.5, True) * torch.rand_like(w) @ w).exp()),
    "captured": captured,
    "level": lambda wrap: lambda x, w: grad(lambda w: wrap(lambda w: torch.no_grad()(x.cos)() * w)(w).sum())(w) * x @ w,
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_forward_and_reverse_mode(order: str, region: str) -> None:
    assert_same_results(lambda wrap: ORDERS[order](REGIONS[region](wrap), *tensors()), remat, plain)


def hessian_vector_product(fn: Callable, x: Tensor, w: Tensor, v: Tensor) -> Any:
    with fwAD.dual_level():
        tangent = pair(fn(fwAD.make_dual(x, v), w))[1]
    return torch.autograd.grad(tangent.sum(), (x, w))


def test_one_recompute_which_stops_early() -> None:
    runs, regions = Runs(block), (remat(block), remat(block, early_stop=False), block)
    hessian_vector_product(remat(runs), *tensors())
    assert runs.count == 2
    products = [count_ops(hessian_vector_product, fn, *tensors())["aten.mm"] for fn in regions]
    assert products[0] < products[1] <= products[2] + 9
    level = lambda x: fwAD.dual_level()(lambda: pair(fwAD.make_dual(x.sin(), x.cos()))[1].exp().sin())()
    x, _, _ = tensors()
    assert_same(*(torch.autograd.grad(f(x).sum(), x) for f in (remat(level), level)))  # a level inside


def test_a_chain_saves_one_primal_and_one_tangent_for_each_region() -> None:
    x, w, v = tensors(N)

    def forward(fn: Callable, depth: int) -> Any:
        with fwAD.dual_level():
            return pair(repeated(lambda h: fn(h, w), depth)(fwAD.make_dual(x, v)))[1]

    held = [held_bytes(forward, remat(block), depth) / KB for depth in (4, 8)]
    assert held[1] - held[0] == 4 * 2 and held_bytes(forward, block, 8) / KB > 2 * held[1]
    x, w = x.detach(), w.detach()
    assert held_bytes(forward, remat(block), 1) == KB  # nothing is saved where nothing requires grad


@pytest.mark.parametrize("raises", [False, True])
def test_a_recompute_leaves_no_tensors_and_no_level(raises: bool) -> None:
    """After the level it needs one of its own."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh()
        if not is_recomputing():
            watch(h)
        elif raises:
            raise KeyError("on purpose")
        return (h @ w).sin()

    inputs = tensors()
    with assert_freed_without_gc() as watch, suppress(KeyError):
        hessian_vector_product(remat(f), *inputs)
        assert not raises
    with pytest.raises(RuntimeError, match="dual_level"):
        fwAD.make_dual(*inputs[1:])


@pytest.mark.parametrize("differentiated", [0, 1], ids=["primal", "tangent"])
def test_a_dual_made_inside_a_transform_is_an_error(differentiated: int) -> None:
    x, _, v = tensors()

    def product(x: Tensor) -> Tensor:
        with fwAD.dual_level():
            return pair(remat(torch.sin)(fwAD.make_dual(*((x, v), (v, x))[differentiated])))[1].sum()

    with pytest.raises(RematError, match="Make the dual tensor outside of that function"):
        grad(product)(x.detach())


def test_a_dual_input_that_is_changed_after_its_region_and_an_outer_one() -> None:
    """The outer region's hooks save the input without its tangent, which must be as in the first run too."""

    def outer(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        return h, remat(lambda h: (h * 2).sin())(h)

    x = rand(3).requires_grad_()
    with fwAD.dual_level():
        h, y = remat(outer)(fwAD.make_dual(x, torch.ones_like(x)))
        h.mul_(0.7)
        tangent = fwAD.unpack_dual(y).tangent
        assert tangent is not None
        with pytest.raises(MutationError, match="argument h was changed in place"):
            torch.autograd.grad(tangent.sum(), x)
