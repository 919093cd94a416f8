"""The runs of a recompute under a policy: by a plan, and in full if that has read what the plan leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .._core.parts import all_parts
from .._region.around import Around
from .._region.left_out import Restart
from .._region.lowerings import go_back, mark
from .._region.run import Run
from .plan import Plan
from .record import Record
from .replay import Replay

T = TypeVar("T")


class Attempt(Run):
    """One such run."""

    __slots__ = ("last", "plan", "record", "replay", "whole")

    def __init__(self, record: Record, plan: Plan | None = None, last: bool = False) -> None:
        super().__init__()
        self.record = record
        self.plan = record.whole_plan() if plan is None else plan
        self.whole = plan is None  # it leaves out nothing
        self.last = last  # what is kept for it alone need not stay
        self.replay: Replay | None = None

    def mode(self, inputs: Sequence[torch.Tensor]) -> Replay:
        self.replay = Replay(self.record, self.plan, inputs, self.whole, self.last)
        return self.replay

    @property
    def starts_over(self) -> bool:  # type: ignore[override]
        return self.replay is not None and self.replay.left_out.is_read

    def escaped(self, result: Any = None) -> bool:
        """Whether somebody has what it left out, other than its result."""
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
        around, marks = Around(), mark()
        # A second attempt would find operands that the first one has changed.
        changes = not record.program.overwritten.isdisjoint(record.inputs[: len(all_parts([*operands]))])
        attempt = Attempt(record, record.plan() if self.root.options.may_leave_out and not changes else None)
        attempt.log = self.log
        try:
            result = go(attempt)
            if not attempt.starts_over and not attempt.escaped(result):
                return result
            del result
        except (Restart, Exception):
            if not attempt.starts_over:
                raise
        around.undo()
        go_back(marks)
        attempt = Attempt(record)
        attempt.log = self.log
        return go(attempt)
