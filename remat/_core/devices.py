"""The accelerator of this build of torch, and its devices. Nothing here starts it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType

import torch

from . import private
from .state import own_work, unseen


@cache
def accelerator() -> tuple[torch.device, ...]:
    """The accelerator of this build of torch, in a tuple that is empty if there is none; does not start it."""
    device = torch.accelerator.current_accelerator()
    return () if device is None else (device,)


def started_devices() -> list[torch.device]:
    """All devices of the accelerator, if the backend has started."""
    return [
        torch.device(device.type, i)
        for device in accelerator()
        if has_started(torch.get_device_module(device))
        for i in range(torch.accelerator.device_count())
    ]


def is_capturing() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_device() -> tuple[torch.device, ...]:
    """The accelerator's current device, if the backend has started."""
    for device in accelerator():
        module = torch.get_device_module(device)
        if has_started(module) and hasattr(module, "current_device"):
            return (torch.device(device.type, module.current_device()),)
    return ()


def set_current_device(value: tuple[torch.device, ...]) -> None:
    """Set the current device to one that ``current_device`` has returned."""
    for device in value:
        torch.accelerator.set_device_index(device.index)


def has_started(module: ModuleType) -> bool:
    """Whether the backend of these devices has started."""
    return getattr(module, "is_initialized", module.is_available)()


def wait_for_backward_threads(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until the backward passes that are over have released these tensors.

    A device's thread reports the end of a pass first, then releases its tensors, and then starts the next pass: ours.
    """
    with torch.enable_grad(), unseen(), own_work(), private.without_levels():
        for device in {tensor.device for tensor in tensors}:
            if device.type not in ("cpu", "meta"):
                nothing = torch.empty(0, device=device, requires_grad=True)
                torch.autograd.grad(nothing.view(0), nothing, torch.empty(0, device=device))
