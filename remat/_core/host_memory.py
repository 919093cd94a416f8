"""Tensors that are saved in host memory between a region's forward and its backward.

The tensors that one region offloads are a group. In a backward pass the first read of a group starts to copy it back,
and the group made before it in the same thread, which is read next. The pass releases these copies at its end.

Copies run on separate streams, concurrently with the computation. The memory that a copy back fills belongs to the
stream that reads it, and the copy starts when that stream gets to the point where it was requested. So if the host runs
far ahead of the device, two groups are on the device, not all. Groups refer to their tensors by weak references.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from . import private
from .devices import NEAR, accelerator
from .passes import Pass, current_pass
from .tensors import memory, span

# The memory of a tensor is not free until its copy to the host ends. A caller with more bytes in flight has to wait.
IN_FLIGHT_BYTES = 512 * 2**20

_lock = threading.RLock()  # one for all groups, as groups use each other, and a pass may end at any time


def stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not offloaded: that is of no use, or it is sparse, quantized, of a subclass or of a level."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.device.type in NEAR or not is_plain or tensor.is_quantized or private.is_wrapped(tensor)


def has_streams(device: torch.device) -> bool:
    """Whether copies run concurrently with the computation. On other devices they are synchronous."""
    return device.type in {each.type for each in accelerator()} and hasattr(torch.get_device_module(device), "Stream")


class Offloaded:
    """One saved tensor in host memory, with its value at the time when this object is made."""

    def __init__(self, tensor: torch.Tensor, group: Group | None = None) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        # The copy on the device, the event after which it is complete, and the stream that its memory belongs to.
        self._arrival: tuple[torch.Tensor, Any, Any] | None = None
        with private.without_levels():
            source = tensor.detach().resolve_conj().resolve_neg()
            if span(source.shape, source.stride()) > source.numel():  # it has gaps in memory
                source = source.clone()
            self._stride = source.stride()
            self._host, self._copied = _to_host(memory(source))
        self.group = Group() if group is None else group
        self.group.members.append(weakref.ref(self))

    def settle(self) -> None:
        """Make the current stream wait for the copy to the host, as its next operation may change the tensor."""
        if self._copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._copied)

    def get(self) -> torch.Tensor:
        """The tensor on its device, for use on the current stream. It is the same object until ``release``."""
        tensor, copied, home = self.prefetch()
        self.group.reached()
        if copied is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_event(copied)
            if current != home:
                tensor.record_stream(current)
        return tensor

    def prefetch(self) -> tuple[torch.Tensor, Any, Any]:
        """Start to copy it back, unless that has started already."""
        with _lock:
            if self._arrival is None:
                with private.without_levels():
                    self._arrival = self._to_device()
            return self._arrival

    def _to_device(self) -> tuple[torch.Tensor, Any, Any]:
        tensor = torch.empty_strided(self.shape, self._stride, dtype=self.dtype, device=self.device)
        if self._copied is None:
            memory(tensor).copy_(self._host)
            return tensor, None, None
        home, back = torch.accelerator.current_stream(self.device), _side(self.device).back
        back.wait_stream(home)  # it may still use the memory's previous contents
        back.wait_event(self._copied)
        with back:
            memory(tensor).copy_(self._host, non_blocking=True)
        return tensor, back.record_event(), home

    def release(self) -> None:
        """Release the copy on the device; ``get`` makes another one."""
        with _lock:
            arrival, self._arrival = self._arrival, None
        if arrival is not None:
            _, copied, home = arrival
            if copied is not None:  # if it was never read, its memory could be reused before the copy into it has ended
                home.wait_event(copied)

    __del__ = release


class Group:
    """The tensors that one region offloads, copied back together. Make it before these, in the region's thread."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[Offloaded]] = []
        self._siblings: Any = vars(_thread).setdefault("groups", weakref.WeakValueDictionary())
        self._siblings[id(self)] = self
        self._reached_in: Callable[[], Pass | None] = lambda: None

    def prefetch(self, running: Pass) -> None:
        """Start to copy the tensors back. The pass releases the copies at its end."""
        running.frames.append(weakref.ref(self))
        with suppress(torch.OutOfMemoryError):  # a prefetch only saves time
            for member in self._alive():
                member.prefetch()

    def empty(self) -> None:
        for member in self._alive():
            member.release()

    def reached(self) -> None:
        """Note that a tensor of this group is read."""
        running = current_pass()
        if running is None:
            return  # no pass would release the other tensors
        with _lock:
            if self._reached_in() is running:
                return
            self._reached_in = weakref.ref(running)
        siblings = [group for ref in self._siblings.valuerefs() if (group := ref()) is not None]
        place = siblings.index(self)
        if private.graph_task_keeps_graph():  # then nodes don't release the groups that the pass is done with
            for group in siblings[place + 1 :]:
                group.empty()
        self.prefetch(running)
        for group in reversed(siblings[:place]):
            if group._alive():
                group.prefetch(running)
                break

    def _alive(self) -> list[Offloaded]:
        return [member for ref in list(self.members) if (member := ref()) is not None]


_thread = threading.local()  # its groups, in the order in which they were made


class _Side:
    """The streams on which a device's copies run."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = torch.Stream(device), torch.Stream(device)
        self.pending: deque[tuple[torch.Event, int]] = deque()
        self.pending_bytes = 0

    def hold_back(self, copied: torch.Event, nbytes: int) -> None:
        """Wait for earlier copies to the host until at most ``IN_FLIGHT_BYTES`` are in flight, or only this copy."""
        late = None
        with _lock:
            self.pending.append((copied, nbytes))
            self.pending_bytes += nbytes
            while self.pending_bytes > IN_FLIGHT_BYTES and len(self.pending) > 1:
                late, nbytes = self.pending.popleft()
                self.pending_bytes -= nbytes
        if late is not None:
            late.synchronize()


_side = functools.cache(_Side)


def _to_host(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """A copy in host memory, and the event after which it is complete."""
    streams = has_streams(memory.device)
    host = torch.empty(memory.shape, dtype=memory.dtype, device="cpu", pin_memory=streams)
    if not streams:
        return host.copy_(memory), None
    side = _side(memory.device)
    side.out.wait_stream(torch.accelerator.current_stream(memory.device))
    with side.out:
        host.copy_(memory, non_blocking=True)
    memory.record_stream(side.out)
    copied = side.out.record_event()
    side.hold_back(copied, host.nbytes)
    return host, copied
