"""How a region is taken through the active torch.func levels: one rule per kind of level.

Each rule unwraps the operands of its level, lets the levels below run the transformed region, and wraps the results.
At a ``grad`` level the region is one Function node, which owns the operands. Its backward takes the region's pullback
through the levels in the same way, so derivatives of any order save only operands. A region that calls torch.func
itself is such a node in plain autograd too, below all levels.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD

from .._core import private
from .._core.passes import nearest_engine_call
from .._core.state import own_work
from .._core.tensors import is_dense, is_dual, is_in_graph, overlapping
from .._region.error_context import with_region
from .._region.hooks import is_hooks_refusal
from ..errors import MutationError, RematError
from .bottom import Call, is_followed_by_autograd
from .derived import Batched, Graded, Jvp, Pullback, PullbackOfBatched, Tensors, batched_pullback, reached


def apply(region: Any, operands: Tensors, call: Call, wanted: Sequence[bool] = ()) -> list:
    """Run a region at the top of the levels. ``wanted`` marks the operands that ``grad`` levels above follow."""
    operands = list(map(private.unwrap_if_dead, operands))
    if private.transforms_active():
        interpreter = private.current_interpreter()
        return _RULES[interpreter.key().value](interpreter, region, operands, call, wanted)
    if region.uses_func and is_followed_by_autograd(operands) and not any(map(is_dual, operands)):
        inputs = [t.detach().requires_grad_(is_in_graph(t)) for t in operands]
        outs = call.at_bottom(region, inputs, ())
        followed = {i: t for i, t in enumerate(inputs) if t.requires_grad}
        unread = followed.keys() - reached(outs, followed)
        outside = {} if region is region.root else {i: operands[i] for i in followed}
        for i in reached(outs, outside):
            raise RematError(
                f"A derivative of a region that calls torch.func reads {region.root.inputs.name(i)} in a hook or a "
                f"Function's backward, which loses its derivative. Read it in a Function that has it as an input."
            )
        # The node leads to what is read. In a recompute the rest requires grad all the same.
        read = [t.detach() if i in unread else t for i, t in enumerate(operands)]
        return _separate(PlainNode.apply(region, call, outs, operands, *read), operands)
    return call.at_bottom(region, operands, wanted)


def _at_vmap(interpreter: Any, region: Any, operands: Tensors, call: Call, wanted: Sequence[bool]) -> list:
    level, randomness = interpreter.level(), interpreter.randomness()
    pairs = [private.unwrap_batched(t, level) for t in operands]
    values, dims = [value for value, _ in pairs], tuple(dim for _, dim in pairs)
    maps = randomness == "different" or any(dim is not None for dim in dims)  # or no result is batched
    sums = maps and any(w and dim is None for w, dim in zip(wanted, dims))
    # A region that was called outside of this level has drawn there what recomputes must draw.
    drawn = randomness if region.root.kinds[level - 1 : level] == (private.VMAP,) else "same"
    batched = Batched(region, dims, interpreter.batch_size(), drawn, sums)
    if isinstance(region, Pullback):
        inner = call.batched.get((level, _ungraded(region.inner)))
        batched, values = batched_pullback(batched, values, inner, call.orders_below, randomness)
    with interpreter.lower():
        outs = apply(batched, values, call, wanted)
    if wanted and not isinstance(batched, PullbackOfBatched):
        # A node above refers to the region, so it may need its pullback.
        call.batched[level, _ungraded(region)] = batched
    return [t if dim is None else private.wrap_batched(t, dim, level) for t, dim in zip(outs, batched.out_dims)]


def _at_jvp(interpreter: Any, region: Any, operands: Tensors, call: Call, wanted: Sequence[bool]) -> list:
    level = interpreter.level()
    duals = [fwAD.unpack_dual(t) if private.level_of(t) == level and is_dense(t) else (t, None) for t in operands]
    primals = [private.unwrap_grad(private.unwrap_if_dead(primal), level) for primal, _ in duals]
    tangents = [private.unwrap_grad(private.unwrap_if_dead(t), level) for _, t in duals if t is not None]
    mask = tuple(t is not None for _, t in duals)
    if not tangents:
        region = _graded(region, level, operands, mask)
        with interpreter.lower():
            outs = apply(region, primals, call, wanted)
        return _wrapped(outs, level)
    moved = Jvp(region, mask, tuple([private.level_of(t) == level and not moves for t, moves in zip(operands, mask)]))
    wanted = [*wanted, *compress(wanted, mask)]
    with private.set_forward_grad_enabled(True), interpreter.lower():
        outs = apply(moved, [*primals, *tangents], call, wanted)
    wrapped = _wrapped(outs, level)
    rest = iter(wrapped[len(moved.out_mask) :])
    return [fwAD.make_dual(t, next(rest)) if moves else t for t, moves in zip(wrapped, moved.out_mask)]


def _at_grad(interpreter: Any, region: Any, operands: Tensors, call: Call, wanted: Sequence[bool]) -> list:
    level = interpreter.level()
    if any(private.level_of(t) == level and is_dual(t) for t in operands):
        raise RematError(
            "A region got a dual tensor that `forward_ad.make_dual` made inside a function differentiated by "
            "torch.func.grad or vjp. Make the dual tensor outside of that function, or use torch.func.jvp inside."
        )
    recorded = torch.is_grad_enabled()
    followed = tuple([recorded and is_in_graph(t) and private.level_of(t) == level for t in operands])
    region = _graded(region, level, operands, followed)
    if not any(followed):
        with interpreter.lower():
            outs = apply(region, _unwrapped(operands, level), call, wanted)
        return _wrapped(outs, level)
    wanted = [a or b for a, b in zip(followed, wanted)] if wanted else followed
    # A tensor of a level below may require grad there, or have a tangent. This level's node must not see that.
    operands = [t if private.level_of(t) == level else private.wrap_grad(t, level) for t in operands]
    with private.single_level_functions_allowed():
        outs = RegionNode.apply(region, call, level, wanted, *operands)  # type: ignore[attr-defined]
    return list(outs) if isinstance(region, Pullback) else _separate(outs, operands)


def _separate(outs: Tensors, operands: Tensors) -> list:
    """Let autograd refuse to change a node's result in place if the derivative of another tensor had to follow.

    Results of a node are no views of each other or of operands, whatever memory they share. No operation may change one
    of the views that an operation with several results makes. Gradients are no views without a region either.
    """
    shared = overlapping({i: t for i, t in enumerate(outs) if t.requires_grad}, operands)
    return [t.unsqueeze(0).unbind()[0] if i in shared else t for i, t in enumerate(outs)]


def _unwrapped(tensors: Sequence[Any], level: int) -> list:
    return [None if t is None else private.unwrap_grad(t, level) for t in tensors]


def _wrapped(values: Sequence[Any], level: int) -> list:
    return [None if t is None else private.wrap_grad(t, level) for t in values]


def _graded(region: Any, level: int, operands: Tensors, followed: tuple[bool, ...]) -> Any:
    """Restore a level around a first run where the function can see it: other levels are below, or a `Watch` saw it."""
    root = region.root
    below = root.kinds[: level - 1]
    if root.ran or not (private.VMAP in below or private.JVP in below or root.graded):
        return region
    return Graded(region, level, followed, tuple([private.level_of(t) == level for t in operands]))


def _ungraded(region: Any) -> Any:
    """The region without the levels that are restored around it, which a node above this one may not know."""
    while isinstance(region, Graded):
        region = region.inner
    return region


_RULES = {private.VMAP: _at_vmap, private.JVP: _at_jvp, private.GRAD: _at_grad}


class RegionNode(private.SingleLevelFunction):
    """A region at one ``grad`` level. It owns the operands."""

    @staticmethod
    def forward(ctx: Any, region: Any, call: Call, level: int, wanted: Sequence, *operands: torch.Tensor) -> tuple:
        first, lower = not region.root.ran, private.current_interpreter().lower
        with private.set_forward_grad_enabled(True), torch.enable_grad(), lower():
            outs = apply(region, _unwrapped(operands, level), call, wanted)
        wrapped = tuple(_wrapped(outs, level))
        ctx.region, ctx.call, ctx.level, ctx.thread = region, call, level, threading.get_ident()
        ctx.operands = operands  # saved ones would live until the level ends; changes are detected at the bottom
        ctx.set_materialize_grads(False)
        is_of_level = isinstance(region, Graded) and region.level == level
        depends = region.depends if is_of_level else call.depends
        if first and depends is not None:
            ctx.mark_non_differentiable(*(t for t, d in zip(wrapped, depends) if not d))
        return wrapped

    @staticmethod
    @private.never_traced
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        region, call, level, operands = ctx.region, ctx.call, ctx.level, ctx.operands
        needs = ctx.needs_input_grad[4:]
        if not _graph_is_unreachable(level, operands, ctx.thread):
            grads = pull_back(region, operands, cotangents, needs, call, level)
        else:  # this is the node's only backward, and its level need not record it
            ctx.region = ctx.call = ctx.operands = None
            if call.tape is not None and region is region.root and len(region.kinds) == 1:
                call.tape.last = True  # neither a further derivative nor another level needs it
            with private.current_interpreter().lower():
                values, below = _unwrapped(operands, level), _unwrapped(cotangents, level)
                grads = pull_back(region, values, below, needs, call, level)
            grads = _wrapped(grads, level)
        return None, None, None, None, *grads


class PlainNode(torch.autograd.Function):
    """A region in plain autograd that calls torch.func, so it can't run under saved-tensor hooks. Saves operands."""

    @staticmethod
    def forward(ctx: Any, region: Any, call: Call, outs: Tensors, saved: Tensors, *_: torch.Tensor) -> tuple:
        ctx.region, ctx.call = region, call
        # Autograd refuses inference tensors, and later changes of what the region changed, of which there is a copy.
        changed = [private.version(t) != guard.version for t, guard in zip(saved, call.guards)]
        ctx.held = {i: t for i, t in enumerate(saved) if t.is_inference() or any(changed[i : i + 1])}
        ctx.save_for_backward(*(None if i in ctx.held else t for i, t in enumerate(saved)))
        ctx.set_materialize_grads(False)
        results = tuple(t.detach() for t in outs)
        ctx.mark_non_differentiable(*(r for r, t in zip(results, outs) if not is_in_graph(t)))
        return results

    @staticmethod
    @private.never_traced
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        call, needs = ctx.call, ctx.needs_input_grad[4:]
        try:
            call.guarded(call.operands)  # its error is more precise than autograd's
        except MutationError as error:
            raise with_region(error, ctx.region, recomputing=False)  # noqa: B904
        operands = [ctx.held.get(i, t) for i, t in enumerate(ctx.saved_tensors)]
        return None, None, None, None, *pull_back(ctx.region, operands, cotangents, needs, call, level=0)


def _graph_is_unreachable(level: int, operands: Tensors, thread: int) -> bool:
    """Whether nothing can read the graph of a node's backward, which would keep each recompute's inputs alive.

    If torch.func.grad itself runs the backward, it unwraps the results and ends the level. The graph must be recorded
    for a ``vjp`` whose level has ended, and for user code that calls ``torch.autograd.grad`` inside of a transformed
    function. ``thread`` has run the node's forward.
    """
    alive = any(private.level_of(t) == level and not private.is_dead(t) for t in operands)
    if not alive or not private.transforms_active():
        return False
    interpreter = private.top_interpreter()
    if interpreter.key().value != private.GRAD or interpreter.level() != level:
        return False
    call = nearest_engine_call(sys._getframe(1))
    if call is None and threading.get_ident() != thread:
        # A device thread: the thread that called the engine waits in that very call.
        call = nearest_engine_call(sys._current_frames().get(thread))
    caller = call and call.f_back and call.f_back.f_back
    return caller is not None and caller.f_code is private.func_grad_engine_call.__code__


def pull_back(region: Any, operands: Tensors, cotangents: Sequence, needs: Sequence, call: Call, level: int) -> list:
    """The gradients of the operands in ``needs``, None for the others."""
    given = tuple(t is not None for t in cotangents)
    if not any(given) or not any(needs):
        return [None] * len(needs)
    pullback = Pullback(region, tuple(needs), given, level)
    try:
        with own_work():
            found = apply(pullback, [*operands, *(t for t in cotangents if t is not None)], call)
    except Exception as error:
        if is_hooks_refusal(error) and not region.uses_func:
            region.root.calls_func()
            call.tape = None  # its graph would call it under hooks
            return pull_back(region, operands, cotangents, needs, call, level)
        raise with_region(error, region, recomputing=False)  # noqa: B904
    grads, present = iter(found), iter(pullback.present)
    return [next(grads) if needed and next(present) else None for needed in needs]
