"""The accelerator of this build of torch, its devices and streams. Nothing here starts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from . import private
from .state import own_work, unseen
from .tensors import parts

NEAR = {"cpu", "meta"}  # devices whose tensors are in host memory, or have no memory


@cache
def accelerator() -> tuple[torch.device, ...]:
    """The accelerator of this build of torch, in a tuple that is empty if there is none; does not start it."""
    device = torch.accelerator.current_accelerator()
    return () if device is None else (device,)


def accelerators_of(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """The modules of the accelerators that these tensors are on, as ``torch.cuda``, by their types."""
    kinds = {tensor.device.type for tensor in tensors} - NEAR
    return {kind: torch.get_device_module(kind) for kind in sorted(kinds)}


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
        for device in {tensor.device for tensor in tensors if tensor.device.type not in NEAR}:
            nothing = torch.empty(0, device=device, requires_grad=True)
            torch.autograd.grad(nothing.view(0), nothing, torch.empty(0, device=device))


def current_streams() -> list[torch.Stream]:
    """The current stream of each device. A region may use other devices than those of its inputs."""
    return [
        torch.accelerator.current_stream(torch.device(device.type, i))
        for device in accelerator()
        if has_started(torch.get_device_module(device))
        for i in range(torch.accelerator.device_count())
    ]


def streams_for(tensors: Iterable[torch.Tensor]) -> list[torch.Stream]:
    """The streams on which an operation that reads these tensors runs now."""
    kinds = {device.type for device in accelerator()}
    devices = {tensor.device for tensor in tensors if tensor.device.type in kinds}
    return [torch.accelerator.current_stream(device) for device in devices]


@contextmanager
def resumed(streams: list[torch.Stream]) -> Iterator[None]:
    """Run on these streams, after the work already queued on the caller's streams and before their next work."""
    with ExitStack() as stack:
        for stream in streams:
            if stream != (caller := torch.accelerator.current_stream(stream.device)):
                stream.wait_stream(caller)
                stack.callback(caller.wait_stream, stream)
                stack.enter_context(stream)
        yield


def is_on_another(device: torch.device, streams: list[torch.Stream]) -> bool:
    """Whether the device's current stream is not one of these."""
    known = [stream for stream in streams if stream.device == device]
    return bool(known) and torch.accelerator.current_stream(device) not in known


def make_readable(tensor: torch.Tensor, streams: list[torch.Stream]) -> None:
    """Let the current stream read a tensor that a recompute has made on these streams, and perhaps others."""
    for stream in streams:
        if stream.device == tensor.device:
            current = torch.accelerator.current_stream(stream.device)
            if current != stream:
                current.wait_stream(stream)
            for part in parts(tensor):
                part.record_stream(current)
