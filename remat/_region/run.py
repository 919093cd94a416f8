"""What belongs to one run of a region. It is passed along with the operands, through all that transforms make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Run:
    """A recompute of all that there is."""

    __slots__ = ("log",)

    recorder: Any = None  # notes the operations of a first run under a policy
    replay: Any = None  # sees those of a recompute
    watch: Any = None  # finds captured tensors that no variable leads to
    starts_over = False  # it has read what it leaves out

    def __init__(self) -> None:
        self.log: Any = None  # notes the operations for the user, or compares them

    def mode(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The mode that sees the operations, if one has to. These tensors come from outside."""
        return None

    def escaped(self) -> bool:
        """Whether somebody has what it left out when it has ended."""
        return False

    def carry_out(self, operands: Sequence[torch.Tensor], go: Callable[[Run], T]) -> T:
        """Recompute, by whichever runs that takes."""
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
