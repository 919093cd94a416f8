"""The log of a first run under a policy: the operations, with numbers for the values that they read and made."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._core.lines import Line
from .._policy.policy import Verdict
from .values import Layout, layouts


class Entry(NamedTuple):
    """The record of one operation of a first run."""

    key: tuple  # equal for operations that compute the same result
    reads: tuple[int, ...]  # the values that it read
    outs: tuple[int, ...]  # the values that it made: in new storages, then in storages that it wrote to
    overwritten: tuple[int, ...]  # the values that it overwrote
    tracked: tuple[int, ...]  # the values in `outs` that are differentiated
    result: Any  # the description of its result
    under: tuple[bool, bool]  # whether an operand required grad, whether grad mode was on
    verdict: Verdict | None  # the verdict on its results as long as they have no names

    @property
    def holds(self) -> bool:
        """Whether its operands may have to be saved: its results can't be saved, or only if something reads them."""
        return self.verdict is None or not self.tracked


class Log:
    """The entries of all operations, and what is known about the values that they made."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.lines: dict[int, Line] = {}  # the lines that called the operations
        self.made: dict[int, int] = {}  # for each value the number of the operation that made it
        self.saveable: dict[int, Verdict] = {}  # the values that the policy allows to be saved
        self.overwritten: set[int] = set()
        self.exposed: set[int] = set()  # detached values, which Python can read without a dispatch mode seeing it

    def __len__(self) -> int:
        return len(self.entries)

    def append(self, entry: Entry) -> None:
        """Add the entry of the next operation."""
        number, verdict = len(self.entries), entry.verdict
        for value in entry.outs:
            self.made[value] = number
            if verdict is not None:
                self.saveable[value] = verdict
        if entry.overwritten:
            self.overwritten.update(entry.overwritten)
        self.entries.append(entry)

    def maker(self, value: int) -> Entry:
        """Return the operation that made a value."""
        return self.entries[self.made[value]]

    def layout(self, value: int) -> Layout | None:
        """Return the layout of the result that a value was made as, or None if the result can't be described."""
        maker = self.maker(value)
        return next((layout for layout in layouts(maker.result) if maker.outs[layout.i] == value), None)

    def decide(self, value: int, verdict: Verdict) -> None:
        """Set the verdict on a value that has got a name."""
        if verdict is not Verdict.RECOMPUTE:
            self.saveable[value] = verdict
        else:
            self.saveable.pop(value, None)
