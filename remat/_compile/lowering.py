"""The lowering under ``torch.compile``: torch's checkpoint, with the policy in the words of its selective one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .._core import private
from .._policy.policy import Verdict, as_policy
from .._region.options import Options


def call(fn: Callable, options: Options, args: tuple, kwargs: dict) -> Any:
    """Call ``fn`` as a checkpointed part of the graph that is being traced; inlined under torch.func and export."""
    if options.policy is not None and options.policy.saves_everything:
        return fn(*args, **kwargs)
    return checkpoint(fn, args, kwargs, options.policy, preserve_rng_state=options.preserve_rng_state)


def checkpoint(fn: Callable, args: tuple, kwargs: dict, policy: Any, **settings: Any) -> Any:
    """The same with settings of torch's function."""
    if private.transforms_active() or private.exporting():
        return fn(*args, **kwargs)
    if policy is not None:  # Dynamo takes a partial of a function as a context, and only one that it sees being made
        settings["context_fn"] = functools.partial(_contexts_of, policy)
    with private.no_nested_graph_breaks():
        return private.original_checkpoint(
            lambda *inputs: fn(*inputs, **kwargs), *args, use_reentrant=False, **settings
        )


def _contexts_of(policy: Any) -> tuple:
    """A policy as torch's selective checkpoint takes it. Names aren't seen there, and what is offloaded is saved."""
    policy = as_policy(policy)

    def judge(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = policy.judge(ctx, op, args, kwargs, frozenset()) is not Verdict.RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(judge)
