"""The log of a first run under a policy: what each operation did, in numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._core.lines import Line
from .._policy.policy import Verdict
from .values import Layout, layouts


class Entry(NamedTuple):
    """What an operation of a first run did."""

    key: tuple  # equal for operations that make the same result
    reads: tuple[int, ...]  # the values that it read,
    outs: tuple[int, ...]  # those that it made, of new storages, then of those that it wrote to,
    overwritten: tuple[int, ...]  # those that it overwrote,
    tracked: tuple[int, ...]  # and those of its own that are differentiated
    result: Any  # a description
    under: tuple[bool, bool]  # whether it read what requires grad, whether grad mode was on
    verdict: Verdict | None  # what becomes of what it made, as long as that has no names

    @property
    def holds(self) -> bool:
        """Whether what may be kept of its inputs may be needed: it isn't kept itself, or only if something reads it."""
        return self.verdict is None or not self.tracked


class Log:
    """What the operations did, and what is known of the values that they made."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.lines: dict[int, Line] = {}  # for operations, where they were called
        self.made: dict[int, int] = {}  # for each value that an operation made, which one
        self.saveable: dict[int, Verdict] = {}  # what the policy lets be kept
        self.overwritten: set[int] = set()
        self.exposed: set[int] = set()  # detached values: Python may read these where no mode sees it

    def __len__(self) -> int:
        return len(self.entries)

    def append(self, entry: Entry) -> None:
        """Another operation has run."""
        number, verdict = len(self.entries), entry.verdict
        for value in entry.outs:
            self.made[value] = number
            if verdict is not None:
                self.saveable[value] = verdict
        if entry.overwritten:
            self.overwritten.update(entry.overwritten)
        self.entries.append(entry)

    def maker(self, value: int) -> Entry:
        """The operation that made a value."""
        return self.entries[self.made[value]]

    def layout(self, value: int) -> Layout | None:
        """How the tensor lies as which a value was made, if that can be described."""
        maker = self.maker(value)
        return next((layout for layout in layouts(maker.result) if maker.outs[layout.i] == value), None)

    def decide(self, value: int, verdict: Verdict) -> None:
        """What becomes of a value that has got a name."""
        if verdict is not Verdict.RECOMPUTE:
            self.saveable[value] = verdict
        else:
            self.saveable.pop(value, None)
