"""Compiled autograd over eager regions: the recompute runs outside of the graph that Dynamo traces for the backward."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor

from remat import RecomputeMismatchError, is_recomputing, policies, remat

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RUNS: list[bool] = []  # which runs of `block` recompute
INSIDE: list[weakref.ref] = []  # values inside of the runs


def block(x: Tensor, w: Tensor) -> Tensor:
    RUNS.append(is_recomputing())
    h = torch.nn.functional.dropout(x @ w, 0.3)
    INSIDE.append(weakref.ref(h))
    return h.exp()


def nested(wrap: Callable) -> Callable:
    inner = wrap(block)
    return wrap(lambda x, w: inner(x.cos(), w).exp())


def gradient_inside(wrap: Callable) -> Callable:
    return wrap(lambda x, w: torch.func.grad(lambda x: (x @ w).sin().exp().sum())(x).sin())


@contextmanager
def by_config(backend: str = "eager") -> Iterator[Callable]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield lambda y, **options: torch.compile(lambda: y.backward(**options), backend=backend)()


@contextmanager
def by_context(backend: str = "eager") -> Iterator[Callable]:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        yield lambda y, **options: y.backward(**options)


@contextmanager
def eagerly(backend: str = "") -> Iterator[Callable]:
    yield lambda y, **options: y.backward(**options)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 12).view(4, 3).requires_grad_(), (torch.eye(3) * 0.5 + 0.1).requires_grad_()


def grads(f: Callable, way: Callable, times: int = 1, backend: str = "eager") -> list[Any]:
    """The gradients after several backward passes of one forward."""
    torch.manual_seed(0)
    x, w = inputs()
    y = f(x, w).sum()
    with way(backend) as backward:
        for i in range(times):
            backward(y, retain_graph=i < times - 1)
    return [x.grad, w.grad]


@pytest.mark.parametrize(("model", "policy"), [(nested, policies.save_matmuls), (gradient_inside, None)])
def test_gradients_in_a_compiled_and_in_a_later_eager_backward(model: Callable, policy: Any) -> None:
    expected = grads(model(lambda f: f), eagerly)
    f = model(lambda f: remat(f, policy=policy))
    assert_same(grads(f, by_context), expected)
    assert_same(grads(f, eagerly), expected)


@pytest.mark.parametrize(
    ("policy", "way", "backend"), [(None, by_config, "aot_eager"), (policies.save_matmuls, by_context, "eager")]
)
def test_each_backward_recomputes_once_and_keeps_nothing(policy: Any, way: Callable, backend: str) -> None:
    expected = grads(block, eagerly, 2)
    RUNS.clear()
    assert_same(grads(remat(block, policy=policy), way, 2, backend), expected)
    assert RUNS == [False, True, True]
    assert not any(ref() for ref in INSIDE)


def test_a_mismatch_raises_and_restores_all_state() -> None:
    runs = deque[int]()  # which isn't restored

    def fn(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x[:2].sin().exp()

    x, _ = inputs()
    y = remat(fn)(x).sum()
    with pytest.raises(RecomputeMismatchError), by_context() as backward:
        backward(y)
    assert not is_recomputing() and torch.is_grad_enabled()
    assert_same(grads(remat(block), eagerly), grads(block, eagerly))
