"""Regions that can't be part of a compiled graph."""

from __future__ import annotations

from .._core import private, private_compile

_TRANSFORM = (
    "The region calls torch.func.grad or vjp, which refuse the saved-tensor hooks of a compiled region. Python runs "
    "the region instead: compile without fullgraph=True."
)


@private_compile.constant  # so that it is called while Dynamo traces
def reason_to_break() -> str:
    """Why the region that Dynamo has traced to its end can't be part of the graph; empty if it can be."""
    graph = private_compile.traced_function()
    return _TRANSFORM if any(node.target is private.hooks_disable for node in graph.nodes) else ""
