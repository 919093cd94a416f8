"""Regions that torch.func transforms make of a region. They run on operands and can be recomputed, as a region can.

A derived region's first operands are those of the region it is made from, in the same order. Its ``run`` works on the
levels that are active where it is called, with none on plain tensors, and returns the new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import torch

from .._ambient.ambient import Ambient
from .._core import private
from .._core.tensors import as_leaf, chain, history, is_dual, is_in_graph, is_recorded, requires_grad_somewhere
from .._region.region import Run
from ..errors import MutationError

Tensors = Sequence[torch.Tensor]


@dataclass(slots=True, eq=False)
class Derived:
    """A transform of ``inner``; ``root`` is the region that the user called."""

    inner: Any
    root = property(lambda self: self.inner.root)

    @property
    def uses_func(self) -> bool:
        """Whether it calls ``torch.func.vjp``, which can't run under saved-tensor hooks: a pullback at a level does."""
        at_level = isinstance(self.inner, _PULLBACKS) and not isinstance(self, _PULLBACKS)
        return self.inner.uses_func or at_level


@dataclass(slots=True, eq=False)
class Graded(Derived):
    """A region inside a ``grad`` level of its own, whose graph is not read: its function can see the level."""

    level: int
    mask: tuple[bool, ...]
    lifted: tuple[bool, ...]  # which operands are of this level
    depends: list[bool] | None = None  # which results require grad at the level, found by a run

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        with private.grad_level() as level, private.allow_requires_grad(True):
            pairs = zip(lift(operands, self.lifted, level), self.mask)
            outs = self.inner.run([t.requires_grad_() if follows else t for t, follows in pairs], run)
            self.depends = [is_in_graph(t) for t in outs]
            return [private.unwrap_grad(t, level) for t in outs]


def lift(tensors: Tensors, which: Sequence[bool], level: int) -> list[torch.Tensor]:
    """The tensors, those in ``which`` wrapped for a ``grad`` level."""
    return [private.wrap_grad(t, level) if lifted else t for t, lifted in zip(tensors, which)]


@dataclass(slots=True, eq=False)
class Jvp(Derived):
    """``jvp`` of a region. Its operands are all operands of the region, then the tangents of those in ``mask``."""

    mask: tuple[bool, ...]
    lifted: tuple[bool, ...]  # which operands without a tangent are of this level, so that they may change in place
    out_mask: list[bool] = field(default_factory=list)  # which outputs have a tangent, found by the first run

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        primals = operands[: len(self.mask)]

        def at(*duals: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(duals)
            inputs = lift(primals, self.lifted, private.current_interpreter().level())
            outs = self.inner.run([next(rest) if moves else t for t, moves in zip(inputs, self.mask)], run)
            if (watch := run.watch) is not None:  # it can't tell when the level has ended
                watch.moving.update(id(t) for _, t in watch.stored if _moves(t))
            if any(lifted and is_dual(t) for t, lifted in zip(inputs, self.lifted)):
                raise MutationError(_GOT_TANGENT)
            self.out_mask = self.out_mask or list(map(is_dual, outs))
            return [*outs, duals[0].new_zeros(())]  # torch.func.jvp wants at least one output

        heads = tuple(compress(primals, self.mask))
        outs, tangents = torch.func.jvp(at, heads, tuple(operands[len(self.mask) :]))  # type: ignore[misc]
        return [*outs[:-1], *compress(tangents, self.out_mask)]


def _moves(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent of the current level."""
    return any(is_dual(t) for t in chain(tensor) if private.level_of(t) == private.current_level())


_GOT_TANGENT = (
    "A region under torch.func.jvp changes an argument or captured tensor in place and gives it a tangent, which the "
    "tensor outside would not get. Use an out-of-place operation in the region, and return the result."
)


Pull = Callable[[Tensors], list]


@dataclass(slots=True, eq=False)
class Pullback(Derived):
    """The map from a region's operands, and cotangents of its outputs in ``given``, to gradients.

    The gradients are those of the operands in ``needs``; ``present`` marks those that aren't zero by structure.
    """

    needs: tuple[bool, ...]
    given: tuple[bool, ...]
    level: int  # the level that needs it
    present: list[bool] = field(default_factory=list)  # found by running
    ambient: Ambient | None = None  # of the first backward: autocast around it casts there too

    def run(self, operands: Tensors, run: Run, tape: Any = None) -> list[torch.Tensor]:
        count = len(self.needs)
        return self.linearize(operands[:count], run, tape)(operands[count:])

    def linearize(self, primals: Tensors, run: Run, tape: Any) -> Pull:
        """Recompute the region at ``primals``, by the tape if there is one, and return the linear map."""
        if tape is not None:
            pull = tape.pull(self)
        elif private.transforms_active() or any(t.is_inference() for t in primals):
            pull = self._by_func(primals, run)
        else:
            pull = self._by_autograd(primals, run)

        def gradients(cotangents: Tensors) -> list[torch.Tensor]:
            if self.ambient is None:
                self.ambient = Ambient((), (), preserve_rng_state=False)
                grads = pull(cotangents)
            else:
                record = torch.is_grad_enabled()
                with self.ambient.restored(), torch.set_grad_enabled(record):
                    grads = pull(cotangents)
            if self.present:  # another way to pull back may find more zeros by structure than the first one did
                grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, compress(primals, self.needs))]
            else:
                self.present += [g is not None for g in grads]
            return list(compress(grads, self.present))

        return gradients

    def _by_func(self, primals: Tensors, run: Run) -> Pull:
        inner, lifted = self.inner, (True,) * len(primals)
        if isinstance(inner, Graded) and inner.level == self.level:  # the level of the vjp replaces it
            inner, lifted = inner.inner, inner.lifted

        unread: set[int] = set()

        def at(*heads: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(heads)
            inputs = lift(primals, lifted, private.current_interpreter().level())
            operands = [next(rest) if needs else t for t, needs in zip(inputs, self.needs)]
            outs = list(compress(inner.run(operands, run), self.given))
            unread.update({*range(len(heads))} - reached(outs, dict(enumerate(heads))))
            return outs

        _, vjp = torch.func.vjp(at, *compress(primals, self.needs))  # type: ignore[misc]

        def pull(cotangents: Tensors) -> list:
            grads = vjp(list(cotangents), create_graph=private.dual_level_active() or None)
            # Its zeros for what the outputs don't depend on would become NaN where a derivative is infinite.
            return [None if i in unread else g for i, g in enumerate(grads)]

        return pull

    def _by_autograd(self, primals: Tensors, run: Run) -> Pull:
        # The result is recorded only if an input or cotangent is. Gradients are taken with respect to the aliases.
        record = torch.is_grad_enabled()
        followed = record and any(map(is_recorded, primals))
        with torch.enable_grad():
            pairs = zip(primals, self.needs)
            inputs = [t if not needs else t[...] if followed and t.requires_grad else as_leaf(t) for t, needs in pairs]
            given = compress(self.inner.run(inputs, run), self.given)
            outs = [out if is_in_graph(out) else None for out in given]
        heads = list(compress(inputs, self.needs))

        def pull(cotangents: Tensors) -> list:
            create = followed or (record and any(map(requires_grad_somewhere, cotangents)))
            return gradients(outs, heads, cotangents, create, retain=True)

        return pull


def reached(outs: Tensors, ends: dict[int, torch.Tensor]) -> set[int]:
    """The numbers of the ends that are results, or to which the results' graphs lead at the outermost level of each."""
    nodes = {end.grad_fn for end in ends.values()}
    edges: set[Any] = {(out.grad_fn, out.output_nr) for out in outs}
    edges.update(edge for node in history([out.grad_fn for out in outs], nodes) for edge in node.next_functions)
    leaves = {*map(id, outs), *(id(getattr(node, "variable", None)) for node, _ in edges)}
    return {i for i, t in ends.items() if id(t) in leaves or (t.grad_fn and (t.grad_fn, t.output_nr) in edges)}


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


def transforms_of(region: Any) -> Iterator[Any]:
    """The transforms of the region, the last one first."""
    while region is not region.root:
        yield region
        region = region.inner


@dataclass(slots=True, eq=False)
class Batched(Derived):
    """``vmap`` of a region, over these dimensions of the operands."""

    in_dims: tuple[int | None, ...]
    batch_size: int
    randomness: str
    sums: bool = False  # a level above follows an operand without a batch dimension: its gradient must not be summed
    out_dims: list[int | None] = field(default_factory=list)  # found by running

    def run(self, operands: Tensors, run: Run) -> list[torch.Tensor]:
        return self._mapped(lambda inputs: self.inner.run(inputs, run), operands, self.in_dims)

    def _mapped(self, fn: Callable, operands: Tensors, in_dims: Sequence) -> list[torch.Tensor]:
        with private.vmap_level(self.batch_size, self.randomness) as level:
            outs = fn([t if d is None else private.wrap_batched(t, d, level) for t, d in zip(operands, in_dims)])
            pairs = [private.unwrap_batched(out, level) for out in outs]
        self.out_dims = [dim for _, dim in pairs]
        return [out for out, _ in pairs]


class BatchedPullback(Batched):
    """``vmap`` of the pullback of a region that is not mapped: that region is recomputed once, outside of the level."""

    __slots__ = ()

    def run(self, operands: Tensors, run: Run, tape: Any = None) -> list[torch.Tensor]:
        count = len(self.inner.needs)
        pull = self.inner.linearize(operands[:count], run, tape)
        return self._mapped(pull, operands[count:], self.in_dims[count:])


_PULLBACKS = Pullback, BatchedPullback


class PullbackOfBatched(Pullback):
    """A pullback of the ``vmap`` of a region. Its gradients have the operands' dimensions."""

    __slots__ = ()

    @property
    def out_dims(self) -> list:
        return list(compress(compress(self.inner.in_dims, self.needs), self.present))


def batched_pullback(
    batched: Batched, values: list, inner: Batched | None, orders_below: int, randomness: str
) -> tuple[Any, list]:
    """``batched``, which maps a pullback, and its operands; or the pullback of ``inner``, from a run of the region.

    ``orders_below``: how many derivatives autograd may take below ``vmap``. ``randomness``: of what a pullback draws.
    """
    pullback, dims, size = batched.inner, batched.in_dims, batched.batch_size
    count = len(pullback.needs)
    if inner is None or (inner.in_dims, inner.batch_size, inner.randomness) != (dims[:count], size, batched.randomness):
        # The region itself ran below this level, or before it was entered: a mapped pullback recomputes it there.
        is_mapped = any(dim is not None for dim in dims[:count])
        return batched if is_mapped else BatchedPullback(pullback, dims, size, randomness), values
    if all(dim is None for dim in (*inner.in_dims, *inner.out_dims)):
        # The level maps nothing: the region is recomputed once, in a level of its own.
        return BatchedPullback(replace(pullback, inner=inner), dims, size, randomness), values
    targets: list[Any] = list(compress(inner.out_dims, pullback.given))
    order = sum(isinstance(each, Pullback) for each in transforms_of(pullback))
    if order > orders_below or None in targets or None in compress(inner.in_dims, pullback.needs):
        return batched, values
    aligned = [_align(t, dim, target, size) for t, dim, target in zip(values[count:], dims[count:], targets)]
    # Both pullbacks have one list of what is present.
    shared = PullbackOfBatched(inner, pullback.needs, pullback.given, pullback.level, pullback.present)
    return shared, values[:count] + aligned


def _align(tensor: torch.Tensor, dim: int | None, target: int, size: int) -> torch.Tensor:
    if dim is None:
        return tensor.unsqueeze(target).expand(*tensor.shape[:target], size, *tensor.shape[target:])
    return tensor.movedim(dim, target)
