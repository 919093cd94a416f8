"""The arguments and results of a region: which leaves are tensors, and how to rebuild them with other tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._core import trees
from ..errors import RecomputeMismatchError
from .fingerprints import fingerprint

_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])


@dataclass(slots=True)
class Arguments:
    """The structure of ``(args, kwargs)``, and the leaves that are not tensors."""

    spec: trees.TreeSpec
    leaves: Sequence[Any]  # None for each tensor
    uses: Sequence[tuple[int, int]]  # position of a leaf, index of its operand

    def searched(self) -> list[Any]:
        """The leaves that may lead to captured tensors."""
        return [leaf for leaf in self.leaves if leaf is not None and not isinstance(leaf, torch.Generator)]

    def generators(self) -> list[torch.Generator]:
        return [leaf for leaf in self.leaves if leaf is not None and isinstance(leaf, torch.Generator)]

    def filled(self, operands: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments with these tensors."""
        leaves = list(self.leaves)
        for position, index in self.uses:
            leaves[position] = operands[index]
        result: Any = self.spec.unflatten(leaves)
        return result

    def contents(self, filled: Any) -> list[int]:
        """The ids of what the containers among these ``filled`` arguments hold; none if there are no containers."""
        if self.spec.num_nodes == self.spec.num_leaves + 3:  # the tuple and the dict of a call, in a pair
            return []
        return [*map(id, trees.flatten(filled)[0])]

    def name(self, fn: Any, i: int) -> str:
        """The name of the i-th operand in errors: the parameter of ``fn`` or, in a built-in function, the position."""
        path = self.spec.accessors()[next(position for position, index in self.uses if index == i)]
        is_keyword, key, inside = path[0].entry == 1, path[1].entry, path[2:].codify("")
        if is_keyword:
            return f"argument {key}{inside}"
        try:
            parameters = list(inspect.signature(fn).parameters.values())[: key + 1]
        except (TypeError, ValueError):
            parameters = []
        if len(parameters) <= key or any(each.kind is each.VAR_POSITIONAL for each in parameters):
            return f"argument args[{key}]{inside}"
        return f"argument {parameters[key].name}{inside}"


@functools.lru_cache(128)
def _positional(count: int) -> Arguments:
    """Positional arguments that are all tensors, without duplicates."""
    return Arguments(trees.flatten(((0,) * count, {}))[1], (None,) * count, [(i, i) for i in range(count)])


def take_apart(args: tuple, kwargs: dict) -> tuple[Arguments, list[torch.Tensor]]:
    """Return the arguments and their distinct tensors: arguments that are one tensor stay one in the recompute."""
    if not kwargs and _TENSORS.issuperset(map(type, args)) and len(set(map(id, args))) == len(args):
        return _positional(len(args)), list(args)
    leaves, spec = trees.flatten((args, kwargs))
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


NEW, OPERAND, VALUE = "a new tensor", "one of the inputs", "not a tensor"


@dataclass(slots=True)
class Outputs:
    """The structure of a result, recorded in the first run.

    A result that is an operand, or the same tensor as an earlier result, is not new: it never passes through an
    autograd Function, so that it keeps its identity and its history.
    """

    options: Any
    spec: Any = None
    entries: Sequence[tuple[str, Any]] = ()
    prints: Sequence[Any] = ()  # fingerprints of the new tensors

    def record(self, result: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Flatten the result of the first run and return its new tensors."""
        leaves, self.spec = trees.flatten(result)
        self.entries, new = _sort(leaves, operands)
        self.prints = [fingerprint(t, self.options.determinism_check) for t in new]
        return new

    def compare(self, result: Any, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the new tensors of a recompute's result. RecomputeMismatchError if it differs from the first one."""
        leaves, spec = trees.flatten(result)
        entries, new = _sort(leaves, operands)
        check = self.options.determinism_check
        # There is no structure yet, nor are there entries, if a backward pass inside of the first run recomputes it.
        if check != "none" and self.spec not in (None, spec):
            raise RecomputeMismatchError(
                f"The region returned a different structure in the recompute: "
                f"{trees.describe_difference(self.spec, spec, 'output')} A region's function must return the same "
                f"structure in each run: look for a branch on Python state that changed between the runs."
            )
        for i, ((kind, number), (kind_now, number_now)) in enumerate(zip(self.entries, entries)):
            before, now = kind, kind_now
            if kind == kind_now == NEW:
                before, now = self.prints[number], fingerprint(new[number_now], check)
            if check != "none" and now != before:
                raise RecomputeMismatchError(
                    f"{trees.paths(self.spec, 'output')[i]} was {before} in the region's forward and {now} in the "
                    f"recompute. A region's function must be deterministic: look for a branch on changed Python state, "
                    f"or on a random value that isn't drawn from one of torch's generators."
                )
        return new

    def build(self, new: Sequence[Any], operands: Sequence[Any]) -> Any:
        """Build the result for the user from the new tensors and the caller's operands."""
        source = {NEW: new, OPERAND: operands}
        leaves = [value if kind == VALUE else source[kind][value] for kind, value in self.entries]
        # Values that are not tensors are not needed any more, and could hold a reference to the region's own graph.
        self.entries = [(kind, None if kind == VALUE else value) for kind, value in self.entries]
        return self.spec.unflatten(leaves)


def _sort(leaves: Sequence[Any], operands: Sequence[torch.Tensor]) -> tuple[list[tuple[str, Any]], list[torch.Tensor]]:
    places: dict[int, tuple[str, Any]] = {id(t): (OPERAND, i) for i, t in enumerate(operands)}
    entries: list[tuple[str, Any]] = []
    new: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in places:
            places[id(leaf)] = NEW, len(new)
            new.append(leaf)
        entries.append(places.get(id(leaf), (VALUE, leaf)))
    return entries, new
