"""What is recomputed, what is saved and when it is freed: operations, peaks and leaks under each transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import Fn, W, Wrap, X, Y, both, f, plain, through_autograd
from cases import assert_same, rand, repeated
from torch import Tensor, nn
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves

from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, leaked_bytes, peak_bytes
from remat import is_recomputing, remat


def summed(fn: Fn) -> Fn:
    return lambda *args: fn(*args).sum()


def pulled(fn: Fn, *cotangents: Tensor) -> Any:
    _, pull = vjp(fn, X)
    return [pull(each) for each in cotangents]


def forces(fn: Fn) -> Fn:
    """The gradient as users write it for the forces of a potential."""
    return lambda x: torch.autograd.grad(fn(x).sin().sum(), x, create_graph=True)[0]


# --- operations -------------------------------------------------------------------------------------------------------

# What differentiates a chain of four regions, and how many regions are recomputed.
COUNTS: dict[str, tuple[Callable[[Fn], Any], int]] = {
    "grad": (lambda f: grad(summed(f))(X), 4),
    "grad, not used": (lambda f: grad(lambda x: (f(x), x.sum())[1])(X), 0),
    "vjp, pulled three times": (lambda f: pulled(f, X, Y, X), 12),
    "vmap(pull)": (lambda f: vmap(vjp(f, X)[1])(torch.stack([X, Y])), 4),
    "jvp": (lambda f: jvp(f, (X,), (Y,)), 0),
    "jacfwd": (lambda f: jacfwd(f)(X), 0),
    "linearize": (lambda f: linearize(f, X)[1](Y), 0),
    "vmap": (lambda f: vmap(f)(X), 0),
    "vmap, nothing batched": (lambda f: vmap(lambda y: f(X[0]) * y)(Y), 0),
    "jacrev": (lambda f: jacrev(f)(X[0]), 4),
    "jacrev, in two chunks": (lambda f: jacrev(f, chunk_size=2)(X[0]), 8),
    "hessian": (lambda f: hessian(summed(f))(X[0]), 4),
    "jvp(grad)": (lambda f: jvp(grad(summed(f)), (X,), (Y,)), 4),
    "vmap(grad)": (lambda f: vmap(grad(summed(f)))(X), 4),
    "vmap(grad), in two chunks": (lambda f: vmap(grad(summed(f)), chunk_size=2)(X), 8),
    "vmap(jacrev)": (lambda f: vmap(jacrev(f))(X), 4),
    "grad(vmap)": (lambda f: grad(summed(vmap(f)))(X), 4),
    "grad(jvp)": (lambda f: grad(lambda x: jvp(f, (x,), (x,))[1].sum())(X), 4),
    "grad(grad)": (lambda f: grad(summed(grad(summed(f))))(X), 11),
    "autograd(vmap)": (lambda f: through_autograd(vmap(f), X), 4),
    "autograd(grad)": (lambda f: through_autograd(grad(summed(f)), X), 11),
    "grad(autograd)": (lambda f: grad(summed(forces(f)))(X), 12),
}


SECOND_ORDER = ("hessian", "jvp(grad)", "vmap(jacrev)", "grad(jvp)", "grad(grad)", "autograd(grad)", "grad(autograd)")


@pytest.mark.parametrize("name", COUNTS)
def test_how_often_a_region_is_recomputed(name: str) -> None:
    """The last product of a region isn't, and a first derivative itself takes no more operations than without remat."""
    transform, recomputed = COUNTS[name]
    both(lambda wrap: transform(repeated(wrap(f), 4)))
    before, after = (count_ops(transform, repeated(wrap(f), 4)) for wrap in (plain, remat))
    assert after["aten.tanh"] == before["aten.tanh"] + recomputed
    if name not in SECOND_ORDER:
        assert after["aten.tanh_backward"] == before["aten.tanh_backward"]
        products = [sum(count[f"aten.{op}"] for op in ("mm", "bmm", "mv", "dot")) for count in (before, after)]
        assert products[1] <= products[0] + recomputed


def test_only_requested_gradients_are_computed() -> None:
    """For one region: two products forward, one recomputed; two backward for `x`, one for `w2`."""
    block = remat(lambda x, w1, w2: torch.tanh(x @ w1) @ w2)
    for argnums, products in {0: 2, 1: 2, 2: 1, (0, 2): 3, (0, 1, 2): 4}.items():
        assert count_ops(grad(summed(block), argnums), X, W, Y)["aten.mm"] == 3 + products, argnums


def test_the_recompute_stops_early() -> None:
    counts = count_ops(grad(summed(remat(lambda x: x.sin().cos() + 1))), X)
    # The cosine saves its operand, which is a sine; nothing after it is recomputed.
    assert (counts["aten.add"], counts["aten.sin"]) == (1, 3)


def test_a_region_that_draws_random_numbers_runs_once_in_the_forward() -> None:
    runs = []

    def layer(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return torch.dropout(x.sin(), 0.5, True).exp()

    for _ in range(2):
        grad(summed(remat(layer)))(X)
    assert runs == [False, True] * 2


def test_reading_requires_grad_adds_no_recomputes() -> None:
    def products(fn: Callable) -> int:
        region = remat(fn)
        program = lambda y: through_autograd(lambda x: grad(lambda y: region(x, y).sin().sum())(y), X)
        program(Y)
        return count_ops(program, Y)["aten.mm"]

    asks = lambda x, y: ((y @ W).sin() if (x * 1).requires_grad else (y @ W).sin() * x) @ W
    assert products(asks) == products(lambda x, y: ((y @ W).sin() * x) @ W)


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f)), jacrev], ids=["grad", "vmap(grad)", "jacrev"])
@pytest.mark.parametrize("given", ["argument", "captured", "module"])
def test_gradients_of_parameters_that_are_not_requested(given: str, transform: Callable) -> None:
    """They require grad below all levels, which does not affect the level that differentiates the input."""
    layer = nn.Linear(4, 4, bias=False).double()
    w = layer.weight
    programs: dict[str, Callable] = {
        "argument": lambda x, wrap: wrap(lambda x, w: (x @ w.T).sin())(x, w).sum(),
        "captured": lambda x, wrap: wrap(lambda x: (x @ w.T).sin())(x).sum(),
        "module": lambda x, wrap: wrap(layer)(x).sin().sum(),
    }
    program = lambda wrap: transform(lambda x: programs[given](x, wrap))(X)
    before, after = (count_ops(program, wrap)["aten.mm"] for wrap in (plain, remat))
    assert after == before + 1  # the recompute
    both(program)


# --- memory -----------------------------------------------------------------------------------------------------------

LONG = rand(64, grad=False)


def tall(wrap: Wrap) -> Fn:
    return repeated(wrap(lambda x: x.sin().exp().sin().exp().sin().exp().sin()), 8)


def through_all(fn: Fn) -> Any:
    return through_autograd(fn, LONG)


# What differentiates the chain, and which part of the memory without remat it needs at most.
PEAKS: dict[str, tuple[Callable[[Fn], Any], float]] = {
    "grad": (lambda f: grad(summed(f))(LONG), 0.3),
    "vjp": (lambda f: vjp(f, LONG)[1](LONG), 0.5),
    "vmap(grad)": (lambda f: vmap(grad(f))(LONG), 0.3),
    "grad(vmap)": (lambda f: grad(summed(vmap(f)))(LONG), 0.3),
    "jacrev": (lambda f: jacrev(lambda x: f(x)[:3])(LONG), 0.6),
    "jvp(grad)": (lambda f: jvp(grad(summed(f)), (LONG,), (LONG,)), 0.4),
    "grad(jvp)": (lambda f: grad(lambda x: jvp(f, (x,), (x,))[1].sum())(LONG), 0.4),
    "grad(grad)": (lambda f: grad(summed(grad(summed(f))))(LONG), 0.5),
    "jacrev(jacrev)": (lambda f: jacrev(jacrev(summed(f)))(LONG[:5]), 0.5),
    "jacrev(jacfwd)": (lambda f: jacrev(jacfwd(summed(f)))(LONG[:5]), 0.5),
    "jacfwd(jacrev)": (lambda f: jacfwd(jacrev(summed(f)))(LONG[:5]), 0.5),
    "autograd(grad)": (lambda f: through_all(grad(summed(f))), 0.7),
    "grad(autograd)": (lambda f: grad(summed(forces(f)))(LONG), 0.7),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak(name: str) -> None:
    transform, part = PEAKS[name]
    both(lambda wrap: transform(tall(wrap)))
    peaks = [peak_bytes(transform, tall(wrap)) for wrap in (remat, plain)]
    assert peaks[0] < part * peaks[1], peaks[0] / peaks[1]
    assert leaked_bytes(transform, tall(remat)) == 0


@pytest.mark.parametrize("transform", [lambda f: jvp(f, (X,), (X,)), lambda f: jacfwd(jacfwd(f))(X[0])])
def test_the_peak_of_forward_mode_does_not_grow_with_the_regions(transform: Callable) -> None:
    few, many = (peak_bytes(transform, repeated(remat(f), n)) for n in (3, 12))
    assert few == many


def test_a_captured_weight_that_is_differentiated() -> None:
    def program(wrap: Wrap) -> Any:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            return repeated(wrap(lambda x: (x @ w).tanh().exp().sin() @ w), 6)(x).sum()

        return grad(loss)(W, rand(64, 4, grad=False))

    both(program)
    assert peak_bytes(program, remat) < 0.6 * peak_bytes(program, plain)
    assert leaked_bytes(program, remat) == 0


def test_a_region_that_calls_transforms() -> None:
    program = lambda wrap: through_all(
        repeated(wrap(lambda x: grad(lambda x: x.sin().exp().sin().exp().sum())(x).sin()), 8)
    )
    both(program)
    assert peak_bytes(program, remat) < 0.6 * peak_bytes(program, plain)
    assert count_ops(program, remat)["aten.sin"] <= 2 * count_ops(program, plain)["aten.sin"]


def test_only_operands_are_saved() -> None:
    many = lambda wrap: vjp(repeated(wrap(lambda x: x.sin().exp().sin().exp().sin()), 3), X)
    assert held_bytes(many, remat) <= 4 * X.nbytes < 9 * X.nbytes <= held_bytes(many, plain)
    assert leaked_bytes(many, remat) == 0


def test_everything_is_freed_without_garbage_collection() -> None:
    with assert_freed_without_gc() as watch:

        def noted(x: Tensor) -> Tensor:
            h = x.sin()
            if not torch._C._functorch.is_functorch_wrapped_tensor(h):
                watch(h)
            return h.exp()

        x = X.clone()
        fn = remat(noted)
        out, pull = vjp(lambda x: fn(x * 2), x)
        results = pull(out), jvp(fn, (x,), (Y,)), grad(summed(fn))(x), grad(summed(grad(summed(fn))))(x), vmap(fn)(x)
        watch(x, *tree_leaves(results))
        del x, out, pull, results


# --- per-sample gradients ---------------------------------------------------------------------------------------------

WEIGHTS = [(rand(6, 6, seed=i, grad=False) / 3, rand(6, seed=i, grad=False)) for i in range(5)]
SAMPLES = rand(16, 6, grad=False)


def loss(wrap: Wrap) -> Callable[[list, Tensor], Tensor]:
    run = wrap(lambda x, w, b: (torch.tanh(x @ w).exp() + b).sin() @ w.T)

    def call(weights: list, x: Tensor) -> Tensor:
        for w, b in weights:
            x = run(x, w, b)
        return x.sin().sum()

    return call


SHARED = {"in_dims": (None, 0)}
# Programs of the weights and a batch of samples, and which part of the memory without remat each needs at most:
# gradients of all weights per sample, and a Jacobian, are themselves larger than the residuals.
PER_SAMPLE: dict[str, tuple[Callable[[Wrap], Callable], float]] = {
    "by weights": (lambda wrap: vmap(grad(loss(wrap)), **SHARED), 1),
    "by input": (lambda wrap: vmap(grad(loss(wrap), argnums=1), **SHARED), 0.5),
    "by both, with values": (lambda wrap: vmap(grad_and_value(loss(wrap), argnums=(0, 1)), **SHARED), 1),
    "grad(vmap)": (lambda wrap: grad(summed(vmap(loss(wrap), **SHARED)), argnums=(0, 1)), 0.5),
    "jacrev(vmap)": (lambda wrap: jacrev(vmap(loss(wrap), **SHARED), argnums=1), 1.5),
    "vmap(vjp)": (lambda wrap: vmap(lambda ws, x: vjp(loss(wrap), ws, x)[1](x.sum()), **SHARED), 1),
    "norms": (
        lambda wrap: vmap(lambda ws, x: sum(g.square().sum() for g in tree_leaves(grad(loss(wrap))(ws, x))), **SHARED),
        0.9,
    ),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_per_sample_gradients(name: str) -> None:
    program, part = PER_SAMPLE[name]
    both(lambda wrap: program(wrap)(WEIGHTS, SAMPLES))
    before, after = (count_ops(program(wrap), WEIGHTS, SAMPLES) for wrap in (plain, remat))
    assert (before["aten.tanh"], after["aten.tanh"]) == (5, 10)
    assert after["aten.tanh_backward"] == before["aten.tanh_backward"]
    x = rand(64, 6, grad=False)
    peaks = [peak_bytes(program(wrap), WEIGHTS, x) for wrap in (remat, plain)]
    assert peaks[0] < part * peaks[1], peaks[0] / peaks[1]
    assert leaked_bytes(program(remat), WEIGHTS, x) == 0


def scalar(name: str, wrap: Wrap) -> Callable[[Tensor], Tensor]:
    return lambda x, *ws: sum(g.sin().sum() for g in tree_leaves(PER_SAMPLE[name][0](wrap)([ws, *WEIGHTS[:1]], x)))


DERIVATIVES: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda f: grad(f, (0, 1, 2))(SAMPLES[:3], *WEIGHTS[1]),
    "jacfwd": lambda f: jacfwd(f)(SAMPLES[:3], *WEIGHTS[1]),
    "jvp": lambda f: jvp(f, (SAMPLES[:3], *WEIGHTS[1]), (SAMPLES[3:6], *WEIGHTS[2])),
    "hessian": lambda f: hessian(f)(SAMPLES[:1], *WEIGHTS[1]),
    "autograd": lambda f: through_autograd(f, SAMPLES[:3], *WEIGHTS[1]),
    "vmap": lambda f: vmap(f, (None, 0, 0))(SAMPLES[:3], *(torch.stack([t, t.sin()]) for t in WEIGHTS[1])),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", ["by weights", "by input", "grad(vmap)", "norms"])
def test_derivatives_of_per_sample_gradients(name: str, derivative: str) -> None:
    both(lambda wrap: DERIVATIVES[derivative](scalar(name, wrap)))


@pytest.mark.parametrize("in_dims", [(0, 0, None), (0, None, 0), (None, 0, 0), (None, None, 0), (None, 0, None)])
def test_some_weights_are_batched_and_some_are_not(in_dims: tuple) -> None:
    batches = SAMPLES[:3], torch.stack([WEIGHTS[0][0]] * 3).cumsum(0), torch.stack([WEIGHTS[0][1]] * 3).cumsum(0)
    args = [batch if dim == 0 else batch[0] for batch, dim in zip(batches, in_dims)]

    def program(wrap: Wrap) -> Any:
        first = grad(lambda x, w, b: loss(wrap)([(w, b)], x), (0, 1, 2))
        second = grad(lambda *a: sum(g.sin().sum() for g in first(*a)), (0, 1))
        return vmap(first, in_dims)(*args), vmap(second, in_dims)(*args)

    both(program)


def test_a_per_sample_gradient_is_not_the_sum_over_the_batch() -> None:
    found = PER_SAMPLE["by weights"][0](remat)(WEIGHTS, SAMPLES)
    assert_same([tuple(g[7] for g in pair) for pair in found], grad(loss(plain))(WEIGHTS, SAMPLES[7]), exact=False)


@pytest.mark.parametrize("region", [lambda x, w: x.sin(), lambda x, w: (x * w).detach()])
def test_a_result_that_depends_on_no_parameter_may_be_changed_in_place(region: Callable) -> None:
    """It requires no grad at the level that differentiates the parameters."""

    def build(wrap: Wrap) -> Callable:
        def call(w: Tensor, x: Tensor) -> Tensor:
            y = wrap(region)(x, w) * 1.0
            first = y[0].sin()
            y.mul_(0.9)
            assert not y.requires_grad
            return (y * w).sum() * first

        return call

    both(lambda wrap: vmap(grad(build(wrap)), (None, 0))(X[0], Y), exact=True)
    both(lambda wrap: jvp(lambda w: grad(build(wrap))(w, Y[0]), (X[0],), (X[0],)), exact=True)
