"""Backward passes: what they hold, and that they let go of it at their end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import RematError
from . import private


class Pass:
    """One backward pass: which frames it filled and, in a graph that is kept, what its nodes have read.

    Nodes of a kept graph don't let go of their slots. A node may read twice what it saved, so a value stays until
    another node of the thread reads; what a region inside reads of the one around stays until another region inside
    reads; and everything is let go when the pass ends. The engine owns this object, as a
    callback, and drops it also when the pass fails.
    """

    __slots__ = ("__weakref__", "frames", "reading", "shared", "unpacked")

    def __init__(self) -> None:
        self.frames: list[Callable[[], Any]] = []
        self.reading: dict[int, tuple[int | None, list[Any]]] = {}
        self.shared: dict[int, tuple[Any, list[Any]]] = {}
        self.unpacked: dict[Any, torch.Tensor] = {}

    def __call__(self) -> None:
        """The pass has ended; what there is to do, ``__del__`` does."""

    def __del__(self) -> None:
        for _, slots in (*self.reading.values(), *self.shared.values()):
            _drop(slots)
        for ref in self.frames:
            frame = ref()
            if frame is not None:
                frame.clear()

    def read(self, slot: Any, frame: Any, reader: Any) -> None:
        """A slot of ``frame`` was read, by a node or by the frame of a region inside, ``reader``."""
        if reader is not None:
            before, slots = self.shared.get(id(frame), (None, []))
            if before is not reader:
                _drop(slots)
                slots = []
            slots.append(slot)
            self.shared[id(frame)] = reader, slots
            return
        current = private.current_node()
        node = None if current is None else private.sequence_number(current)
        thread = threading.get_ident()
        before, slots = self.reading.get(thread, (None, []))
        if node is None or node != before:
            _drop(slots)
            self.reading[thread] = node, [slot]
        else:
            slots.append(slot)


class PassGroup(Pass):
    """The backward passes in the scope of a ``GraphExecGroup``: what one of them gets is there for the next.

    What a node reads is for one of them alone, so it goes when that one has read it. What regions inside read stays,
    for a region that is recomputed in one pass may read more of it in the next.
    """

    __slots__ = ("taken",)

    def __init__(self) -> None:
        super().__init__()
        self.taken: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def read(self, slot: Any, frame: Any, reader: Any) -> None:
        if reader is None and (running := current_pass()) is not None:
            running.read(slot, frame, reader)

    def take(self, slot: Any) -> None:
        """A node asks for what ``slot`` stands for. Who looks at it outside of any pass gets it for the moment alone.

        Raises:
            RematError: a node did in another pass, so it may be gone.
        """
        if private.graph_task_id() == -1:
            return
        if self.taken.setdefault(slot, private.graph_task_id()) != private.graph_task_id():
            raise RematError(
                "Two backward passes in one GraphExecGroup need the same value of a region, which is recomputed once "
                "for all passes of the group. Run overlapping passes outside of the group, or each in its own group."
            )


_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
_groups: weakref.WeakKeyDictionary[Any, PassGroup] = weakref.WeakKeyDictionary()


def current_group() -> PassGroup | None:
    """What the passes in the scope of the current ``GraphExecGroup`` share; None outside of any."""
    scope = private.graph_exec_group()
    if scope is None:
        return None
    return _groups.get(scope) or _groups.setdefault(scope, PassGroup())


def current_scope() -> Pass | None:
    """Whatever runs of regions in the current pass are for: that pass, or the group that it belongs to."""
    return None if private.graph_task_id() == -1 else current_group() or current_pass()


def current_pass() -> Pass | None:
    """The backward pass that runs in this thread, if any."""
    task = private.graph_task_id()
    if task == -1:
        return None
    found = _passes.get(task)
    if found is None:
        found = _passes[task] = Pass()
        private.at_end_of_backward(found)
    return found


def _drop(slots: list[Any]) -> None:
    for slot in slots:
        slot.value = None
