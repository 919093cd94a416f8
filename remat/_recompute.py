"""The run again of a region, which fills the slots of its first run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as fwAD

from . import _torch
from ._determinism import saved_fingerprint, user_line
from ._errors import RecomputeMismatchError
from ._slots import Slot, Stop
from ._state import alias, as_in_forward
from ._streams import resumed

if TYPE_CHECKING:
    from ._engine import Frame


class Filler:
    """One run again of a region: hooks that count what it saves and put it into the slots that are alive."""

    __slots__ = ("count", "difference", "ending", "frame", "last", "slots", "stopped", "value", "wanted")

    def __init__(self, frame: Frame, slots: list[Slot | None], wanted: Slot) -> None:
        self.frame = frame
        self.slots = slots
        self.wanted = wanted
        self.value: torch.Tensor | None = None  # of the wanted slot
        self.count = 0
        self.stopped = False
        self.ending: int | None = None  # after so many steps it stops
        self.difference: str | None = None
        self.last = max(i for i, slot in enumerate(slots) if slot is not None)

    def run(self) -> None:
        frame, root = self.frame, self.frame.region.root
        frame.consts.accumulated |= frame.inside
        needs_level = (frame.operands.duals or frame.consts.duals) and not _torch.dual_level_active()
        with (
            _torch.without_levels(),
            _torch.torch_function_enabled(),
            _torch.hooks_allowed(whoever_forbids=True),
            torch.enable_grad(),
            fwAD.dual_level() if needs_level else nullcontext(),
            resumed(frame.streams) if frame.streams else nullcontext(),
        ):
            operands = [frame.operands.again(i) for i in range(len(frame.operands))]
            trace, root.trace = root.trace, None  # saved tensors are counted here
            result = None
            replay = root.log = None if frame.log is None else frame.log.replay()
            if frame.record is not None and frame.record.tells:
                root.plan = frame.record.plan(slot for slot in self.slots if slot is not None)
            _torch.push_hooks(self.pack, _same)
            try:
                with as_in_forward(frame.policies, filling=frame.open):
                    result = frame.region.call_again(operands)
            except (Stop, Exception):
                # TorchScript makes another exception of a stop; and it may be another region's.
                if not self.stopped:
                    raise
            finally:
                _torch.pop_hooks()
                again, root.replay = root.replay, None
                root.log, root.trace, root.plan = None, trace, None
            if not self.stopped:
                self._check_end(result, replay)
            del operands, result
            if again is not None:
                again.finish()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _torch.is_wrapped(tensor):
            return _torch.bare(tensor)
        index = self.count
        options = self.frame.options
        if self.stopped or (self.ending is not None and self._position() >= self.ending):
            self.stopped = True
            raise Stop
        self.count += 1
        value = alias(tensor)
        if index >= len(self.slots):
            if options.determinism_check != "none" and not self.frame.open:
                raise RecomputeMismatchError(self._too_many())
            return value
        slot = self.slots[index]
        if slot is not None:
            if options.determinism_check != "none":
                before, now = self.frame.prints[index], saved_fingerprint(tensor, options.determinism_check)
                if before is not None and before.differs(now) and self.difference is None:
                    self.difference = self._differs(index, before, now)
            root_replay = self.frame.region.root.replay
            if root_replay is not None:
                root_replay.late.fill([value])
            slot.value = value
            if slot is self.wanted:
                self.value = value
            slot.version = _torch.version(value)
        # With a log, the operation that comes next tells more.
        if self.difference is not None and (self.frame.log is None or index >= self.last):
            raise RecomputeMismatchError(self.difference)
        if options.early_stop and index == self.last:
            # The operation that runs now may fill what it has saved: then it must run to its end.
            early = [slot.source.after for slot in self.slots[max(0, index - 2) : index + 1] if slot and slot.early]
            self.ending = max(early, default=None)
            self.stopped = self.ending is None
        if self.stopped:
            raise Stop
        return value

    def _position(self) -> int:
        replay = self.frame.region.root.replay
        return 0 if replay is None else replay.position

    def _check_end(self, result: Any, replay: Any) -> None:
        if replay is not None:
            replay.check_end()
        if self.frame.options.determinism_check == "none" or self.frame.open:
            return
        if self.difference is not None:
            raise RecomputeMismatchError(self.difference)
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


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
