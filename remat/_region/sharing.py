"""Tensors of a region that are the same tensor, or share memory. In a recompute their replacements do so too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core.layout import holder, is_dense, span
from .._core.parts import is_plain
from .._core.state import unseen

if TYPE_CHECKING:
    from .guards import Guards

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


class Overlap(NamedTuple):
    """Tensors of ``[*given, *captured]`` that share a part of a storage; separate copies would no longer share it."""

    extents: dict[int, Extent]
    operands: Guards
    captured_inputs: Guards

    def of_copies(self) -> dict[int, Extent]:
        """The tensors of which a recompute gets copies."""
        first = len(self.operands)
        return {
            i: extent
            for i, extent in self.extents.items()
            if (i in self.operands.changed if i < first else i - first in self.captured_inputs.changed)
        }


def overlapping(tensors: Sequence[Any], operands: Guards, captured_inputs: Guards) -> list[Overlap]:
    """Find overlaps of tensors that the guards may have copies of. Overlaps of different dtypes are not found."""
    changed = [*operands.may_have_changed, *(len(operands) + i for i in captured_inputs.may_have_changed)]
    spans: dict[Any, list[tuple[int, int, int]]] = {}
    extents: dict[int, Extent] = {}
    storages = []  # kept alive, so that their ids stay valid
    for i in changed:
        tensor = tensors[i]
        if is_dense(tensor) and is_plain(tensor) and tensor.numel():
            extent = extents[i] = tensor.shape, tensor.stride(), tensor.storage_offset()
            storages.append(holder(tensor))
            key = id(storages[-1]), tensor.dtype
            spans.setdefault(key, []).append((tensor.storage_offset(), _end(*extent), i))
    groups: list[dict[int, Extent]] = []
    for each in spans.values():
        last = 0
        for start, end, i in sorted(each):
            if start >= last:
                groups.append({})
            groups[-1][i] = extents[i]
            last = max(last, end)
    return [Overlap(group, operands, captured_inputs) for group in groups if len(group) > 1]


def as_before(
    given: Sequence[torch.Tensor],
    captured: Sequence[torch.Tensor],
    same: Sequence[tuple[int, int]],
    overlaps: Sequence[Overlap],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors of a recompute: copies share memory where the tensors did, and pairs in ``same`` are one tensor."""
    tensors = [*given, *captured]
    for overlap in overlaps:
        if len(group := overlap.of_copies()) > 1:
            _lay_on_each_other(group, tensors)
    for i, first in same:
        tensors[i] = tensors[first]
    return tensors[: len(given)], tensors[len(given) :]


def _lay_on_each_other(group: dict[int, Extent], tensors: list[torch.Tensor]) -> None:
    start = min(offset for _, _, offset in group.values())
    end = max(_end(*extent) for extent in group.values())
    with torch.no_grad():
        memory = tensors[next(iter(group))].new_empty(end - start)
        for i, (size, stride, offset) in group.items():
            part = memory.as_strided(size, stride, offset - start).copy_(tensors[i])
            tensors[i] = part.detach().requires_grad_(tensors[i].requires_grad)


def _end(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    return offset + span(size, stride)
