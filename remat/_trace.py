"""What a first run under torch.func called, to be compared where no saved tensors are counted.

Some pullbacks run a region again under levels, not under saved-tensor hooks. There the calls of torch functions are
compared: those whose result is differentiated in one run must all be made in the other, in that order. What is not
differentiated may differ, as a function may log in one of its runs only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._determinism import user_line
from ._errors import RecomputeMismatchError
from ._parts import requires_grad_somewhere


class Entry(NamedTuple):
    """One call: what is compared, and whether its result is differentiated."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    followed: bool

    def same(self, other: Entry) -> bool:
        return self[:3] == other[:3]

    def __str__(self) -> str:
        return f"{self.name} -> {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Trace:
    """The calls of a first run."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def note(self, func: Any, result: Any) -> None:
        while isinstance(result, (tuple, list)) and result:
            result = result[0]
        if isinstance(result, torch.Tensor):
            name = getattr(func, "__name__", None) or str(func)
            followed = result.requires_grad or requires_grad_somewhere(result)
            self.add(Entry._make((name, result.dtype, result.shape, followed)))

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

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
        self.due = iter([entry for entry in first.entries if entry.followed])
        self.next_due = next(self.due, None)

    def add(self, entry: Entry) -> None:
        if self.next_due is not None and self.next_due.same(entry):
            self.next_due = next(self.due, None)
        if not entry.followed:
            return
        for i in range(self.position, len(self.all)):
            if self.all[i].same(entry):
                self.position = i + 1
                return
        raise RecomputeMismatchError(
            f"The region called {entry} at {user_line()} when it was run again, and not there in its forward. {_ADVICE}"
        )

    def end(self) -> None:
        if self.next_due is not None:
            raise RecomputeMismatchError(
                f"The region called {self.next_due} in its forward, and not there when it was run again. {_ADVICE}"
            )


_ADVICE = (
    "A region must do the same each time. Look for Python state that changed between the runs, or a branch on values "
    "that are random or not reproducible."
)
