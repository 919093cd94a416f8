"""The bottom of a region in a compiled transform: no level is left, the operands are tensors of AOT autograd.

All of it is one graph, in which a recompute is a second copy of the region. The copy is made to depend on the
cotangents, as a compiler could otherwise move it to the first run, where its values would live until the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .._core import private, private_compile
from .._core.parts import as_leaf, is_recorded
from .._functorch.bottom import CHANGES
from .._functorch.derived import Tensors
from .._functorch.pullback import Pullback
from .._functorch.tape import Call
from .._region.hooks import hooks_allowed
from .._region.run import Run
from ..errors import MutationError
from .tags import judge


def run_at_bottom(region: Any, operands: Tensors, call: Call, wanted: Sequence[bool] | None) -> list:
    """Run a region, or a transform of it, on tensors of AOT autograd."""
    root = region.root
    run = partial(_again, region) if root.ran else partial(region.run, run=Run())
    recorded = torch.is_grad_enabled() and any(map(is_recorded, operands))
    if recorded and not region.uses_func:
        run = partial(_checkpointed, run, root.saved.policy)
    if root.ran:
        return run(operands)
    before = list(map(private_compile.value_now, operands))
    outs = _first(run, operands, () if recorded else wanted or ())
    now = map(private_compile.value_now, operands)
    root.changed = {i: old for i, (old, new) in enumerate(zip(before, now)) if old is not new}
    if any(is_recorded(operands[i]) for i in root.changed):
        raise MutationError(CHANGES)
    return outs


def _first(run: Callable, operands: Tensors, wanted: Sequence[bool]) -> list:
    """A first run; operands in ``wanted`` are cut from their history."""
    if not any(wanted):
        return run(operands)
    # With grad mode the same kernels are chosen as in a recompute, which is differentiated.
    with torch.enable_grad():
        outs = run([as_leaf(t) if each else t for t, each in zip(operands, wanted)])
    return [t.detach() for t in outs]


def _again(region: Any, operands: Tensors) -> list:
    """A recompute, on operands that depend on the cotangents."""
    count = _primals(region, len(operands))
    before = region.root.before(operands[:count])
    return region.run([*after(before, operands[count:]), *operands[count:]], Run())


def _primals(region: Any, count: int) -> int:
    """The number of operands of a recompute before the cotangents."""
    while region is not region.root:
        if isinstance(region, Pullback):
            return len(region.needs)
        region = region.inner
    return count


def after(tensors: Tensors, others: Tensors) -> list[torch.Tensor]:
    """These tensors, made to depend on the others by plain operations, which every backend supports."""
    known = [t.detach().reshape(-1)[:1].reshape(()) for t in others if t.numel()]
    if not known:
        return list(tensors)
    condition = reduce(torch.logical_and, [t == t for t in known])
    return [torch.where(condition, t, t) for t in tensors]


def _checkpointed(run: Callable, policy: Any, operands: Tensors) -> list:
    """A run as a checkpointed part of the graph, for the partitioner, if autograd differentiates below all levels."""

    def contexts() -> tuple:
        first, again = create_selective_checkpoint_contexts(partial(judge, policy))
        first.ac_graph_id = next(private_compile.graph_ids)
        return first, again

    with hooks_allowed(even_if_disabled=True):
        return private.original_checkpoint(
            lambda *tensors: run(list(tensors)),
            *operands,
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=False,
            context_fn=contexts,
        )
