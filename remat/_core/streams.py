"""Streams: a region is recomputed on the streams of its first run.

Autograd runs each backward node on the stream of its forward, so the node that starts a recompute may be on any of the
streams that a region used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from .devices import accelerator, started_devices
from .parts import parts


def current_streams() -> list[torch.Stream]:
    """The current stream of each device. A region may use other devices than those of its inputs."""
    return [torch.accelerator.current_stream(device) for device in started_devices()]


def streams_for(tensors: Iterable[torch.Tensor]) -> list[torch.Stream]:
    """The streams on which an operation that reads these tensors runs now."""
    kinds = {device.type for device in accelerator()}
    devices = {tensor.device for tensor in tensors if tensor.device.type in kinds}
    return [torch.accelerator.current_stream(device) for device in devices]


@contextmanager
def resumed(streams: list[torch.Stream]) -> Iterator[None]:
    """Run on these streams, after the work already queued on the caller's streams and before their next work."""
    callers = [torch.accelerator.current_stream(stream.device) for stream in streams]
    switched = [(s, c) for s, c in zip(streams, callers) if s != c]
    with ExitStack() as stack:
        for stream, caller in switched:
            stream.wait_stream(caller)
            stack.enter_context(stream)
        yield
    for stream, caller in switched:
        caller.wait_stream(stream)


def record_use(tensor: torch.Tensor) -> None:
    """Keep a tensor's memory, which may be another stream's, from being reused before the current stream is done."""
    for stream in streams_for([tensor]):
        tensor.record_stream(stream)


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
