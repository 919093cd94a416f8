"""Tensors that wait in host memory between a region's forward and its backward.

Each is copied out when it is made, and back when it is read or a little before. What one region offloads is a group: in
a backward pass the first read of a group starts bringing back all of it, and all of the group made before it in the
same thread, which is the one that comes next. What a pass brought back goes at its end.

Copies run on streams of their own, beside the computation. The memory that a copy back fills belongs to the stream that
reads it, and the copy starts when that stream gets to where it was asked for. So a caller that runs far ahead of the
device holds two groups on it, not all.

Ownership goes one way, reader -> tensor -> group. Groups know their tensors, and each other, by weak references.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from . import private
from .devices import accelerator
from .layout import memory, span
from .passes import Pass, current_pass

# Memory that is copied out is not free until the copy ends: a caller may be ahead of the copies by so much.
IN_FLIGHT_BYTES = 512 * 2**20

_lock = threading.RLock()  # one for all: a group reaches into another, and a pass may end anywhere


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether there is nothing to win: the tensor is in host memory, or in none."""
    return tensor.device.type in ("cpu", "meta")


def has_streams(device: torch.device) -> bool:
    """Whether copies run beside the computation; elsewhere they are made at once."""
    known = any(device.type == each.type for each in accelerator())
    return known and hasattr(torch.get_device_module(device), "Stream")


class Offloaded:
    """One kept tensor in host memory. Its value is that of the moment when this is made.

    It stays where it is, and ``get`` returns it itself, if it is in host memory already or more than plain memory of a
    device: sparse, quantized, of a subclass or a level of ``torch.func``. ``nbytes`` is what it takes in host memory.
    """

    __slots__ = (
        "__weakref__", "_arrival", "_copied", "_host", "_kept", "_stride", "device", "dtype", "group",
        "nbytes", "shape",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, group: Group | None = None) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.nbytes = tensor.numel() * tensor.element_size()
        self.group: Group | None = None
        self._arrival: _Arrival | None = None
        self._copied: torch.Event | None = None
        self._kept = tensor if _stays(tensor) else None
        if self._kept is not None:
            return
        with private.without_levels():
            source = _without_gaps(tensor)
            self._stride = source.stride()
            self._host, self._copied = _to_host(memory(source))
        self.nbytes = self._host.nbytes
        self.group = Group() if group is None else group
        self.group.members.append(weakref.ref(self))

    def settle(self) -> None:
        """Let the current stream wait for the copy out: what it does next may change the tensor in place."""
        if self._copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._copied)

    def get(self) -> torch.Tensor:
        """The tensor, on its device, for the current stream: the same one until ``release``."""
        if self._kept is not None:
            return self._kept
        assert self.group is not None
        arrival = self._bring()
        self.group.reached()
        return arrival.ready()

    def prefetch(self) -> None:
        """Start bringing it back, unless that was done."""
        if self._kept is None:
            self._bring()

    def release(self) -> None:
        """Let go of what was brought back; ``get`` brings it back again."""
        with _lock:
            self._arrival = None

    def _bring(self) -> _Arrival:
        with _lock:
            if self._arrival is None:
                with private.without_levels():
                    self._arrival = _to_device(self._host, self._copied, self.shape, self._stride, self.device)
            return self._arrival


class Group:
    """What one region offloads, brought back together. Make it before the first of them, in the region's thread."""

    __slots__ = ("__weakref__", "_number", "_reached_in", "_siblings", "members")

    def __init__(self) -> None:
        self.members: list[weakref.ref[Offloaded]] = []
        self._number = next(_numbers)
        self._siblings = _thread.groups
        self._siblings[self._number] = self
        self._reached_in: Callable[[], Pass | None] = lambda: None

    def prefetch(self) -> None:
        """Start bringing all of them back."""
        if (running := current_pass()) is not None:
            running.frames.append(weakref.ref(self))
        with suppress(torch.OutOfMemoryError):  # what is there when it is read is only faster
            for member in self._alive():
                member.prefetch()

    def clear(self) -> None:
        """Let go of all that was brought back."""
        for member in self._alive():
            member.release()

    def reached(self) -> None:
        """One of them is read: a backward pass has come to this group."""
        running = current_pass()
        if running is None:
            return  # nobody would let go of the others
        with _lock:
            if self._reached_in() is running:
                return
            self._reached_in = weakref.ref(running)
        siblings = [group for ref in self._siblings.valuerefs() if (group := ref()) is not None]
        if private.graph_task_keeps_graph():  # then nothing else lets go of those that the pass is done with
            for group in siblings:
                if group._number > self._number and group._reached_in() is running:
                    group.clear()
        self.prefetch()
        for group in reversed(siblings):
            if group._number < self._number and group._alive():
                group.prefetch()
                break

    def _alive(self) -> list[Offloaded]:
        return [member for ref in list(self.members) if (member := ref()) is not None]


class _Thread(threading.local):
    """The groups that were made in a thread, in order."""

    def __init__(self) -> None:
        self.groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


_numbers = itertools.count()
_thread = _Thread()


# --- the copies -----------------------------------------------------------------------------------------------------


class _Arrival:
    """A tensor on its way back: it is there after the event ``done``, in memory that belongs to the stream ``home``."""

    __slots__ = ("done", "home", "tensor")

    def __init__(self, tensor: torch.Tensor, done: torch.Event | None = None, home: torch.Stream | None = None) -> None:
        self.tensor, self.done, self.home = tensor, done, home

    def ready(self) -> torch.Tensor:
        """The tensor, for what the current stream does next."""
        if self.done is not None:
            current = torch.accelerator.current_stream(self.tensor.device)
            current.wait_event(self.done)
            if current != self.home:
                self.tensor.record_stream(current)
        return self.tensor

    def __del__(self) -> None:
        # Perhaps it was never read, and then the memory is used again before the copy into it has ended.
        if self.done is not None and self.home is not None:
            self.home.wait_event(self.done)


class _Side:
    """The streams on which a device's copies run."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = torch.Stream(device), torch.Stream(device)
        self.pending: deque[tuple[torch.Event, int]] = deque()
        self.pending_bytes = 0

    def hold_back(self, copied: torch.Event, nbytes: int) -> None:
        """Wait until this copy out and those before it that have not ended are no more than may be in flight."""
        late = None
        with _lock:
            self.pending.append((copied, nbytes))
            self.pending_bytes += nbytes
            while self.pending_bytes > IN_FLIGHT_BYTES and len(self.pending) > 1:
                late, nbytes = self.pending.popleft()
                self.pending_bytes -= nbytes
        if late is not None:
            late.synchronize()


_sides: dict[torch.device, _Side] = {}


def _side(device: torch.device) -> _Side:
    with _lock:
        if device not in _sides:
            _sides[device] = _Side(device)
        return _sides[device]


def _to_host(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """A copy in host memory, and the event after which it is one."""
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


def _to_device(
    host: torch.Tensor,
    copied: torch.Event | None,
    shape: Sequence[int],
    stride: Sequence[int],
    device: torch.device,
) -> _Arrival:
    """The tensor of this memory, on its way to the device."""
    tensor = torch.empty_strided(shape, stride, dtype=host.dtype, device=device)
    if copied is None:
        memory(tensor).copy_(host)
        return _Arrival(tensor)
    home, back = torch.accelerator.current_stream(device), _side(device).back
    back.wait_stream(home)  # which may still use the memory for what was there before
    back.wait_event(copied)
    with back:
        memory(tensor).copy_(host, non_blocking=True)
    return _Arrival(tensor, back.record_event(), home)


# --- memory ---------------------------------------------------------------------------------------------------------


def _stays(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return not plain or tensor.is_quantized or private.is_wrapped(tensor) or in_host_memory(tensor)


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it takes only some of the elements that it spans, or if its values differ from those."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if span(tensor.shape, tensor.stride()) <= tensor.numel() else tensor.clone()
