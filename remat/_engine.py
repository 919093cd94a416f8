"""The engine: runs a region so that autograd keeps slots instead of tensors, and fills the slots when one is read.

Saved-tensor hooks stand between autograd and what it saves. In the forward every tensor that the region makes is
replaced by an empty slot; inputs and captured tensors stay themselves. The first slot that a backward reads makes the
region run again, under hooks that put what it saves, in the same order, into those slots that are still alive.

Ownership goes one way, so that reference counts alone free it all: autograd's node -> slot and frame -> region.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD

from . import _torch
from ._determinism import fingerprint, user_line
from ._errors import MutationError, RecomputeMismatchError
from ._kept import Kept


class Slot:
    """Stands for one saved tensor; the value is there only while a backward pass needs it."""

    __slots__ = ("__weakref__", "index", "value", "version")

    def __init__(self, index: int) -> None:
        self.index = index
        self.value: torch.Tensor | None = None
        self.version = 0


class Stop(BaseException):
    """Ends a run again as soon as its slots are filled. Not an Exception, so that user code lets it through."""


class Frame:
    """The record of one region under saved-tensor hooks."""

    __slots__ = (
        "__weakref__", "consts", "inside", "known", "lock", "open", "operands", "options", "outer", "prints", "region",
        "slots", "start",
    )  # fmt: skip

    def __init__(self, region: Any, operands: Kept, consts: Kept, options: Any) -> None:
        self.region = region
        self.operands = operands
        self.consts = consts
        self.options = options
        self.slots: list[Callable[[], Slot | None] | None] = []
        self.prints: list[Any] = []
        self.lock = threading.RLock()
        self.open = True
        self.outer: tuple | None = None  # the hooks around the region
        self.inside = False  # a backward pass ran inside the region's forward
        self.start = _torch.next_sequence_number()
        self.known = {id(t): (consts, i) for i, t in enumerate(consts.tensors)}
        self.known.update({id(t): (operands, i) for i, t in enumerate(operands.tensors)})

    # --- the forward ------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], Any]) -> Any:
        """Run the region for the first time; what it saves becomes slots of this frame."""
        self.outer = _torch.top_hooks(True)
        if self.outer is not None:
            ours = isinstance(getattr(self.outer[0], "__self__", None), (Frame, Filler))
            self.operands.hand_over(*self.outer)
            self.consts.hand_over(*self.outer, _made_by_an_outer_region if ours else _has_history)
        _torch.push_hooks(self.pack, self.unpack)
        try:
            result = call()
        finally:
            _torch.pop_hooks()
        self.open = False
        self.known.clear()
        self.operands.close()
        self.consts.close()
        return result

    def pack(self, tensor: torch.Tensor) -> Any:
        index = len(self.slots)
        served = self._served(tensor)
        if served is not None:
            self.slots.append(None)
            self.prints.append(None)
            return served
        slot = Slot(index)
        self.slots.append(weakref.ref(slot))
        self.prints.append(fingerprint(tensor, self.options.determinism_check))
        return slot

    def _served(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """How to get a tensor that is there without a run again: an input, a captured tensor or a view of one."""
        found = self.known.get(id(tensor))
        if found is not None:
            kept, i = found
            return Input(kept, i) if kept.is_as_before(i, tensor) else None
        base = _torch.view_base(tensor)
        if base is not None and (found := self.known.get(id(base))) is not None:
            kept, i = found
            shares = kept.is_as_before(i, base) and i not in kept.packed and not kept.duals
            return View(kept, i, tensor.detach()) if shares else None
        if tensor.is_leaf:
            return Found(tensor) if tensor.requires_grad else None
        assert tensor.grad_fn is not None
        if _torch.sequence_number(tensor.grad_fn) >= self.start:
            return None
        return Found(tensor) if self.outer is None else HandedOver(self.outer[1], self.outer[0](tensor))

    # --- the backward -----------------------------------------------------------------------------------------------

    def unpack(self, packed: Any) -> torch.Tensor:
        self.inside |= self.open
        if type(packed) is not Slot:
            return packed()
        with self.lock:
            value = packed.value
            if value is None:
                value = self._fill(packed)
        if _torch.graph_task_keeps_graph():
            _reading.read(packed)
        if _torch.version(value) != packed.version:
            raise MutationError(
                f"A tensor that was saved for the backward, {fingerprint(value, 'metadata')}, was changed in place "
                f"later in the same region. This is an error without remat too: use the out-of-place operation."
            )
        return value

    def _fill(self, wanted: Slot) -> torch.Tensor:
        """Run the region again. Outside of a backward pass only the wanted slot gets its value, and does not keep it."""
        task = _torch.graph_task_id()
        alive = [None if ref is None else ref() for ref in self.slots]
        if task == -1:
            alive = [slot if slot is wanted else None for slot in alive]
        filler = Filler(self, alive)
        filler.run()
        value = wanted.value
        if value is None:
            raise RecomputeMismatchError(filler.too_few())
        if task == -1:
            wanted.value = None
        else:
            _torch.at_end_of_backward(_Clear(weakref.ref(self)))
        return value

    def clear(self) -> None:
        """Let go of the values that a backward pass got and did not use up."""
        for ref in self.slots:
            if ref is not None and (slot := ref()) is not None:
                slot.value = None


class Filler:
    """One run again of a region: hooks that count what it saves and put it into the slots that are alive."""

    __slots__ = ("count", "frame", "last", "slots")

    def __init__(self, frame: Frame, slots: list[Slot | None]) -> None:
        self.frame = frame
        self.slots = slots
        self.count = 0
        self.last = max(i for i, slot in enumerate(slots) if slot is not None)

    def run(self) -> None:
        frame = self.frame
        frame.consts.accumulated |= frame.inside
        needs_level = (frame.operands.duals or frame.consts.duals) and not _torch.dual_level_active()
        with (
            _torch.without_levels(),
            _torch.hooks_allowed(),
            torch.enable_grad(),
            fwAD.dual_level() if needs_level else nullcontext(),
        ):
            operands = [frame.operands.again(i) for i in range(len(frame.operands))]
            _torch.push_hooks(self.pack, _same)
            try:
                result = frame.region.call_again(operands)
            except Stop:
                if self.count <= self.last:
                    raise  # another region's
                return
            finally:
                _torch.pop_hooks()
        if self.frame.options.early_stop and self.count > self.last:
            return  # user code swallowed the stop
        self._check_end(result)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self.count
        options = self.frame.options
        if options.early_stop and index > self.last:
            raise Stop
        self.count += 1
        value = tensor.detach()
        if index >= len(self.slots):
            if options.determinism_check != "none" and not self.frame.open:
                raise RecomputeMismatchError(self._too_many())
            return value
        slot = self.slots[index]
        if slot is not None:
            if options.determinism_check != "none":
                before, now = self.frame.prints[index], fingerprint(tensor, options.determinism_check)
                if before != now:
                    raise RecomputeMismatchError(self._differs(index, before, now))
            slot.value = value
            slot.version = _torch.version(value)
        if options.early_stop and index == self.last:
            raise Stop
        return value

    def _check_end(self, result: Any) -> None:
        if self.frame.options.determinism_check == "none" or self.frame.open:
            return
        if self.count < len(self.slots):
            raise RecomputeMismatchError(self.too_few())
        self.frame.region.check_result(result)

    def _differs(self, index: int, before: Any, now: Any) -> str:
        return (
            f"Tensor {index} that the region saved for its backward was {before} in the forward and is {now} when the "
            f"region was run again, at {user_line()}. {_ADVICE}"
        )

    def _too_many(self) -> str:
        return (
            f"The region saved {len(self.slots)} tensors for its backward in the forward, and one more when it was "
            f"run again, at {user_line()}. {_ADVICE}"
        )

    def too_few(self) -> str:
        return (
            f"The region saved {len(self.slots)} tensors for its backward in the forward, and only {self.count} when "
            f"it was run again. {_ADVICE}"
        )


_ADVICE = (
    "A region must do the same each time. Look for Python state that changed between the runs, a branch on values that "
    "are random or not reproducible, or a cache; `remat(..., debug=True)` shows the first operation that differs."
)


class Input:
    """An input or a captured tensor of the region."""

    __slots__ = ("i", "kept")

    def __init__(self, kept: Kept, i: int) -> None:
        self.kept, self.i = kept, i

    def __call__(self) -> torch.Tensor:
        return self.kept.get(self.i)


class View(Input):
    """A view of such a tensor: it shares its memory, so it costs none."""

    __slots__ = ("version", "view")

    def __init__(self, kept: Kept, i: int, view: torch.Tensor) -> None:
        super().__init__(kept, i)
        self.view, self.version = view, _torch.version(view)

    def __call__(self) -> torch.Tensor:
        if _torch.version(self.view) != self.version:
            raise MutationError(self.kept.message(self.i))
        return self.view


class Found:
    """A tensor that has a history older than the region, or none: it is there anyway."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, _torch.version(tensor)

    def __call__(self) -> torch.Tensor:
        if _torch.version(self.tensor) != self.version:
            raise MutationError(
                f"A captured tensor, {fingerprint(self.tensor, 'metadata')}, was changed in place after the region's "
                f"forward and before its backward. Change it after the backward, or give the region a copy."
            )
        return self.tensor


class HandedOver:
    """Such a tensor, kept by the hooks around the region."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self.unpack, self.packed = unpack, packed

    def __call__(self) -> torch.Tensor:
        return self.unpack(self.packed)


class _Clear:
    """Called at the end of a backward pass; does not keep the frame alive until then."""

    __slots__ = ("frame",)

    def __init__(self, frame: Callable[[], Frame | None]) -> None:
        self.frame = frame

    def __call__(self) -> None:
        _reading.clear()
        frame = self.frame()
        if frame is not None:
            frame.clear()


class _Reading(threading.local):
    """The slots that the running node has read, in a graph that is kept.

    A node may read twice what it saved, so a value stays until another node reads: nodes of a kept graph don't let go
    of their slots by themselves.
    """

    def __init__(self) -> None:
        self.node: int | None = None
        self.slots: list[Slot] = []

    def read(self, slot: Slot) -> None:
        current = _torch.current_node()
        node = None if current is None else _torch.sequence_number(current)
        if node != self.node or node is None:
            self.clear()
            self.node = node
        self.slots.append(slot)

    def clear(self) -> None:
        for slot in self.slots:
            slot.value = None
        self.slots.clear()
        self.node = None


_reading = _Reading()


def mark() -> Callable[[], None]:
    """Returns a function that undoes what the region around has recorded since: for a run that is given up."""
    hooks = _torch.top_hooks(True)
    around = None if hooks is None else getattr(hooks[0], "__self__", None)
    if isinstance(around, Frame):
        return functools.partial(_truncate, around, len(around.slots))
    if isinstance(around, Filler):
        return functools.partial(setattr, around, "count", around.count)
    return _nothing


def _truncate(frame: Frame, count: int) -> None:
    del frame.slots[count:], frame.prints[count:]


def _nothing() -> None:
    pass


def _has_history(tensor: torch.Tensor) -> bool:
    return not tensor.is_leaf


def _made_by_an_outer_region(tensor: torch.Tensor) -> bool:
    """Perhaps: parameters are surely not, and what else is not the outer region keeps as it is."""
    return not (tensor.is_leaf and tensor.requires_grad)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
