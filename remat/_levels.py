"""How a region is taken through the active torch.func levels: one rule per kind of level.

Each rule unwraps the operands of its level, lets the levels below run what the transform makes of the region, and
wraps the results. At a ``grad`` level that is one Function node, which keeps the operands; its backward takes the
region's pullback through the levels in the same way, so that derivatives of any order keep operands only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat
from operator import and_, eq
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD

from . import _torch
from ._bottom import Call, run_at_bottom
from ._bulk import requires_grad
from ._derived import Batched, Graded, InnerPullback, Jvp, Pullback, differentiable, without_overlap
from ._errors import RematError
from ._parts import is_dual
from ._proof import nobody_reads_the_graph
from ._state import own_work

Tensors = Sequence[torch.Tensor]


def apply(region: Any, operands: Tensors, call: Call, wanted: Sequence[bool] | None = None, skip: int = 0) -> list:
    """Run a region at the top of the stack of levels; returns its new tensors.

    ``wanted`` are the operands that a ``grad`` level above follows. At the level ``skip`` nothing is followed.
    """
    operands = list(map(_torch.unwrap_if_dead, operands))
    if not _torch.transforms_active():
        return run_at_bottom(region, operands, call, wanted)
    interpreter = _torch.top_interpreter()
    kind = interpreter.key().value
    if kind == _torch.GRAD:
        return _at_grad(interpreter, region, operands, call, wanted, skip)
    if kind == _torch.VMAP:
        return _at_vmap(_torch.current_interpreter(), region, operands, call, wanted, skip)
    if kind == _torch.JVP:
        return _at_jvp(_torch.current_interpreter(), region, operands, call, wanted, skip)
    raise RuntimeError(f"remat does not know the torch.func transform {interpreter.key()}.")


class NeedsLevel(BaseException):
    """Gives a first run up: it drew random numbers, which a ``vmap`` level has a say in, batched operands or not."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region = region


# --- vmap -----------------------------------------------------------------------------------------------------------


def _at_vmap(interpreter: Any, region: Any, operands: Tensors, call: Call, wanted: Any, skip: int) -> list:
    level = interpreter.level()
    pairs = [_torch.unwrap_batched(t, level) for t in operands]
    values, dims = [value for value, _ in pairs], tuple(dim for _, dim in pairs)
    if all(dim is None for dim in dims) and not region.root.mapped:
        first = not region.root.ran
        with interpreter.lower():
            outs = apply(region, operands, call, wanted, skip)
        if first and interpreter.randomness() != "same" and region.root.ambient.moved():
            raise NeedsLevel(region.root)
        return outs
    batched, values = _batch(region, values, dims, interpreter, call)
    if wanted is not None and any(w and dim is None for w, dim in zip(wanted, dims)):
        call.tape_fits = False  # its gradient would be the sum over the batch
    with interpreter.lower():
        outs = apply(batched, values, call, wanted, skip)
    out_dims = batched.out_dims
    call.out_dims[batched.key] = out_dims
    if isinstance(region, Pullback):
        region.present = batched.present if isinstance(batched, Pullback) else region.present
    return [t if dim is None else _torch.wrap_batched(t, dim, level) for t, dim in zip(outs, out_dims)]


def _batch(region: Any, values: list, dims: tuple, interpreter: Any, call: Call) -> tuple[Any, list]:
    """``vmap`` of a region. Of a pullback it is the pullback of the ``vmap`` where that means the same."""
    size, randomness = interpreter.batch_size(), interpreter.randomness()
    if isinstance(region, Pullback):
        inner_dims, outer_dims = dims[: region.primals], dims[region.primals :]
        inner = Batched(region.inner, inner_dims, size, randomness)
        out_dims = call.out_dims.get(inner.key)
        needs_batched = all(dim is not None for dim, needs in zip(inner_dims, region.needs) if needs)
        if out_dims is not None and needs_batched and not region.root.by_level:
            targets = [dim for dim, given in zip(out_dims, region.given) if given]
            if all(target is not None for target in targets):
                aligned = [
                    _align(t, d, target, size) for t, d, target in zip(values[region.primals :], outer_dims, targets)
                ]
                pullback = PullbackOfBatched(inner, region.needs, region.given, region.level)
                return pullback, values[: region.primals] + aligned
        # The region itself ran below this level, or before it: a pullback that is mapped runs it again there.
        may_share = all(dim is None for dim in inner_dims) and out_dims is None
        return Batched(region, dims, size, randomness, may_share), values
    return Batched(region, dims, size, randomness), values


class PullbackOfBatched(Pullback):
    """A pullback whose gradients have the batch dimensions of the operands."""

    __slots__ = ()

    @property
    def out_dims(self) -> list:
        dims = [dim for dim, needs in zip(self.inner.in_dims, self.needs) if needs]
        return [dim for dim, present in zip(dims, self.present) if present]


def _align(tensor: torch.Tensor, dim: int | None, target: int | None, size: int) -> torch.Tensor:
    assert target is not None
    if dim is None:
        return tensor.unsqueeze(target).expand(*tensor.shape[:target], size, *tensor.shape[target:])
    return tensor.movedim(dim, target)


# --- jvp ------------------------------------------------------------------------------------------------------------


def _at_jvp(interpreter: Any, region: Any, operands: Tensors, call: Call, wanted: Any, skip: int) -> list:
    level = interpreter.level()
    duals = [fwAD.unpack_dual(t) if _torch.level_of(t) == level else (t, None) for t in operands]
    primals = [_torch.unwrap_grad(primal, level) for primal, _ in duals]
    tangents = [None if t is None else _torch.unwrap_grad(t, level) for _, t in duals]
    mask = tuple(t is not None for t in tangents)
    if not any(mask):
        region = _graded(region, level, operands, (False,) * len(mask))
        with interpreter.lower():
            outs = apply(region, primals, call, wanted, skip)
        return [_torch.wrap_grad(t, level) for t in outs]
    moved = Jvp(region, mask)
    if wanted is not None:
        wanted = [*wanted, *(w for w, moves in zip(wanted, mask) if moves)]
    with _torch.set_forward_grad_enabled(True), interpreter.lower():
        outs = apply(moved, [*primals, *(t for t in tangents if t is not None)], call, wanted, skip)
    count = len(moved.out_mask)
    wrapped = [_torch.wrap_grad(t, level) for t in outs]
    rest = iter(wrapped[count:])
    return [
        fwAD.make_dual(without_overlap(t), next(rest)) if moves else t
        for t, moves in zip(wrapped[:count], moved.out_mask)
    ]


# --- grad -----------------------------------------------------------------------------------------------------------


def _at_grad(interpreter: Any, region: Any, operands: Tensors, call: Call, wanted: Any, skip: int) -> list:
    level = interpreter.level()
    if _torch.dual_level_active() and any(_torch.level_of(t) == level and is_dual(t) for t in operands):
        raise RematError(
            "A region got a dual tensor that `forward_ad.make_dual` made inside of a function which torch.func.grad or "
            "vjp differentiates. Make it outside of that function, or use torch.func.jvp inside."
        )
    followed = [False] * len(operands)
    if level != skip and torch.is_grad_enabled():
        at_level = map(eq, map(_torch.level_of, operands), repeat(level))
        followed = list(map(and_, map(requires_grad, operands), at_level))
    region = _graded(region, level, operands, tuple(followed))
    if not any(followed):
        with _Below(interpreter, torch.is_grad_enabled()):
            outs = apply(region, _values(operands, level), call, wanted, skip)
        return _wrapped(outs, level)
    wanted = followed if wanted is None else [a or b for a, b in zip(followed, wanted)]
    job = Job(region, call, level, wanted, skip)
    # What is of a level below may require grad there, or have a tangent, which is no concern of this level's node.
    operands = [t if _torch.level_of(t) == level else _torch.wrap_grad(t, level) for t in operands]
    allowed = _torch.single_level_functions_allowed()
    _torch.allow_single_level_functions(True)
    try:
        return list(RegionNode.apply(job, *operands))  # type: ignore[attr-defined]
    finally:
        _torch.allow_single_level_functions(allowed)


def _values(operands: Tensors, level: int) -> list[torch.Tensor]:
    return list(map(_torch.unwrap_grad, operands, repeat(level)))


def _wrapped(values: Tensors, level: int) -> list[torch.Tensor]:
    return list(map(_torch.wrap_grad, values, repeat(level)))


class _Below:
    """Without the top level, a ``grad`` one; autograd is off if it was off around that level."""

    __slots__ = ("before", "recorded", "top")

    def __init__(self, interpreter: Any, recorded: bool) -> None:
        self.recorded = recorded and _torch.grad_interpreter(interpreter).prevGradMode()

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        _torch.set_grad_enabled(self.recorded)
        self.top = _torch.pop_level()

    def __exit__(self, *exception: Any) -> None:
        _torch.push_level(self.top)
        _torch.set_grad_enabled(self.before)


def _graded(region: Any, level: int, operands: Tensors, followed: tuple[bool, ...]) -> Any:
    """Put a level back around a first run, where the function could tell that it is missing.

    That is where other levels are below it, where it draws random numbers (laid out in memory differently), where it
    asks what autograd follows, where autocast tells levels apart, and where it cuts a tensor from the graph of this
    level alone.
    """
    root = region.root
    if root.ran or isinstance(region, Pullback):
        return region
    lifted = tuple([_torch.level_of(t) == level for t in operands])
    below = root.kinds[: level - 1]
    if _torch.VMAP in below or _torch.JVP in below or root.memory.known.graded or root.by_level:
        return Graded(region, level, followed, lifted)
    if _torch.VMAP in root.kinds and root.ambient.casts:
        return Graded(region, level, (False,) * len(followed), lifted)
    return region


class Job:
    """What a node is to do: a region and what its call knows. ``thread`` is where the forward ran."""

    __slots__ = ("call", "level", "region", "skip", "thread", "wanted")

    def __init__(self, region: Any, call: Call, level: int, wanted: Any, skip: int) -> None:
        self.region = region
        self.call = call
        self.level = level
        self.wanted = wanted
        self.skip = skip
        self.thread = threading.get_ident()


class RegionNode(_torch.SingleLevelFunction):
    """A region at one ``grad`` level. It keeps the operands."""

    @staticmethod
    def forward(ctx: Any, job: Job, *operands: torch.Tensor) -> tuple:
        level = job.level
        values = _values(operands, level)
        first = not job.region.root.ran
        with _torch.set_forward_grad_enabled(True), _Below(_torch.top_interpreter(), True):
            outs = apply(job.region, values, job.call, job.wanted, job.skip)
        wrapped = tuple(_wrapped(outs, level))
        # Attributes, not save_for_backward, which would keep them until the level ends; changes are seen at the bottom.
        ctx.job, ctx.operands = job, operands
        ctx.set_materialize_grads(False)
        known = job.call.depends if first else None
        depends = list(map(differentiable, wrapped)) if known is None else known
        ctx.mark_non_differentiable(*(t for t, d in zip(wrapped, depends) if not d))
        return wrapped

    @staticmethod
    @_torch.never_traced
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        job, operands = ctx.job, ctx.operands
        skip = 0
        if nobody_reads_the_graph(job.level, operands, job.thread):
            skip = job.level
            ctx.job = ctx.operands = None  # this was the node's only backward
            if job.call.tape is not None and job.region is job.region.root and len(job.region.kinds) == 1:
                job.call.tape.last = True  # no pullback of a pullback, and no other level's
        return None, *pull_back(job.region, operands, cotangents, ctx.needs_input_grad[1:], job.call, job.level, skip)


def pull_back(
    region: Any,
    operands: Tensors,
    cotangents: Sequence,
    needs: Sequence[bool],
    call: Call,
    level: int,
    skip: int,
) -> list:
    """The gradients of the operands in ``needs``, None for the others."""
    given = tuple(t is not None for t in cotangents)
    if not any(given) or not any(needs):
        return [None] * len(needs)
    if region.root.by_level and isinstance(region, Pullback) and region.level == level:
        region = InnerPullback(region)  # by `torch.autograd.grad` in a function under torch.func.grad
    pullback = Pullback(region, tuple(needs), given, level)
    with own_work():
        found = apply(pullback, [*operands, *(t for t in cotangents if t is not None)], call, skip=skip)
    if len(found) == len(needs):
        return found
    grads = iter(found)
    present = iter(pullback.present)
    return [next(grads) if needed and next(present) else None for needed in needs]
