"""What a region becomes at each level: operands and results of other levels, random numbers, modes, and pullbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from both import Fn, W, Wrap, X, Y, both, f, through_autograd
from cases import rand, total
from torch import Tensor
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import conv1d, dropout, linear

from benchmarks.measure import count_ops
from remat import RematError, policies, remat

EVERYTHING = policies.everything_saveable
ROWS = torch.stack([X, Y])


def summed(fn: Fn) -> Fn:
    return lambda *args: fn(*args).sum()


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
    "per row": lambda g: vmap(lambda x, y: jvp(g, (x, y), (y, x)))(ROWS, ROWS.cos()),
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
    "jvp": lambda f: lambda x: jvp(lambda p: total(f(p, x)), (x,), (x.cos(),))[1],
    "vmap": lambda f: lambda x: vmap(lambda p: grad(lambda q: total(f(q, x)))(x) * p)(x),
}
GIVEN: dict[str, Callable[[Fn, Wrap], Any]] = {
    "a plain tensor": lambda fn, wrap: fn(X[0]),
    "autograd": lambda fn, wrap: through_autograd(lambda x: fn(x) + x, X[0]),
    "grad": lambda fn, wrap: grad(lambda x: fn(x).sin().sum())(X[0]),
    "a region": lambda fn, wrap: wrap(fn)(X[0]),
}


@pytest.mark.parametrize("fn", [swapped, mixed, differentiates])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ONE_BELOW)
def test_operands_that_are_the_same_tensor_below_the_levels(name: str, given: str, fn: Fn) -> None:
    """A transform gives a function a tensor that it follows, and the function also reads the same tensor unfollowed."""
    both(lambda wrap: GIVEN[given](ONE_BELOW[name](wrap(fn)), wrap))


def test_operands_without_a_tangent_stay_without_one() -> None:
    """A tangent of zeros would have no batch dimension, so that no in-place operation could write to it."""

    def in_place(x: Tensor) -> Tensor:
        return x.clone().sin_()

    def build(wrap: Wrap) -> Fn:
        def call(x: Tensor) -> Tensor:
            still = grad(lambda p: wrap(lambda p: x.sin())(p).sum())(X[0])
            unrelated = wrap(lambda p, q: (p.sin(), q.cos()))(x, X[0])[1]
            return jvp(in_place, (x.sin(),), (still,))[1] + jvp(in_place, (x.sin(),), (unrelated,))[1]

        return call

    both(lambda wrap: jacfwd(build(wrap))(X[0]))
    both(lambda wrap: jacfwd(lambda x: wrap(build(wrap))(x * 1).sin())(X[0]))
    both(lambda wrap: jacfwd(jacfwd(build(wrap)))(X[0]))


def test_an_operand_keeps_the_strides_of_dimensions_of_size_1() -> None:
    """Operations may take another path otherwise: a chunk of one row is a batch with odd strides."""

    def program(wrap: Wrap) -> Any:
        def mapped(x: Tensor, w: Tensor) -> Tensor:
            layer = wrap(lambda t: linear(t, w))

            def changed(p: Tensor, q: Tensor) -> Tensor:
                t = q * 1
                t[0] = p[1]
                return layer(t)

            pushed = lambda p, q: jvp(lambda p: changed(p, q), (p,), (p,))[1]
            return vmap(pushed, (0, 1), chunk_size=1)(torch.stack([x, x.cos()]), torch.stack([Y, Y.cos()], 1))

        return through_autograd(mapped, X, W)

    both(program)


def test_an_argument_that_a_mapped_region_changes() -> None:
    both(lambda wrap: [vmap(wrap(lambda x: x.mul_(2).sin()))(x) + x for x in [X.clone()]])


def test_dual_tensors_made_inside_are_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        with fwAD.dual_level():
            return fwAD.unpack_dual(remat(torch.sin)(fwAD.make_dual(x, x)))[1].sum()

    with pytest.raises(RematError, match=r"`forward_ad.make_dual` made inside .* use torch\.func\.jvp inside"):
        grad(fn)(X)


def test_a_traced_function_is_called() -> None:
    region = remat(lambda x: x.sin().mul_(2))
    assert torch.equal(functionalize(region)(X), region(X))
    assert count_ops(functionalize(grad(summed(region))), X)["aten.sin"] == 1


# --- random numbers and modes -----------------------------------------------------------------------------------------


def drops(x: Tensor) -> Tensor:
    return dropout(x.sin(), 0.5) * x


def draws(x: Tensor) -> Tensor:
    """Random numbers that don't depend on an operand with a batch dimension."""
    return (x * torch.randn(4, dtype=x.dtype)).sin()


ONES = torch.ones(4, dtype=X.dtype)
RANDOM: dict[str, Callable[[Wrap, Fn], Any]] = {
    "vmap": lambda wrap, vmap: vmap(wrap(drops))(X),
    "vmap(grad)": lambda wrap, vmap: vmap(grad(summed(wrap(drops))))(X),
    "vmap(jacrev)": lambda wrap, vmap: vmap(jacrev(wrap(drops)))(X),
    "vmap(vmap(grad))": lambda wrap, vmap: vmap(vmap(grad(wrap(drops))))(X),
    "grad(vmap)": lambda wrap, vmap: grad(summed(vmap(wrap(drops))))(X),
    "grad(region(vmap))": lambda wrap, vmap: grad(summed(wrap(vmap(wrap(drops)))))(X),
    "jacrev(vmap)": lambda wrap, vmap: jacrev(lambda x: vmap(wrap(drops))(x).sum(0))(X),
    "jacfwd(vmap)": lambda wrap, vmap: jacfwd(lambda x: vmap(wrap(drops))(x).sum(0), randomness="same")(X),
    "grad(grad(vmap))": lambda wrap, vmap: grad(summed(grad(summed(vmap(wrap(drops))))))(X),
    "autograd(vmap)": lambda wrap, vmap: through_autograd(lambda x: vmap(wrap(drops))(x) * torch.rand(4), X),
    "no batch": lambda wrap, vmap: vmap(lambda y: wrap(draws)(ONES) * y)(X),
    "no batch, grad": lambda wrap, vmap: vmap(lambda y: grad(summed(wrap(draws)))(ONES) * y)(X),
    "no batch, grad around": lambda wrap, vmap: grad(lambda w: vmap(lambda y: wrap(draws)(w) * y)(X).sum())(ONES),
    "jacfwd": lambda wrap, vmap: jacfwd(wrap(drops), randomness="same")(X[0]),
    "jacrev(jacfwd)": lambda wrap, vmap: jacrev(jacfwd(summed(wrap(drops)), randomness="same"))(X[0]),
    "hessian": lambda wrap, vmap: jacfwd(jacrev(summed(wrap(drops))), randomness="same")(X[0]),
}


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("name", RANDOM)
def test_all_runs_draw_the_same_numbers(name: str, randomness: str) -> None:
    both(lambda wrap: RANDOM[name](wrap, functools.partial(vmap, randomness=randomness)))


@pytest.mark.parametrize("transform", [lambda g: g, lambda g: grad(summed(g))])
def test_the_error_for_random_numbers_under_vmap_is_torchs(transform: Callable) -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(transform(remat(drops)))(X)


def test_a_generator_of_the_user() -> None:
    def program(wrap: Wrap) -> Any:
        generator = torch.Generator().manual_seed(3)
        g = wrap(lambda x, gen: (x * torch.rand(4, generator=gen, dtype=x.dtype)).sin())
        gradient = grad(lambda x: vmap(lambda x: g(x, generator), randomness="same")(x).sum())
        return gradient(X), torch.rand(2, generator=generator)

    both(program)


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

# Programs of a pullback whose level has ended.
PULLED: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda pull: grad(lambda t: pull(t).sin().sum())(Y),
    "jacrev": lambda pull: jacrev(pull)(Y),
    "jacfwd": lambda pull: jacfwd(pull)(Y),
    "hessian": lambda pull: hessian(lambda t: pull(t).exp().sum())(Y),
    "jvp": lambda pull: jvp(pull, (Y,), (X,)),
    "vjp": lambda pull: vjp(pull, Y)[1](X),
    "vmap(grad)": lambda pull: vmap(grad(lambda t: pull(t).sin().sum()))(ROWS),
    "grad(vmap)": lambda pull: grad(lambda rows: vmap(lambda t: pull(t).sin())(rows).sum())(ROWS),
    "vmap(jacfwd)": lambda pull: vmap(jacfwd(pull))(ROWS),
    "jvp(vmap)": lambda pull: jvp(vmap(lambda t: pull(t).sin()), (ROWS,), (ROWS,)),
}


@pytest.mark.parametrize("name", PULLED)
def test_a_pullback_is_transformed_after_its_level_ended(name: str) -> None:
    def program(wrap: Wrap) -> Any:
        _, pull = vjp(wrap(f), X)
        return PULLED[name](lambda t: pull(t)[0])

    both(program)


# Their backward runs after the level of the `vjp` has ended, so its backward must have been recorded.
BELOW: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda g: grad(lambda x: g(x).sin().sum())(X),
    "jacfwd": lambda g: jacfwd(g)(X),
    "jacrev": lambda g: jacrev(g)(X),
    "hessian": lambda g: hessian(lambda x: g(x).sin().sum())(X),
    "vmap(grad)": lambda g: vmap(grad(lambda x: g(x).sin().sum()))(ROWS),
    "vjp": lambda g: vjp(g, X)[1](Y),
    "autograd": lambda g: through_autograd(g, X),
}


@pytest.mark.parametrize("name", BELOW)
def test_levels_below_differentiate_a_pullback(name: str) -> None:
    both(lambda wrap: BELOW[name](lambda x: vjp(wrap(f), x)[1](x.sin())[0]))
    both(lambda wrap: BELOW[name](lambda x: vmap(vjp(wrap(f), x)[1])(torch.stack([x, x.sin()]))[0].sum(0)))


def test_autograd_through_a_pullback_of_any_order() -> None:
    def program(wrap: Wrap) -> Any:
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        out, pull = vjp(wrap(f), x)
        pulled = pull(y)[0]
        value = torch.autograd.grad(out.sum(), x, retain_graph=True)
        first = torch.autograd.grad(pulled.cos().sum(), (x, y), retain_graph=True)
        second = torch.autograd.grad(pulled.sin().sum(), (x, y), create_graph=True)
        return value, first, torch.autograd.grad(second[0].square().sum(), (x, y))

    both(program)


@pytest.mark.parametrize("check", ["metadata", "none"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_regions_inside_regions(order: int, check: str) -> None:
    """The regions are new, so that nothing recorded in an earlier call matters; then they are called again."""

    def program(wrap: Wrap) -> Any:
        inner = wrap(lambda x: x.sin().cos())
        middle = wrap(lambda x: inner(x.exp()).tanh() * x)
        fn = wrap(lambda x: middle(x).sin().sum())
        for _ in range(order):
            fn = lambda x, fn=fn: grad(fn)(x).square().sum()
        return fn(X[0]), fn(X[0])

    both(program, determinism_check=check)
