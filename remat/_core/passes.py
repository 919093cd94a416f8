"""Backward passes: the values that are recomputed for them, and the release of these at their end."""

from __future__ import annotations

import threading
import weakref
from types import FrameType
from typing import Any

import torch

from ..errors import RematError
from . import private


class Pass:
    """One backward pass: the frames whose slots it filled and, in a retained graph, the slots that its nodes have read.

    Nodes of a retained graph don't release their slots, and may read one twice. So a value is released when another
    node of the thread reads one; if an inner region reads it, when another inner region does; and all when the pass
    ends. The engine owns this object, as a callback, and drops it also when the pass fails.
    """

    def __init__(self) -> None:
        self.frames: list[weakref.ref[Any]] = []
        self.reading: dict[Any, tuple[Any, list[Any]]] = {}  # the last reader, and what it has read
        self.unpacked: dict[Any, torch.Tensor] = {}

    def __call__(self) -> None:
        """The pass has ended; ``__del__`` does the work."""

    def __del__(self) -> None:
        for _, read in self.reading.values():
            for slot in read:
                slot.value = None
        for ref in self.frames:
            if (owner := ref()) is not None:
                owner.empty()

    def read(self, slot: Any, frame: Any, reader: Any) -> None:
        """Note that a slot of ``frame`` was read by a node, or by ``reader``, the frame of an inner region."""
        place: Any = "a frame", id(frame)
        if reader is None:
            node = private.current_node()
            reader = None if node is None else private.sequence_number(node)
            place = "the pass", threading.get_ident()
        before, slots = self.reading.get(place, (None, []))
        if reader is None or reader != before:
            for old in slots:
                old.value = None
            slots = []
        slots.append(slot)
        self.reading[place] = reader, slots


class PassGroup(Pass):
    """The backward passes in the scope of a ``GraphExecGroup``. The values recomputed for one are there for the next.

    A value that a node reads is for one pass only, so it is released when it has been read. Values that inner regions
    read stay, as an inner region that is recomputed in one pass may read more of them in the next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def read(self, slot: Any, frame: Any, reader: Any) -> None:
        if reader is None and (running := current_pass()) is not None:
            running.read(slot, frame, reader)

    def take(self, slot: Any) -> None:
        """Note that the current pass reads ``slot``, and raise an error if another has: it may be released already."""
        task = private.graph_task_id()
        if task != -1 and self.taken.setdefault(slot, task) != task:
            raise RematError(
                "Two backward passes in one GraphExecGroup need the same value of a region, which is recomputed once "
                "for all passes of the group. Run overlapping passes outside of the group, or each in its own group."
            )


_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
_groups: weakref.WeakKeyDictionary[Any, PassGroup] = weakref.WeakKeyDictionary()


def current_group() -> PassGroup | None:
    """The passes in the scope of the current ``GraphExecGroup``; None outside of one."""
    if (scope := private.graph_exec_group()) is None:
        return None
    return _groups.setdefault(scope, PassGroup())


def current_scope() -> Pass | None:
    """The current pass, or the group that it belongs to: regions that are recomputed now are recomputed for it."""
    return None if private.graph_task_id() == -1 else current_group() or current_pass()


def current_pass() -> Pass | None:
    """The backward pass that runs in this thread, if any."""
    if (task := private.graph_task_id()) == -1:
        return None
    found = _passes.get(task)
    if found is None:
        found = _passes[task] = Pass()
        private.at_end_of_backward(found)
    return found


def nearest_engine_call(frame: FrameType | None, within: FrameType | None = None) -> FrameType | None:
    """The innermost call of autograd's engine from ``frame`` out, up to ``within``."""
    code = private.engine_call.__code__
    while frame is not within and frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is within else frame
