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
from ._handed import Handed
from ._hooks import check_hooks_are_allowed, hooks_allowed
from ._kept import Kept
from ._passes import current_group, current_scope
from ._recompute import Filler
from ._slots import Above, Found, RecordedSlot, Slot, View
from ._state import alias, state
from ._streams import current_streams


class Frame:
    """The record of one region under saved-tensor hooks."""

    __slots__ = (
        "__weakref__", "check", "consts", "inside", "known", "lock", "log", "open", "operands", "options", "outer",
        "policies", "read_inside", "record", "region", "slot", "slots", "start", "streams",
    )  # fmt: skip

    def __init__(self, region: Any, operands: Kept, consts: Kept, options: Any, read_inside: bool = False) -> None:
        if not region.root.ran:
            check_hooks_are_allowed()
        self.region = region
        self.operands = operands
        self.consts = consts
        self.options = options
        self.read_inside = read_inside  # a backward pass inside reads the slots: they keep their values until its end
        self.slots: list[Callable[[], Slot | None] | None] = []
        self.check = options.determinism_check
        self.lock = threading.RLock()
        self.open = True
        self.outer: tuple | None = None  # the hooks around the region
        self.inside = False  # a backward pass ran inside the region's forward
        self.start = _torch.next_sequence_number()
        root = region.root
        self.streams = current_streams(root.devices) if root.devices else ()
        self.log = OpLog() if options.debug else None
        self.policies = tuple(state.policies)
        self.record = None if root.ran else root.record
        self.slot = Slot if self.record is None else RecordedSlot
        self.known = {id(t): (consts, i) for i, t in enumerate(consts.tensors)}
        for i, t in enumerate(operands.tensors):
            self.known[id(t)] = operands, i

    # --- the forward ------------------------------------------------------------------------------------------------

    def run(self, call: Callable, *args: Any) -> Any:
        """Run the region for the first time, by ``call(*args)``; what it saves becomes slots of this frame."""
        self.outer = _torch.top_hooks(True)
        if self.outer is not None:
            owner = getattr(self.outer[0], "__self__", None)
            in_region = isinstance(owner, (Frame, Filler))
            which = _made_by_an_outer_region if in_region else _has_history
            self.operands.hand_over(self.outer, to_region=in_region)
            self.consts.hand_over(self.outer, None if getattr(owner, "takes_all", False) else which, in_region)
        elif self.options.offload_inputs and not self.region.root.kinds:  # torch.func's levels keep their inputs
            self.operands.offload()
        if self.record is not None:
            self.record.outer = self.outer
        root = self.region.root
        root.log = self.log
        with hooks_allowed(whoever_forbids=root.ran):
            _torch.push_hooks(self.pack, self.unpack)
            try:
                result = call(*args)
            finally:
                _torch.pop_hooks()
                root.log = None
        self.open = False
        if self.read_inside:
            self.clear()
        self.known = {}
        self.operands.close()
        self.consts.close()
        self.consts.forget_histories()
        if self.record is not None:
            self.record.close()
        return result

    def pack(self, tensor: torch.Tensor) -> Any:
        found = self.known.get(id(tensor))
        if found is not None:
            kept, i = found
            if _torch.version(tensor) == kept.versions[i]:
                self.slots.append(None)
                return found
        elif _torch.is_wrapped(tensor):
            if self.record is not None:
                self.record.needs(tensor)
            return Above(tensor)
        base, node = _torch.view_base(tensor), tensor.grad_fn
        if base is not None or node is None or _torch.sequence_number(node) < self.start:
            served = None if found else self._served(tensor, base, node)
            if served is not None:
                self.slots.append(None)
                return served
        slot = self.slot()
        slot.fingerprint = saved_fingerprint(tensor, node, self.check)
        slot.first = slot.value = None
        if node is None and not tensor.requires_grad:
            slot.watch(tensor)
        if self.record is not None:
            self.record.saved(tensor, slot)
        if self.read_inside:
            slot.value = alias(tensor)
            slot.version = _torch.version(slot.value)
        self.slots.append(weakref.ref(slot))
        return slot

    def _served(self, tensor: torch.Tensor, base: torch.Tensor | None, node: Any) -> Callable[[], torch.Tensor] | None:
        """How to get a tensor that is there without a run again: a view of an input, or what was there before."""
        if base is not None and (found := self.known.get(id(base))) is not None:
            kept, i = found
            shares = kept.is_as_before(i, base) and i not in kept.packed and not kept.duals
            return View(kept, i, alias(tensor)) if shares else None
        if node is None:
            return Found(tensor) if tensor.requires_grad else None
        if _torch.sequence_number(node) >= self.start:
            return None
        return Found(tensor) if self.outer is None else Handed(tensor, self.outer).get

    # --- the backward -----------------------------------------------------------------------------------------------

    def unpack(self, packed: Any) -> torch.Tensor:
        self.inside |= self.open
        if type(packed) is tuple:
            kept, i = packed
            if not kept.packed and not kept.changed:
                tensor = kept.tensors[i]
                if _torch.version(tensor) == kept.versions[i]:
                    return tensor
            return self._as_reader(kept.saved, i)
        if not isinstance(packed, Slot):
            return self._as_reader(packed)
        value = packed.value
        if value is None and packed.residual is not None:
            return self._as_reader(packed.residual.on, packed.source.layout)
        if state.reader is None and (group := current_group()) is not None:
            group.take(packed)
        if value is None:
            value = self._as_reader(self._filled, packed)
        if _torch.version(value) != packed.version or (packed.first and packed.has_changed()):
            raise MutationError(
                f"A captured tensor, or one that the region made, {fingerprint(value, 'metadata')}, was saved for the "
                f"backward and then changed in place. This is an error without remat too, unless saved-tensor hooks "
                f"keep a copy: use the out-of-place operation, or give the region a copy: `.clone()`."
            )
        if _torch.graph_task_keeps_graph() and (running := current_scope()) is not None:
            running.read(packed, self, state.reader)
        return value

    def _as_reader(self, get: Callable, *args: Any) -> torch.Tensor:
        """What is asked of the hooks around the region meanwhile, this frame asks."""
        reader, state.reader = state.reader, self
        try:
            return get(*args)
        finally:
            state.reader = reader

    def _filled(self, wanted: Slot) -> torch.Tensor:
        """Run the region again. Outside of a backward pass only the wanted slot gets its value, for the moment."""
        with self.lock:
            value = wanted.value
            if value is not None:
                return value  # another thread has run it
            running = current_scope()
            alive = [None if ref is None or (slot := ref()) is None or slot.residual else slot for ref in self.slots]
            if running is None:
                alive = [slot if slot is wanted else None for slot in alive]
            filler = Filler(self, alive, wanted)
            filler.run()
            value = filler.value
            if value is None:
                raise RecomputeMismatchError(filler.too_few())
            if running is None:
                wanted.value = None
            else:
                running.frames.append(weakref.ref(self))
            return value

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
    del frame.slots[count:]


def _nothing() -> None:
    pass


def _has_history(tensor: torch.Tensor) -> bool:
    return not tensor.is_leaf


def _made_by_an_outer_region(tensor: torch.Tensor) -> bool:
    """Perhaps: parameters are surely not, and what else is not the outer region keeps as it is."""
    return not (tensor.is_leaf and tensor.requires_grad)
