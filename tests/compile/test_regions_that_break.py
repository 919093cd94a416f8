"""Regions that Python runs under `torch.compile`, since a compiled backward would fail or be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, jvp, vjp, vmap

import remat
from remat import compat, is_recomputing, policies

W = torch.linspace(-1, 1, 9).view(3, 3)
REGION = "tag_activation_checkpoint"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    RUNS.clear()
    yield
    enabled = hooks_are_enabled()
    torch._C._autograd._saved_tensors_hooks_enable()
    torch._dynamo.reset()
    assert enabled


RUNS: list[bool] = []  # which runs of a region recompute, where Python executes them


def hooks_are_enabled() -> bool:
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


def regions(counter: CompileCounterWithBackend) -> int:
    """The number of regions in compiled graphs."""
    return sum(REGION in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


def value_and_grad(f: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = f(x)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


X = torch.linspace(-1, 1, 12).view(4, 3)


# --- derivatives inside ---------------------------------------------------------------------------------------------


def smooth(z: Tensor) -> Tensor:
    return (z @ W).sin()


def by_grad(x: Tensor) -> Tensor:
    return (x - 0.1 * grad(lambda z: smooth(z).sum())(x)).sin()


def by_vjp(x: Tensor) -> Tensor:
    out, pull = vjp(smooth, x)
    return pull(out)[0] * x


def by_jacrev(x: Tensor) -> Tensor:
    return jacrev(smooth)(x).sum((0, 1)) * x


def per_sample(x: Tensor) -> Tensor:
    return vmap(grad(lambda z: smooth(z).sum()))(x) * x


def in_a_module(x: Tensor) -> Tensor:
    return remat.remat(lambda z: smooth(by_grad(z)))(x).tanh()


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("fn", [by_grad, by_vjp, by_jacrev, per_sample, in_a_module])
def test_a_region_that_takes_a_derivative(fn: Callable, policy: Any) -> None:
    def region(x: Tensor) -> Tensor:
        RUNS.append(is_recomputing()) if not torch.compiler.is_compiling() else None
        return fn(x)

    expected = value_and_grad(fn, X)
    f = torch.compile(remat.remat(region, policy=policy), backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(value_and_grad(f, X), expected)
    assert RUNS.count(True) == 2  # Python recomputes it, once a step
    assert hooks_are_enabled()
    later = torch.compile(remat.remat(smooth), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(value_and_grad(later, X), value_and_grad(smooth, X))


def test_the_code_around_such_a_region_is_compiled() -> None:
    counter = CompileCounterWithBackend("inductor")
    taken, plain = compat.checkpoint(use_reentrant=False)(by_grad), remat.remat(smooth)

    def model(x: Tensor) -> Tensor:
        return plain(taken(plain(x)))

    expected = value_and_grad(lambda x: smooth(by_grad(smooth(x))), X)
    torch.testing.assert_close(value_and_grad(torch.compile(model, backend=counter), X), expected)
    assert regions(counter) == 2


@pytest.mark.parametrize(
    "fn", [lambda x: vmap(smooth)(x) * x, lambda x: jvp(smooth, (x,), (x,))[1]], ids=["vmap", "jvp"]
)
def test_regions_with_other_transforms_are_compiled(fn: Callable) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(remat.remat(fn), backend=counter, fullgraph=True)
    torch.testing.assert_close(value_and_grad(f, X), value_and_grad(fn, X))
    assert regions(counter) == 1


def test_fullgraph_is_an_error_with_the_reason() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"calls torch\.func\.grad or vjp"):
        torch.compile(remat.remat(by_grad), backend="aot_eager", fullgraph=True)(X.clone().requires_grad_())


def test_a_refusal_of_compiled_code_leaves_hooks_enabled() -> None:
    """Code by the backend "eager" disables saved-tensor hooks, and raises before it enables them again."""
    step = torch.compile(grad(lambda z: z.sin().sum()), backend="eager")

    def fn(x: Tensor) -> Tensor:
        return x.sin() * step(x)

    remat.saved_residuals(fn, X.clone().requires_grad_())
    assert hooks_are_enabled()
    torch._dynamo.reset()
    with suppress(Exception):  # Dynamo fails to trace the mode of the region
        remat.remat(fn)(X.clone().requires_grad_())
    assert hooks_are_enabled()
