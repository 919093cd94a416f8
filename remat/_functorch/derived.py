"""Regions that torch.func transforms make of a region. They run on operands and can be recomputed, as a region can.

A derived region's first operands are those of the region it is made from, in the same order. Its ``run`` works on the
levels that are active where it is called: with none, on plain tensors. `Graded` and `Jvp` are here; the ``vmap`` of a
region is in ``_functorch/batched.py``, its pullback in ``_functorch/pullback.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from .._core import private
from .._core.parts import is_differentiable, is_dual
from .._region.run import Run

Tensors = Sequence[torch.Tensor]


class Derived(ABC):
    """A transform of ``inner``; ``root`` is the region that the user called."""

    __slots__ = ("inner", "root")

    is_pullback = False  # it differentiates ``inner``, by torch.func.vjp if a level is active

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.root = inner.root

    @abstractmethod
    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        """Run the transformed region at the active levels, and return its new tensors."""

    def call_again(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        return self.run(operands, run)

    def check_result(self, result: Any) -> None:  # noqa: B027
        """Do nothing: the region compares its own runs."""

    @property
    def uses_func(self) -> bool:
        """Whether it calls ``torch.func.vjp``, which can't run under saved-tensor hooks."""
        return self.inner.uses_func


class Graded(Derived):
    """A region inside a ``grad`` level of its own, whose graph is not read.

    The level is restored where other levels are below it, as the function can see it: its inputs require grad, and
    some choices depend on that or on the level itself (that of an attention kernel, autocast under ``vmap``).
    """

    __slots__ = ("depends", "level", "lifted", "mask")

    def __init__(self, inner: Any, level: int, mask: tuple[bool, ...], lifted: tuple[bool, ...]) -> None:
        super().__init__(inner)
        self.depends: list[bool] | None = None  # which results require grad at the level, found by a run
        self.level = level
        self.mask = mask
        self.lifted = lifted  # which operands are of this level

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        with private.grad_level() as level, private.allow_requires_grad(True):
            wrapped = self.lift(operands, level)
            for tensor, follows in zip(wrapped, self.mask):
                if follows:
                    tensor.requires_grad_()
            outs = self.inner.run(wrapped, run)
            self.depends = [t.requires_grad for t in outs]
            return [private.unwrap_grad(t, level) for t in outs]

    def lift(self, operands: Tensors, level: int) -> list[torch.Tensor]:
        """The operands, wrapped for the level."""
        return [private.wrap_grad(t, level) if lifted else t for t, lifted in zip(operands, self.lifted)]


class Jvp(Derived):
    """``jvp`` of a region. Its operands are all operands of the region, then the tangents of those in ``mask``."""

    __slots__ = ("mask", "out_mask")

    def __init__(self, inner: Any, mask: tuple[bool, ...]) -> None:
        super().__init__(inner)
        self.mask = mask
        self.out_mask: list[bool] = []  # which outputs have a tangent, found by the first run

    @property
    def uses_func(self) -> bool:
        return self.inner.uses_func or self.inner.is_pullback

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        primals = list(operands[: len(self.mask)])
        moving = [i for i, moves in enumerate(self.mask) if moves]

        def at(*duals: torch.Tensor) -> list[torch.Tensor]:
            inputs = list(primals)
            for i, dual in zip(moving, duals):
                inputs[i] = dual
            outs = self.inner.run(inputs, run)
            self.out_mask = self.out_mask or [is_differentiable(t) and is_dual(t) for t in outs]
            return [*outs, duals[0].new_zeros(())]  # torch.func.jvp wants at least one output

        heads = tuple(without_overlap(primals[i]) for i in moving)
        outs, tangents = torch.func.jvp(at, heads, tuple(operands[len(self.mask) :]))  # type: ignore[misc]
        return [*outs[:-1], *(t for t, moves in zip(tangents, self.out_mask) if moves)]


def without_overlap(tensor: torch.Tensor) -> torch.Tensor:
    """A primal that is not expanded: ``make_dual`` gives the tangent the primal's strides, which must not overlap."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))
    return tensor.contiguous() if expanded else tensor
