"""Wrappers to compare with: none, torch's own checkpoints, and Meta's `torch_remat`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = [
    "ATTENTION",
    "LINEAR",
    "MATMULS",
    "MM",
    "Fn",
    "Op",
    "Wrapper",
    "plain",
    "save_everything",
    "torch_checkpoint",
    "torch_remat_checkpoint",
    "torch_selective",
    "torch_selective_by_count",
]

Op: TypeAlias = torch._ops.OpOverload
Fn: TypeAlias = Callable[..., Any]
Wrapper: TypeAlias = Callable[[Fn], Fn]

aten = torch.ops.aten
MM = aten.mm.default
LINEAR = [MM, aten.addmm.default]
MATMULS = [*LINEAR, aten.bmm.default, aten.baddbmm.default]
ATTENTION = [  # each device has one of them
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


def plain(fn: Fn) -> Fn:
    """The function as it is."""
    return fn


def torch_checkpoint(fn: Fn) -> Fn:
    """The function under torch's own non-reentrant checkpoint."""
    return partial(checkpoint, fn, use_reentrant=False)


def torch_selective(saved: Any) -> Wrapper:
    """Torch's selective checkpoint, which saves the results of these operators, or what a policy function selects."""
    contexts = partial(create_selective_checkpoint_contexts, saved)
    return lambda fn: partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def torch_selective_by_count(*saved: tuple[Op, int]) -> Wrapper:
    """Torch's selective checkpoint, which saves the results of some calls: `(op, i)` is the `i`-th call of `op`."""

    def contexts() -> Any:
        calls: Counter[tuple[Op, bool]] = Counter()

        def decide(ctx: Any, op: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            run = op, ctx.is_recompute
            call = op, calls[run]
            calls[run] += 1
            return CheckpointPolicy.MUST_SAVE if call in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(decide)

    return lambda fn: partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def save_everything(ctx: Any, op: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy function for torch's selective checkpoint."""
    return CheckpointPolicy.MUST_SAVE


def torch_remat_checkpoint(fn: Fn) -> Fn:
    """The function under Meta's checkpoint, which saves the results of regions that are marked in the function."""
    import torch_remat

    return torch_remat.checkpoint()(fn)
