"""A policy in the words of torch's selective checkpoint, which tags the operations of a trace.

The name of a value comes after the operation that made it, by which time that is tagged: it is tagged once more.
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

_NAMES = "remat.names"  # where a node of the trace has them


def judge(policy: Policy, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The answer to torch's question about an operation that was just traced."""
    name = private_compile.said_of_node().get(NAME) if op is torch.ops.aten.alias.default else None
    if name is not None:
        _tag_named(policy, private_compile.traced_node(args[0]), name)
    if facts_of(op).views:  # it is recomputed for nothing, and to save it would save what it is a view of
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _tag(policy.judge(ctx, op, args, kwargs, frozenset()))


def _tag(verdict: Verdict) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if verdict is RECOMPUTE else CheckpointPolicy.MUST_SAVE


def _tag_named(policy: Policy, node: Any, name: str) -> None:
    """Tag a node whose value is given a name, or is a view of what is, if it is one of the region's."""
    if node is None:  # a backend runs what Dynamo has traced as it is
        return
    while node.op == "call_function" and node.target is not operator.getitem and facts_of(node.target).views:
        node = node.args[0]
    made = [node]
    if node.target is operator.getitem:  # the operation has several results
        node = node.args[0]
        made = [node, *node.users]
    if node.op != "call_function" or "recompute" not in node.meta:
        return
    names = node.meta[_NAMES] = node.meta.get(_NAMES, frozenset()) | {name}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    ctx, op, *_ = question(node.target, args, kwargs, node.meta["val"])
    tag = _tag(policy.judge(ctx, op, args, kwargs, names))
    for each in made:
        each.meta["recompute"] = tag
