"""The frame of a region under saved-tensor hooks. Autograd saves slots in place of tensors; reading one fills them all.

When a backward pass reads the first slot, the region is recomputed under hooks. The hooks put the tensors that autograd
saves, in the same order, into the slots that are still alive.

Ownership is one-way, so reference counts alone free everything: autograd's node -> slot and frame -> region.
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
from .._core.streams import current_streams, make_readable
from .._policy.policy import Policy
from .._region.around import of_region
from .._region.error_context import with_region
from .._region.fingerprints import LOOKS, fingerprint
from .._region.guards import Guard, Guards, Held, close
from .._region.packed import Packed
from .._region.turns import turn
from ..errors import MutationError, RecomputeMismatchError
from .operation_log import OpLog
from .recompute import Filler
from .slots import Slot, reference


class Frame:
    """What a region's first run leaves for backward passes: its slots, and everything that is needed to fill them."""

    __slots__ = (
        "__weakref__",
        "captured_inputs",
        "check",
        "inside",
        "lock",
        "log",
        "look",
        "mixed",
        "modes",
        "noted",
        "one_output",
        "open",
        "operands",
        "options",
        "outer",
        "policies",
        "policy",
        "read_inside",
        "read_once",
        "record",
        "refs",
        "region",
        "slots",
        "stopped",
        "streams",
    )  # fmt: skip

    def __init__(
        self,
        region: Any,
        operands: Guards,
        captured_inputs: Guards,
        outer: tuple | None,
        policy: Policy | None,
        read_inside: bool,
    ) -> None:
        self.region = region
        self.operands = operands
        self.captured_inputs = captured_inputs
        self.options = options = region.root.options
        self.outer = outer  # the hooks around the region, to which operands and captured tensors were handed
        self.read_inside = read_inside  # backward passes inside read slots, which own their values in the first run
        self.slots: list[Slot | None] = []  # one for each tensor that autograd saved, None where it needs no slot
        self.refs: list[Callable[[], Any]] = []  # weak references to the slots before those, which only nodes own
        self.read_once = False  # the slots were filled for one pass, which reads each of them once
        self.check = options.determinism_check
        self.look = LOOKS[self.check]
        self.lock = threading.RLock()
        self.open = True
        self.one_output = False
        self.inside = False  # a backward pass ran inside the region's forward
        self.streams = current_streams()
        self.mixed = False  # a recompute has used other streams too
        self.stopped = False  # the last recompute stopped early, as soon as all slots were filled
        self.modes = modes_that_see() > 0
        self.log = OpLog() if options.debug else None
        self.policies = state.policies
        self.policy = policy
        self.record: Any = None  # of the first run under the policy, once that run has ended
        self.noted = read_inside or policy is not None

    def close(self) -> None:
        """End the first run."""
        self.open = False
        if self.read_inside:
            self.clear()
        close(self.operands, self.captured_inputs)
        self.captured_inputs.forget_histories()

    # --- the backward -----------------------------------------------------------------------------------------------

    @private.never_traced  # compiled autograd calls it in its graph
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Slot):
            value = packed.value
            if value is not None and self.read_once and packed.first is None and raw_version(value) == packed.version:
                return value
        elif type(packed) is Guard and packed.packed is None and not self.open:
            tensor = packed.tensor
            if packed.version >= 0 and raw_version(tensor) == packed.version:
                return tensor
        return self._unpacked(packed)

    def unpack_under_policy(self, packed: Any) -> torch.Tensor:
        if self.record is not None:  # a backward pass inside the region may come before the record exists
            self.record.in_backward()
        return self.unpack(packed)

    def _unpacked(self, packed: Any) -> torch.Tensor:
        try:
            return self._read(packed)
        except Exception as error:
            raise with_region(error, self.region, recomputing=False)  # noqa: B904

    def _read(self, packed: Any) -> torch.Tensor:
        """``unpack`` for the cases that its fast path doesn't handle."""
        if self.open:
            self.on_inner_backward()
        if isinstance(packed, (Held, Packed)):
            tensor = self._as_reader(packed.saved if isinstance(packed, Held) else packed.get)
            if self.streams and isinstance(packed, Guard) and packed.packed is not None:
                make_readable(tensor, self.streams)  # an outer region's recompute made it, and may have stopped
            return tensor
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
            make_readable(value, self.streams)
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

    def on_inner_backward(self) -> None:
        """Note that a backward pass runs before the first run has ended, here and in outer regions."""
        if not self.inside:
            self.inside = True
            if (around := of_region(self.outer)) is not None:
                around.on_inner_backward()

    def _as_reader(self, get: Callable, *args: Any) -> torch.Tensor:
        """Call ``get``; meanwhile this frame is the reader of the values that outer regions recompute."""
        reader, state.reader = state.reader, self
        try:
            return get(*args)
        finally:
            state.reader = reader

    def _filled(self, wanted: Slot, to_the_end: bool = False) -> torch.Tensor:
        """Recompute the region. Outside of a backward pass only the wanted slot is filled, and emptied at once."""
        with turn(), self.lock:
            value = wanted.value
            if value is not None:
                return value  # another thread has recomputed it
            running = current_scope()
            self._release()
            alive = [ref() for ref in self.refs]
            if running is None:
                alive = [slot if slot is wanted else None for slot in alive]
            elif self.policy is not None:
                alive = [None if slot and slot.residual else slot for slot in alive]
            self.read_once = running is not None and not private.graph_task_keeps_graph() and current_group() is None
            filler = Filler(self, alive, to_the_end, self.read_once and self._is_last())
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
                filler.release()
            self.read_once &= not self.mixed
            if value is None:
                return self._filled(wanted, to_the_end)  # another thread has released the value meanwhile
            if running is None:
                wanted.value = None
            else:
                running.frames.append(weakref.ref(self))
            return value

    def _is_last(self) -> bool:
        """Whether no recompute comes after this one, as the pass reads all slots and doesn't keep the graph.

        False inside an outer region, where each recompute must do the same.
        """
        if self.record is None or self.record.in_region or self.inside or not self.one_output:
            return False
        if self.record.saved_values.nbytes <= LEFT_ALONE_BYTES:
            return False
        inputs = *self.operands.tensors, *self.captured_inputs.tensors
        return all(t is not None and (not is_in_graph(t) or _is_reached(t)) for t in inputs)

    def _release(self) -> None:
        """Drop the references to slots: from now on a slot lives as long as the node of autograd that saved it."""
        self.refs += map(reference, self.slots)
        self.slots.clear()

    def clear(self) -> None:
        """Release the values that were filled in for a backward pass and not read."""
        if not self.lock.acquire(blocking=False):
            return  # another pass fills the slots, and clears them at its end; it may be waiting for this thread
        try:
            for ref in self.refs:
                if slot := ref():
                    slot.value = None
        finally:
            self.lock.release()


LEFT_ALONE_BYTES = 4096  # so little is not worth a query of autograd, which takes 20 us for each input


def _is_reached(tensor: torch.Tensor) -> bool:
    """Whether the current backward pass computes the gradient of this tensor."""
    with private.without_dispatch(), torch.inference_mode(False):
        node = torch.autograd.graph.get_gradient_edge(tensor).node
    try:
        return private.will_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is requested
        return True
