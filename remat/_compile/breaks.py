"""Regions that can't be part of a compiled graph: its backward would fail, or have wrong gradients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from .._core import private, private_compile
from .._core.layout import holder

_TRANSFORM = (
    "The region calls torch.func.grad or vjp, which refuse the saved-tensor hooks of a compiled region. Python runs "
    "the region instead: compile without fullgraph=True."
)
_CHANGE = (
    "The region changes a buffer, a parameter or an argument of the compiled function in place, and its results depend "
    "on that tensor, of which a compiled recompute would read the new value. Python runs the region instead: compile "
    "without fullgraph=True."
)


@private_compile.constant  # so that it is called while Dynamo traces
def reason_to_break() -> str:
    """Why the region that Dynamo has traced to its end can't be part of the graph; empty if it can be."""
    graph, called, versions, whole = private_compile.traced_function()
    if any(node.target is private.hooks_disable for node in chain(graph.nodes, *map(nodes, called))):
        return _TRANSFORM
    changed = [t for t, version in zip(_inputs(graph), versions) if private.version(t) != version]
    # A change of any other tensor is made out of place, when AOT autograd traces.
    changed = [t for t in changed if any(holder(t) is holder(given) for given in _inputs(whole))]
    return _CHANGE if changed and _are_differentiated(changed, graph) else ""


def _are_differentiated(changed: list[torch.Tensor], graph: Graph) -> bool:
    """Whether a value that depends on these inputs requires grad: then a recompute may read them."""
    depend: set[Node] = set()
    holders = set(map(holder, changed))
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
    found = []
    for node in nodes:
        value = node.meta.get("example_value")
        for each in value if isinstance(value, (tuple, list)) else (value,):
            while isinstance(each, torch.Tensor) and private.is_wrapped(each):
                each = private.unwrap_once(each)
            if isinstance(each, torch.Tensor):
                found.append(each)
    return found
