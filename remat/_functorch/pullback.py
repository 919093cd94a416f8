"""The pullback of a region: the linear map from cotangents of its outputs to gradients of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .._core import private
from .._core.parts import as_leaf, is_recorded, requires_grad_somewhere
from .._region.run import Run
from .derived import Derived, Graded, Tensors

T = TypeVar("T")
Pull = Callable[[Tensors], list]


class Pullback(Derived):
    """The map from a region's operands, and cotangents of its outputs in ``given``, to gradients.

    The gradients are those of the operands in ``needs``; ``present`` marks those that aren't zero by structure.
    """

    __slots__ = ("given", "level", "needs", "present")

    is_pullback = True

    def __init__(self, inner: Any, needs: tuple[bool, ...], given: tuple[bool, ...], level: int) -> None:
        super().__init__(inner)
        self.level = level  # the level that needs it
        self.needs = needs
        self.given = given
        self.present: list[bool] = []  # found by running

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        count = len(self.needs)
        return self.linearize(operands[:count], run)(operands[count:])

    def linearize(self, primals: Tensors, run: Run, tape: Any = None) -> Pull:
        """Recompute the region at ``primals``, by the tape if there is one, and return the linear map."""
        if tape is not None:
            pull = tape.pull(self)
        elif private.transforms_active() or any(t.is_inference() for t in primals):
            pull = self._by_func(primals, run)
        else:
            pull = self._by_autograd(primals, run)

        def gradients(cotangents: Tensors) -> list[torch.Tensor]:
            grads = pull(cotangents)
            if self.present:  # another way to pull back may find more zeros by structure than the first one did
                grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, self.heads(primals))]
            else:
                self.present = [g is not None for g in grads]
            return [g for g, present in zip(grads, self.present) if present]

        return gradients

    def _by_func(self, primals: Tensors, run: Run) -> Pull:
        needed = [i for i, needs in enumerate(self.needs) if needs]
        inner = self._without_level()
        lift = _lift_all if inner is self.inner else self.inner.lift

        def at(*heads: torch.Tensor) -> list[torch.Tensor]:
            inputs = lift(primals, private.current_interpreter().level())
            for i, head in zip(needed, heads):
                inputs[i] = head
            return self.chosen(inner.run(inputs, run))

        _, vjp = torch.func.vjp(at, *self.heads(primals))  # type: ignore[misc]
        return lambda cotangents: list(vjp(list(cotangents)))

    def _by_autograd(self, primals: Tensors, run: Run) -> Pull:
        # The result is recorded only if an input or cotangent is. Gradients are taken with respect to the aliases.
        record = torch.is_grad_enabled()
        followed = record and any(map(is_recorded, primals))
        with torch.enable_grad():
            inputs = [_alias(t, followed) if needs else t for t, needs in zip(primals, self.needs)]
            outs = [out if out.requires_grad else None for out in self.chosen(self.inner.run(inputs, run))]
        heads = self.heads(inputs)

        def pull(cotangents: Tensors) -> list:
            create = followed or (record and any(map(requires_grad_somewhere, cotangents)))
            return gradients(outs, heads, cotangents, create, retain=True)

        return pull

    def _without_level(self) -> Any:
        """The region that it differentiates, without a Graded level that the level of a vjp replaces."""
        inner = self.inner
        return inner.inner if isinstance(inner, Graded) and inner.level == self.level else inner

    def heads(self, operands: Sequence[T]) -> list[T]:
        """The operands whose gradients are needed."""
        return [operand for operand, needs in zip(operands, self.needs) if needs]

    def chosen(self, outs: Sequence[T]) -> list[T]:
        """The outputs that have a cotangent."""
        return [out for out, given in zip(outs, self.given) if given]


def gradients(outs: Sequence[Any], heads: Tensors, cotangents: Tensors, create: bool, retain: bool) -> list:
    """``torch.autograd.grad``, with None for each head that the outputs don't depend on; an output may be None too."""
    pairs = [(out, cotangent) for out, cotangent in zip(outs, cotangents) if out is not None]
    if not pairs:
        return [None] * len(heads)
    if private.dual_level_active():  # some formulas have tangents only where autograd records them
        retain = create = True
    outs, cotangents = zip(*pairs)
    # Unused heads are allowed, and nothing is accumulated.
    return list(private.engine_call(outs, cotangents, retain, create, tuple(heads), True, accumulate_grad=False))


def _lift_all(operands: Tensors, level: int) -> list[torch.Tensor]:
    return [private.wrap_grad(t, level) for t in operands]


def _alias(tensor: torch.Tensor, followed: bool) -> torch.Tensor:
    if followed and tensor.requires_grad:
        return tensor[...]
    return as_leaf(tensor)
