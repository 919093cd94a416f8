"""What a torch.func transform makes of a region: again something that runs on operands, and can be run again.

A derived region's first operands are those of the region it is made from, in the same order. Its ``run`` works on the
levels that are active where it is called: with none, on plain tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import is_not
from typing import Any

import torch

from . import _torch
from ._parts import as_leaf, is_dual, is_recorded, requires_grad_somewhere

Tensors = Sequence[torch.Tensor]
Pull = Callable[[Tensors], list]


class Derived(ABC):
    """A transform of ``inner``; ``root`` is the region that the user called."""

    __slots__ = ("inner", "key", "root")

    def __init__(self, inner: Any, key: tuple) -> None:
        self.inner = inner
        self.root = inner.root
        self.key = (*inner.key, key)

    @abstractmethod
    def run(self, operands: Tensors) -> list[torch.Tensor]:
        """The new tensors of the transformed region, at the levels that are active."""

    def call_again(self, operands: Tensors) -> list[torch.Tensor]:
        return self.run(operands)

    def check_result(self, result: Any) -> None:  # noqa: B027
        """The region's own runs are compared by the region."""

    @property
    def uses_func(self) -> bool:
        """Whether it calls ``torch.func.vjp``, which can't run under saved-tensor hooks."""
        return self.inner.uses_func


class Batched(Derived):
    """``vmap`` of a region, over these dimensions of the operands."""

    __slots__ = ("batch_size", "in_dims", "may_share", "out_dims", "randomness")

    def __init__(self, inner: Any, in_dims: tuple, batch_size: int, randomness: str, may_share: bool = False) -> None:
        super().__init__(inner, ("vmap", in_dims, batch_size, randomness))
        self.may_share = may_share
        self.in_dims = in_dims
        self.batch_size = batch_size
        self.randomness = randomness
        self.out_dims: list[int | None] = []  # found by running

    @property
    def primals(self) -> int:
        """How many first operands need no batch dimension: a pullback of an unbatched region runs that region once."""
        return self.inner.primals if self.may_share and isinstance(self.inner, (Pullback, Batched)) else 0

    @property
    def uses_func(self) -> bool:
        return self.inner.uses_func or (_is_pullback(self.inner) and not self.primals)

    def run(self, operands: Tensors) -> list[torch.Tensor]:
        if n := self.primals:
            return self.linearize(operands[:n])(operands[n:])
        return self._mapped(self.inner.run, operands, self.in_dims)

    def linearize(self, primals: Tensors, tape: Any = None) -> Pull:
        pull = self.inner.linearize(primals, tape)
        return lambda others: self._mapped(pull, others, self.in_dims[len(primals) :])

    def _mapped(self, fn: Callable, operands: Tensors, in_dims: Sequence[int | None]) -> list[torch.Tensor]:
        with _torch.vmap_level(self.batch_size, self.randomness) as level:
            outs = fn([t if d is None else _torch.wrap_batched(t, d, level) for t, d in zip(operands, in_dims)])
            pairs = [_torch.unwrap_batched(out, level) for out in outs]
        self.out_dims = [dim for _, dim in pairs]
        return [out for out, _ in pairs]


class Graded(Derived):
    """A region with a ``grad`` level around, whose own graph nobody reads.

    It is put back where other levels are below it, for what the function can see: that its inputs require grad, and
    what depends on that or on the level itself (the choice of an attention kernel, autocast under ``vmap``).
    """

    __slots__ = ("level", "lifted", "mask")

    def __init__(self, inner: Any, level: int, mask: tuple[bool, ...], lifted: tuple[bool, ...]) -> None:
        super().__init__(inner, ("grad", mask, lifted))
        self.level = level
        self.mask = mask
        self.lifted = lifted  # which operands are of this level

    def run(self, operands: Tensors) -> list[torch.Tensor]:
        with _torch.grad_level() as level, _torch.allow_requires_grad(True):
            wrapped = self.lift(operands, level)
            for tensor, follows in zip(wrapped, self.mask):
                if follows:
                    tensor.requires_grad_()
            outs = self.inner.run(wrapped)
            return [_torch.unwrap_grad(t, level) for t in outs]

    def lift(self, operands: Tensors, level: int) -> list[torch.Tensor]:
        """The operands as they are at the level."""
        return [_torch.wrap_grad(t, level) if lifted else t for t, lifted in zip(operands, self.lifted)]


class Jvp(Derived):
    """``jvp`` of a region. Its operands are all operands of the region, then the tangents of those in ``mask``."""

    __slots__ = ("mask", "out_mask")

    def __init__(self, inner: Any, mask: tuple[bool, ...]) -> None:
        super().__init__(inner, ("jvp", mask))
        self.mask = mask
        self.out_mask: list[bool] = []  # which outputs have a tangent, found by the first run

    @property
    def uses_func(self) -> bool:
        return self.inner.uses_func or _is_pullback(self.inner)

    def run(self, operands: Tensors) -> list[torch.Tensor]:
        primals = list(operands[: len(self.mask)])
        moving = [i for i, moves in enumerate(self.mask) if moves]

        def run(*duals: torch.Tensor) -> list[torch.Tensor]:
            inputs = list(primals)
            for i, dual in zip(moving, duals):
                inputs[i] = dual
            outs = self.inner.run(inputs)
            self.out_mask = self.out_mask or [differentiable(t) and is_dual(t) for t in outs]
            return [*outs, duals[0].new_zeros(())]  # torch.func.jvp wants at least one output

        heads = tuple(without_overlap(primals[i]) for i in moving)
        outs, tangents = torch.func.jvp(run, heads, tuple(operands[len(self.mask) :]))  # type: ignore[misc]
        return [*outs[:-1], *(t for t, moves in zip(tangents, self.out_mask) if moves)]


class Pullback(Derived):
    """The pullback of a region: from its operands and cotangents of its outputs in ``given`` to gradients.

    The gradients are those of the operands in ``needs``; ``present`` says which of them aren't zero by structure.
    """

    __slots__ = ("given", "level", "needs", "present")

    def __init__(self, inner: Any, needs: tuple[bool, ...], given: tuple[bool, ...], level: int) -> None:
        super().__init__(inner, ("pullback", needs, given))
        self.level = level  # the one that asks for it
        self.needs = needs
        self.given = given
        self.present: list[bool] = []  # found by running

    @property
    def primals(self) -> int:
        return len(self.needs)

    @property
    def uses_func(self) -> bool:
        return self.root.by_level or self.inner.uses_func

    def run(self, operands: Tensors, tape: Any = None) -> list[torch.Tensor]:
        return self.linearize(operands[: self.primals], tape)(operands[self.primals :])

    def linearize(self, primals: Tensors, tape: Any = None) -> Pull:
        """Run the region again at ``primals``; returns the linear map from cotangents to gradients."""
        if tape is not None:
            pull = tape.pull(self)
        elif self.root.by_level or _torch.transforms_active() or any(t.is_inference() for t in primals):
            pull = self._by_func(primals)
        else:
            pull = self._by_autograd(primals)

        def gradients(cotangents: Tensors) -> list[torch.Tensor]:
            grads = pull(cotangents)
            if self.present:  # another way to pull back may find more zeros by structure than the first one did
                heads = compress(primals, self.needs)
                grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, heads)]
            else:
                self.present = list(map(is_not, grads, repeat(None)))
            return list(compress(grads, self.present))

        return gradients

    def _by_func(self, primals: Tensors) -> Pull:
        needed = [i for i, needs in enumerate(self.needs) if needs]
        inner = self._without_level()
        lift = _lift_all if inner is self.inner else self.inner.lift

        def run(*heads: torch.Tensor) -> list[torch.Tensor]:
            inputs = lift(primals, _torch.current_interpreter().level())
            for i, head in zip(needed, heads):
                inputs[i] = head
            return self.chosen(inner.run(inputs))

        _, vjp = torch.func.vjp(run, *(primals[i] for i in needed))  # type: ignore[misc]
        return lambda cotangents: list(vjp(list(cotangents)))

    def _by_autograd(self, primals: Tensors) -> Pull:
        # The result is differentiated in turn only if something here is; aliases are the places to differentiate at.
        record = torch.is_grad_enabled()
        followed = record and any(map(is_recorded, primals))
        with torch.enable_grad():
            inputs = [_alias(t, followed) if needs else t for t, needs in zip(primals, self.needs)]
            outs = self.chosen(self.inner.run(inputs))
        heads = [t for t, needs in zip(inputs, self.needs) if needs]

        def pull(cotangents: Tensors) -> list:
            create = followed or (record and any(map(requires_grad_somewhere, cotangents)))
            return gradients(outs, [out.requires_grad for out in outs], heads, cotangents, create, retain=True)

        return pull

    def _without_level(self) -> Any:
        """What it differentiates, where the level of a vjp stands for the one that a Graded region put back."""
        inner = self.inner
        return inner.inner if isinstance(inner, Graded) and inner.level == self.level else inner

    def chosen(self, outs: Sequence[Any]) -> list:
        """Those that have a cotangent."""
        return [out for out, given in zip(outs, self.given) if given]


class InnerPullback(Pullback):
    """A pullback that is differentiated by its own level again: it runs at the level that the outer one puts back."""

    __slots__ = ()

    def __init__(self, pullback: Pullback) -> None:
        super().__init__(pullback._without_level(), pullback.needs, pullback.given, pullback.level)
        self.key, self.present = pullback.key, pullback.present

    def _by_func(self, primals: Tensors) -> Pull:
        with _torch.allow_requires_grad(True):
            return self._by_autograd(primals)


def gradients(
    outs: Sequence[Any],
    depends: Sequence[bool],
    heads: Tensors,
    cotangents: Tensors,
    create: bool,
    retain: bool,
) -> list:
    """``torch.autograd.grad``, with None for each head that the outputs don't depend on."""
    outs, cotangents = tuple(compress(outs, depends)), tuple(compress(cotangents, depends))
    if not outs:
        return [None] * len(heads)
    if _torch.dual_level_active():  # some formulas have tangents only where autograd records them
        retain = create = True
    # Unused heads are allowed, and nothing is accumulated.
    return list(_torch.engine_call(outs, cotangents, retain, create, tuple(heads), True, accumulate_grad=False))


def _lift_all(operands: Tensors, level: int) -> list[torch.Tensor]:
    return [_torch.wrap_grad(t, level) for t in operands]


def _alias(tensor: torch.Tensor, followed: bool) -> torch.Tensor:
    if followed and tensor.requires_grad:
        return tensor.view_as(tensor)
    return as_leaf(tensor)


def _is_pullback(region: Any) -> bool:
    return isinstance(region, Pullback) or (isinstance(region, Batched) and region.primals > 0)


def differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def without_overlap(tensor: torch.Tensor) -> torch.Tensor:
    """``make_dual`` lays the tangent out as the primal, which can't be done for an expanded one."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))
    return tensor.contiguous() if expanded else tensor
