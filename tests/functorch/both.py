"""Programs of a function `wrap`, which makes a region of a function, or is `plain`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from cases import assert_same, rand
from torch import Tensor

from remat import remat

Fn = Callable[..., Any]
Wrap = Callable[..., Fn]
Program = Callable[[Wrap], Any]
W, X, Y = rand(4, 4, grad=False), rand(4, 4, seed=1, grad=False), rand(4, 4, seed=2, grad=False)


def plain(fn: Fn, **options: Any) -> Fn:
    return fn


def both(program: Program, exact: bool = False, **options: Any) -> None:
    """Assert that a program has the same results with regions, and leaves the generator in the same state."""
    found = []
    for wrap in (functools.partial(remat, **options), plain):
        torch.manual_seed(0)
        found.append((program(wrap), torch.get_rng_state()))
    assert_same(*found, exact=exact)


def f(x: Tensor) -> Tensor:
    """Its backward needs the first product, not the second one."""
    return torch.tanh(x @ W) @ W


def through_autograd(fn: Fn, *args: Tensor) -> Any:
    """The result of a function, and its gradients by plain autograd."""
    leaves = [t.clone().requires_grad_() for t in args]
    out = fn(*leaves)
    value = sum(t.sin().sum() for t in (out if isinstance(out, (tuple, list)) else [out]))
    return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True)
