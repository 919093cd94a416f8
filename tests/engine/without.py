"""What the tests of this folder compare with: a function without a region, and its gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Wrap = Callable[..., Callable]
N, KB = 32, 32 * 32 * 8  # a large matrix, and its bytes


def plain(fn: Callable, **options: Any) -> Callable:
    return fn


def grad(out: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of the sum of a result, or of several."""
    out = sum(t.sum() for t in out) if isinstance(out, (tuple, list)) else out.sum()
    return torch.autograd.grad(out, inputs, **options)
