"""What the first run of a region leaves for its nodes: the guard on its operands, and a tape for the first backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._region.guards import NO_GUARDS, Guards
from .batched import Batched
from .derived import Tensors
from .pullback import Pull, Pullback, gradients


class Call:
    """What the nodes of one call of a region share of its first run. It owns the tape, so no region may own it."""

    __slots__ = ("batched", "bottom", "depends", "guards", "operands", "recorder", "tape", "watch")

    def __init__(self, recorder: Any, bottom: Callable[..., list]) -> None:
        self.recorder = recorder  # records the first run, under a policy
        self.bottom = bottom  # runs the region below all levels
        self.watch: Any = None  # of the first run
        self.depends: list[bool] | None = None  # which results depend on operands that are followed
        self.batched: dict[Any, Batched] = {}  # the ``vmap`` of the region, and of its pullbacks
        self.tape: Tape | None = None
        self.operands: Tensors = ()
        self.guards: Guards = NO_GUARDS  # the operands' guards

    def guard(self, root: Any, operands: Tensors, inputs: Tensors) -> None:
        """Guard the operands of the first run, as its ``inputs``, which may be leaves in place of operands."""
        self.operands, self.guards = operands, Guards(inputs, names(root))

    def guarded(self, operands: Tensors) -> list[torch.Tensor]:
        """The operands of a recompute, checked for changes, and as they were before the region changed them."""
        known = len(self.operands)
        same = [i < known and _is_same(t, self.operands[i]) for i, t in enumerate(operands)]
        return [self.guards[i].checked(t) if same[i] else t for i, t in enumerate(operands)]


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
        self.last = False  # no other backward will run it
        # Edges, as the outputs themselves need not stay alive.
        self.edges = [torch.autograd.graph.get_gradient_edge(t) if t.requires_grad else None for t in outs]

    def pull(self, pullback: Pullback) -> Pull:
        edges, heads = pullback.chosen(self.edges), pullback.heads(self.inputs)
        return lambda cotangents: gradients(edges, heads, cotangents, create=False, retain=not self.last)

    def serves(self, pullback: Pullback) -> bool:
        return pullback.inner is self.region and all(t.requires_grad for t in pullback.heads(self.inputs))


def names(root: Any) -> Callable[[int], str]:
    """The names in errors of the operands of a region and of its transforms."""
    return lambda i: root.name(i) if i < root.arity else f"the derivative of {root.name(i % max(root.arity, 1))}"
