"""``vmap`` of a region and of its pullback, which may be computed as the pullback of the ``vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core import private
from .._region.run import Run
from .derived import Derived, Tensors
from .pullback import Pull, Pullback

Dims = Sequence[int | None]


class Batched(Derived):
    """``vmap`` of a region, over these dimensions of the operands."""

    __slots__ = ("batch_size", "in_dims", "out_dims", "randomness", "sums")

    def __init__(self, inner: Any, in_dims: tuple, batch_size: int, randomness: str, sums: bool = False) -> None:
        super().__init__(inner)
        self.in_dims = in_dims
        self.batch_size = batch_size
        self.randomness = randomness
        self.sums = sums  # a level above follows an operand without a batch dimension: its gradient must not be summed
        self.out_dims: list[int | None] = []  # found by running

    @property
    def uses_func(self) -> bool:
        return self.inner.uses_func or self.inner.is_pullback

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        return self._mapped(lambda inputs: self.inner.run(inputs, run), operands, self.in_dims)

    def _mapped(self, fn: Callable, operands: Tensors, in_dims: Dims) -> list[torch.Tensor]:
        with private.vmap_level(self.batch_size, self.randomness) as level:
            outs = fn([t if d is None else private.wrap_batched(t, d, level) for t, d in zip(operands, in_dims)])
            pairs = [private.unwrap_batched(out, level) for out in outs]
        self.out_dims = [dim for _, dim in pairs]
        return [out for out, _ in pairs]


class BatchedPullback(Batched):
    """``vmap`` of the pullback of a region that is not mapped: that region is recomputed once, outside of the level."""

    __slots__ = ()

    is_pullback = True

    @property
    def uses_func(self) -> bool:
        return self.inner.uses_func

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        count = len(self.inner.needs)
        return self.linearize(operands[:count], run)(operands[count:])

    def linearize(self, primals: Tensors, run: Run, tape: Any = None) -> Pull:
        pull = self.inner.linearize(primals, run, tape)
        return lambda cotangents: self._mapped(pull, cotangents, self.in_dims[len(primals) :])


class PullbackOfBatched(Pullback):
    """A pullback whose gradients have the batch dimensions of the operands."""

    __slots__ = ()

    @property
    def out_dims(self) -> list:
        return [dim for dim, present in zip(self.heads(self.inner.in_dims), self.present) if present]


def batched_pullback(
    pullback: Pullback, values: list, dims: tuple, size: int, randomness: str, inner: Batched | None
) -> tuple[Any, list]:
    """``vmap`` of a pullback, and its operands; where the order makes no difference, the pullback of the ``vmap``.

    ``inner`` is the ``vmap`` of the region, from a run of it.
    """
    count = len(pullback.needs)
    if inner is None or (inner.in_dims, inner.batch_size, inner.randomness) != (dims[:count], size, randomness):
        # The region itself ran below this level, or before it was entered: a mapped pullback recomputes it there.
        kind = BatchedPullback if all(dim is None for dim in dims[:count]) else Batched
        return kind(pullback, dims, size, randomness), values
    targets = pullback.chosen(inner.out_dims)
    if None in targets or None in pullback.heads(inner.in_dims):
        return Batched(pullback, dims, size, randomness), values
    aligned = [_align(t, dim, target, size) for t, dim, target in zip(values[count:], dims[count:], targets)]
    return PullbackOfBatched(inner, pullback.needs, pullback.given, pullback.level), values[:count] + aligned


def _align(tensor: torch.Tensor, dim: int | None, target: int | None, size: int) -> torch.Tensor:
    assert target is not None
    if dim is None:
        return tensor.unsqueeze(target).expand(*tensor.shape[:target], size, *tensor.shape[target:])
    return tensor.movedim(dim, target)
