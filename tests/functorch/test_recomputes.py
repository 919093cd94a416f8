"""What is recomputed, what is saved and when it is freed: operations, peaks and leaks under each transform."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import ALL, ONCE, Fn, V, W, Wrap, X, Y, both, f, forces, squares, summed, through_autograd, vmap
from cases import plain, rand, repeated
from side_by_side import Runs
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jacfwd, jacrev, linearize, vjp
from torch.utils._pytree import tree_leaves

from benchmarks.measure import count_ops, held_bytes, leaked_bytes, peak_bytes
from remat import remat

# How many of a chain of four regions are recomputed.
COUNTS: dict[str, int] = {
    "grad": 4, "vjp": 8, "vmap of a pullback": 4, "jacrev": 4, "grad(vmap)": 4, "vmap(grad)": 4, "vmap(jacrev)": 4,
    "vmap(vmap(grad))": 4, "autograd": 4, "autograd(vmap)": 4, "hessian": 4, "jvp(grad)": 4, "jvp(vmap(grad))": 4,
    "grad(jvp)": 4, "grad(grad)": 12, "autograd(grad)": 12, "dual(grad)": 4, **dict.fromkeys(ONCE, 0),
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[[Fn, Tensor], Any], int]] = {
    "grad, not used": (lambda g, x: grad(lambda x: (g(x), x.sum())[1])(x), 0),
    "linearize": (lambda g, x: linearize(g, x)[1](x), 0),
    "vmap, nothing batched": (lambda g, x: vmap(lambda y: g(x) * y)(Y), 0),
    "jacrev, in two chunks": (lambda g, x: jacrev(g, chunk_size=2)(x), 8),
    "vmap(grad), in two chunks": (lambda g, x: vmap(grad(summed(g)), chunk_size=2)(torch.stack([x] * 4)), 8),
}
# The backwards of these take other operations.
SECOND_ORDER = ("hessian", "jvp", "grad(jvp)", "grad(grad)", "autograd(grad)", "dual(grad)", "vmap(jacrev)")


@pytest.mark.parametrize("name", [*COUNTS, *OTHERS])
def test_how_often_a_region_is_recomputed(name: str) -> None:
    """The last product of a region isn't, and a first derivative itself takes no more operations than without remat."""
    transform, recomputed = OTHERS[name] if name in OTHERS else (ALL[name], COUNTS[name])
    program = lambda wrap: transform(repeated(wrap(f), 4), V)
    both(program)
    before, after = (count_ops(program, wrap) for wrap in (plain, remat))
    assert after["aten.tanh"] == before["aten.tanh"] + recomputed
    if not name.startswith(SECOND_ORDER):
        assert after["aten.tanh_backward"] == before["aten.tanh_backward"]
        products = [sum(count[f"aten.{op}"] for op in ("mm", "bmm", "mv", "dot")) for count in (before, after)]
        assert products[1] <= products[0] + recomputed


def test_only_requested_gradients_are_computed() -> None:
    """For one region: two products forward, one recomputed; two backward for `x`, one for `w2`."""
    block = remat(lambda x, w1, w2: torch.tanh(x @ w1) @ w2)
    for argnums, products in {0: 2, 1: 2, 2: 1, (0, 2): 3, (0, 1, 2): 4}.items():
        assert count_ops(grad(summed(block), argnums), X, W, Y)["aten.mm"] == 3 + products, argnums


def test_a_region_that_draws_random_numbers_runs_once_in_the_forward() -> None:
    runs = Runs(lambda x: torch.dropout(x.sin(), 0.5, True).exp())
    grad(summed(remat(runs)))(X)
    assert runs.count == 2


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
    assert count_ops(torch.no_grad()(program), remat)["aten.sin"] == count_ops(program, plain)["aten.sin"]
    both(program)


LONG = rand(64, grad=False)
tall = lambda wrap: repeated(wrap(lambda x: x.sin().exp().sin().exp().sin().exp().sin()), 8)


def with_a_captured_weight(wrap: Wrap) -> Any:
    chain = lambda w: repeated(wrap(lambda x: (x @ w).tanh().exp().sin() @ w), 6)
    return grad(lambda w, x: chain(w)(x).sum())(W, rand(64, 4, grad=False))


def of_a_region_that_calls_transforms(wrap: Wrap) -> Any:
    inner = wrap(lambda x: grad(lambda x: x.sin().exp().sin().exp().sum())(x).sin())
    return through_autograd(repeated(inner, 8), LONG)


# Which part of the memory without remat a chain of regions needs at most.
PEAKS: dict[str, float] = {
    "grad": 0.3, "vjp": 0.5, "vmap(grad)": 0.3, "grad(vmap)": 0.3, "jacrev": 0.8, "jvp(grad)": 0.4, "grad(jvp)": 0.4,
    "grad(grad)": 0.5, "hessian": 0.5, "jacrev(jacrev)": 0.8, "autograd(grad)": 0.7, "autograd, twice": 1.01,
}  # fmt: skip
PROGRAMS: dict[str, tuple[Callable[[Wrap], Any], float]] = {
    "with a captured weight": (with_a_captured_weight, 0.6),
    "of a region that calls transforms": (of_a_region_that_calls_transforms, 0.6),
    "autograd in grad": (lambda wrap: grad(squares(forces(tall(wrap))))(LONG), 0.7),
}


@pytest.mark.parametrize("name", [*PEAKS, *PROGRAMS])
def test_the_peak(name: str) -> None:
    short = LONG[:8] if name.startswith(("hessian", "jac")) else LONG
    program, part = PROGRAMS.get(name) or (lambda wrap: ALL[name](tall(wrap), short), PEAKS[name])
    both(program)
    peaks = [peak_bytes(program, wrap) for wrap in (remat, plain)]
    assert peaks[0] < part * peaks[1], peaks[0] / peaks[1]
    assert leaked_bytes(program, remat) == 0


@pytest.mark.parametrize("transform", [ONCE["jvp"], lambda g, x: jacfwd(jacfwd(g))(x)])
def test_the_peak_of_forward_mode_does_not_grow_with_the_regions(transform: Callable) -> None:
    few, many = (peak_bytes(transform, repeated(remat(f), n), V) for n in (3, 12))
    assert few == many and leaked_bytes(transform, remat(f), V) == 0


def test_only_operands_are_saved() -> None:
    many = lambda wrap: vjp(repeated(wrap(lambda x: x.sin().exp().sin().exp().sin()), 3), X)
    assert held_bytes(many, remat) <= 4 * X.nbytes < 9 * X.nbytes <= held_bytes(many, plain)
    assert leaked_bytes(many, remat) == 0


def test_calls_of_a_mapped_pullback_leave_no_objects() -> None:
    pull = vmap(vjp(remat(torch.sin), X)[1])
    counts = [(pull(torch.stack([X, X])), gc.collect(), len(gc.get_objects()))[2] for _ in range(9)]
    assert counts[8] < counts[2] + 6  # other threads may leave some


WEIGHTS = [(rand(6, 6, seed=i, grad=False) / 3, rand(6, seed=i, grad=False)) for i in range(5)]
SAMPLES = rand(16, 6, grad=False)


def loss(wrap: Wrap) -> Callable[[list, Tensor], Tensor]:
    run = wrap(lambda x, w, b: (torch.tanh(x @ w).exp() + b).sin() @ w.T)

    def call(weights: list, x: Tensor) -> Tensor:
        for w, b in weights:
            x = run(x, w, b)
        return x.sin().sum()

    return call


norm_of = lambda fn: lambda *args: sum(t.square().sum() for t in tree_leaves(fn(*args)))
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
    "norms": (lambda wrap: vmap(norm_of(grad(loss(wrap))), **SHARED), 0.9),
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
