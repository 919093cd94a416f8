"""How the regions inside a region were lowered, in order: its recompute lowers them alike, whatever was learnt.

The same for the choices of budgets that they knew: with others a recompute would save other tensors.
"""

from __future__ import annotations

from typing import Any, TypeVar

from .._core.state import state

T = TypeVar("T")


class Lowerings:
    """Of one run of a region. The first run notes them in the list ``noted``, a recompute follows that list."""

    __slots__ = ("at", "follows", "noted")

    def __init__(self, noted: list[Any], follows: bool) -> None:
        self.noted, self.follows = noted, follows
        self.at = 0

    def next(self, own: Any) -> Any:
        """What holds for the region that is called now, if it would be ``own`` elsewhere."""
        if not self.follows:
            self.noted.append(own)
        elif self.at < len(self.noted):
            own = self.noted[self.at]
        self.at += 1
        return own

    def go_back(self, at: int) -> None:
        """What was called since is given up."""
        if not self.follows:
            del self.noted[at:]
        self.at = at


def as_in_first_run(own: T) -> T:
    """The same for all runs of regions around: the outermost is the one that may follow a list."""
    for run in state.lowerings:
        own = run.next(own)
    return own


def mark() -> list[tuple[Lowerings, int]]:
    """Where the runs around are now, for `go_back`."""
    return [(run, run.at) for run in state.lowerings]


def go_back(marks: list[tuple[Lowerings, int]]) -> None:
    """What was called since then is given up."""
    for run, at in marks:
        run.go_back(at)
