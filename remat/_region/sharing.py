"""Tensors of a region that are one tensor. In a recompute their replacements are one tensor too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._core.state import unseen

if TYPE_CHECKING:
    pass

Extent = tuple[Sequence[int], Sequence[int], int]  # size, stride, offset in the storage


def same(given: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs of positions in ``[*given, *captured]`` that are one tensor.

    The second position is the first captured one, the first a given one or a later captured one.
    """
    first: dict[int, int] = {}
    places = [(i, first.setdefault(id(tensor), i)) for i, tensor in enumerate(captured, len(given))]
    twice = [(i, j) for i, j in places if i != j]
    return twice + [(i, first[id(tensor)]) for i, tensor in enumerate(given) if id(tensor) in first]


def twice_below(
    operands: Sequence[torch.Tensor], given: Sequence[torch.Tensor], captured: Sequence[Any], same: Sequence[tuple]
) -> list[int]:
    """Operands that below the levels are an earlier operand or a captured tensor, but were not at the call."""
    first: dict[int, Any] = dict.fromkeys(map(id, captured))
    known = {i for i, _ in same}
    pairs = enumerate(zip(operands, given))
    return [i for i, (tensor, outer) in pairs if first.setdefault(id(tensor), outer) is not outer and i not in known]


def apart(operands: Sequence[torch.Tensor], which: Collection[int]) -> Sequence[torch.Tensor]:
    """The operands, those in ``which`` as views, so that autograd distinguishes them."""
    if not which:
        return operands
    with unseen():
        return [t[...] if i in which else t for i, t in enumerate(operands)]


def as_before(
    given: Sequence[torch.Tensor], captured: Sequence[torch.Tensor], same: Sequence[tuple[int, int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of a recompute, in which the pairs in ``same`` are one tensor again."""
    tensors = [*given, *captured]
    for i, first in same:
        tensors[i] = tensors[first]
    return tensors[: len(given)], tensors[len(given) :]
