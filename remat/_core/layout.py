"""How tensors lie in memory, and copies that lie as they do.

Operations ask for strides, and autograd saves other tensors where they differ, or the same ones in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import private
from .parts import is_plain


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is a plain one: sizes and strides on a storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def holder(tensor: torch.Tensor) -> Any:
    """What stands for a tensor's memory: its storage, or a sparse tensor itself, which has none."""
    return tensor.untyped_storage() if is_dense(tensor) else tensor


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory there are from a tensor's first to its last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride))


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor lies in, as a vector: an expanded tensor's is smaller than the tensor."""
    return tensor.as_strided((span(tensor.shape, tensor.stride()),), (1,))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, expanded and with gaps as the tensor is."""
    copy = tensor.clone()
    if not is_dense(tensor) or private.is_wrapped(tensor) or not is_plain(tensor) or copy.stride() == tensor.stride():
        return copy
    return memory(tensor).clone().as_strided(tensor.shape, tensor.stride())


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor, or a copy of it if it has other strides than these; zeros are in the gaps."""
    if tensor.stride() == stride:
        return tensor
    copy = tensor.new_zeros(span(tensor.shape, stride)).as_strided(tensor.shape, stride)
    to = copy
    for dim, step in enumerate(stride):
        if step == 0 and tensor.shape[dim] > 1:
            to, tensor = to.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    to.copy_(tensor)
    return copy
