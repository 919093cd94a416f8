"""The bottom of the func lowering: no level is left, the operands are plain tensors.

For ``grad`` levels above, the engine executes the first run on inputs without history. Its graph, whose saved tensors
are slots, is a *tape*. The first backward executes it: one recompute, stopped early.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch

from .._core import private
from .._core.tensors import as_leaf, detached, is_dual, is_in_graph, is_recorded
from .._engine.frame import Frame, outside_of_batched_backward
from .._engine.lowering import Saver
from .._engine.operation_log import OpLog
from .._region.guards import CHANGED, NO_GUARDS, Guards, close, hand_captured, hand_operands
from .._region.hooks import check_hooks_are_allowed, hooks_allowed, hooks_hidden
from .._region.region import Run
from .._selective.replay import Recompute
from ..errors import MutationError
from .derived import Batched, BatchedPullback, Pull, Pullback, Tensors, gradients, reached, transforms_of
from .watch import Watch


class Call:
    """What the nodes of one call of a region share of its first run. It owns the tape, so no region may own it."""

    __slots__ = ("batched", "depends", "guards", "operands", "orders_below", "recorder", "tape", "unread", "watch")

    def __init__(self, recorder: Any = None, orders_below: int = 2) -> None:
        self.recorder = recorder  # records the first run, under a policy
        self.watch: Any = None  # of the first run
        self.depends: list[bool] | None = None  # which results depend on operands that are followed
        self.batched: dict[tuple[int, Any], Batched] = {}  # level, region -> its ``vmap``, also of its pullbacks
        self.tape: Tape | None = None
        self.operands: Tensors = ()
        self.guards: Guards = NO_GUARDS  # the operands' guards
        self.orders_below = orders_below  # see `Watch`
        self.unread: set[int] = set()  # operands that autograd follows below all levels, and no result depends on

    def at_bottom(self, region: Any, operands: Tensors, wanted: Sequence[bool]) -> list:
        """Run a region, or a transform of it, on plain operands."""
        if self.unread:
            operands = [as_leaf(t, False) if i in self.unread else t for i, t in enumerate(operands)]
        root, recorded = region.root, is_followed_by_autograd(operands)
        if not root.ran:
            return self._first(region, operands, wanted, recorded)
        if root.record is not None:
            root.record.in_backward()
        with hooks_allowed(), outside_of_batched_backward():
            outs = self._again(region, self.guarded(operands), recorded)
        return list(map(detached, outs)) if private.dual_level_active() and not recorded else outs

    def guarded(self, operands: Tensors) -> list[torch.Tensor]:
        """The operands of a recompute, checked for changes, and as they were before the region changed them."""
        known = []
        for t, before, guard in zip(operands, self.operands, self.guards):
            if _is_same(t, before):
                t = guard.checked(t, before)
            elif guard.lost or guard.copy is not None:  # a tangent, whose number is another one in a derivative
                raise MutationError("A region changes an input in place that has a tangent. Change a copy: `.clone()`.")
            known.append(t)
        return [*known, *operands[len(known) :]]

    def _first(self, region: Any, operands: Tensors, wanted: Sequence[bool], recorded: bool) -> list:
        root = region.root
        dual = any(map(is_dual, operands))
        inference = any(t.is_inference() for t in operands)  # autograd can't record inference tensors
        follows = bool(wanted) and not inference
        # Whether one graph has the gradients that each of the levels needs.
        fits = follows and not any(isinstance(each, Batched) and each.sums for each in transforms_of(region))
        inputs = operands
        if fits:  # operands that autograd itself follows, below all levels, stay as they are
            inputs = [as_leaf(t) if w and not (recorded and is_in_graph(t)) else t for t, w in zip(operands, wanted)]
        self.operands, self.guards = operands, Guards(inputs, root.inputs.name)
        in_node = recorded and region.uses_func and not dual  # a node of plain autograd represents all of the region
        self.watch = Watch(root, follows or in_node, recorded or dual)
        with torch.enable_grad() if follows else nullcontext():
            if region.uses_func or not (recorded or follows):
                outs = self._first_without_hooks(region, inputs, recorded or follows)
            else:
                outs = self._first_under_hooks(region, inputs)
        self.orders_below = self.watch.orders_below
        if fits:
            self.depends = [is_in_graph(t) for t in outs]
        if recorded and fits:  # else the results would have a history that the same program without remat hasn't
            own = operands[: len(root.inputs.operands)]  # without tangents, whose numbers may be those of cotangents
            followed = {i: t for i, t in enumerate(own) if is_in_graph(t)}
            self.unread = followed.keys() - reached(outs, followed)
            recorded = any(is_in_graph(t) for i, t in enumerate(operands) if i not in self.unread)
        if recorded or not follows:
            return outs
        if fits and not region.uses_func:
            self.tape = Tape(region, inputs, outs)
        return list(map(detached, outs))

    def _first_under_hooks(self, region: Any, inputs: Tensors) -> list:
        check_hooks_are_allowed()
        root = region.root
        run = Run(OpLog() if root.options.debug else None, self.recorder, self.watch)
        try:
            return _run(region, inputs, self.guards, root.inputs.captured, run, root.options.read_inside)
        except RuntimeError as error:
            if is_refused_change(error):
                raise MutationError(f"An argument or a captured tensor {CHANGED}") from error
            raise

    def _first_without_hooks(self, region: Any, inputs: Tensors, differentiated: bool) -> list:
        root, recorder = region.root, self.recorder if differentiated else None
        outs = region.run(inputs, Run(None, recorder, self.watch))
        close(self.guards, root.inputs.captured)
        if recorder is not None:
            root.record = recorder.close(outs)
        return outs

    def _again(self, region: Any, operands: Tensors, recorded: bool) -> list:
        root = region.root
        if recorded and not region.uses_func:
            guards = Guards(operands, root.inputs.name)
            run = Recompute(OpLog() if root.options.debug else None, root=root)
            return _run(region, operands, guards, NO_GUARDS, run, read_inside=True)
        pullback = region.inner if isinstance(region, BatchedPullback) else region
        if self.tape is not None and isinstance(pullback, Pullback) and self.tape.serves(pullback):
            return region.run(operands, Recompute(root=root), self.tape)
        if root.options.debug:
            root.known.warn_once("uncompared", UNCOMPARED, root.line)
        with hooks_hidden():
            return region.run(operands, Recompute(root=root))


def _is_same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a tensor is ``before``, or an alias of it that a level has made, with the same memory and version."""
    if tensor is before or tensor.layout is not torch.strided or before.layout is not torch.strided:
        return tensor is before
    return tensor.shape == before.shape and tensor.data_ptr() == before.data_ptr()


class Tape:
    """The graph of a first run at the bottom: from its inputs to edges of its outputs."""

    __slots__ = ("edges", "inputs", "last", "region")

    def __init__(self, region: Any, inputs: Tensors, outs: Tensors) -> None:
        self.region = region
        self.inputs = inputs
        self.last = False  # only one more backward will run it
        # Edges, as the outputs themselves need not stay alive.
        self.edges = [torch.autograd.graph.get_gradient_edge(t) if is_in_graph(t) else None for t in outs]

    def pull(self, pullback: Pullback) -> Pull:
        edges, heads = list(compress(self.edges, pullback.given)), list(compress(self.inputs, pullback.needs))
        return lambda cotangents: gradients(edges, heads, cotangents, create=False, retain=not self.last)

    def serves(self, pullback: Pullback) -> bool:
        return pullback.inner is self.region and all(t.requires_grad for t in compress(self.inputs, pullback.needs))


def is_followed_by_autograd(operands: Tensors) -> bool:
    """Whether plain autograd records operations on plain operands."""
    return torch.is_grad_enabled() and any(map(is_recorded, operands))


def is_refused_change(error: RuntimeError) -> bool:
    """Whether torch refuses to change a differentiated tensor in place. Only the error's text shows it."""
    return "leaf Variable that requires grad" in str(error)


def _run(region: Any, inputs: Tensors, operands: Guards, captured: Guards, run: Run, read_inside: bool) -> list:
    """Run a region under the saved-tensor hooks of the engine."""
    outer = private.top_hooks(True)
    hand_operands(outer, operands)
    hand_captured(outer, captured)
    return Saver(Frame(region, operands, captured, outer, run, read_inside), run).run(region.run, inputs)


UNCOMPARED = (
    "debug=True compares no operations of a region whose derivative is itself mapped or differentiated, as in a "
    "Hessian-vector product. Use determinism_check='values', which compares the region's results there."
)
