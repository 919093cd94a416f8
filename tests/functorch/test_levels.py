"""What a region becomes at each level: operands and results of other levels, random numbers, modes, and pullbacks."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import ALL, ONCE, RECOMPUTE, Fn, V, W, Wrap, X, Y, both, f, pushed, rows, summed, through_autograd, vmap
from torch import Tensor
from torch.func import functionalize, grad, hessian, jvp, vjp
from torch.nn.functional import dropout, silu

from benchmarks.measure import count_ops
from remat import checkpoint_name, policies, remat, scan

EVERYTHING = policies.everything_saveable
# Programs of a function of two tensors, which outer transforms and inner ones follow.
GIVEN: dict[str, Callable[[Fn], Fn]] = {
    "first inside": lambda g: lambda y: grad(lambda x: g(x, y).sum())(Y[0]),
    "second inside": lambda g: lambda x: grad(lambda y: g(x, y).sum())(Y[0]),
    "both inside": lambda g: lambda x: grad(lambda y: g(x * y, y).sum())(x.cos()),
    "the same tensor": lambda g: lambda x: grad(lambda p: g(p, x).sum())(x),
    "twice": lambda g: lambda y: grad(lambda x: grad(lambda x: g(x, y).sum())(x).sin().sum())(Y[0]),
    "mapped": lambda g: lambda x: vmap(grad(lambda y: g(x, y).sum()))(Y).sum(0),
    "mapped inside": lambda g: lambda x: grad(lambda y: vmap(g, (None, 0))(x, Y * y).sum())(V),
    "vjp": lambda g: lambda y: vjp(lambda x: g(x, y), Y[0])[1](y.cos())[0],
    "jvp": lambda g: lambda y: jvp(lambda x: g(x, y), (Y[0],), (Y[0],))[1],
}


def depends(x: Tensor, y: Tensor) -> Tensor:
    """Energies are differentiated only with respect to what requires grad."""
    p, out = x * 1, ((x * y).sin() + y).sum()
    if not (p.requires_grad and out.requires_grad):
        return out * y
    (g,) = torch.autograd.grad(out, p, create_graph=True, allow_unused=True)
    return y if g is None else g.sin() * y


unused = lambda x, y: x.sin()
# Dropout draws in the order of elements at a level, in that of memory below.
FUNCTIONS: dict[str, Callable[[Wrap], Fn]] = {
    "unused": lambda wrap: wrap(unused),
    "used outside": lambda wrap: lambda x, y: wrap(unused)(x, y) * y,
    "used": lambda wrap: wrap(lambda x, y: x.sin() * y.cos()),
    "captured": lambda wrap: lambda x, y: wrap(lambda x: x.sin() * y.cos())(x),
    "captured, unused": lambda wrap: lambda x, y: wrap(lambda x: x.sin() if y is not None else x)(x),
    "nested": lambda wrap: wrap(lambda x, y: wrap(unused)(x, y).exp()),
    "swapped": lambda wrap: lambda x, y: sum(t.sin() * (i + 1) for i, t in enumerate(wrap(lambda x, y: (y, x))(x, y))),
    "returned": lambda wrap: lambda x, y: sum(wrap(lambda x, y: (x.sin() * y, x, y, x * 1))(x, y)).sin(),
    "depends": lambda wrap: wrap(depends),
    "depends, nested": lambda wrap: wrap(lambda x, y: wrap(depends)(x, y).sin()),
    "is computed": lambda wrap: wrap(lambda x, y: (h := x.sin()) * (2 if h.is_leaf else 3) * y),
    "drops": lambda wrap: wrap(lambda x, y: dropout(torch.outer(x, y).t() * 1, 0.5).sum(0)),
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("policy", [None, EVERYTHING], ids=["no policy", "everything"])
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("transform", ALL)
def test_a_function_sees_what_its_innermost_level_follows(transform: str, given: str, fn: str, policy: Any) -> None:
    if given == "jvp" and (transform.startswith("dual") or fn.startswith("depends")):
        pytest.skip("torch can't run it")
    for _ in range(2):  # the second call uses what the first one recorded
        both(lambda wrap: ALL[transform](lambda x: GIVEN[given](FUNCTIONS[fn](wrap))(x) + x, V), policy=policy)


def test_a_region_in_a_traced_function_is_called() -> None:
    both(lambda wrap: functionalize(wrap(lambda x: x.sin().mul_(2)))(X))
    assert count_ops(functionalize(grad(summed(remat(torch.sin)))), X)["aten.sin"] == 1


def drops(x: Tensor) -> Tensor:
    return dropout(x.sin(), 0.5) * x


def draws(x: Tensor) -> Tensor:
    """The random numbers don't depend on the operand, which may have no batch dimension."""
    return (x * torch.randn(4, dtype=x.dtype)).sin()


RANDOM: dict[str, Callable[[Wrap, Fn], Any]] = {
    "vmap": lambda wrap, vmap: vmap(wrap(drops))(X),
    "vmap(grad)": lambda wrap, vmap: vmap(grad(summed(wrap(drops))))(X),
    "grad(region(vmap))": lambda wrap, vmap: grad(summed(wrap(vmap(wrap(drops)))))(X),
    "autograd(vmap)": lambda wrap, vmap: through_autograd(lambda x: vmap(wrap(drops))(x) * torch.rand(4), X),
    "no batch": lambda wrap, vmap: vmap(lambda y: wrap(draws)(V) * y)(X),
    "no batch, grad": lambda wrap, vmap: vmap(lambda y: grad(summed(wrap(draws)))(V) * y)(X),
    "no batch, maximum": lambda wrap, vmap: vmap(lambda y: grad(summed(wrap(lambda x: draws(x) * x.max())))(V) * y)(X),
    "no batch, two grads": lambda wrap, vmap: vmap(grad(lambda y: (grad(summed(wrap(draws)))(V) * y).sum()))(X),
    "no batch, mapped pull": lambda wrap, vmap: vmap(lambda y: vmap(vjp(wrap(draws), V)[1])(X)[0].sum(0) * y)(X),
    "no batch, grad around": lambda wrap, vmap: grad(lambda w: vmap(lambda y: wrap(draws)(w) * y)(X).sum())(V),
}


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("name", RANDOM)
def test_all_runs_draw_the_same_numbers_under_vmap(name: str, randomness: str) -> None:
    both(lambda wrap: RANDOM[name](wrap, functools.partial(torch.func.vmap, randomness=randomness)))


class Noisy(torch.autograd.Function):
    """Its backward draws random numbers."""

    generate_vmap_rule = True
    forward = staticmethod(lambda x: x * 1)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: g * torch.rand_like(g))


# Maps of a pullback, after the region has drawn outside of the level.
PULLED: dict[str, Callable[[Fn, Fn], Any]] = {
    "jvp": lambda vmap, pull: vmap(pushed(pull))(X),
    "vjp": lambda vmap, pull: vmap(lambda c: vjp(pull, V)[1](c)[0])(X),
    "no batch": lambda vmap, pull: vmap(lambda c: pull(V) * c)(X),
    "call": lambda vmap, pull: vmap(pull)(X),
}


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
@pytest.mark.parametrize("name", PULLED)
def test_a_recompute_draws_what_the_region_drew_outside_of_vmap(name: str, randomness: str) -> None:
    mapped = functools.partial(torch.func.vmap, randomness=randomness)

    def program(wrap: Wrap, fn: Fn) -> Any:
        pull = vjp(wrap(fn), V)[1]
        return PULLED[name](mapped, lambda c: pull(c)[0])

    both(lambda wrap: program(wrap, drops))
    if randomness != "error" and name in ("no batch", "call"):
        both(lambda wrap: program(wrap, lambda x: Noisy.apply(drops(x))))


@pytest.mark.parametrize("name", ALL)
def test_all_runs_draw_the_same_numbers(name: str) -> None:
    both(lambda wrap: ALL[name](wrap(drops), V))
    both(lambda wrap: ALL[name](wrap(draws), V))


SAME: dict[str, Callable[[Fn], Any]] = {
    "jvp": lambda f: jvp(f, (X,), (Y,)),
    "vmap": lambda f: torch.func.vmap(f, randomness="same")(X[None]),
}


@pytest.mark.parametrize("drop", [dropout, functools.partial(torch.nn.functional.alpha_dropout, training=True)])
@pytest.mark.parametrize("name", SAME)
def test_dropout_of_a_transposed_tensor_that_no_transform_follows_draws_the_same_numbers(name: str, drop: Fn) -> None:
    """Torch draws in the order of elements at a level, and in that of memory below all levels."""
    other = X.t().contiguous().t().requires_grad_()
    both(lambda wrap: SAME[name](lambda x: wrap(drop)(other) * x))


def test_dropout_in_a_region_within_regions_that_call_torch_func_draws_the_same_numbers() -> None:
    def program(wrap: Wrap) -> Fn:
        inner = wrap(wrap(lambda x: dropout(x.t(), 0.5)))
        return wrap(wrap(lambda x: grad(torch.sin)(x.sum()) * inner(x)))

    both(lambda wrap: grad(summed(program(wrap)))(X))


def without_grad(wrap: Wrap) -> Fn:
    scale = torch.no_grad()(wrap(lambda x: x.abs().exp()))
    both_ways = torch.no_grad()(torch.enable_grad()(wrap(torch.sin)))
    return lambda x: scale(x) * wrap(torch.exp)(x) * both_ways(x) * x.detach()


def with_grad(wrap: Wrap) -> Fn:
    """The region's result has a gradient although the caller has disabled grad mode, as forces of a frozen model do."""
    enables = torch.enable_grad()(lambda x: x.square().exp())
    return lambda x: torch.no_grad()(wrap(enables))(x) * x


@pytest.mark.parametrize("fn", [without_grad, with_grad])
@pytest.mark.parametrize("transform", [grad, hessian, lambda f: vmap(grad(f)), lambda f: grad(summed(grad(f)))])
def test_grad_mode_inside(transform: Callable, fn: Callable) -> None:
    both(lambda wrap: transform(summed(fn(wrap)))(X))
    both(lambda wrap: transform(summed(wrap(fn(wrap))))(X))


def test_a_gradient_that_is_not_recorded_has_a_tangent() -> None:
    both(lambda wrap: jvp(torch.no_grad()(grad(summed(wrap(silu)))), (V,), (V,)))  # torch has two formulas for `silu`


def test_a_tangent_requires_grad_only_if_it_depends_on_what_is_followed() -> None:
    both(lambda wrap: grad(lambda w: w.sum() * pushed(wrap(lambda x: x.sin() + w))(V).requires_grad)(V))


def test_nested_regions_that_change_a_captured_tensor() -> None:
    def program(wrap: Wrap) -> Any:
        n = torch.ones_like(V)
        region = wrap(wrap(lambda x: (x * torch.mul(n, 2.0, out=n).clone()).sin()))
        return through_autograd(pushed(pushed(region)), V), n

    both(program)


@pytest.mark.parametrize("name", ALL)
def test_a_pullback_is_transformed_after_its_level_ended(name: str) -> None:
    """A backward of lower levels needs what the backward of the `vjp` has recorded."""
    both(lambda wrap: (lambda pull: ALL[name](lambda t: pull(t)[0].sin(), V))(vjp(wrap(f), V)[1]))
    both(lambda wrap: ALL[name](lambda x: vjp(wrap(f), x)[1](x.sin())[0], V))
    both(lambda wrap: ALL[name](lambda x: vmap(vjp(wrap(f), x)[1])(rows(x))[0].sum(0), V))


# Results of which two share memory that a derivative has to follow, and the number of one of them.
SHARED: dict[str, tuple[Callable[[Tensor], tuple], int]] = {
    "a tensor and its view": (lambda h: (h, h.view_as(h)), 0),
    "a view and its tensor": (lambda h: (h.view_as(h), h), 0),
    "slices that overlap": (lambda h: (h[:3], h[1:]), 1),
    "two of three": (lambda h: (h + 1, h, h[0]), 2),
}
# Here none has to follow, or the results are the same tensor.
SEPARATE: dict[str, tuple[Callable[[Tensor], tuple], int]] = {
    "the same tensor": (lambda h: (h, h), 1),
    "new tensors": (lambda h: (h, h * 1), 0),
    "a tensor and its values": (lambda h: (h, h.detach()), 0),
    "no view of it": (lambda h: (h + 1, h, h[0]), 0),
}
INSIDE: dict[str, Fn] = {"sin": torch.sin, "gradient": grad(lambda x: x.sin().sum())}


def changes(results: Callable[[Tensor], tuple], number: int | None, before: Fn, wrap: Wrap) -> Fn:
    region = wrap(lambda x: results(before(x)))

    def fn(x: Tensor) -> Tensor:
        outs = region(x * 1)
        if number is not None:
            outs[number].mul_(2)
        return sum((i + 1) * out.sin().sum() for i, out in enumerate(outs)) * x.cos()

    return fn


@pytest.mark.parametrize("before", INSIDE)
@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("transform", ALL)
def test_a_result_that_shares_memory_with_another_one_may_not_change(transform: str, case: str, before: str) -> None:
    results, number = SHARED[case]
    both(lambda wrap: ALL[transform](changes(results, None, INSIDE[before], wrap), V))
    try:
        both(lambda wrap: ALL[transform](changes(results, number, INSIDE[before], wrap), V))
    except RuntimeError as error:
        assert "replace the inplace operation by an out-of-place one" in str(error)
        assert transform in RECOMPUTE
    else:
        assert transform in ONCE or before == "sin"


def test_a_view_of_an_argument_that_a_region_returns_may_not_change() -> None:
    with pytest.raises(RuntimeError, match="replace the inplace operation by an out-of-place one"):
        grad(lambda x: (remat(lambda h: h[:])(h := x * 1).mul_(V), h.sin().sum())[1])(V)


@pytest.mark.parametrize("case", SEPARATE)
@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "grad(grad)", "autograd", "autograd(grad)"])
def test_another_result_may_change(transform: str, case: str) -> None:
    both(lambda wrap: ALL[transform](changes(*SEPARATE[case], torch.sin, wrap), V))


def test_another_result_may_change_where_samples_share_an_argument() -> None:
    def program(wrap: Wrap) -> Tensor:
        region = wrap(lambda w, x: SEPARATE["a tensor and its values"][0]((w * x).sin()))

        def fn(w: Tensor, x: Tensor) -> Tensor:
            h, values = region(w, x)
            return (h * values.add_(1)).sum()

        return vmap(grad(fn), (None, 0))(V, X)

    both(program)


scores = lambda x: checkpoint_name(x.masked_fill(X > 0.8, -torch.inf) * 0.5, "h").softmax(-1) @ W
SCORES: dict[str, Callable[[Wrap], Fn]] = {
    "over": lambda wrap: wrap(lambda x: ((x @ W).masked_fill(X > 0.8, -torch.inf) / 2).softmax(-1)),
    "nested": lambda wrap: wrap(lambda x: wrap(scores)(x * 1).sin()),
    "scan": lambda wrap: lambda x: scan(lambda x, _: (wrap(scores)(x), None), x, length=3)[0],
}


@pytest.mark.parametrize("policy", [policies.save_matmuls, EVERYTHING, policies.save_only_these_names("h")], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_infinity_times_a_zero_of_forward_mode_is_zero(name: str, policy: Any) -> None:
    """What has no tangent has a zero without memory in its place, and plain torch does not multiply such zeros."""
    for transform in ("hessian", "jvp(grad)", "grad(jvp)", "jvp(vmap(grad))", "dual(grad)"):
        both(lambda wrap: RECOMPUTE[transform](SCORES[name](wrap), X), policy=policy)
    both(lambda wrap: vmap(lambda x: RECOMPUTE["jvp(grad)"](SCORES[name](wrap), x))(rows(X)), policy=policy)
