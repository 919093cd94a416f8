"""CUDA streams: a region runs again on the streams of its first run.

Autograd runs each backward node on the stream of its forward, so the node that starts a recompute may be on any of the
streams that a region used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


def current_streams(devices: Iterable[torch.device]) -> list[torch.cuda.Stream]:
    """The current stream of each CUDA device among these."""
    return [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]


@contextmanager
def resumed(streams: list[torch.cuda.Stream]) -> Iterator[None]:
    """Run on these streams: after what was started where the caller is, and before what it starts next."""
    callers = [torch.cuda.current_stream(stream.device) for stream in streams]
    switched = [(s, c) for s, c in zip(streams, callers) if s != c]
    with ExitStack() as stack:
        for stream, caller in switched:
            stream.wait_stream(caller)
            stack.enter_context(torch.cuda.stream(stream))
        yield
    for stream, caller in switched:
        caller.wait_stream(stream)
