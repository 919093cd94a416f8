"""What programs are compared under: nothing, torch's own checkpoints, and Meta's `torch_remat`."""

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
ATTENTION = [  # one of them on each device
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
    """The same with a selection: a list of operators, or a function as `create_selective_checkpoint_contexts` takes."""
    contexts = partial(create_selective_checkpoint_contexts, saved)
    return lambda fn: partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def torch_selective_by_count(*saved: tuple[Op, int]) -> Wrapper:
    """The same for what some calls of operators make: `(op, i)` is the `i`-th call of `op`."""

    def contexts() -> Any:
        calls: Counter[tuple[Op, bool]] = Counter()

        def verdict_on(ctx: Any, op: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            run = op, ctx.is_recompute
            call = op, calls[run]
            calls[run] += 1
            return CheckpointPolicy.MUST_SAVE if call in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(verdict_on)

    return lambda fn: partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def save_everything(ctx: Any, op: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """For torch's selective checkpoint."""
    return CheckpointPolicy.MUST_SAVE


def torch_remat_checkpoint(fn: Fn) -> Fn:
    """The function under Meta's checkpoint, which keeps what regions marked in the function say."""
    import torch_remat

    return torch_remat.checkpoint()(fn)
