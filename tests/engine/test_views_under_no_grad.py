"""Views made under `no_grad` of a tensor that requires grad: they report `requires_grad`, but get no gradient.

Operations on such a view save fewer tensors, so a recompute must use such a view too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from benchmarks.measure import count_ops, held_bytes
from remat import policies, remat

Wrap = Callable[[Callable], Callable]


def plain(fn: Callable) -> Callable:
    return fn


def row(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x[0]


def product(wrap: Wrap) -> Callable:
    return lambda v, w: (v * w).sin()


def alone(wrap: Wrap) -> Callable:
    return lambda v, w: v.sin().exp() * w.detach()


def region_inside(wrap: Wrap) -> Callable:
    return lambda v, w: wrap(lambda a: (a * w).tanh())(v).sin()


def captured(wrap: Wrap) -> Callable:
    return lambda v, w: wrap(lambda w: (v * w).sin().exp())(w)


def gradient_inside(wrap: Wrap) -> Callable:
    return lambda v, w: torch.autograd.grad((v * w).sin().sum(), w, create_graph=True)[0]


def asks(wrap: Wrap) -> Callable:
    return lambda v, w: (v * w).sin() if v.requires_grad and v.is_leaf else (v + w).cos()


BODIES = [product, alone, region_inside, captured, gradient_inside, asks]


def twice(f: Callable, x: Tensor, w: Tensor) -> Any:
    out = f(row(x), w)
    return out, [torch.autograd.grad(out.sum(), [x, w], allow_unused=True, retain_graph=True) for _ in range(2)]


def accumulated(f: Callable, x: Tensor, w: Tensor) -> Any:
    f(row(x), w).sum().backward()
    return x.grad, w.grad


def made_again_a_leaf(f: Callable, x: Tensor, w: Tensor) -> Any:
    v = row(x).requires_grad_()
    return torch.autograd.grad(f(v, w).sum(), [v, w])


def of_first(f: Callable, x: Tensor, w: Tensor) -> Any:
    v = row(x)
    out = grad(lambda v: f(v, w).sum())(v)
    return out, torch.autograd.grad(out.sum(), [x, w], allow_unused=True)


def of_second(f: Callable, x: Tensor, w: Tensor) -> Any:
    v = row(x)
    out = grad(lambda w: f(v, w).sum())(w)
    return out, torch.autograd.grad(out.sum(), [x, w], allow_unused=True)


def of_rows(f: Callable, x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        rows = x[:2]
    out = vmap(grad(lambda v: f(v, w).sum()))(rows)
    return out, torch.autograd.grad(out.sum(), [x, w], allow_unused=True)


def pulled_back(f: Callable, x: Tensor, w: Tensor) -> Any:
    out, pull = vjp(lambda v: f(v, w), row(x))
    return out, pull(torch.ones_like(out))


def at_a_level(f: Callable, x: Tensor, w: Tensor) -> Any:
    return grad(lambda x, w: f(row(x), w).sum(), argnums=(0, 1))(x, w)


def forward(f: Callable, x: Tensor, w: Tensor) -> Any:
    v = row(x)
    return jvp(lambda w: f(v, w), (w,), (w.cos(),))


RUNS = [twice, accumulated, made_again_a_leaf, of_first, of_second, of_rows, pulled_back, at_a_level, forward]


@pytest.mark.parametrize("policy", [None, policies.save_ops(torch.ops.aten.mul)], ids=str)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("body", BODIES)
def test_same_as_without_remat(body: Callable, run: Callable, policy: Any) -> None:
    def outcome(wrap: Wrap) -> Any:
        try:
            return run(wrap(body(wrap)), rand(3, 3, seed=0), rand(3, seed=1))
        except RuntimeError as error:
            return str(error).splitlines()[0]  # plain autograd raises it too, where nothing is differentiable

    expected = outcome(plain)
    assert_same(outcome(lambda fn: remat(fn, policy=policy)), expected, exact=False)


def test_memory() -> None:
    """The view is an input, which is saved as it is; the function runs twice."""
    x, w = rand(32, 32, seed=0), rand(32, 32, seed=1)
    with torch.no_grad():
        v = x[:]
    f = remat(lambda v, w: (v * w).sin().exp().cos())
    kept = held_bytes(lambda: f(v, w))
    assert kept == held_bytes(lambda: remat(lambda v, w: (v * w).sin().exp().cos())(v.detach(), w))
    assert count_ops(lambda: f(v, w).sum().backward())["aten.exp"] == 2
