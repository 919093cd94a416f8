"""The memory layout of tensors, and copies with the same layout.

Operations depend on strides: where these differ, autograd saves other tensors, or saves them in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import private
from .parts import is_plain


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has sizes and strides on one storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def holder(tensor: torch.Tensor) -> Any:
    """What represents a tensor's memory: its storage, or the tensor itself if it is sparse and so has none."""
    return tensor.untyped_storage() if is_dense(tensor) else tensor


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements in memory from a tensor's first to its last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride))


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor spans, as a vector. It is smaller than the tensor if the tensor is expanded."""
    return tensor.as_strided((span(tensor.shape, tensor.stride()),), (1,))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same layout, expanded and with gaps if the tensor is."""
    copy = tensor.clone()
    if not is_dense(tensor) or private.is_wrapped(tensor) or not is_plain(tensor) or copy.stride() == tensor.stride():
        return copy
    return memory(tensor).clone().as_strided(tensor.shape, tensor.stride())


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor with these strides: the tensor itself, or a copy with zeros in the gaps."""
    if tensor.stride() == stride:
        return tensor
    copy = tensor.new_zeros(span(tensor.shape, stride)).as_strided(tensor.shape, stride)
    to = copy
    for dim, step in enumerate(stride):
        if step == 0 and tensor.shape[dim] > 1:
            to, tensor = to.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    to.copy_(tensor)
    return copy


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes, without the dtype and without lazy conjugation or negation."""
    storage = tensor.untyped_storage()
    with private.without_dispatch():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
