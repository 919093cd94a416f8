"""The state of one run of a region. It is passed with the operands through all transformed versions of the region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Run:
    """The base class of runs. On its own, a recompute that skips and restores nothing."""

    __slots__ = ("log",)

    recorder: Any = None  # records the operations of a first run under a policy
    replay: Any = None  # the dispatch mode of a recompute under a policy
    watch: Any = None  # sees the torch functions that a first run under torch.func calls
    must_restart = False  # it has read a value that it skips

    def __init__(self) -> None:
        self.log: Any = None  # the operation log of ``debug=True``

    def mode(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the dispatch mode for the run, or None. ``inputs`` come from outside of the region."""
        return None

    def escaped(self) -> bool:
        """Whether a skipped value is still referenced after the run."""
        return False

    def carry_out(self, operands: Sequence[torch.Tensor], go: Callable[[Run], T]) -> T:
        """Recompute, in as many attempts as needed."""
        return go(self)


class FirstRun(Run):
    """A first run."""

    __slots__ = ("recorder", "watch")

    def __init__(self, recorder: Any, watch: Any = None) -> None:
        super().__init__()
        self.recorder, self.watch = recorder, watch

    def mode(self, inputs: Sequence[torch.Tensor]) -> Any:
        if self.recorder is not None:
            self.recorder.bind(inputs)
        return self.recorder
