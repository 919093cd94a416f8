"""What a region becomes at each level: operands and results of other levels, random numbers, modes, and pullbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from both import ALL, RECOMPUTE, Fn, V, W, Wrap, X, Y, both, f, rows, summed, through_autograd
from cases import rand, total
from torch import Tensor
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import conv1d, dropout

from benchmarks.measure import count_ops
from remat import RematError, policies, remat

EVERYTHING = policies.everything_saveable

# --- operands of several levels ---------------------------------------------------------------------------------------

# Programs of a function of two arguments: one of them is differentiated, and captured tensors have the tangents.
INSIDE: dict[str, Callable[[Fn], Fn]] = {
    "first": lambda f: lambda x, y: grad(lambda x: f(x, y))(x),
    "second": lambda f: lambda x, y: grad(lambda y: f(x, y))(y),
    "first, twice": lambda f: lambda x, y: grad(lambda x: grad(lambda x: f(x, y))(x).sin().sum())(x),
    "first, then second": lambda f: lambda x, y: grad(lambda y: grad(lambda x: f(x, y))(x).sin().sum())(y),
    "per row": lambda f: lambda x, y: vmap(lambda x, y: grad(lambda x: f(x, y))(x))(x, y),
    "per row, shared": lambda f: lambda x, y: vmap(lambda x: grad(lambda x: f(x, y))(x))(x),
    "jacrev": lambda f: lambda x, y: jacrev(lambda x: f(x, y))(x),
}
AROUND: dict[str, Callable[[Fn], Any]] = {
    "both": lambda g: jvp(g, (X, Y), (Y, W)),
    "second moves": lambda g: jvp(lambda y: g(X, y), (Y,), (W,)),
    "per row": lambda g: vmap(lambda x, y: jvp(g, (x, y), (y, x)))(rows(X), rows(Y)),
    "jacfwd": lambda g: jacfwd(g, argnums=1)(X[:2, :2], Y[:2, :2]),
    "grad": lambda g: grad(lambda x: jvp(lambda y: g(x, y), (Y,), (W,))[1].sin().sum())(X),
}
TWO: dict[str, Callable[[Wrap], Fn]] = {
    "unused": lambda wrap: lambda x, y: wrap(lambda x, y: x.sin())(x, y).sum(),
    "used outside": lambda wrap: lambda x, y: (wrap(lambda x, y: x.sin())(x, y) * y).sum(),
    "used": lambda wrap: lambda x, y: wrap(lambda x, y: x.sin() * y.cos())(x, y).sin().sum(),
    "captured": lambda wrap: lambda x, y: wrap(lambda x: x.sin() * y.cos())(x).sin().sum(),
    "captured, unused": lambda wrap: lambda x, y: wrap(lambda x: x.sin() if y is not None else x)(x).sin().sum(),
    "nested": lambda wrap: lambda x, y: wrap(lambda x, y: wrap(lambda x, y: x.sin())(x, y).exp())(x, y).sum(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin"), EVERYTHING], ids=str)
@pytest.mark.parametrize("two", TWO)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("around", AROUND)
def test_operands_of_lower_levels_have_tangents(around: str, inside: str, two: str, policy: Any) -> None:
    both(lambda wrap: AROUND[around](INSIDE[inside](TWO[two](wrap))), policy=policy)


def swapped(p: Tensor, q: Tensor) -> tuple:
    return q, p


def mixed(p: Tensor, q: Tensor) -> tuple:
    return p.sin() * q, p, q, p * 1


def differentiates(p: Tensor, q: Tensor) -> tuple:
    out = (p * q).sin().sum()
    if not (out.requires_grad and p.requires_grad):
        return q * 2, q
    (g,) = torch.autograd.grad(out, p, create_graph=True, allow_unused=True)
    return q if g is None else g * q, q


ONE_BELOW: dict[str, Callable[[Fn], Fn]] = {
    "grad": lambda f: lambda x: grad(lambda p: total(f(p, x)))(x),
    "grad, of the second": lambda f: lambda x: grad(lambda p: total(f(x, p)))(x),
    "three": lambda f: lambda x: grad(lambda p, q: total((f(p, q), f(q, x))))(x, x),
    "vjp": lambda f: lambda x: vjp(lambda p: f(p, x), x)[1](tuple(x.cos() for _ in f(x, x)))[0],
    "jvp": lambda f: lambda x: jvp(lambda p: total(f(p, x)), (x,), (x.cos(),))[1] + x,
    "vmap": lambda f: lambda x: vmap(lambda p: grad(lambda q: total(f(q, x)))(x) * p)(x),
}


@pytest.mark.parametrize("fn", [swapped, mixed, differentiates])
@pytest.mark.parametrize("around", ["call", "autograd", "grad", "in a region"])
@pytest.mark.parametrize("name", ONE_BELOW)
def test_operands_that_are_the_same_tensor_below_the_levels(name: str, around: str, fn: Fn) -> None:
    """A transform gives a function a tensor that it follows, and the function also reads the same tensor unfollowed."""
    both(lambda wrap: ALL[around](lambda x: ONE_BELOW[name](wrap(fn))(x) + x, V))


@pytest.mark.parametrize("transform", [jacfwd, lambda f: jacfwd(jacfwd(f))])
def test_operands_without_a_tangent_stay_without_one(transform: Callable) -> None:
    """A tangent of zeros would have no batch dimension, so that no in-place operation could write to it."""

    def build(wrap: Wrap) -> Fn:
        def call(x: Tensor) -> Tensor:
            still = grad(lambda p: wrap(lambda p: x.sin())(p).sum())(V)
            unrelated = wrap(lambda p, q: (p.sin(), q.cos()))(x, V)[1]
            return sum(jvp(lambda x: x.clone().sin_(), (x.sin(),), (t,))[1] for t in (still, unrelated))

        return call

    both(lambda wrap: transform(build(wrap))(V))
    both(lambda wrap: transform(lambda x: wrap(build(wrap))(x * 1).sin())(V))


def test_an_argument_that_a_mapped_region_changes() -> None:
    both(lambda wrap: [vmap(wrap(lambda x: x.mul_(2).sin()))(x) + x for x in [X.clone()]])


def test_dual_tensors_made_inside_are_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        with fwAD.dual_level():
            return fwAD.unpack_dual(remat(torch.sin)(fwAD.make_dual(x, x)))[1].sum()

    with pytest.raises(RematError, match=r"`forward_ad.make_dual` made inside .* use torch\.func\.jvp inside"):
        grad(fn)(X)


def test_a_region_in_a_traced_function_is_called() -> None:
    both(lambda wrap: functionalize(wrap(lambda x: x.sin().mul_(2)))(X))
    assert count_ops(functionalize(grad(summed(remat(torch.sin)))), X)["aten.sin"] == 1


# --- random numbers and modes -----------------------------------------------------------------------------------------


def drops(x: Tensor) -> Tensor:
    return dropout(x.sin(), 0.5) * x


def draws(x: Tensor) -> Tensor:
    """The random numbers don't depend on the operand, which may have no batch dimension."""
    return (x * torch.randn(4, dtype=x.dtype)).sin()


RANDOM: dict[str, Callable[[Wrap, Fn], Any]] = {
    "vmap": lambda wrap, vmap: vmap(wrap(drops))(X),
    "vmap(grad)": lambda wrap, vmap: vmap(grad(summed(wrap(drops))))(X),
    "vmap(vmap(grad))": lambda wrap, vmap: vmap(vmap(grad(wrap(drops))))(X),
    "grad(region(vmap))": lambda wrap, vmap: grad(summed(wrap(vmap(wrap(drops)))))(X),
    "jacfwd(vmap)": lambda wrap, vmap: jacfwd(lambda x: vmap(wrap(drops))(x).sum(0), randomness="same")(X),
    "grad(grad(vmap))": lambda wrap, vmap: grad(summed(grad(summed(vmap(wrap(drops))))))(X),
    "autograd(vmap)": lambda wrap, vmap: through_autograd(lambda x: vmap(wrap(drops))(x) * torch.rand(4), X),
    "no batch": lambda wrap, vmap: vmap(lambda y: wrap(draws)(V) * y)(X),
    "no batch, grad": lambda wrap, vmap: vmap(lambda y: grad(summed(wrap(draws)))(V) * y)(X),
    "no batch, grad around": lambda wrap, vmap: grad(lambda w: vmap(lambda y: wrap(draws)(w) * y)(X).sum())(V),
}


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("name", RANDOM)
def test_all_runs_draw_the_same_numbers_under_vmap(name: str, randomness: str) -> None:
    both(lambda wrap: RANDOM[name](wrap, functools.partial(vmap, randomness=randomness)))


@pytest.mark.parametrize("name", RECOMPUTE)
def test_all_runs_draw_the_same_numbers(name: str) -> None:
    both(lambda wrap: RECOMPUTE[name](wrap(drops), V))


@pytest.mark.parametrize("transform", [lambda g: g, lambda g: grad(summed(g))])
def test_the_error_for_random_numbers_under_vmap_is_that_of_torch(transform: Callable) -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(transform(remat(drops)))(X)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_an_inner_run_that_is_abandoned_in_a_region_with_a_policy(randomness: str) -> None:
    """A region starts again when it has drawn numbers at a level where no operand is batched.

    What the policy of the region around it had handed to the outermost region is handed over again then.
    """

    def program(wrap: Wrap) -> Any:
        inner = wrap(lambda x: dropout(x.sin(), 0.4), policy=EVERYTHING)
        middle, y = wrap(lambda x: inner(x * 2), policy=EVERYTHING), rand(4, 4)
        return through_autograd(lambda x: vmap(wrap(lambda p: (middle(y), p.relu())[1]), randomness=randomness)(x), X)

    both(program)


def test_casts_of_a_region_without_tangents_at_a_jvp_level() -> None:
    """Under ``vmap``, autocast acts at the level: a region without tangents is affected by it too."""
    weight = rand(4, 1, 2, grad=False).float()

    def program(wrap: Wrap) -> Any:
        block = wrap(lambda x: conv1d(x[None, None], weight).sum((0, 2)))
        with torch.autocast("cpu", torch.bfloat16):
            return vmap(lambda x: jvp(lambda z: (block(x), z.sin()), (x,), (x.cos(),))[0][0])(X.float())

    both(program, exact=True)


def without_grad(wrap: Wrap) -> Fn:
    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = wrap(lambda x: x.abs().exp())(x)
        with torch.no_grad(), torch.enable_grad():
            both_ways = wrap(torch.sin)(x)
        return scale * wrap(torch.exp)(x) * both_ways * x.detach()

    return call


def with_grad(wrap: Wrap) -> Fn:
    """The region's result has a gradient although the caller has disabled grad mode, as forces of a frozen model do."""

    def enables(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.square().exp()

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            c = wrap(enables)(x)
        return c * x

    return call


@pytest.mark.parametrize("fn", [without_grad, with_grad])
@pytest.mark.parametrize("transform", [grad, hessian, lambda f: vmap(grad(f)), lambda f: grad(summed(grad(f)))])
def test_grad_mode_inside(transform: Callable, fn: Callable) -> None:
    both(lambda wrap: transform(summed(fn(wrap)))(X))
    both(lambda wrap: transform(summed(wrap(fn(wrap))))(X))


def test_grad_mode_inside_of_compiled_code() -> None:
    both(lambda wrap: torch.compile(grad(summed(with_grad(wrap))), backend="aot_eager")(X))


# --- pullbacks and nested regions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_pullback_is_transformed_after_its_level_ended(name: str) -> None:
    def program(wrap: Wrap) -> Any:
        _, pull = vjp(wrap(f), V)
        return ALL[name](lambda t: pull(t)[0].sin(), V)

    both(program)


@pytest.mark.parametrize("name", ALL)
def test_lower_levels_differentiate_a_pullback(name: str) -> None:
    """Their backward runs after the level of the `vjp` has ended, so its backward must have been recorded."""
    both(lambda wrap: ALL[name](lambda x: vjp(wrap(f), x)[1](x.sin())[0], V))
    both(lambda wrap: ALL[name](lambda x: vmap(vjp(wrap(f), x)[1])(rows(x))[0].sum(0), V))


@pytest.mark.parametrize("check", ["metadata", "none"])
@pytest.mark.parametrize("name", ALL)
def test_regions_inside_regions(name: str, check: str) -> None:
    """The regions are new, so that nothing recorded in an earlier call matters; then they are called again."""

    def program(wrap: Wrap) -> Any:
        inner = wrap(lambda x: x.sin().cos())
        middle = wrap(lambda x: inner(x.exp()).tanh() * x)
        fn = wrap(lambda x: middle(x).sin())
        return ALL[name](fn, V), ALL[name](fn, V)

    both(program, determinism_check=check)
