"""``debug=True``: the operations of a region's runs, compared one by one, with the user's source lines."""

from __future__ import annotations

from typing import Any

import torch

from ._determinism import fingerprint
from ._errors import RecomputeMismatchError
from ._facts import facts_of
from ._lines import user_line
from ._ranges import Ranges
from ._state import state
from ._torch import DispatchMode

# The engine itself detaches what it takes, so these come and go.
_IGNORED = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class OpLog(DispatchMode):
    """Notes each operation of a first run."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, str, str]] = []
        self.again: list[tuple[str, str, str]] = []  # of the last run again
        self.ranges = Ranges()
        self.noting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if facts_of(func).marks:
            return self.ranges.mark(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if self.noting and func not in _IGNORED and not (state.unseen or self.ranges):
            self.note(str(func), _describe(result), str(user_line()))
        return result

    def note(self, op: str, result: str, line: str) -> None:
        self.entries.append((op, result, line))

    def go_back(self, count: int) -> None:
        """Forget what was noted after the first ``count`` operations."""
        del self.entries[count:]

    def __enter__(self) -> OpLog:
        state.logs = *state.logs, self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.logs = state.logs[:-1]

    def replay(self) -> Replay:
        """The log of a run again, which is compared with this one while it grows."""
        replay = Replay(self)
        self.again = replay.entries
        return replay

    def texts(self) -> tuple[list[str], list[str]]:
        """Both runs, as users see them."""
        first, again = (
            [f"{op} -> {result} at {line}" for op, result, line in run] for run in (self.entries, self.again)
        )
        return first, again


class Replay(OpLog):
    """Compares each operation of a run again with that of the first run.

    Raises:
        RecomputeMismatchError: at the first one that differs.
    """

    def __init__(self, first: OpLog) -> None:
        super().__init__()
        self.first = first

    def note(self, op: str, result: str, line: str) -> None:
        super().note(op, result, line)
        i = len(self.entries) - 1
        if i >= len(self.first.entries):
            self._fail(i, "there was none", f"{op} -> {result} at {line}")
        first_op, first_result, first_line = self.first.entries[i]
        if (first_op, first_result) != (op, result):
            self._fail(i, f"{first_op} -> {first_result} at {first_line}", f"{op} -> {result} at {line}")

    def check_end(self) -> None:
        """After a run again that wasn't stopped early."""
        i = len(self.entries)
        if i < len(self.first.entries):
            op, result, line = self.first.entries[i]
            self._fail(i, f"{op} -> {result} at {line}", "there is none")

    def _fail(self, i: int, before: str, now: str) -> None:
        raise RecomputeMismatchError(
            f"Operation {i} of the region differs between its runs.\n  In the forward: {before}\n"
            f"  When run again: {now}\n"
            f"A region must do the same each time: look at what decides between these two lines."
        )


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return str(fingerprint(result, "metadata"))
    if isinstance(result, (tuple, list)):
        return "(" + ", ".join(map(_describe, result)) + ")"
    return type(result).__name__
