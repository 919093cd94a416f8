"""The saved-tensor hooks around a region: they keep what it takes from outside, as they keep what autograd saves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from .._core import private
from .._core.state import state
from .guards import Guards


class RegionHooks(ABC):
    """The object whose methods are the saved-tensor hooks of a region, in its first run or in a recompute."""

    __slots__ = ()

    @property
    def around(self) -> RegionHooks | None:
        """That of the region around it, which gets what this one's policy keeps."""
        return None

    @property
    @abstractmethod
    def count(self) -> int:
        """How many tensors it has saved so far."""

    @abstractmethod
    def go_back(self, count: int) -> None:
        """Forget what was saved after the first ``count`` tensors."""

    def has_backward_inside(self) -> None:  # noqa: B027
        """A backward pass runs before the first run has ended."""


def of_region(hooks: tuple | None) -> RegionHooks | None:
    """Whose these hooks are, if they are a region's."""
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, RegionHooks) else None


class Around:
    """The hooks at one moment: those of a region around, in whichever of its runs, of somebody else, or none."""

    __slots__ = ("hooks", "logs", "owner", "positions", "region")

    def __init__(self) -> None:
        self.hooks = private.top_hooks(True)
        self.owner: Any = None if self.hooks is None else getattr(self.hooks[0], "__self__", None)
        self.region = region = of_region(self.hooks)
        self.positions: list[tuple[Any, int]] = []  # how far this region has come, and those around it
        while region is not None:
            self.positions.append((region, region.count))
            region = region.around
        self.logs = [(log, len(log.entries)) for log in state.logs]  # of regions around, and how far each has come

    def undo(self) -> None:
        """Have the regions around forget what they have recorded since: a run inside of them is given up."""
        for region, position in (*self.positions, *self.logs):
            region.go_back(position)

    def take(self, operands: Guards, uses: Iterable[tuple[int, int]] | None = None) -> None:
        """Let them keep a region's operands. That may be all that a recompute of the region around is for."""
        if self.hooks is not None:
            each = range(len(operands)) if uses is None else [i for _, i in uses]
            operands.hand_over(self.hooks, None, None if self.region is None else each)

    def take_captured(self, consts: Guards) -> None:
        """Let them keep captured tensors, but not what will be there anyway."""
        if self.hooks is not None and consts.tensors:
            in_region = self.region is not None
            which = _made_by_an_outer_region if in_region else _has_history
            each = range(len(consts)) if in_region else None
            consts.hand_over(self.hooks, None if getattr(self.owner, "takes_all", False) else which, each)


def _has_history(tensor: torch.Tensor) -> bool:
    return not tensor.is_leaf


def _made_by_an_outer_region(tensor: torch.Tensor) -> bool:
    """Perhaps: parameters are surely not, and what else is not the outer region keeps as it is."""
    return not (tensor.is_leaf and tensor.requires_grad)
