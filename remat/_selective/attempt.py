"""The attempts of a recompute under a policy: first by a plan, then in full if a skipped value was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .._core.parts import all_parts
from .._region.around import Around
from .._region.placeholders import Restart
from .._region.run import Run
from .plan import Plan
from .record import Record
from .replay import Replay

T = TypeVar("T")


class Attempt(Run):
    """One attempt of a recompute."""

    __slots__ = ("last", "plan", "record", "replay", "whole")

    def __init__(self, record: Record, plan: Plan | None = None, last: bool = False) -> None:
        super().__init__()
        self.record = record
        self.plan = record.whole_plan() if plan is None else plan
        self.whole = plan is None  # it skips no step
        self.last = last  # values that are saved only for the recompute can be released as they are restored
        self.replay: Replay | None = None

    def mode(self, inputs: Sequence[torch.Tensor]) -> Replay:
        self.replay = Replay(self.record, self.plan, inputs, self.whole, self.last)
        return self.replay

    @property
    def must_restart(self) -> bool:  # type: ignore[override]
        return self.replay is not None and self.replay.placeholders.is_read

    def escaped(self, result: Any = None) -> bool:
        """Whether placeholders of skipped values are still alive, other than those in the result."""
        return self.replay is not None and self.replay.escaped(result)


class Recompute(Run):
    """A recompute that fills no slots."""

    __slots__ = ("root",)

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = root

    def carry_out(self, operands: Sequence[torch.Tensor], go: Callable[[Run], T]) -> T:
        record: Record | None = self.root.record
        if record is None:
            return go(self)
        around = Around()
        # If the region overwrites its operands, a second attempt would get operands that the first has changed.
        changes = not record.program.overwritten.isdisjoint(record.inputs[: len(all_parts([*operands]))])
        attempt = Attempt(record, record.plan() if self.root.options.may_skip and not changes else None)
        attempt.log = self.log
        try:
            result = go(attempt)
            if not attempt.must_restart and not attempt.escaped(result):
                return result
            del result
        except (Restart, Exception):
            if not attempt.must_restart:
                raise
        around.undo()
        attempt = Attempt(record)
        attempt.log = self.log
        return go(attempt)
