"""The lowering under ``torch.compile``, for regions that Dynamo traces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .._core import private
from .._core.lines import warn
from .._core.state import state, within
from .._policy.policy import NOTHING, Budget, Policy, as_policy
from .._region.options import Options
from . import transforms
from .graphs import judge, reason_to_break


def call(fn: Callable, options: Options, args: tuple, kwargs: dict, context_fn: Callable | None = None) -> Any:
    """Call ``fn`` as a checkpointed part of the graph that is being traced, with a ``context_fn`` or a policy.

    The outermost region decides for everything inside it, so inner regions are inlined.
    """
    if options.determinism_check != "metadata" or options.debug or not options.early_stop:
        warn_once(_IGNORED_OPTIONS)
    policy = options.policy
    if isinstance(policy, Budget):
        warn_once(_IGNORED_BUDGET)
        policy = None
    if state.traced is NOTHING and policy is not None and as_policy(policy) is not NOTHING:
        warn_once(_INNER_POLICY)
    if state.disabled or state.traced is not None or private.exporting() or not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    known = policy if isinstance(policy, Policy) else NOTHING  # a function or a list selects no names
    with within(traced=known), private.no_nested_graph_breaks():
        if private.transforms_active():
            return transforms.call(fn, args, kwargs, policy, context_fn)
        if policy is not None:
            # Dynamo takes a partial of a function as a context, and only one that it sees being made.
            context_fn = functools.partial(_contexts_of, policy)
        settings: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        return private.original_checkpoint(
            lambda *inputs: _or_break(fn(*inputs, **kwargs)),
            *args,
            use_reentrant=False,
            preserve_rng_state=options.preserve_rng_state,
            **settings,
        )


def _or_break(result: Any) -> Any:
    """The result of a region that is part of the graph. Another one breaks the graph, so that Python runs it."""
    if reason := reason_to_break():
        private.graph_break(reason)
    return result


_IGNORED_OPTIONS = (
    "The options determinism_check, debug and early_stop of a region have no effect under torch.compile: the region's "
    "graph is recomputed as it was traced."
)
_INNER_POLICY = (
    "A region with a policy is inside of a region without one. Under torch.compile the outermost region decides, so "
    "nothing is saved in it: give the policy to the outer region."
)
_IGNORED_BUDGET = (
    "A region with a budget saves nothing under torch.compile: a budget chooses what to save after a first run, and "
    "compiled code is traced before that. Use another policy, or set the compiler's own `activation_memory_budget`, "
    "which applies to the whole graph."
)


@private.constant  # so that it is called while Dynamo traces
def warn_once(message: str) -> bool:
    _warn(message)
    return True


_warn = functools.cache(warn)


def _contexts_of(policy: Any) -> tuple:
    """A policy as the contexts of torch's selective checkpoint."""
    return create_selective_checkpoint_contexts(functools.partial(judge, as_policy(policy)))
