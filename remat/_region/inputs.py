"""The inputs of a region: the tensors that its runs get from outside.

These are its *operands*, the tensor leaves of the arguments and, under torch.func, captured tensors that a transform
follows; and all other captured tensors, which the region itself saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .._captured.captured import Captured, Path
from .._captured.variables import Variables, bound
from .._core import private
from .._core.state import unseen
from .._core.tensors import is_left_from_vmap
from .arguments import Arguments
from .guards import NO_GUARDS, Guards

Tensors = Sequence[torch.Tensor]


class Inputs:
    """The inputs of one call. Errors name an operand by ``name(i)``."""

    __slots__ = (
        "_apart", "_bindings", "_found", "_ids", "_same", "_variables", "arguments", "captured", "fn",
        "operands",
    )  # fmt: skip

    def __init__(self, fn: Callable, arguments: Arguments, tensors: list) -> None:
        self.fn, self.arguments = fn, arguments
        self.operands = tensors  # that the caller passed: the arguments' tensors, then captured ones
        self._found: Captured | None = None  # what the function captures
        self._variables: Sequence[Variables] = ()  # the variables that it reads
        # Most regions have none of these. Few objects for each region keep the garbage collector's work small.
        self.captured: Guards = NO_GUARDS  # captured tensors that are not operands
        self._ids: Sequence[int] = ()  # the ids of the tensors in `captured`, by which variables refer to them
        self._bindings: Mapping[int, tuple[Path, int]] = {}  # id of a captured operand -> path, index of the operand
        self._apart: Collection[int] = ()  # operands of which the runs get views
        self._same: Mapping[int, int] = {}  # index of an operand -> index in `captured`, of tensors that are one

    def find(self, follow: Callable[[torch.Tensor], bool] | None) -> list[torch.Generator]:
        """Find what the function captures now. Tensors that ``follow`` takes become operands. Return all generators."""
        if self._found is None:
            self._found = self.search()
            self._variables = self._found.variables
        captured: dict[int, tuple[Path, torch.Tensor]] = {}
        bindings: dict[int, tuple[Path, int]] = {}
        operands = list(self.operands)
        generators = self.arguments.generators()
        index = {id(t): i for i, t in enumerate(operands)} if follow else {}
        for path, value in self._found.tensors:
            if not isinstance(value, torch.Tensor):
                generators.append(value)
            elif is_left_from_vmap(value):
                continue  # a module has stored it, as its last activation
            elif follow is not None and (id(value) in index or follow(value)):
                if id(value) not in index:
                    index[id(value)] = len(operands)
                    operands.append(value)
                bindings[id(value)] = path, index[id(value)]
            else:  # no transform can read what several ended levels have left
                captured[id(value)] = path, private.unwrap_if_dead(value)
        self._bindings, self.operands = bindings, operands
        if captured:
            paths, tensors = zip(*captured.values())
            self._ids = list(captured)
            self.captured = Guards(tensors, lambda i: f"captured {paths[i]}", self._found.buffers)
            self.captured.note_gradients()
            self._same = {i: self._ids.index(id(t)) for i, t in enumerate(operands) if id(t) in captured}
        return generators

    def search(self) -> Captured:
        """Search what the function captures now."""
        return Captured(self.fn, *self.arguments.searched())

    def with_captured(self, operands: Tensors) -> list[torch.Tensor]:
        """Return these operands and the captured tensors, for a first run."""
        return [*operands, *self.captured.tensors]

    def release(self) -> None:
        """Release the operands, which the recompute gets from its caller, and the captured tensors."""
        self.operands = []
        self._found = None

    def roll_back(self) -> None:
        """Undo the effects of an abandoned first run on captured tensors and variables."""
        assert self._found is not None
        self.captured.roll_back()
        bound(self._variables, {id(tensor): tensor for _, tensor in self._found.tensors}).put()

    def name(self, i: int) -> str:
        """The name of the i-th operand in errors; larger numbers are those of the operands' derivatives."""
        given = {index for _, index in self.arguments.uses}
        captured = {index: f"captured {path}" for path, index in self._bindings.values()}
        if i in given:
            return self.arguments.name(self.fn, i)
        return captured[i] if i in captured else f"the derivative of {self.name(i % len(given | captured.keys()))}"

    def apart(self, operands: Tensors) -> Tensors:
        """Return the operands of a first run below all levels, different tensors where the caller's are different.

        A level may have hidden that two are one, or that one is a captured tensor. Autograd distinguishes views.
        """
        first: dict[int, Any] = dict.fromkeys(map(id, self.captured.tensors))
        pairs = enumerate(zip(operands, self.operands))
        self._apart = {i for i, (tensor, outer) in pairs if first.setdefault(id(tensor), outer) is not outer}
        return self.kept_apart(operands)

    def kept_apart(self, operands: Tensors) -> Tensors:
        """Return the operands of a run, with views in place of those that are one: all runs must save the same."""
        if not self._apart:
            return operands
        with unseen():
            return [t[...] if i in self._apart else t for i, t in enumerate(operands)]

    def bound_first(self, operands: Tensors) -> AbstractContextManager:
        """Within, variables of captured operands have these values, for a first run."""
        if not self._bindings:
            return nullcontext()
        return bound(self._variables, self._followed(operands), keep_changes=True)

    def again(self, operands: Tensors) -> tuple[Tensors, Tensors]:
        """Return the operands and the captured tensors of a recompute. Those that were one tensor are one again."""
        captured = [guard.captured_again(self.captured.accumulated) for guard in self.captured]
        if self._same:
            operands = [captured[self._same[i]] if i in self._same else t for i, t in enumerate(operands)]
        return operands, captured

    def bound_again(self, operands: Tensors, captured: Tensors) -> AbstractContextManager:
        """Within, variables have the values of the first run, with these tensors, for a recompute."""
        return bound(self._variables, {**self._followed(operands), **dict(zip(self._ids, captured))})

    def _followed(self, operands: Tensors) -> dict[int, torch.Tensor]:
        return {key: operands[i] for key, (_, i) in self._bindings.items()}
