"""The gradients that the tests of this folder compare, and the size of their large matrices."""

from typing import Any

import torch
from torch import Tensor

N, KB = 32, 32 * 32 * 8  # a large matrix, and its bytes


def grad(out: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of the sum of a result, or of several."""
    out = sum(t.sum() for t in out) if isinstance(out, (tuple, list)) else out.sum()
    return torch.autograd.grad(out, inputs, **options)
