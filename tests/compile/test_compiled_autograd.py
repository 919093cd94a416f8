"""Compiled autograd over eager regions: the recompute runs outside of the graph that Dynamo traces for the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import RecomputeMismatchError, checkpoint_name, is_recomputing, policies, remat

RUNS: list[bool] = []  # which runs of `block` recompute
INSIDE: list[weakref.ref] = []


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    RUNS.clear()
    INSIDE.clear()
    yield
    torch._dynamo.reset()


def block(x: Tensor, w: Tensor) -> Tensor:
    RUNS.append(is_recomputing())
    h = checkpoint_name((x @ w).sin(), "h").exp()
    INSIDE.append(weakref.ref(h))
    return (h @ w).tanh() @ w


def one(wrap: Callable) -> Callable:
    return wrap(block)


def nested(wrap: Callable) -> Callable:
    inner = wrap(block)
    return wrap(lambda x, w: inner(inner(x.cos(), w), w).exp())


def captured(wrap: Callable) -> Callable:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = w.sin()
        return wrap(lambda x: (x @ y).exp().sin() @ w)(x)

    return fn


def random(wrap: Callable) -> Callable:
    return wrap(lambda x, w: torch.nn.functional.dropout(x @ w, 0.5).sin().exp())


def in_place(wrap: Callable) -> Callable:
    return wrap(lambda x, w: (x @ w).sin_().exp().mul(2).add_(1).tanh())


def under_hooks(wrap: Callable) -> Callable:
    f = wrap(block)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return f(x, w)

    return fn


def gradient_inside(wrap: Callable) -> Callable:
    return wrap(lambda x, w: torch.func.grad(lambda x: (x @ w).sin().exp().sum())(x).sin())


def mapped(wrap: Callable) -> Callable:
    f = wrap(block)
    return lambda x, w: torch.vmap(f, (0, None))(x[:, None], w)


MODELS = [one, nested, captured, random, in_place, under_hooks, gradient_inside, mapped]
POLICIES = [None, policies.save_matmuls, policies.save_only_these_names("h")]


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


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert all(map(torch.equal, actual, expected))


def named(value: Any) -> str:
    """A name that is the same in every process."""
    return getattr(value, "__name__", str(value))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "policy"), [*((model, None) for model in MODELS), (nested, policies.save_matmuls)], ids=named
)
def test_gradients_in_compiled_and_in_later_eager_backwards(model: Callable, policy: Any) -> None:
    expected = grads(model(lambda f: f), eagerly)
    f = model(lambda f: remat(f, policy=policy))
    assert_same(grads(f, by_context), expected)
    assert_same(grads(f, eagerly), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "way"), [(None, by_config), *((policy, by_context) for policy in POLICIES)], ids=named
)
def test_one_recompute_for_each_backward(policy: Any, way: Callable) -> None:
    expected = grads(block, eagerly, 2)
    RUNS.clear()
    f = remat(block, policy=policy)
    assert_same(grads(f, way, 2), expected)
    assert RUNS == [False, True, True]
    assert_same(grads(f, eagerly, 2), expected)
    assert RUNS == [False, True, True] * 2


def test_with_a_compiler_for_the_backward() -> None:
    expected = grads(block, eagerly)
    assert_same(grads(remat(block), by_config, backend="aot_eager"), expected)


def test_a_compiled_function_around_an_eager_region() -> None:
    """Forward and backward are compiled except for the region, which breaks the graph."""

    def fn(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin().exp()

    def step(f: Callable, x: Tensor) -> Tensor:
        y = f(x * 2).cos().sum()
        y.backward()
        return y.detach()

    x, other = (torch.linspace(0, 1, 5, requires_grad=True) for _ in range(2))
    step(fn, other)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(remat(fn), x)
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES[:2], ids=named)
def test_nothing_is_saved_between_two_backward_passes(policy: Any) -> None:
    x, w = inputs()
    y = remat(block, policy=policy)(x, w).sum()
    assert INSIDE[0]() is None
    with by_context() as backward:
        backward(y, retain_graph=True)
        assert len(INSIDE) == 2
        assert INSIDE[1]() is None


def test_a_mismatch_raises_and_restores_all_state() -> None:
    runs: list[int] = []

    def fn(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x[:2].sin().exp()

    x, _ = inputs()
    y = remat(fn)(x).sum()
    with pytest.raises(RecomputeMismatchError), by_context() as backward:
        backward(y)
    assert not is_recomputing()
    assert torch.is_grad_enabled()
    assert_same(grads(remat(block), eagerly), grads(block, eagerly))


def test_no_more_values_are_alive_than_in_an_eager_backward() -> None:
    """Blocks are recomputed one after another, each when the backward reaches it."""

    def most_alive(way: Callable) -> int:
        counts: list[int] = []

        def counted(x: Tensor, w: Tensor) -> Tensor:
            counts.append(sum(ref() is not None for ref in INSIDE))  # values of the earlier blocks
            return block(x, w)

        RUNS.clear()
        INSIDE.clear()
        f = remat(counted)
        grads(lambda x, w: f(f(f(f(x, w), w), w), w), way)
        assert RUNS == [False] * 4 + [True] * 4
        return max(counts[4:])

    assert most_alive(by_context) == most_alive(eagerly) == 0
