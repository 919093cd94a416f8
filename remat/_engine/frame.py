"""The frame of a region under saved-tensor hooks: when a backward reads the first slot, the region is recomputed.

Hooks put the tensors that autograd saves, in the same order, into the slots that are still alive. Ownership is one-way,
so reference counts alone free everything: autograd's node -> slot and frame -> region.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.utils.hooks import RemovableHandle

from .._core import private, trees
from .._core.devices import current_streams, is_on_another, make_readable, resumed
from .._core.facts import facts_of
from .._core.lines import user_line
from .._core.passes import current_group, current_scope
from .._core.private import DispatchMode, modes_that_see, raw_version
from .._core.state import alias, state, within
from .._core.tensors import bare, is_dense, is_in_graph
from .._region.error_context import with_region
from .._region.fingerprints import LOOKS, describe, fingerprint, is_other, maker_of
from .._region.guards import BEHIND, Guard, Guards, Held, close
from .._region.hooks import Packed, RegionHooks, drop_gradient_hooks, hooks_allowed, of_region
from .._region.placeholders import Restart
from .._region.region import Run
from .._region.turns import turn
from .._selective.replay import Replay
from .._selective.saved import with_form
from ..errors import MutationError, RecomputeMismatchError, RematError
from .operation_log import OpLog
from .slots import InputSlot, Slot, Slots


class Stop(BaseException):
    """Ends a recompute as soon as its slots are filled. Not an Exception, so that user code lets it through."""


class Frame:
    """What a region's first run leaves for backward passes: its slots, and everything that is needed to fill them."""

    __slots__ = (
        "__weakref__", "captured_inputs", "inside", "is_noted", "log", "modes", "open", "operands", "outer", "policies",
        "read_inside", "record", "region", "slots", "streams",
    )  # fmt: skip

    def __init__(
        self, region: Any, operands: Guards, captured_inputs: Guards, outer: tuple | None, run: Run, read_inside: bool
    ) -> None:
        self.region, self.operands, self.captured_inputs = region, operands, captured_inputs
        self.outer = outer  # the hooks around the region, to which operands and captured tensors were handed
        # Of this region and those around it: in the middle of a first run no replay adds the own one for inner regions.
        own = () if run.recorder is None else (run.recorder.recording.judge.policy,)
        self.policies = *state.policies, *own
        self.read_inside = read_inside  # backward passes inside read slots, which own their values in the first run
        # Whether slots may own values in the first run, or it is below levels of torch.func.
        self.is_noted = read_inside or bool(own) or bool(region.root.kinds)
        self.slots = Slots()
        self.open = True  # in the first run
        self.inside = False  # a backward pass ran inside the region's forward
        self.streams = current_streams()
        self.modes = modes_that_see() > 0
        self.log = run.log
        self.record: Any = None  # of the first run under the policy, once that run has ended

    def close(self, recorder: Any, result: Any) -> None:
        """End the first run."""
        self.open = False
        if self.read_inside:
            self.slots.empty()
        close(self.operands, self.captured_inputs)
        if recorder is not None:
            self.record = self.region.root.record = recorder.close(trees.flatten(result)[0])

    @private.never_traced  # compiled autograd calls it in its graph
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Slot):
            value = packed.value
            if value is not None and self.slots.once and packed.first is None and raw_version(value) == packed.version:
                return value
        elif type(packed) is Guard and packed.packed is None and not (self.open or (self.record and self.record.warns)):
            tensor = packed.tensor
            if packed.version >= 0 and raw_version(tensor) == packed.version:
                return tensor
        reader, state.reader = state.reader, self  # of values that outer regions recompute
        try:
            return self._read(packed, reader)
        except Exception as error:
            raise with_region(error, self.region, recomputing=False)  # noqa: B904
        finally:
            state.reader = reader

    def _read(self, packed: Any, reader: Frame | None) -> torch.Tensor:
        """``unpack`` for the cases that its fast path doesn't handle; for ``reader``, or for a node of the graph."""
        if self.record is not None:  # a backward pass inside the region may come before the record exists
            self.record.in_backward()
        if self.open:
            self.on_inner_backward()
        if isinstance(packed, (Held, Packed)):
            tensor = packed.saved() if isinstance(packed, Held) else packed.get()
            if isinstance(packed, Guard) and packed.packed is not None:
                make_readable(tensor, self.streams)  # an outer region's recompute made it, and may have stopped
            return tensor
        if (residual := packed.residual) is not None:
            return with_form(residual.get(), packed.source.form)
        value = packed.value
        if reader is None and (group := current_group()) is not None:
            group.take(packed)
        if value is None:
            value = self._filled(packed)
        if self.slots.stopped and private.fills_what_it_saves():
            packed.value = None
            value = self._filled(packed, to_the_end=True)
        if self.slots.mixed:
            make_readable(value, self.streams)
        is_copy = reader is not None and type(packed) is InputSlot  # for a region inside; autograd raises an error
        if private.version(value) != packed.version or (not is_copy and packed.has_changed()):
            raise MutationError(
                f"A tensor that the region captured or computed, {fingerprint(value, 'metadata')}, was saved for the "
                f"backward and then changed in place. The same program raises an error without remat, unless saved-"
                f"tensor hooks save a copy. Use the out-of-place operation, or give the region a copy: `.clone()`."
            )
        if self.open and self.read_inside:
            return value
        if private.graph_task_keeps_graph() and (running := current_scope()) is not None:
            running.read(packed, self, reader)
        return value

    def on_inner_backward(self) -> None:
        for guard in (*self.operands, *self.captured_inputs):
            if guard.tensor is not None and not guard.leaf and _is_passed(guard.tensor):
                raise RematError(BEHIND.format(guard.name))
        self.inside = self.captured_inputs.accumulated = True
        around = getattr(of_region(self.outer), "frame", None)  # hooks of a recompute that is over have none
        if around is not None:
            around.on_inner_backward()

    def _filled(self, wanted: Slot, to_the_end: bool = False) -> torch.Tensor:
        """Recompute the region. Outside of a backward pass only the wanted slot is filled, and emptied at once."""
        slots = self.slots
        with turn(), slots.lock:
            value = wanted.value
            if value is not None:
                return value  # another thread has recomputed it
            running = current_scope()
            alive = slots.alive()
            if running is None:
                alive = [slot if slot is wanted else None for slot in alive]
            else:
                alive = [None if slot and slot.residual else slot for slot in alive]
            once = not private.graph_task_keeps_graph() and current_group() is None
            filler = Filler(self, alive, to_the_end, once and self._is_last())
            try:
                filler.run()
                value = wanted.value
                if alive.index(wanted) >= filler.count:
                    raise filler.mismatch_of_count(f"only {filler.count} in the recompute")
            except RecomputeMismatchError as error:
                if self.log is not None and error.logs is None:
                    error.logs = self.log.texts()
                raise
            finally:
                slots.once, slots.stopped = once and not slots.mixed, filler.stopped
                filler.release()
            if value is None:
                return self._filled(wanted, to_the_end)  # another thread has released the value meanwhile
            if running is None:
                wanted.value = None
            else:
                running.frames.append(weakref.ref(self.slots))
            return value

    def _is_last(self) -> bool:
        """Whether no recompute comes after this one."""
        record = self.record
        # Few bytes are not worth a query of autograd, which takes 20 us for each input.
        if record is None or not record.one_output or record.saved_values.nbytes <= 4096:
            return False
        inputs = *self.operands.tensors, *self.captured_inputs.tensors
        if any(tensor is None for tensor in inputs):
            return False
        with private.without_dispatch(), torch.inference_mode(False):
            edge = torch.autograd.graph.get_gradient_edge  # there is none of a sparse leaf
            return all(is_dense(t) and _executes(edge(t).node) for t in inputs if is_in_graph(t))


def _is_passed(tensor: torch.Tensor) -> bool:
    """Whether the current backward pass goes on behind a tensor."""
    with private.without_dispatch(), torch.inference_mode(False):
        node: Any = tensor.grad_fn
    return _executes(node) and any(_executes(each) for each, _ in node.next_functions)


def _executes(node: Any) -> bool:
    """Whether the current backward pass executes a node, which is None where no gradient is needed."""
    try:
        return node is not None and private.will_execute_node(node)
    except RuntimeError:  # of a leaf whose gradient is requested
        return True


class Filler(RegionHooks):
    """One recompute of a region: hooks that count the tensors that autograd saves, and put them into the live slots."""

    def __init__(self, frame: Frame, slots: list[Slot | None], to_the_end: bool = False, last: bool = False) -> None:
        self.frame = frame
        self.to_the_end = to_the_end  # without early stop: an operation may save a tensor before it fills it
        self.is_last = last  # there will be no other recompute
        self.options = options = frame.region.root.options
        self.look, self.slots = LOOKS[options.determinism_check], slots
        self.count = 0  # of the expected tensors that autograd has saved so far
        self.attempt = Run()
        self.stopped = False  # as soon as all slots were filled
        self.difference: RecomputeMismatchError | None = None
        self.last_slot = next(filter(None, reversed(slots)))

    def run(self) -> None:
        before = torch.is_grad_enabled()
        private.set_grad_enabled(True)
        try:
            with ExitStack() as stack:
                for context in shields(self.frame):
                    stack.enter_context(context)
                if not self._attempt(whole=not self.options.may_skip):  # it has read a value that it skipped
                    self.go_back(0)
                    self.stopped, self.difference = False, None
                    self._attempt(whole=True)
        finally:
            private.set_grad_enabled(before)

    def _attempt(self, whole: bool) -> bool:
        """Recompute the region once; return False if that has to be repeated in full."""
        frame, region = self.frame, self.frame.region
        # Recorders of inner regions skip nothing. The recompute may start within the bookkeeping of any other run.
        filling = len(state.recordings) if frame.open else state.filling
        with within(own_work=True, logs=(), filling=filling):  # operands may be copies, or made by an outer recompute
            operands = [guard.again() for guard in frame.operands]
        self.attempt = run = self._run_by_plan(whole)
        replay = run.replay
        first_hook = RemovableHandle.next_id
        private.push_hooks(self._pack_any if frame.is_noted else self.pack, lambda packed: packed)
        try:
            # Logs of unfinished runs must not record this recompute.
            with within(unseen=False, logs=(), policies=frame.policies, filling=filling):
                region.run(operands, run)
        except (Stop, Restart, Exception) as error:
            # TorchScript replaces ours by other exceptions; and Stop and Restart may come from another region.
            if not self.stopped and not (replay and replay.placeholders.is_read):
                if self.difference is not None and "TorchScript" in str(error):
                    raise RecomputeMismatchError(f"{self.difference} {_SCRIPT}") from error
                raise
        finally:
            private.pop_hooks()
            drop_gradient_hooks(frame.captured_inputs.tensors, first_hook)
        return replay is None or not (replay.placeholders.is_read or replay.escaped())

    def _run_by_plan(self, whole: bool) -> Run:
        """The run of a recompute; it executes everything where the first run left no record."""
        frame, record = self.frame, self.frame.region.root.record
        log = None if frame.log is None else OpLog(frame.log)
        if record is None:
            return Run(log)
        plan = None
        if not whole:  # the slots of a frame without a record are those of another derivative
            plan = record.plan(None if frame.record is None else filter(None, self.slots))
        return Run(log, replay=Replay(record, plan, self.is_last))

    def release(self) -> None:
        """Drop all references: a container may still lead to a node of the recompute, which owns its pack hook."""
        self.__dict__.clear()

    def go_back(self, count: int) -> None:
        self.count = count

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.count == len(self.slots):
            self._check_more()
            slot = None
        else:
            slot = self.slots[self.count]
            self.count += 1
        if slot is None:  # only a backward pass inside reads it; a leaf owns no graph, so it needs no alias
            return tensor if tensor.is_leaf else alias(tensor)
        value = alias(tensor)
        if self.frame.streams and is_on_another(tensor.device, self.frame.streams):
            self.frame.slots.mixed = True
        now = self.look(tensor)
        if now != slot.fingerprint:
            self._compare(slot, now, tensor)
        slot.fill(value)
        if slot is self.last_slot:
            self._end()
        return value

    def _pack_any(self, tensor: torch.Tensor) -> torch.Tensor:
        """``pack`` for a run that may skip operations, or below levels: inner levels save tensors that are wrapped."""
        if private.is_wrapped(tensor):
            return bare(tensor)
        replay, count = self.attempt.replay, self.count
        if replay is not None and any(self.slots[count : count + 1]):
            replay.placeholders.read([tensor])
        return self.pack(tensor)

    def _check_more(self) -> None:
        if self.stopped or self.frame.open:  # the first run has come no further
            self._stop()
        if self.options.determinism_check != "none":
            raise self.mismatch_of_count(f"one more in the recompute, at {user_line()}")

    def _compare(self, slot: Slot, now: tuple, tensor: torch.Tensor) -> None:
        before, index = slot.fingerprint, self.count - 1
        # Of an operation's results, which are saved one after the other, some have no maker, such as random seeds.
        makers = [maker_of(each.fingerprint) for each in self.frame.slots.alive()[max(0, index - 5) : index] if each]
        maker = next((each for each in reversed(makers) if each is not type(None)), type(None))
        is_input = tensor.is_leaf and tensor.requires_grad  # then the first run had no slot for it
        if is_other(before, now, maker) or (is_input and maker_of(before) is not type(None)):
            difference = self.mismatch(
                f"Tensor {index} that the region saved for its backward was {describe(before, now)} in the forward and "
                f"{describe(now, before)} in the recompute, at {user_line()}"
            )
            if self.frame.log is None:  # otherwise the log raises a more precise error at the next operation
                raise difference

    def _end(self) -> None:
        """All slots are filled."""
        if self.difference is not None:
            raise self.difference
        # After the last operation user code may call `record_stream` or let streams wait for each other, so a recompute
        # on several streams doesn't stop early. In the middle of a first run it does: the first run came no further.
        stops = self.frame.open or (self.options.early_stop and not self.frame.slots.mixed)
        if stops and not self.to_the_end:
            self._stop()

    def _stop(self) -> None:
        self.stopped = True
        raise Stop

    def mismatch(self, what: str) -> RecomputeMismatchError:
        advice = _ADVICE if self.options.debug else f"{_ADVICE} {_DEBUG}"
        self.difference = self.difference or RecomputeMismatchError(f"{what}. {advice}")
        return self.difference

    def mismatch_of_count(self, now: str) -> RecomputeMismatchError:
        return self.mismatch(f"The region saved {len(self.slots)} tensors for its backward in the forward, and {now}")


_ADVICE = (
    "A region's function must be deterministic. Look for Python state that changed between the runs, a branch on "
    "values that are random or not reproducible, a cache, or saved-tensor hooks around the region that change values."
)
_SCRIPT = "TorchScript changes a function after its first call: run all under `torch.jit.optimized_execution(False)`."
_DEBUG = "`remat(..., debug=True)` shows the first operation that differs."


def shields(frame: Frame) -> list[Any]:
    """The contexts of a recompute: none, in a plain backward pass."""
    contexts = [make() for is_needed, make in _SHIELDS if is_needed()]
    if frame.modes:
        contexts.append(PlainMode())
    if any(each.dual for each in (*frame.operands, *frame.captured_inputs)) and not private.dual_level_active():
        contexts.append(fwAD.dual_level())
    if frame.streams:
        contexts.append(resumed(frame.streams))
    return contexts


class PlainMode(DispatchMode):
    """A mode that only runs the operations. Some of torch's code, such as derivative formulas, checks for any mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return facts_of(func).run(*args, **(kwargs or {}))


def _batched_depth() -> int:
    """How many ``torch.autograd.grad(..., is_grads_batched=True)`` run, which forbid random numbers."""
    private.increment_batched_depth()
    return private.decrement_batched_depth()


@contextmanager
def outside_of_batched_backward() -> Iterator[None]:
    """Suspend batched backwards, as a recompute is not part of them."""
    depth = _batched_depth()
    for _ in range(depth):
        private.decrement_batched_depth()
    try:
        yield
    finally:
        for _ in range(depth):
            private.increment_batched_depth()


_SHIELDS: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (private.transforms_active, private.without_levels),
    (_batched_depth, outside_of_batched_backward),
    # Only the backward is in it: autograd saves nothing in a forward under it.
    (torch.is_inference_mode_enabled, partial(torch.inference_mode, False)),
    (lambda: not private.is_torch_function_enabled(), private.torch_function_enabled),
    (private.hooks_disabled_message, hooks_allowed),
]
