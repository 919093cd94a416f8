"""A policy for torch's selective checkpoint, which tags the operations of a trace.

A value gets its name after the operation that made it was tagged, so that operation is tagged once more.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from .._core import private_compile
from .._core.facts import facts_of
from .._policy.judge import question
from .._policy.names import NAME
from .._policy.policy import Policy
from .._policy.verdict import RECOMPUTE, Verdict

_NAMES = "remat.names"  # the key of the names in a node's ``meta``


def judge(policy: Policy, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy's decision about an operation of the trace, as torch's policy functions return it."""
    for node, verdict in judge_named(policy, op, args):
        for each in (node, *results_of(node)):
            each.meta["recompute"] = _tag(verdict)
    if facts_of(op).views:  # to recompute a view costs nothing, and to save it would save its base
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _tag(policy.judge(ctx, op, args, kwargs, frozenset()))


def _tag(verdict: Verdict) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if verdict is RECOMPUTE else CheckpointPolicy.MUST_SAVE


def judge_named(policy: Policy, op: Any, args: tuple) -> list[tuple[Any, Verdict]]:
    """For an operation that gives a value a name: the node that made the value, and the verdict on it by all its names.

    No node is found if a backend runs Dynamo's trace as it is, or if the value is an argument of the graph.
    """
    name = private_compile.said_of_node().get(NAME) if op is torch.ops.aten.alias.default else None
    node = None if name is None else maker(private_compile.traced_node(args[0]))
    if node is None:
        return []
    names = node.meta[_NAMES] = node.meta.get(_NAMES, frozenset()) | {name}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    ctx, op, *_ = question(node.target, args, kwargs, node.meta["val"])
    return [(node, policy.judge(ctx, op, args, kwargs, names))]


def maker(node: Any) -> Any:
    """The node of the operation that made a value; ``node`` may be a view of it, or one of several results."""
    while node is not None and node.op == "call_function":
        if node.target is not operator.getitem and not facts_of(node.target).views:
            return node
        node = node.args[0]
    return None


def results_of(node: Any) -> list[Any]:
    """The nodes of the results of an operation that has several."""
    return [user for user in node.users if user.target is operator.getitem]
