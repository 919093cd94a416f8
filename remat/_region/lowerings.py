"""How the regions inside a region were lowered, in order: its recompute lowers them alike, whatever was learnt."""

from __future__ import annotations

from .._core.state import state


class Lowerings:
    """Of one run of a region. The first run notes them in the list ``by_func``, a recompute follows that list."""

    __slots__ = ("at", "by_func", "follows")

    def __init__(self, by_func: list[bool], follows: bool) -> None:
        self.by_func, self.follows = by_func, follows
        self.at = 0

    def next(self, by_func: bool) -> bool:
        """Whether the region that is called now is lowered to torch.func, if it would be ``by_func`` elsewhere."""
        if not self.follows:
            self.by_func.append(by_func)
        elif self.at < len(self.by_func):
            by_func = self.by_func[self.at]
        self.at += 1
        return by_func

    def go_back(self, at: int) -> None:
        """What was called since is given up."""
        if not self.follows:
            del self.by_func[at:]
        self.at = at


def lowered_by_func(by_func: bool) -> bool:
    """The same for all runs of regions around: the outermost is the one that may follow a list."""
    for run in state.lowerings:
        by_func = run.next(by_func)
    return by_func


def mark() -> list[tuple[Lowerings, int]]:
    """Where the runs around are now, for `go_back`."""
    return [(run, run.at) for run in state.lowerings]


def go_back(marks: list[tuple[Lowerings, int]]) -> None:
    """What was called since then is given up."""
    for run, at in marks:
        run.go_back(at)
