"""The frame of a region under saved-tensor hooks: autograd has slots in place of tensors, and reading one fills them.

The first slot that a backward reads has the region recomputed, under hooks that put what it saves, in the same order,
into those slots that are still alive.

Ownership goes one way, so that reference counts alone free it all: autograd's node -> slot and frame -> region.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._core import private
from .._core.parts import is_in_graph
from .._core.passes import current_group, current_scope
from .._core.private import modes_that_see, raw_version
from .._core.state import state
from .._core.streams import current_streams, taken
from .._policy.policy import Policy
from .._region.around import of_region
from .._region.fingerprints import LOOKS, fingerprint
from .._region.guards import Guards
from .._region.sharing import overlapping
from .._region.telling import told
from .._region.turns import turn
from ..errors import MutationError, RecomputeMismatchError
from .operation_log import OpLog
from .recompute import Filler
from .slots import Slot, reference


class Frame:
    """What is left of a region's first run for backward passes: its slots, and all that it takes to fill them."""

    __slots__ = (
        "__weakref__", "alone", "check", "consts", "inside", "lock", "log", "look", "lowerings", "mixed",
        "modes", "noted", "one_output", "open", "operands", "options", "outer", "policies", "policy",
        "read_inside", "record", "refs", "region", "slots", "stopped", "streams",
    )  # fmt: skip

    def __init__(
        self,
        region: Any,
        operands: Guards,
        consts: Guards,
        outer: tuple | None,
        policy: Policy | None,
        read_inside: bool,
    ) -> None:
        self.region = region
        self.operands = operands
        self.consts = consts
        self.options = options = region.root.options
        self.outer = outer  # the hooks around the region, which have been given these tensors
        self.read_inside = read_inside  # a backward pass inside reads the slots: they keep their values until its end
        self.slots: list[Slot | None] = []  # one for each tensor that the region has saved, None where it needs none
        self.refs: list[Callable[[], Any]] = []  # to the first of them, once these live as long as autograd's nodes
        self.alone = False  # the values that are there belong to a pass that reads each once
        self.check = options.determinism_check
        self.look = LOOKS[self.check]
        self.lock = threading.RLock()
        self.open = True
        self.one_output = False
        self.inside = False  # a backward pass ran inside the region's forward
        self.streams = current_streams()
        self.mixed = False  # a recompute has used other streams too
        self.stopped = False  # the last recompute stopped when the slots had their tensors
        self.modes = modes_that_see() > 0
        self.log = OpLog() if options.debug else None
        self.policies = state.policies
        self.lowerings: list[bool] = []  # of the regions inside
        self.policy = policy
        self.record: Any = None  # of the first run under it, when that has ended
        self.noted = read_inside or policy is not None

    def close(self) -> None:
        """The first run has ended."""
        self.open = False
        if self.read_inside:
            self.clear()
        root, kept = self.region.root, (self.operands, self.consts)
        tensors = [tensor for each in kept for tensor in each.tensors]
        for each in kept:
            each.close()
        if self.region is root and any(each.may_have_changed for each in kept):
            root.overlaps = overlapping(tensors, *kept)
        del tensors
        self.consts.forget_histories()

    # --- the backward -----------------------------------------------------------------------------------------------

    @private.never_traced  # compiled autograd calls it in its graph
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

    def unpack_under_policy(self, packed: Any) -> torch.Tensor:
        if self.record is not None:  # a backward pass inside of the region may come before its end
            self.record.in_backward()
        return self.unpack(packed)

    def _unpacked(self, packed: Any) -> torch.Tensor:
        try:
            return self._read(packed)
        except Exception as error:
            raise told(error, self.region, recomputing=False)  # noqa: B904

    def _read(self, packed: Any) -> torch.Tensor:
        """The same with all that may be the case."""
        if self.open:
            self.has_backward_inside()
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
        if self.stopped and private.fills_what_it_saves():
            packed.value = None
            value = self._as_reader(self._filled, packed, True)
        if self.mixed:
            taken(value, self.streams)
        if private.version(value) != packed.version or (packed.first and packed.has_changed()):
            raise MutationError(
                f"A tensor that the region captured or computed, {fingerprint(value, 'metadata')}, was saved for the "
                f"backward and then changed in place. The same program raises an error without remat, unless saved-"
                f"tensor hooks save a copy. Use the out-of-place operation, or give the region a copy: `.clone()`."
            )
        if self.open and self.read_inside:
            return value
        if private.graph_task_keeps_graph() and (running := current_scope()) is not None:
            running.read(packed, self, state.reader)
        return value

    def has_backward_inside(self) -> None:
        """A backward pass runs before the first run has ended: so it does for the regions around."""
        if not self.inside:
            self.inside = True
            if (around := of_region(self.outer)) is not None:
                around.has_backward_inside()

    def _as_reader(self, get: Callable, *args: Any) -> torch.Tensor:
        """What is asked of the hooks around the region meanwhile, this frame asks."""
        reader, state.reader = state.reader, self
        try:
            return get(*args)
        finally:
            state.reader = reader

    def _filled(self, wanted: Slot, to_the_end: bool = False) -> torch.Tensor:
        """Run the region again. Outside of a backward pass only the wanted slot gets its value, for the moment."""
        with turn(), self.lock:
            value = wanted.value
            if value is not None:
                return value  # another thread has run it
            running = current_scope()
            self._release()
            alive = [ref() for ref in self.refs]
            if running is None:
                alive = [slot if slot is wanted else None for slot in alive]
            elif self.policy is not None:
                alive = [None if slot and slot.residual else slot for slot in alive]
            self.alone = running is not None and not private.graph_task_keeps_graph() and current_group() is None
            filler = Filler(self, alive, to_the_end, self.alone and self._is_last())
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
                return self._filled(wanted, to_the_end)  # another thread has let go of it meanwhile
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
        if self.record.keep.nbytes <= LEFT_ALONE_BYTES:
            return False
        inputs = *self.operands.tensors, *self.consts.tensors
        return all(t is not None and (not is_in_graph(t) or _is_reached(t)) for t in inputs)

    def _release(self) -> None:
        """From now on a slot lives as long as a node of autograd needs it."""
        self.refs += map(reference, self.slots)
        self.slots.clear()

    def clear(self) -> None:
        """Let go of the values that a backward pass got and did not use up."""
        if not self.lock.acquire(blocking=False):
            return  # another pass is at it, whose end does this: it may wait for the thread that this one ends in
        try:
            for ref in self.refs:
                if slot := ref():
                    slot.value = None
        finally:
            self.lock.release()


LEFT_ALONE_BYTES = 4096  # to ask autograd takes 20 us for each input


def _is_reached(tensor: torch.Tensor) -> bool:
    """Whether the backward pass that runs now goes through this tensor."""
    with private.without_dispatch(), torch.inference_mode(False):
        node = torch.autograd.graph.get_gradient_edge(tensor).node
    try:
        return private.will_execute_node(node)
    except RuntimeError:  # a leaf of which the gradient is asked for
        return True
