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
from typing import Any

import torch

from . import _torch
from ._debug import OpLog
from ._determinism import fingerprint, saved_fingerprint
from ._errors import MutationError, RecomputeMismatchError
from ._kept import Kept
from ._passes import current_pass
from ._recompute import Filler
from ._slots import Above, Found, HandedOver, Input, Slot, View
from ._state import alias, state
from ._streams import current_streams


class Frame:
    """The record of one region under saved-tensor hooks."""

    __slots__ = (
        "__weakref__", "consts", "inside", "known", "lock", "log", "open", "operands", "options", "outer", "policies",
        "prints", "read_inside", "record", "region", "slots", "start", "streams",
    )  # fmt: skip

    def __init__(self, region: Any, operands: Kept, consts: Kept, options: Any, read_inside: bool = False) -> None:
        self.region = region
        self.operands = operands
        self.consts = consts
        self.options = options
        self.read_inside = read_inside  # a backward pass inside reads the slots: they keep their values until its end
        self.slots: list[Callable[[], Slot | None] | None] = []
        self.prints: list[Any] = []
        self.lock = threading.RLock()
        self.open = True
        self.outer: tuple | None = None  # the hooks around the region
        self.inside = False  # a backward pass ran inside the region's forward
        self.start = _torch.next_sequence_number()
        self.streams = current_streams(region.root.devices)
        self.log = OpLog() if options.debug else None
        self.policies = list(state.policies)
        self.record = None if region.root.ran else region.root.record
        self.known = {id(t): (consts, i) for i, t in enumerate(consts.tensors)}
        self.known.update({id(t): (operands, i) for i, t in enumerate(operands.tensors)})

    # --- the forward ------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], Any]) -> Any:
        """Run the region for the first time; what it saves becomes slots of this frame."""
        self.outer = _torch.top_hooks(True)
        if self.outer is not None:
            owner = getattr(self.outer[0], "__self__", None)
            which = _made_by_an_outer_region if isinstance(owner, (Frame, Filler)) else _has_history
            self.operands.hand_over(*self.outer)
            self.consts.hand_over(*self.outer, None if getattr(owner, "takes_all", False) else which)
        if self.record is not None:
            self.record.outer = self.outer
        self.region.root.log = self.log
        with _torch.hooks_allowed():
            _torch.push_hooks(self.pack, self.unpack)
            try:
                result = call()
            finally:
                _torch.pop_hooks()
                self.region.root.log = None
        self.open = False
        if self.read_inside:
            self.clear()
        self.known.clear()
        self.operands.close()
        self.consts.close()
        if self.record is not None:
            self.record.close()
        return result

    def pack(self, tensor: torch.Tensor) -> Any:
        if _torch.is_wrapped(tensor):
            if self.record is not None:
                self.record.needs(tensor)
            return Above(tensor)
        served = self._served(tensor)
        if served is not None:
            self.slots.append(None)
            self.prints.append(None)
            return served
        slot = Slot(tensor)
        if self.read_inside:
            slot.value = alias(tensor)
            slot.version = _torch.version(slot.value)
        if self.record is not None:
            self.record.saved(tensor, slot)
        self.slots.append(weakref.ref(slot))
        self.prints.append(saved_fingerprint(tensor, self.options.determinism_check))
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
            return View(kept, i, alias(tensor)) if shares else None
        if tensor.is_leaf:
            return Found(tensor) if tensor.requires_grad else None
        assert tensor.grad_fn is not None
        if _torch.sequence_number(tensor.grad_fn) >= self.start:
            return None
        return Found(tensor) if self.outer is None else HandedOver(self.outer[1], self.outer[0](tensor))

    # --- the backward -----------------------------------------------------------------------------------------------

    def unpack(self, packed: Any) -> torch.Tensor:
        reader, state.reader = state.reader, self
        try:
            return self._unpack(packed, reader)
        finally:
            state.reader = reader

    def _unpack(self, packed: Any, reader: Any) -> torch.Tensor:
        self.inside |= self.open
        if type(packed) is not Slot:
            return packed()
        if packed.residual is not None:
            return packed.residual.on(packed.source.layout)
        with self.lock:
            value = packed.value
            if value is None:
                value = self._fill(packed)
            changed = _torch.version(value) != packed.version
        if changed or packed.has_changed():
            raise MutationError(
                f"A captured tensor, or one that the region made, {fingerprint(value, 'metadata')}, was saved for the "
                f"backward and then changed in place. This is an error without remat too: use the out-of-place "
                f"operation, or give the region a copy: `.clone()`."
            )
        if _torch.graph_task_keeps_graph() and (running := current_pass()) is not None:
            running.read(packed, self, reader)
        return value

    def _fill(self, wanted: Slot) -> torch.Tensor:
        """Run the region again. Outside of a backward pass only the wanted slot gets its value, for the moment."""
        running = current_pass()
        alive = [None if ref is None or (slot := ref()) is None or slot.residual else slot for ref in self.slots]
        if running is None:
            alive = [slot if slot is wanted else None for slot in alive]
        filler = Filler(self, alive, wanted)
        filler.run()
        if filler.value is None:
            raise RecomputeMismatchError(filler.too_few())
        if running is None:
            wanted.value = None
        else:
            running.frames.append(weakref.ref(self))
        return filler.value

    def clear(self) -> None:
        """Let go of the values that a backward pass got and did not use up."""
        with self.lock:
            for ref in self.slots:
                if ref is not None and (slot := ref()) is not None:
                    slot.value = None


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
