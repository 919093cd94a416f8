"""Tensors that are made of others (DTensor), and those below the levels of ``torch.func``."""

from __future__ import annotations

from typing import Any

import torch

from ._torch import bottom


def is_wrapper_call(types: tuple[type, ...]) -> bool:
    """Whether an operation is on tensors that are made of others, by the protocol that torch has for them."""
    return any(hasattr(cls, "__tensor_flatten__") for cls in types)


def is_plain(tensor: Any) -> bool:
    """Whether it is not made of others."""
    return type(tensor) is torch.Tensor or not hasattr(type(tensor), "__tensor_flatten__")


def parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors below all levels that such a tensor is made of."""
    if not isinstance(tensor, torch.Tensor):
        return []  # DTensor lists its mesh too
    tensor = bottom(tensor)
    if is_plain(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))]
