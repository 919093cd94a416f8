"""The lowering under ``torch.compile``: torch's checkpoint, with the policy in the words of its selective one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from . import _torch
from ._policy import Policy, Verdict
from ._region import Options


def call(fn: Callable, options: Options, judge: Callable | None, args: tuple, kwargs: dict) -> Any:
    """Call ``fn`` as a checkpointed part of the graph that is being traced; inlined under torch.func and export."""
    if (
        _torch.transforms_active()
        or _torch.exporting()
        or (options.policy is not None and options.policy.saves_everything)
    ):
        return fn(*args, **kwargs)
    # Dynamo takes a partial of functions as a context, and only one that it sees being made.
    contexts: Any = (
        {} if judge is None else {"context_fn": functools.partial(create_selective_checkpoint_contexts, judge)}
    )
    return torch.utils.checkpoint.checkpoint(
        lambda *inputs: fn(*inputs, **kwargs),
        *args,
        use_reentrant=False,
        preserve_rng_state=options.preserve_rng_state,
        **contexts,
    )


def judge_of(policy: Policy | None) -> Callable | None:
    """A policy as torch's selective checkpoint takes it. Names aren't seen there, and what is offloaded is saved."""
    if policy is None or not policy.judges_ops:
        return None

    def judge(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = policy.judge(ctx, op, args, kwargs, frozenset()) is not Verdict.RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return judge
