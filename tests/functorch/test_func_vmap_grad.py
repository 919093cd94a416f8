"""Per-sample gradients, and gradients of mapped functions: values, recomputes and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.measure import assert_freed_without_gc, count_ops, leaked_bytes, peak_bytes
from remat import remat

Wrap = Callable[[Callable], Callable]
REGIONS, WIDTH = 5, 6
X = rand(16, WIDTH, grad=False)


def plain(fn: Callable) -> Callable:
    return fn


def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (torch.tanh(x @ w).exp() + b).sin() @ w.T


def loss(wrap: Wrap) -> Callable[[list, Tensor], Tensor]:
    run = wrap(block)

    def call(weights: list, x: Tensor) -> Tensor:
        for w, b in weights:
            x = run(x, w, b)
        return x.sin().sum()

    return call


def make_weights() -> list[tuple[Tensor, Tensor]]:
    pairs = [(rand(WIDTH, WIDTH, seed=i), rand(WIDTH, seed=i)) for i in range(REGIONS)]
    return [(w.detach() / 3, b.detach()) for w, b in pairs]


WEIGHTS = make_weights()

# A program takes the weights and a batch of samples. The batched inputs determine its pullback.
PROGRAMS: dict[str, Callable[[Wrap], Callable]] = {
    "by weights": lambda wrap: vmap(grad(loss(wrap)), in_dims=(None, 0)),
    "by input": lambda wrap: vmap(grad(loss(wrap), argnums=1), in_dims=(None, 0)),
    "by both": lambda wrap: vmap(grad(loss(wrap), argnums=(0, 1)), in_dims=(None, 0)),
    "with values": lambda wrap: vmap(grad_and_value(loss(wrap)), in_dims=(None, 0)),
    "grad of vmap": lambda wrap: grad(lambda ws, x: vmap(loss(wrap), in_dims=(None, 0))(ws, x).sum(), argnums=(0, 1)),
    "jacrev of vmap": lambda wrap: jacrev(lambda ws, x: vmap(loss(wrap), in_dims=(None, 0))(ws, x), argnums=1),
    "vmap of vjp": lambda wrap: vmap(lambda ws, x: vjp(loss(wrap), ws, x)[1](x.sum()), in_dims=(None, 0)),
    "norms": lambda wrap: vmap(
        lambda ws, x: sum(g.square().sum() for pair in grad(loss(wrap))(ws, x) for g in pair),
        in_dims=(None, 0),
    ),
}


def both(program: Callable[[Wrap], Callable], *args: Any) -> None:
    assert_same(program(remat)(*args), program(plain)(*args), exact=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name: str) -> None:
    both(PROGRAMS[name], WEIGHTS, X)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_recompute(name: str) -> None:
    before, after = (count_ops(PROGRAMS[name](wrap), WEIGHTS, X) for wrap in (plain, remat))
    assert (before["aten.tanh"], after["aten.tanh"]) == (REGIONS, 2 * REGIONS)
    # The backward itself computes no more than without remat.
    assert after["aten.tanh_backward"] == before["aten.tanh_backward"] == REGIONS


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory(name: str) -> None:
    x = rand(64, WIDTH, grad=False)
    memory = {wrap: peak_bytes(PROGRAMS[name](wrap), WEIGHTS, x) for wrap in (plain, remat)}
    # Gradients of all weights per sample, and a Jacobian, are themselves larger than the residuals.
    limits = {"by input": 0.5, "grad of vmap": 0.5, "norms": 0.9, "jacrev of vmap": 1.5}
    assert memory[remat] < limits.get(name, 1) * memory[plain]
    assert leaked_bytes(PROGRAMS[name](remat), WEIGHTS, x) == 0


def test_per_sample_gradient_is_not_the_sum_over_the_batch() -> None:
    weights, _ = PROGRAMS["by both"](remat)(WEIGHTS, X)
    for i in (0, 7):
        one = grad(loss(plain))(WEIGHTS, X[i])
        assert_same([tuple(g[i] for g in pair) for pair in weights], one, exact=False)


def test_mixed_batches() -> None:
    """Some weights with a batch dimension, some without; some samples shared."""
    w, b = WEIGHTS[0]
    batches = {"w": torch.stack([w, w.sin(), w.cos()]), "b": torch.stack([b, b.sin(), b.cos()])}
    x = X[:3]

    def program(wrap: Wrap) -> Callable:
        return grad(lambda x, w, b: wrap(block)(x, w, b).sum(), argnums=(0, 1, 2))

    for in_dims in ((0, 0, None), (0, None, 0), (None, 0, 0), (None, None, 0), (None, 0, None)):
        args = [batched if dim == 0 else batched[0] for batched, dim in zip((x, batches["w"], batches["b"]), in_dims)]
        both(lambda wrap: vmap(program(wrap), in_dims=in_dims), *args)
        second = lambda wrap: lambda *a: sum(g.sin().sum() for g in program(wrap)(*a))
        both(lambda wrap: vmap(grad(second(wrap), argnums=(0, 1)), in_dims=in_dims), *args)


def test_two_batches() -> None:
    """Per sample and per model."""
    weights = [(torch.stack([w, w.sin()]), torch.stack([b, b.cos()])) for w, b in WEIGHTS[:2]]

    def program(wrap: Wrap) -> Callable:
        per_sample = vmap(grad(loss(wrap), argnums=(0, 1)), in_dims=(None, 0))
        return vmap(per_sample, in_dims=(0, None))

    both(program, weights, X[:3])
    both(lambda wrap: vmap(PROGRAMS["grad of vmap"](wrap), in_dims=(0, None)), weights, X[:3])
    counts = count_ops(program(remat), weights, X[:3])
    assert counts["aten.tanh"] == 2 * len(weights)


@pytest.mark.parametrize("name", ["by weights", "by input", "grad of vmap", "norms"])
def test_derivatives_of_per_sample_gradients(name: str) -> None:
    weights, x = WEIGHTS[:2], X[:3]

    def total(wrap: Wrap) -> Callable:
        def call(x: Tensor) -> Tensor:
            leaves, _ = torch.utils._pytree.tree_flatten(PROGRAMS[name](wrap)(weights, x))
            return sum(g.sin().sum() for g in leaves)

        return call

    both(lambda wrap: grad(total(wrap)), x)
    both(lambda wrap: jacfwd(total(wrap)), x)
    both(lambda wrap: lambda x: jvp(total(wrap), (x,), (x.cos(),)), x)
    both(lambda wrap: hessian(total(wrap)), x[:1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_autograd_through(name: str) -> None:
    def program(wrap: Wrap) -> list[Tensor]:
        weights = [(w.clone().requires_grad_(), b.clone().requires_grad_()) for w, b in WEIGHTS[:2]]
        x = X[:3].clone().requires_grad_()
        leaves, _ = torch.utils._pytree.tree_flatten(PROGRAMS[name](wrap)(weights, x))
        total = sum(g.sin().sum() for g in leaves)
        return list(torch.autograd.grad(total, [x, *(t for pair in weights for t in pair)]))

    assert_same(program(remat), program(plain), exact=False)


def test_higher_orders_per_sample() -> None:
    f = lambda wrap: wrap(lambda x: (x.sin() * x).exp().sum())
    for transform in (hessian, lambda g: jacrev(jacrev(g)), lambda g: jacfwd(jacrev(jacfwd(g)))):
        both(lambda wrap: vmap(transform(f(wrap))), X[:3, :3])


def test_everything_is_freed() -> None:
    with assert_freed_without_gc() as watch:
        grads = PROGRAMS["by both"](remat)(WEIGHTS, X)
        watch(grads[1], *(g for pair in grads[0] for g in pair))
        del grads


class Wrapped(nn.Module):
    """Two layers in a region."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, self.second, self.wrap = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), wrap

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(lambda x: self.second(self.first(x).sin()))(x)


def expanded(wrap: Wrap) -> list[Any]:
    """Per-sample gradients by expanded weights, a module's own way of computing them."""
    torch.manual_seed(0)
    model = Wrapped(wrap)
    call_for_per_sample_grads(model)(X.float()).square().sum().backward()
    return [p.grad_sample for p in model.parameters()]


def test_expanded_weights() -> None:
    """Regions refuse them, torch's checkpoint computes wrong gradients, and `vmap(grad)` the right ones."""
    with pytest.raises(RuntimeError, match="Expanded Weights") as error:
        expanded(remat)
    assert "`vmap(grad(loss))`" in error.value.__notes__[0]
    wrong = expanded(lambda fn: lambda x: torch_checkpoint(fn, x, use_reentrant=False))
    right = expanded(plain)
    assert not torch.allclose(wrong[0], right[0], rtol=0.1)
    torch.manual_seed(0)
    model = Wrapped(remat)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = vmap(grad(lambda w, x: functional_call(model, w, (x,)).square().sum()), (None, 0))(weights, X.float())
    assert_same(list(found.values()), right, exact=False)


@pytest.mark.parametrize("region", [lambda x, w: x.sin(), lambda x, w: (x * w).detach()])
def test_result_that_depends_on_no_parameter(region: Callable) -> None:
    """It requires no grad at the level that differentiates the parameters, so it may be changed in place."""

    def loss(wrap: Callable) -> Callable:
        def call(w: Tensor, x: Tensor) -> Tensor:
            y = wrap(region)(x, w) * 1.0
            first = y[0].sin()
            y.mul_(0.9)
            assert not y.requires_grad
            return (y * w).sum() * first

        return call

    w, x = rand(4, grad=False), rand(3, 4, seed=1, grad=False)
    per_sample = [vmap(grad(loss(wrap)), in_dims=(None, 0))(w, x) for wrap in (remat, plain)]
    assert_same(*per_sample)
    forward_over_reverse = [jvp(lambda w: grad(loss(wrap))(w, x[0]), (w,), (w,)) for wrap in (remat, plain)]
    assert_same(*forward_over_reverse)
