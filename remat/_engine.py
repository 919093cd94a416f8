"""The engine: runs a region so that autograd keeps slots instead of tensors, and fills the slots when one is read.

Saved-tensor hooks stand between autograd and what it saves. In the forward every tensor that the region makes is
replaced by an empty slot; inputs and captured tensors stay themselves. The first slot that a backward reads makes the
region run again, under hooks that put what it saves, in the same order, into those slots that are still alive.

Ownership goes one way, so that reference counts alone free it all: autograd's node -> slot and frame -> region.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import count, repeat
from typing import Any

import torch

from . import _torch, _tree
from ._around import RegionHooks, of_region
from ._bulk import call, gone
from ._debug import OpLog
from ._determinism import LOOKS, fingerprint
from ._errors import MutationError, RecomputeMismatchError
from ._handed import Handed
from ._hooks import hooks_allowed
from ._kept import Kept
from ._lowerings import Lowerings
from ._parts import is_in_graph
from ._passes import current_group, current_scope
from ._recompute import Filler
from ._sharing import overlapping
from ._slots import SERVED, Above, Found, RecordedSlot, Slot, View
from ._state import alias, own_work, state
from ._streams import current_streams, taken
from ._torch import is_wrapped, modes_that_see, origin, raw_version, sequence_number
from ._turns import turn


class Frame(RegionHooks):
    """The record of one region under saved-tensor hooks."""

    __slots__ = (
        "__weakref__", "alone", "check", "consts", "inside", "known", "lock", "log", "look", "lowerings", "mixed",
        "modes", "noted", "one_output", "open", "operands", "options", "outer", "policies", "read_inside", "record",
        "recording", "refs", "region", "slot", "slots", "start", "streams", "unfilled",
    )  # fmt: skip

    def __init__(
        self, region: Any, operands: Kept, consts: Kept, outer: tuple | None, read_inside: bool = False
    ) -> None:
        self.region = region
        self.operands = operands
        self.consts = consts
        self.options = options = region.root.options
        self.outer = outer  # the hooks around the region, which have been given these tensors
        self.read_inside = read_inside  # a backward pass inside reads the slots: they keep their values until its end
        self.slots: list[Any] = []  # one for each tensor that the region has saved, or ``SERVED``
        self.refs: list[Callable[[], Any]] = []  # to the first of them, once these live as long as autograd's nodes
        self.alone = False  # the values that are there belong to a pass that reads each once
        self.check = options.determinism_check
        self.look = LOOKS[self.check]
        self.lock = threading.RLock()
        self.open = True
        self.one_output = False
        self.inside = False  # a backward pass ran inside the region's forward
        self.start = _torch.next_sequence_number()
        root = region.root
        self.streams = current_streams()
        self.mixed = False  # a recompute has used other streams too
        self.unfilled: Callable[[], Any] = gone  # the slot that the operation which the recompute ended at may fill
        self.modes = modes_that_see() > 0
        self.log = OpLog() if options.debug else None
        self.policies = state.policies
        self.lowerings: list[bool] = []  # of the regions inside
        self.recording = None if root.ran or root.recorder is None else root.recorder.recording
        self.record: Any = None  # when the first run, under a policy, has ended
        self.slot = Slot if self.recording is None else RecordedSlot
        self.noted = read_inside or self.recording is not None
        self.known: dict[int, tuple[Kept, int]] = {}
        for kept in (consts, operands) if consts.tensors else (operands,):
            self.known.update(zip(map(id, kept.tensors), zip(repeat(kept), count())))

    # --- the forward ------------------------------------------------------------------------------------------------

    def run(self, call: Callable, *args: Any) -> Any:
        """Run the region for the first time, by ``call(*args)``; what it saves becomes slots of this frame."""
        if self.outer is None and self.options.offload_inputs and not self.region.root.kinds:
            self.operands.offload()  # torch.func's levels keep their inputs
        root = self.region.root
        if self.recording is not None:
            self.recording.keep.hooks = self.outer
            self.recording.in_region = root.around is not None and root.around.region is not None
        root.log = self.log
        with hooks_allowed(whoever_forbids=root.ran):
            below = self._pack_below_levels if root.kinds else self.pack
            unpack = self.unpack if self.recording is None else self._unpack_under_policy
            _torch.push_hooks(self._pack_and_note if self.noted else below, unpack)
            state.lowerings = *state.lowerings, Lowerings(self.lowerings, follows=False)
            try:
                result = call(*args)
            finally:
                state.lowerings = state.lowerings[:-1]
                _torch.pop_hooks()
                root.log = None
        self.open = False
        if self.read_inside:
            self.clear()
        self.known = {}
        tensors = [*self.operands.tensors, *self.consts.tensors]
        self.operands.close()
        self.consts.close()
        if self.region is root and (self.operands.may_have_changed or self.consts.may_have_changed):
            root.overlaps = overlapping(tensors, self.operands, self.consts)
        del tensors
        self.consts.forget_histories()
        if self.recording is not None:
            self.recording = None
            root.recorded()
            self.record = root.record
            outputs = [t for t in _tree.flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
            self.one_output = len(outputs) == 1
        return result

    def pack(self, tensor: torch.Tensor) -> Any:
        found = self.known.get(id(tensor))
        if found is not None:
            kept, i = found
            before = kept.versions[i]
            if before < 0 or raw_version(tensor) == before:
                self.slots.append(SERVED)
                return found
        base, node = origin(tensor)
        if base is not None or node is None or self._was_there(node):
            served = None if found else self._served(tensor, base, node)
            if served is not None:
                self.slots.append(SERVED)
                return served
        slot = self.slot()
        slot.first = slot.value = None
        if node is None and not tensor.requires_grad:
            slot.watch(tensor, self.check)
        else:
            slot.fingerprint = self.look(tensor)
        self.slots.append(slot)
        return slot

    def _pack_below_levels(self, tensor: torch.Tensor) -> Any:
        """The same with levels of torch.func, of which others save tensors too."""
        if is_wrapped(tensor) and id(tensor) not in self.known:
            return Above(tensor)
        with own_work():  # hooks that an autograd Function calls run under modes, others don't
            return self.pack(tensor)

    def _pack_and_note(self, tensor: torch.Tensor) -> Any:
        """The same where a slot gets a value, or a record must know of it: it may lead to what is kept.

        So it must go with the node.
        """
        recording = self.recording
        if is_wrapped(tensor) and id(tensor) not in self.known:
            if recording is not None:
                recording.needs(tensor)
            return Above(tensor)
        with own_work():
            packed = self.pack(tensor)
        slot = self.slots.pop()
        self.refs.append(weakref.ref(slot))
        if slot is SERVED:
            return packed
        if recording is not None:
            recording.saved(tensor, slot)
        if self.read_inside:
            slot.value = alias(tensor)
            slot.version = _torch.version(slot.value)
        return slot

    def _served(self, tensor: torch.Tensor, base: torch.Tensor | None, node: Any) -> Callable[[], torch.Tensor] | None:
        """How to get a tensor that is there without a run again: a view of an input, or what was there before."""
        if base is not None and (found := self.known.get(id(base))) is not None:
            kept, i = found
            shares = kept.is_as_before(i, base) and i not in kept.packed and not kept.duals
            return View(kept, i, alias(tensor)) if shares else None
        if node is None:
            return Found(tensor) if tensor.requires_grad else None
        if not self._was_there(node):
            return None
        return Found(tensor) if self.outer is None else Handed(tensor, self.outer).get

    def _was_there(self, node: Any) -> bool:
        """Whether a node was made before the region.

        Each thread counts its own nodes, and a backward pass inside may have run in a thread of the device.
        """
        return sequence_number(node) < self.start and not (self.inside and self.streams)

    def _has_backward_inside(self) -> None:
        """And so have the regions around."""
        if not self.inside:
            self.inside = True
            around = self.around
            if isinstance(around, Frame):
                around._has_backward_inside()

    # --- the backward -----------------------------------------------------------------------------------------------

    @_torch.never_traced  # compiled autograd calls it in its graph
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Slot):
            value = packed.value
            if value is not None and self.alone and packed.first is None and raw_version(value) == packed.version:
                return value
        elif type(packed) is tuple:
            kept, i = packed
            if kept.as_they_were:
                tensor = kept.tensors[i]
                if raw_version(tensor) == kept.versions[i]:
                    return tensor
        return self._unpacked(packed)

    def _unpack_under_policy(self, packed: Any) -> torch.Tensor:
        if self.record is not None:  # a backward pass inside of the region may come before its end
            self.record.in_backward()
        return self.unpack(packed)

    def _unpacked(self, packed: Any) -> torch.Tensor:
        """The same with all that may be the case."""
        if self.open:
            self._has_backward_inside()
        if type(packed) is tuple:
            kept, i = packed
            tensor = self._as_reader(kept.saved, i)
            if self.streams and i in kept.packed:  # a region around has recomputed it, perhaps no further
                taken(tensor, self.streams)
            return tensor
        if not isinstance(packed, Slot):
            return self._as_reader(packed)
        value = packed.value
        if value is None and (residual := packed.residual) is not None:
            layout = packed.source.layout
            return self._as_reader(residual.on, layout) if residual.is_elsewhere else residual.on(layout)
        if state.reader is None and (group := current_group()) is not None:
            group.take(packed)
        if value is None:
            value = self._as_reader(self._filled, packed)
        if packed is self.unfilled() and _torch.fills_what_it_saves():
            self.unfilled, packed.value = gone, None
            value = self._as_reader(self._filled, packed, True)
        if self.mixed:
            taken(value, self.streams)
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

    def _filled(self, wanted: Slot, fill: bool = False) -> torch.Tensor:
        """Run the region again. Outside of a backward pass only the wanted slot gets its value, for the moment."""
        with turn(), self.lock:
            value = wanted.value
            if value is not None:
                return value  # another thread has run it
            running = current_scope()
            self._release()
            alive = list(map(call, self.refs))
            if running is None:
                alive = [slot if slot is wanted else SERVED for slot in alive]
            elif self.slot is RecordedSlot:
                alive = [SERVED if slot and slot.residual else slot for slot in alive]
            self.alone = running is not None and not _torch.graph_task_keeps_graph() and current_group() is None
            filler = Filler(self, alive, fill, self.alone and self._is_last())
            try:
                filler.run()
                value = wanted.value
                if value is None and alive.index(wanted) >= filler.count:
                    raise RecomputeMismatchError(filler.too_few())
            except RecomputeMismatchError as error:
                if self.log is not None and error.logs is None:
                    error.logs = self.log.texts()
                raise
            finally:
                filler.let_go()
            self.alone &= not self.mixed
            if value is None:
                return self._filled(wanted, fill)  # another thread has let go of it meanwhile
            if running is None:
                wanted.value = None
            else:
                running.frames.append(weakref.ref(self))
            return value

    def _is_last(self) -> bool:
        """Whether no recompute comes after this one, as the pass reads all slots and doesn't keep the graph.

        Where regions are inside of one another, each recompute must do the same.
        """
        if self.record is None or self.record.in_region or self.inside or not self.one_output:
            return False
        inputs = *self.operands.tensors, *self.consts.tensors
        return all(t is not None and (not is_in_graph(t) or _is_reached(t)) for t in inputs)

    def _release(self) -> None:
        """From now on a slot lives as long as a node of autograd needs it."""
        self.refs += map(weakref.ref, self.slots)
        self.slots.clear()

    @property
    def around(self) -> RegionHooks | None:
        return of_region(self.outer)

    @property
    def count(self) -> int:
        return len(self.refs) + len(self.slots)

    def go_back(self, count: int) -> None:
        del self.slots[max(0, count - len(self.refs)) :]
        del self.refs[count:]

    def clear(self) -> None:
        """Let go of the values that a backward pass got and did not use up."""
        with self.lock:
            for ref in self.refs:
                if slot := ref():
                    slot.value = None


def _is_reached(tensor: torch.Tensor) -> bool:
    """Whether the backward pass that runs now goes through this tensor."""
    with _torch.without_dispatch(), torch.inference_mode(False):
        node = torch.autograd.graph.get_gradient_edge(tensor).node
    try:
        return _torch.will_execute_node(node)
    except RuntimeError:  # a leaf of which the gradient is asked for
        return True
