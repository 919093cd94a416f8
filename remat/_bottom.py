"""The bottom of the func lowering: no level is left, the operands are plain tensors.

A first run for ``grad`` levels above goes through the engine, on inputs cut from any history. The graph that this
leaves, a *tape* whose saved tensors are slots, is what the first backward runs: one recompute, stopped early.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import compress
from operator import is_, methodcaller
from typing import Any

import torch

from . import _torch
from ._around import Around
from ._bulk import requires_grad
from ._derived import Batched, Pullback, gradients
from ._errors import MutationError
from ._hooks import check_hooks_are_allowed, hooks_allowed, hooks_are_allowed, hooks_hidden
from ._intercept import Watch
from ._kept import NONE_KEPT, Kept
from ._parts import as_leaf, detached, is_dual, is_in_graph, is_recorded
from ._saver import Saver
from ._shield import in_batched_backward, outside_of_batched_backward

Tensors = Sequence[torch.Tensor]
_is_inference = methodcaller("is_inference")


class Call:
    """What the nodes of one call of a region share. It owns the tape, so no region may own it."""

    __slots__ = ("depends", "kept", "operands", "out_dims", "tape", "tape_fits")

    def __init__(self) -> None:
        self.depends: list[bool] | None = None  # which results of the first run depend on what is followed
        self.out_dims: dict[tuple, list] = {}
        self.tape: Tape | None = None
        self.tape_fits = True
        self.kept: Kept | None = None
        self.operands: list[torch.Tensor] = []  # those that ``kept`` guards

    def guarded(self, operands: Tensors) -> list[torch.Tensor]:
        """The operands of a run again, checked for changes, and as they were before the region changed them."""
        if self.kept is None:
            return list(operands)
        kept, known = self.kept, len(self.operands)
        unchanged = not (kept.changed or kept.sums) and list(map(_torch.raw_version, self.operands)) == kept.versions
        if unchanged and len(operands) >= known and all(map(is_, operands, self.operands)):
            return list(operands)
        same = [i < known and _is_same(t, self.operands[i]) for i, t in enumerate(operands)]
        return [kept.checked(i, t) if same[i] else t for i, t in enumerate(operands)]

    def close(self, root: Any) -> None:
        """After a first run without the engine, which does the same: let go of what isn't needed."""
        assert self.kept is not None
        self.kept.close()
        root.consts.close()

    def roll_back(self) -> None:
        """Undo what a first run that is given up did to the operands."""
        if self.kept is not None:
            self.kept.roll_back()


def _is_same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """A level may have made an alias of it, which shares its memory and its version."""
    if tensor is before or tensor.layout is not torch.strided or before.layout is not torch.strided:
        return tensor is before
    return tensor.shape == before.shape and tensor.data_ptr() == before.data_ptr()


class Tape:
    """The graph of a first run at the bottom: from its inputs to edges of its outputs."""

    __slots__ = ("edges", "inputs", "key", "last")

    def __init__(self, key: tuple, inputs: list[torch.Tensor], outs: Tensors) -> None:
        self.key = key
        self.inputs = inputs
        self.last = False  # no other backward will run it
        # Edges, as the outputs themselves need not be kept.
        self.edges = [torch.autograd.graph.get_gradient_edge(t) if t.requires_grad else None for t in outs]

    def pull(self, pullback: Pullback) -> Any:
        edges = pullback.chosen(self.edges)
        heads = list(compress(self.inputs, pullback.needs))
        depends = [edge is not None for edge in edges]
        return lambda cts: gradients(edges, depends, heads, cts, create=False, retain=not self.last)

    def serves(self, pullback: Any) -> bool:
        if not isinstance(pullback, Pullback) or pullback.inner.key != self.key:
            return False
        return all(map(requires_grad, compress(self.inputs, pullback.needs)))


def run_at_bottom(region: Any, operands: list[torch.Tensor], call: Call, wanted: Sequence[bool] | None) -> list:
    """Run a region, or what transforms made of it, on plain operands."""
    root = region.root
    dual = _torch.dual_level_active() and any(map(is_dual, operands))
    recorded = torch.is_grad_enabled() and any(map(is_recorded if dual else requires_grad, operands))
    if root.ran:
        if root.record is not None:
            root.record.in_backward()
        batched = outside_of_batched_backward() if in_batched_backward() else nullcontext()
        with hooks_allowed(whoever_forbids=True), batched:
            outs = _again(region, call.guarded(operands), call, recorded, dual)
        return list(map(detached, outs)) if _torch.dual_level_active() and not recorded else outs
    return _first(region, operands, call, wanted, recorded, dual)


def _first(region: Any, operands: list, call: Call, wanted: Any, recorded: bool, dual: bool) -> list:
    root = region.root
    inference = any(map(_is_inference, operands))  # autograd can't record these
    follows = wanted is not None and any(wanted) and not inference
    inputs = operands
    if follows and call.tape_fits:  # what is followed below, by autograd itself, stays as it is
        cut = wanted if not recorded else [w and not is_in_graph(t) for t, w in zip(operands, wanted)]
        inputs = [as_leaf(t) if each else t for t, each in zip(operands, cut)]
    call.operands, call.kept = operands, Kept(inputs, _names(root), root.memory.known.changing)
    if region.uses_func and recorded and not dual:
        return list(PlainNode.apply(region, call, *operands))
    _observe(root, inputs, follows, recorded or dual)
    enabled = torch.enable_grad() if follows and not torch.is_grad_enabled() else nullcontext()
    if region.uses_func:
        with enabled:
            outs = region.run(inputs)
        call.close(root)
        root.recorded(slots_tell=False)
    elif recorded or follows or ((dual or (torch.is_grad_enabled() and not inference)) and hooks_are_allowed()):
        check_hooks_are_allowed()
        saver = _saver(region, call.kept, root.consts)
        with enabled:
            try:
                outs = saver.run(region.run, inputs)
            except RuntimeError as error:
                if "leaf Variable that requires grad" in str(error):
                    raise MutationError(_CHANGES) from error
                raise
    else:
        root.recorder = None  # nothing is differentiated
        outs = region.run(inputs)
        call.close(root)
    if recorded or not follows:
        return outs
    if call.tape_fits and all(step[0] != "jvp" for step in region.key):  # a jvp level above has other results
        call.depends = [t.requires_grad for t in outs]
    if call.tape_fits and not region.uses_func:
        call.tape = Tape(region.key, inputs, outs)
    elif root.record is not None:
        root.record.keep_all()
    return list(map(detached, outs))


def _saver(region: Any, operands: Kept, consts: Kept, read_inside: bool = False) -> Saver:
    around = Around()
    around.take(operands)
    around.take_captured(consts)
    return Saver(region, operands, consts, around.hooks, read_inside)


def _observe(root: Any, inputs: list[torch.Tensor], follows: bool, recorded: bool) -> None:
    """Have the first run watched for captured tensors."""
    root.watch = Watch(root, root.operands(), inputs, follows, recorded)


def _again(region: Any, operands: list, call: Call, recorded: bool, dual: bool) -> list:
    if recorded and not (dual and region.uses_func):
        if region.uses_func:
            return list(PlainNode.apply(region, call, *operands))
        saver = _saver(region, Kept(operands, _names(region.root), set()), NONE_KEPT, read_inside=True)
        return saver.run(region.run, operands)
    pullback, primals = region, getattr(region, "primals", 0)
    while isinstance(pullback, Batched) and pullback.primals:
        pullback = pullback.inner
    if call.tape is not None and primals and call.tape.serves(pullback):
        return region.linearize(operands[:primals], call.tape)(operands[primals:])
    with hooks_hidden():
        return region.run(operands)


_CHANGES = (
    "The region changes an argument or a captured tensor in place while a torch.func transform differentiates it, so "
    "it can't be run again from the new value. Use the out-of-place operation, or give the region a copy: `.clone()`."
)


def _names(root: Any) -> Any:
    return lambda i: root.name(i) if i < root.arity else f"the derivative of {root.name(i % max(root.arity, 1))}"


class PlainNode(torch.autograd.Function):
    """A region in plain autograd that can't run under saved-tensor hooks, as it calls torch.func. It keeps operands."""

    @staticmethod
    def forward(ctx: Any, region: Any, call: Call, *operands: torch.Tensor) -> tuple:
        root = region.root
        first = not root.ran
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in operands]
        if first:
            _observe(root, inputs, follows=True, recorded=True)
        with torch.enable_grad(), _torch.set_forward_grad_enabled(True), nullcontext() if first else hooks_hidden():
            outs = region.run(inputs)
        if first:
            call.close(root)
            root.recorded(slots_tell=False)
        ctx.region, ctx.call = region, call
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        results = tuple(t.detach() for t in outs)
        ctx.mark_non_differentiable(*(r for r, t in zip(results, outs) if not t.requires_grad))
        return results

    @staticmethod
    @_torch.never_traced
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        from ._levels import pull_back

        call, needs = ctx.call, ctx.needs_input_grad[2:]
        call.guarded(call.operands)  # its error says more than autograd's
        return None, None, *pull_back(ctx.region, ctx.saved_tensors, cotangents, needs, call, level=0, skip=0)
