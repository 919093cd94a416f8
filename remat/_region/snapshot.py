"""Properties of tensors recorded at a region's first run, and tensors with these properties for a recompute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD

from .._core import private
from .._core.parts import is_dual, is_in_graph


def leafness(tensor: torch.Tensor) -> bool | None:
    """Whether a tensor is a leaf; None if ``is_leaf`` is true but autograd doesn't follow the tensor."""
    return tensor.is_leaf and (not tensor.requires_grad or is_in_graph(tensor) or None)


def cut(tensor: torch.Tensor, requires_grad: bool, leaf: bool | None) -> torch.Tensor:
    """Cut a tensor from its graph. A non-leaf stays a non-leaf, since inner regions decide by it what to save.

    A tensor that autograd doesn't follow, though it requires grad, stays so: operations save less for it.
    """
    if not requires_grad:
        return tensor.detach() if tensor.requires_grad else tensor
    result = tensor.detach().requires_grad_()
    if leaf:
        return result
    if leaf is None:
        with torch.no_grad():
            return result[...]  # `view_as` would change strides of dimensions of size 1
    return result[...] if result.layout is torch.strided else result.clone()


def tangents(tensors: Sequence[torch.Tensor]) -> dict[int, tuple]:
    """The primal and tangent of every dual tensor, which are freed when its level ends."""
    duals = {}
    for i, tensor in enumerate(tensors):
        if is_dual(tensor):
            duals[i] = tuple((t, t.requires_grad, leafness(t)) for t in fwAD.unpack_dual(tensor))
    return duals


def gradients(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """The identity and version of each leaf's ``.grad``."""
    grads = (t.grad for t in tensors if t.requires_grad and t.is_leaf)
    return [(0, 0) if g is None else (id(g), private.version(g)) for g in grads]


def versions(tensors: Sequence[Any]) -> list[int]:
    """The version counters of tensors."""
    try:
        return list(map(private.raw_version, tensors))
    except RuntimeError:
        return [private.version(tensor) for tensor in tensors]
