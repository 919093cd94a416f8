"""The lowerings of the regions inside a region, in order: its recompute uses the same ones.

The choices that budgets had made by then are recorded too: with other choices a recompute would save other tensors.
"""

from __future__ import annotations

from typing import Any, TypeVar

from .._core.state import state

T = TypeVar("T")


class Lowerings:
    """The inner lowerings of one run. The first run records them in the list ``noted``, a recompute follows it."""

    __slots__ = ("count", "follows", "noted")

    def __init__(self, noted: list[Any], follows: bool) -> None:
        self.noted, self.follows = noted, follows
        self.count = 0

    def next(self, own: Any) -> Any:
        """Return the lowering for the inner region that is called now: the recorded one, else ``own``."""
        if not self.follows:
            self.noted.append(own)
        elif self.count < len(self.noted):
            own = self.noted[self.count]
        self.count += 1
        return own

    def go_back(self, count: int) -> None:
        """Go back to the first ``count`` calls, since the later ones are abandoned."""
        if not self.follows:
            del self.noted[count:]
        self.count = count


def as_in_first_run(own: T) -> T:
    """Apply `Lowerings.next` of all outer runs, the outermost first: only that one can follow a list."""
    for run in state.lowerings:
        own = run.next(own)
    return own
