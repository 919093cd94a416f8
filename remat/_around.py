"""The saved-tensor hooks around a region: they keep what it takes from outside, as they keep what autograd saves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _torch
from ._engine import Frame
from ._kept import Kept
from ._recompute import Filler


class Around:
    """The hooks at one moment: those of a region around, in whichever of its runs, of somebody else, or none."""

    __slots__ = ("hooks", "owner")

    def __init__(self) -> None:
        self.hooks = _torch.top_hooks(True)
        self.owner: Any = None if self.hooks is None else getattr(self.hooks[0], "__self__", None)

    def mark(self) -> Callable[[], None]:
        """Returns a function that undoes what the region around has recorded since: for a run that is given up."""
        owner = self.owner
        if isinstance(owner, Frame):
            return functools.partial(owner.truncate, len(owner.refs) + len(owner.slots))
        if isinstance(owner, Filler):
            return functools.partial(owner.go_back, owner.count)
        return _nothing

    def take(self, operands: Kept) -> None:
        """Let them keep a region's operands. That may be all that a run again of the region around is for."""
        if self.hooks is not None:
            operands.hand_over(self.hooks, to_region=isinstance(self.owner, (Frame, Filler)))

    def take_captured(self, consts: Kept) -> None:
        """Let them keep captured tensors, but not what will be there anyway."""
        if self.hooks is not None and consts.tensors:
            in_region = isinstance(self.owner, (Frame, Filler))
            which = _made_by_an_outer_region if in_region else _has_history
            consts.hand_over(self.hooks, None if getattr(self.owner, "takes_all", False) else which, in_region)


def _nothing() -> None:
    pass


def _has_history(tensor: torch.Tensor) -> bool:
    return not tensor.is_leaf


def _made_by_an_outer_region(tensor: torch.Tensor) -> bool:
    """Perhaps: parameters are surely not, and what else is not the outer region keeps as it is."""
    return not (tensor.is_leaf and tensor.requires_grad)
