"""Contexts that shield a recompute from the state of the backward pass in which it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as fwAD

from .._core import private
from .._core.private import DispatchMode, modes_that_see
from .._core.streams import resumed
from .._region.hooks import hooks_allowed

if TYPE_CHECKING:
    from .frame import Frame


def shields(frame: Frame) -> list[Any]:
    """The contexts of a recompute: none, in a plain backward pass."""
    contexts: list[Any] = []
    if private.transforms_active():
        contexts.append(private.without_levels())
    if in_batched_backward():
        contexts.append(outside_of_batched_backward())
    if torch.is_inference_mode_enabled():  # only the backward is in it: autograd saves nothing in a forward under it
        contexts.append(torch.inference_mode(False))
    if not private.is_torch_function_enabled():
        contexts.append(private.torch_function_enabled())
    if private.hooks_disabled_message() is not None:
        contexts.append(hooks_allowed(even_if_disabled=True))
    if frame.modes and not modes_that_see():
        contexts.append(PlainMode())
    if (frame.operands.has_duals or frame.captured_inputs.has_duals) and not private.dual_level_active():
        contexts.append(fwAD.dual_level())
    if frame.streams:
        contexts.append(resumed(frame.streams))
    return contexts


class PlainMode(DispatchMode):
    """A mode that only runs the operations. Some of torch's code, such as derivative formulas, checks for any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _batched_depth() -> int:
    private.increment_batched_depth()
    return private.decrement_batched_depth()


def in_batched_backward() -> bool:
    """Whether a ``torch.autograd.grad(..., is_grads_batched=True)`` runs, which forbids random numbers."""
    return _batched_depth() > 0


@contextmanager
def outside_of_batched_backward() -> Iterator[None]:
    """Suspend batched backwards, as a recompute is not part of them."""
    depth = _batched_depth()
    for _ in range(depth):
        private.decrement_batched_depth()
    try:
        yield
    finally:
        for _ in range(depth):
            private.increment_batched_depth()
