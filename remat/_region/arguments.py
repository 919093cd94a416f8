"""The arguments of a region: which of their leaves are tensors, and how to rebuild them with other tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._core import trees

_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])


class Arguments:
    """The structure of ``(args, kwargs)``, and the leaves that are not tensors."""

    __slots__ = ("leaves", "positions", "spec", "uses")

    def __init__(self, spec: trees.TreeSpec, leaves: Sequence[Any], uses: Sequence[tuple[int, int]]) -> None:
        self.spec = spec
        self.leaves = leaves  # None for each tensor
        self.uses = uses  # position of a leaf, index of its operand
        first: dict[int, int] = {}
        for position, index in uses:
            first.setdefault(index, position)
        self.positions: Sequence[int] = tuple(first.values())  # of the first use of each operand

    def searched(self) -> list[Any]:
        """The leaves that may lead to captured tensors."""
        return trees.without_plain(self.leaves)

    def generators(self) -> list[torch.Generator]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Generator)]

    def filled(self, operands: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments with these tensors."""
        leaves = list(self.leaves)
        for position, index in self.uses:
            leaves[position] = operands[index]
        return trees.unflatten(self.spec, leaves)

    def name(self, i: int) -> str:
        """The name of the i-th operand in errors."""
        path = trees.paths(self.spec, "")[self.positions[i]]
        return "argument " + (f"args{path[3:]}" if path.startswith("[0]") else f"kwargs{path[3:]}")


class Tensors(Arguments):
    """Arguments whose leaves are all tensors, without duplicates."""

    __slots__ = ()

    def __init__(self, spec: trees.TreeSpec, count: int) -> None:
        self.spec = spec
        self.leaves, self.uses, self.positions = _in_order(count)

    def searched(self) -> list[Any]:
        return []

    generators = searched

    def filled(self, operands: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        return trees.unflatten(self.spec, operands[: len(self.leaves)])


class Positional(Tensors):
    """Positional arguments that are all tensors, without duplicates. Calls with the same number share one instance."""

    __slots__ = ()

    def filled(self, operands: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        return operands[: len(self.leaves)], {}


@functools.lru_cache(128)
def _in_order(count: int) -> tuple[Sequence[None], Sequence[tuple[int, int]], Sequence[int]]:
    return (None,) * count, tuple((i, i) for i in range(count)), range(count)


@functools.lru_cache(128)
def _positional(count: int) -> Positional:
    return Positional(trees.flatten(((0,) * count, {}))[1], count)


def _are_tensors(leaves: Sequence[Any]) -> bool:
    return _TENSORS.issuperset(map(type, leaves)) and len(set(map(id, leaves))) == len(leaves)


def take_apart(args: tuple, kwargs: dict) -> tuple[Arguments, list[torch.Tensor]]:
    """Return the arguments and their distinct tensors: arguments that are one tensor stay one in the recompute."""
    if not kwargs and _are_tensors(args):
        return _positional(len(args)), list(args)
    leaves, spec = trees.flatten((args, kwargs))
    if _are_tensors(leaves):
        return Tensors(spec, len(leaves)), leaves
    index: dict[int, int] = {}
    uses: list[tuple[int, int]] = []
    tensors: list[torch.Tensor] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            uses.append((position, index.setdefault(id(leaf), len(index))))
            if len(index) > len(tensors):
                tensors.append(leaf)
            leaves[position] = None
    return Arguments(spec, leaves, uses), tensors
