"""What a first run under torch.func called, to be compared where no saved tensors are counted.

Some pullbacks run a region again under levels, not under saved-tensor hooks. There the calls of torch functions are
compared: those whose result is differentiated in one run must all be made in the other, in that order. What is not
differentiated may differ, as a function may log in one of its runs only.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from . import _torch
from ._determinism import user_line
from ._errors import RecomputeMismatchError
from ._parts import requires_grad_somewhere

# One call: the function, its result's dtype and shape, and whether that is differentiated. Few runs are compared, so it
# is a plain tuple, and names are looked up later.
Entry: TypeAlias = tuple[Any, torch.dtype, tuple[int, ...], bool]


def _same(a: Entry, b: Entry) -> bool:
    return a[1:3] == b[1:3] and _name(a) == _name(b)


def _name(entry: Entry) -> str:
    return getattr(entry[0], "__name__", None) or str(entry[0])


def _shown(entry: Entry) -> str:
    return f"{_name(entry)} -> {str(entry[1]).removeprefix('torch.')}{list(entry[2])}"


class Trace:
    """The calls of a first run."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def note(self, func: Any, result: Any) -> None:
        while isinstance(result, (tuple, list)) and result:
            result = result[0]
        if isinstance(result, torch.Tensor):
            followed = result.requires_grad or (_torch.is_wrapped(result) and requires_grad_somewhere(result))
            self.entries.append((func, result.dtype, result.shape, followed))

    def mark(self) -> Any:
        """How far it has come, for ``go_back``."""
        return len(self.entries)

    def go_back(self, mark: Any) -> None:
        """Forget what was called since: a region inside gives its first run up and starts again."""
        del self.entries[mark:]

    def end(self) -> None:
        """The run is over."""


class Retrace(Trace):
    """The calls of a run again, compared with those of the first run.

    Raises:
        RecomputeMismatchError: a call whose result is differentiated was made in one of the runs only.
    """

    def __init__(self, first: Trace) -> None:
        super().__init__()
        self.all = first.entries
        self.position = 0  # up to where this run's calls were found in the first one
        self.due = [entry for entry in first.entries if entry[3]]
        self.met = 0  # so many of those came

    def note(self, func: Any, result: Any) -> None:
        super().note(func, result)
        while self.entries:
            self._compare(self.entries.pop())

    def _compare(self, entry: Entry) -> None:
        if self.met < len(self.due) and _same(self.due[self.met], entry):
            self.met += 1
        if not entry[3]:
            return
        for i in range(self.position, len(self.all)):
            if _same(self.all[i], entry):
                self.position = i + 1
                return
        raise RecomputeMismatchError(
            f"The region called {_shown(entry)} at {user_line()} when it was run again, and not there in its forward. "
            f"{_ADVICE}"
        )

    def mark(self) -> Any:
        return self.position, self.met

    def go_back(self, mark: Any) -> None:
        self.position, self.met = mark

    def end(self) -> None:
        if self.met < len(self.due):
            raise RecomputeMismatchError(
                f"The region called {_shown(self.due[self.met])} in its forward, and not there when it was run again. "
                f"{_ADVICE}"
            )


_ADVICE = (
    "A region must do the same each time. Look for Python state that changed between the runs, or a branch on values "
    "that are random or not reproducible."
)
