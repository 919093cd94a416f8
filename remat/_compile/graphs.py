"""What is traced: a policy as tags on its operations, and regions that can't be part of a compiled graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .._core import private
from .._core.facts import facts_of, tensors
from .._core.tensors import bottom, holder
from .._policy.names import NAME
from .._policy.policy import RECOMPUTE, Policy, Verdict
from .._policy.predicates import Question, question

_NAMES = "remat.names"  # the key of the names in a node's ``meta``


def judge(policy: Policy, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy's decision about an operation of the trace, as torch's policy functions return it.

    A value gets its name after the operation that made it was tagged, so that operation is tagged once more.
    """
    for node, verdict in judge_named(policy, op, args):
        for each in (node, *(user for user in node.users if user.target is operator.getitem)):
            each.meta["recompute"] = _tag(verdict)
    if facts_of(op).views:  # to recompute a view costs nothing, and to save it would save its base
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _tag(policy.judge(Question(ctx, op, args, kwargs, {})))


def _tag(verdict: Verdict) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if verdict is RECOMPUTE else CheckpointPolicy.MUST_SAVE


def judge_named(policy: Policy, op: Any, args: tuple) -> list[tuple[Any, Verdict]]:
    """For an operation that gives a value a name: the node that made the value, and the verdict on it by all its names.

    No node is found if a backend runs Dynamo's trace as it is, or if the value is an argument of the graph.
    """
    name = private.said_of_node().get(NAME) if op is torch.ops.aten.alias.default else None
    node = None if name is None else maker(private.traced_node(args[0]))
    if node is None:
        return []
    names = node.meta[_NAMES] = node.meta.get(_NAMES, frozenset()) | {name}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return [(node, policy.judge(question(node.target, args, kwargs, node.meta["val"]), names))]


def maker(node: Any) -> Any:
    """The node of the operation that made a value; ``node`` may be a view of it, or one of several results."""
    while node is not None and node.op == "call_function":
        if node.target is not operator.getitem and not facts_of(node.target).views:
            return node
        node = node.args[0]
    return None


_TRANSFORM = (
    "The region calls torch.func.grad or vjp, which refuse the saved-tensor hooks of a compiled region. Python runs "
    "the region instead: compile without fullgraph=True."
)
_CHANGE = (
    "The region changes a buffer, a parameter or an argument of the compiled function in place, and its results depend "
    "on that tensor, of which a compiled recompute would read the new value. Python runs the region instead: compile "
    "without fullgraph=True."
)


@private.constant  # so that it is called while Dynamo traces
def reason_to_break() -> str:
    """Why the region that Dynamo has traced to its end can't be part of the graph; empty if it can be."""
    graph, called, versions, whole = private.traced_function()
    if any(node.target is private.hooks_disable for node in chain(graph.nodes, *map(nodes, called))):
        return _TRANSFORM
    changed = {holder(t) for t, version in zip(_inputs(graph), versions) if private.version(t) != version}
    # A change of any other tensor is made out of place, when AOT autograd traces.
    changed &= set(map(holder, _inputs(whole)))
    return _CHANGE if _are_differentiated(changed, graph) else ""


def _are_differentiated(holders: set[Any], graph: Graph) -> bool:
    """Whether a value that depends on inputs with these holders requires grad: then a recompute may read them."""
    depend: set[Node] = set()
    for node in graph.nodes:
        given = _read(node)
        used = _tensors(given)
        if depend.isdisjoint(given) and holders.isdisjoint(map(holder, used)):
            continue
        results = _tensors([node])
        if any(t.requires_grad for t in results):
            return True
        depend.add(node)
        holders.update(map(holder, results or used))  # without a result it writes to an operand
    return False


def _read(node: Node) -> list[Node]:
    """What an operation reads. A norm in training only writes its running statistics."""
    if node.target in (F.batch_norm, F.instance_norm) and node.args[5:6] == (True,):
        return [each for each in node.all_input_nodes if each not in node.args[1:3]]
    return node.all_input_nodes


def nodes(module: GraphModule) -> list[Node]:
    """The nodes of a graph, and of those that its operators call."""
    return [node for each in module.modules() if isinstance(each, GraphModule) for node in each.graph.nodes]


def _inputs(graph: Graph) -> list[torch.Tensor]:
    return _tensors(graph.find_nodes(op="placeholder"))


def _tensors(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """The fake tensors of Dynamo's nodes, without the levels of transforms around them."""
    return [bottom(tensor) for node in nodes for tensor in tensors(node.meta.get("example_value"))]
