"""The lowering for plain autograd: in the first run autograd gets slots in place of tensors that the region computes.

Inputs, captured tensors, views of these, and tensors that are older than the region are saved as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._core import private
from .._core.known import Known
from .._core.private import is_wrapped, origin, raw_version, sequence_number
from .._core.state import alias, state
from .._core.tensors import bare
from .._region.arguments import take_apart
from .._region.error_context import with_region
from .._region.fingerprints import LOOKS
from .._region.guards import Guard, Guards, Held, hand_operands
from .._region.hooks import Packed, RegionHooks, hooks_allowed, is_hooks_refusal, of_region
from .._region.options import Options
from .._region.region import Region, Run
from .._selective.recorder import recorder_for
from .frame import Frame
from .operation_log import OpLog
from .slots import InputSlot, Slot


def call(fn: Callable, options: Options, known: Known, args: Any, kwargs: dict) -> Any:
    """Call ``fn`` as a region. RuntimeError if it can't run under saved-tensor hooks; then its changes are undone."""
    arguments, tensors = take_apart(args, kwargs)
    if state.watch is not None:  # the arguments of a region are read by the region around it
        state.watch.reads(tensors)
    operands, outer = Guards(tensors, partial(arguments.name, fn)), private.top_hooks(True)
    hand_operands(outer, operands, arguments.uses)
    region = Region(fn, arguments, tensors, options, known)
    try:
        region.open(outer=outer)
        run = Run(OpLog() if options.debug else None, recorder_for(region))
        frame = Frame(region, operands, region.inputs.captured, outer, run, options.read_inside)
        try:
            return Saver(frame, run).run(region.first, args, kwargs)
        except RuntimeError as error:
            if is_hooks_refusal(error):
                # The function calls torch.func.grad or vjp, which refuse to run under saved-tensor hooks.
                operands.roll_back()
                region.restart()
            raise
    except Exception as error:
        raise with_region(error, region, recomputing=False)  # noqa: B904
    finally:
        region.forget()


class Saver(RegionHooks):
    """The hooks of a first run: they make a slot of a new frame for each tensor that a recompute has to provide."""

    __slots__ = ("_add", "_known", "_look", "_recording", "_run", "_start", "frame")

    def __init__(self, frame: Frame, run: Run) -> None:
        self.frame, self._run = frame, run
        self._recording = None if run.recorder is None else run.recorder.recording
        self._start = private.next_sequence_number()
        self._look = LOOKS[frame.region.root.options.determinism_check]
        self._add = frame.slots.append
        self._known: dict[int, Guard] = {id(each.tensor): each for each in (*frame.captured_inputs, *frame.operands)}

    def run(self, call: Callable, *args: Any) -> Any:
        """Execute the region for the first time, by ``call(*args, run)``."""
        frame, run = self.frame, self._run
        root, recording = frame.region.root, self._recording
        if frame.outer is None and root.options.offload_inputs and not root.kinds:
            frame.operands.offload()  # not under torch.func, whose levels own their inputs
        if recording is not None:
            recording.with_slots(frame.outer)
        with hooks_allowed():
            private.push_hooks(self._pack_and_note if frame.is_noted else self.pack, frame.unpack)
            try:
                result = call(*args, run)
            finally:
                private.pop_hooks()
                self._known, self._recording = {}, None  # inner regions may still refer to these hooks
        frame.close(run.recorder, result)
        return result

    def pack(self, tensor: torch.Tensor) -> Any:
        found = self._known.get(id(tensor))
        if found is not None and (found.version < 0 or raw_version(tensor) == found.version):
            self._add(None)
            return found
        base, node = origin(tensor)
        if found is None and (held := self._held(tensor, base, node)) is not None:
            self._add(None)
            return held
        slot = (Slot if found is None else InputSlot)(self._look(tensor))
        if not tensor.requires_grad:
            slot.first = weakref.ref(tensor)
        self._add(weakref.ref(slot))
        return slot

    def _pack_and_note(self, tensor: torch.Tensor) -> Any:
        """``pack`` where slots may own values, or below levels of torch.func: inner levels save wrapped tensors."""
        recording = self._recording
        if is_wrapped(tensor) and id(tensor) not in self._known:
            if recording is not None:
                recording.needs(tensor)
            return Held(bare(tensor))  # the tensor itself could be part of a reference cycle
        before, state.own_work = state.own_work, True  # if an autograd Function calls the hooks, they run under modes
        try:
            packed = self.pack(tensor)
            if isinstance(packed, Slot):
                if recording is not None:
                    recording.saved(tensor, packed)
                if self.frame.read_inside:
                    packed.fill(alias(tensor))
            return packed
        finally:
            state.own_work = before

    def _held(self, tensor: torch.Tensor, base: torch.Tensor | None, node: Any) -> Held | Packed | None:
        """What returns a tensor that needs no recompute: a view of an input, or an older tensor."""
        if (guard := self._known.get(id(base))) is not None:
            return Held(alias(tensor), guard) if guard.packed is None else None
        if node is None and (base is None or (node := origin(base)[1]) is None):  # views made under `no_grad` have none
            return Held(tensor) if tensor.requires_grad else None
        # Each thread numbers its own nodes: a backward pass inside may have run in a device thread, and this thread may
        # have got an input from another one.
        inside, is_older = self.frame.inside, sequence_number(node) < self._start
        if inside and (self.frame.streams or not is_older):
            is_older = any(guard.tensor.grad_fn is node for guard in self._known.values())
        if not is_older:
            return None
        return Held(tensor) if self.frame.outer is None else Packed(tensor, self.frame.outer)

    @property
    def around(self) -> RegionHooks | None:
        return of_region(self.frame.outer)

    @property
    def count(self) -> int:
        return len(self.frame.slots)

    def go_back(self, count: int) -> None:
        del self.frame.slots[count:]
