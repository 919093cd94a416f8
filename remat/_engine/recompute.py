"""The recompute of a region, which fills the slots of its first run."""

from __future__ import annotations

from contextlib import ExitStack
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from .._core import private
from .._core.lines import user_line
from .._core.parts import bare
from .._core.private import modes_that_see
from .._core.state import alias, as_in_forward, own_work, state
from .._core.streams import is_on_another
from .._region.around import RegionHooks
from .._region.fingerprints import describe, is_other, look_at, may_be_unset
from .._region.hooks import drop_gradient_hooks
from .._region.placeholders import Restart
from .._region.run import Run
from .._selective.attempt import Attempt
from ..errors import RecomputeMismatchError
from .shield import shields
from .slots import Slot, Stop

if TYPE_CHECKING:
    from .frame import Frame


class Filler(RegionHooks):
    """One recompute of a region: hooks that count the tensors that autograd saves, and put them into the live slots."""

    __slots__ = (
        "attempt", "difference", "frame", "is_last", "last_slot", "look", "rest", "root", "slots",
        "stopped", "to_the_end",
    )  # fmt: skip

    def __init__(self, frame: Frame, slots: list[Slot | None], to_the_end: bool = False, last: bool = False) -> None:
        self.frame = frame
        self.to_the_end = to_the_end  # without early stop: an operation may save a tensor before it fills it
        self.is_last = last  # there will be no other recompute
        self.root = frame.region.root
        self.look = frame.look
        self.slots = slots
        self.rest: Any = iter(slots)
        self.attempt = Run()
        self.stopped = False
        self.difference: str | None = None
        self.last_slot = next(filter(None, reversed(slots)))

    def run(self) -> None:
        self.frame.stopped = False
        contexts = shields(self.frame)
        before = torch.is_grad_enabled()
        logs = [log for log in state.logs if log.noting]  # of unfinished runs, which must not record this recompute
        private.set_grad_enabled(True)
        for log in logs:
            log.noting = False
        try:
            if not contexts:
                return self._run()
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                self._run()
        finally:
            private.set_grad_enabled(before)
            for log in logs:
                log.noting = True

    def _run(self) -> None:
        """Recompute the region; if that reads a value that it skipped, recompute all of it."""
        if not self._attempt(whole=not self.frame.options.may_skip):
            self.go_back(0)
            self.stopped, self.difference = False, None
            self._attempt(whole=True)

    def _attempt(self, whole: bool) -> bool:
        """Recompute the region once; return False if that has to be repeated in full."""
        frame, root = self.frame, self.root
        frame.captured_inputs.accumulated |= frame.inside
        with own_work():
            operands = frame.operands.again()
        result = None
        self.attempt = run = self._run_by_plan(whole)
        run.log = None if frame.log is None else frame.log.compared()
        policies = frame.policies
        if frame.open and frame.policy is not None:  # there is no replay yet that adds it for inner regions
            policies = (*policies, frame.policy)
        first_hook = RemovableHandle.next_id
        below = self._pack_below_levels if root.kinds else self.pack
        private.push_hooks(self._pack_and_report if frame.noted else below, _identity)
        try:
            with as_in_forward(policies, filling=frame.open):
                result = frame.region.call_again(operands, run)
        except (Stop, Restart, Exception):
            # TorchScript replaces Stop and Restart by other exceptions; and they may come from another region.
            if not self.stopped and not run.must_restart:
                raise
        finally:
            private.pop_hooks()
            drop_gradient_hooks(frame.captured_inputs.tensors, first_hook)
        if run.must_restart:
            return False
        if not self.stopped:
            self._check_end(result, run.log)
        del operands, result
        return not run.escaped()

    def _run_by_plan(self, whole: bool) -> Run:
        """The run of a recompute; it executes everything where the first run left no record."""
        frame, record = self.frame, self.root.record
        if record is None:
            return Run()
        plan = None
        if not whole:  # the slots of a frame without a record are those of another derivative
            plan = record.plan() if frame.record is None else record.plan(slot for slot in self.slots if slot)
        return Attempt(record, plan, self.is_last and not self.to_the_end)

    def release(self) -> None:
        """Drop all references: a container may still lead to a node of the recompute, which owns its pack hook."""
        del self.attempt, self.frame, self.root, self.slots, self.rest, self.last_slot

    @property
    def count(self) -> int:
        """How many of the expected tensors autograd has saved so far."""
        return len(self.slots) - length_hint(self.rest)

    def go_back(self, count: int) -> None:
        self.rest = iter(self.slots[count:])

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        slot = next(self.rest, _NO_SLOT)
        if slot is None or slot is _NO_SLOT:
            # Only a backward pass inside reads it. A leaf owns no graph, so it needs no alias.
            if slot is _NO_SLOT:
                self._check_more()
            return tensor if tensor.is_leaf else alias(tensor)
        value = alias(tensor) if modes_that_see() else tensor.detach()
        if self.frame.streams and not self.frame.mixed:
            self.frame.mixed = is_on_another(tensor.device, self.frame.streams)
        try:
            now = self.look(tensor)
        except RuntimeError:  # an inference tensor
            now = look_at(value, self.frame.check)
        if now != slot.fingerprint:
            self._compare(slot, now)
        slot.version = now[4]
        slot.value = value  # last, as another thread may be waiting for it
        if slot is self.last_slot:
            self._end()
        return value

    def _pack_below_levels(self, tensor: torch.Tensor) -> torch.Tensor:
        """``pack`` below levels of torch.func. Levels inside the region save tensors too, which are wrapped."""
        return bare(tensor) if private.is_wrapped(tensor) else self.pack(tensor)

    def _pack_and_report(self, tensor: torch.Tensor) -> torch.Tensor:
        """``pack`` for a run that may skip operations: it must know which tensors go into live slots."""
        if private.is_wrapped(tensor):
            return bare(tensor)
        replay = self.attempt.replay
        if replay is not None and replay.placeholders:
            count = self.count
            if count < len(self.slots) and self.slots[count]:
                replay.placeholders.read([tensor])
        return self.pack(tensor)

    def _check_more(self) -> None:
        if self.stopped or (self.frame.open and self.to_the_end):  # the first run has come no further
            self._stop()
        if self.frame.check != "none" and not self.frame.open:
            raise RecomputeMismatchError(self._too_many())

    def _compare(self, slot: Slot, now: tuple) -> None:
        before, index = slot.fingerprint, self.count - 1
        previous = self.frame.refs[index - 1]() if index else None
        if previous is not None and may_be_unset(before, previous.fingerprint[3]):
            before, now = before[:6], now[:6]  # without checksums
        if is_other(before, now):
            self.difference = self.difference or self._differs(index, before, now)
            if self.frame.log is None:  # otherwise the log raises a more precise error at the next operation
                raise RecomputeMismatchError(self.difference)

    def _end(self) -> None:
        """All slots are filled."""
        if self.difference is not None:
            raise RecomputeMismatchError(self.difference)
        # After the last operation user code may call `record_stream` or let streams wait for each other, so a recompute
        # on several streams doesn't stop early. In the middle of a first run it does: the first run came no further.
        if not self.to_the_end and ((self.frame.options.early_stop and not self.frame.mixed) or self.frame.open):
            self._stop()

    def _stop(self) -> None:
        self.stopped = self.frame.stopped = True
        self.rest = iter(())
        raise Stop

    def _check_end(self, result: Any, log: Any) -> None:
        if log is not None:
            log.check_end()
        if self.frame.check == "none" or self.frame.open:
            return
        if self.difference is not None:
            raise RecomputeMismatchError(self.difference)
        if self.count < len(self.slots):
            raise RecomputeMismatchError(self.too_few())
        self.frame.region.check_result(result)

    def _differs(self, index: int, before: Any, now: Any) -> str:
        return (
            f"Tensor {index} that the region saved for its backward was {describe(before, now)} in the forward and "
            f"{describe(now, before)} in the recompute, at {user_line()}. {self._advice}"
        )

    def _too_many(self) -> str:
        return (
            f"The region saved {len(self.slots)} tensors for its backward in the forward, and one more in the "
            f"recompute, at {user_line()}. {self._advice}"
        )

    @property
    def _advice(self) -> str:
        return _ADVICE if self.root.options.debug else f"{_ADVICE} {_DEBUG}"

    def too_few(self) -> str:
        return (
            f"The region saved {len(self.slots)} tensors for its backward in the forward, and only {self.count} in "
            f"the recompute. {self._advice}"
        )


_ADVICE = (
    "A region's function must be deterministic. Look for Python state that changed between the runs, a branch on "
    "values that are random or not reproducible, a cache, or saved-tensor hooks around the region that change values."
)
_DEBUG = "`remat(..., debug=True)` shows the first operation that differs."


_NO_SLOT: Any = object()  # for a tensor that autograd did not save in the first run


def _identity(value: torch.Tensor) -> torch.Tensor:
    return value
