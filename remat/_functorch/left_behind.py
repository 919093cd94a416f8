"""Tensors that a region stores instead of returning them, so that a transform loses their derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._captured.captured import find
from .._captured.path import Path
from .._core import private
from .._core.trees import without_plain
from .._region.watch import Watch
from ..errors import CaptureError


def check_left_behind(region: Any, watch: Watch, outs: Sequence[torch.Tensor]) -> None:
    """Check for such tensors after a first run under torch.func, as only results are wrapped for the levels again.

    Raises:
        CaptureError: the function has stored a tensor that a transform differentiates.
    """
    kinds = region.kinds
    if kinds and private.GRAD not in kinds and private.JVP not in kinds:
        return  # a tensor stored under vmap has no use without remat either
    if any(map(watch.has_lost, region.ambient.cached_since())):
        raise CaptureError(
            "A region under torch.func was the first to read a parametrized weight in `parametrize.cached()`, where "
            "the weight would lose its derivatives. Read `module.weight` before the region, or don't use the cache."
        )
    known = set(map(id, (*outs, *region.operands())))
    values = [*region.arguments.searched(), *without_plain(value for _, value in region.outputs.entries)]
    for path, value in find(region.fn, *values).tensors:
        lost = isinstance(value, torch.Tensor) and id(value) not in known and watch.has_lost(value)
        if lost and not _is_made_anew(path):
            raise CaptureError(
                f"A region under torch.func stored a tensor of shape {tuple(value.shape)} in {path}, where the tensor "
                f"would lose its derivatives. Return it from the function, or store its `.detach()`."
            )


def _is_made_anew(path: Path) -> bool:
    """Whether a path is the list of an LSTM's or GRU's parameters, which each call makes anew if they have changed."""
    return path.up is not None and path.up.step == "._flat_weights"
