"""The private names of torch that only the compile lowering uses, each with its reason, as in ``private.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._subclasses.functional_tensor
import torch.fx.experimental.proxy_tensor as _proxy_tensor
import torch.utils._pytree as _torch_pytree

tree_map = _torch_pytree.tree_map  # Dynamo traces it, and not optree's
FunctionalTensor = torch._subclasses.functional_tensor.FunctionalTensor  # what AOT autograd traces with


def said_of_node() -> dict[str, Any]:
    """The annotations that ``torch.fx.traceback.annotate`` gave the current node; they have no getter."""
    return torch.fx.traceback.current_meta.get("custom") or {}


def traced_node(tensor: torch.Tensor) -> Any:
    """The node of a tensor in the graph that AOT autograd is tracing; None if it isn't tracing."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return None
    torch._sync(tensor)
    proxy = _proxy_tensor.get_proxy_slot(torch._from_functional_tensor(tensor.elem), mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


def traced_by_torch(function: Any) -> bool:
    """Whether torch itself calls its checkpoint with this function, to trace a region that Dynamo has captured."""
    owner = getattr(function, "__self__", function)
    return getattr(owner, "__module__", None) in ("torch._higher_order_ops.wrap", "torch.fx.interpreter")


def functionalizing() -> bool:
    """Whether AOT autograd runs the function, which it does first without a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


# Passes a function's graph, with its tensors as arguments, to a wrapper that only AOT autograd traces, not Dynamo.
lifted = torch._higher_order_ops.wrap.dynamo_bypassing_wrapper
# Whether Dynamo can pass an object such as a policy to a constant function: that of torch 2.11 can't.
TAKES_OBJECTS_AS_CONSTANTS = torch.__version__ >= "2.12"


def constant(fn: Any) -> Any:
    """``torch.compiler.assume_constant_result``, without its import of Dynamo, which takes as long as that of torch."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def graph_break(reason: str) -> None:
    """Make Dynamo break the graph."""
    torch._dynamo.graph_break(msg=reason)


def traced_function() -> tuple[torch.fx.Graph, list[torch.fx.GraphModule], list[int], torch.fx.Graph]:
    """What Dynamo traces now for an operator.

    Returns:
        The graph of the operator's function, the functions that operators in it call, the first versions of its
        tensor inputs, and the whole graph. Nodes have fake tensors.
    """
    output = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    tracer = output.current_tracer
    attributes = [output.nn_modules.get(node.target) for node in tracer.graph.find_nodes(op="get_attr")]
    called = [each for each in attributes if isinstance(each, torch.fx.GraphModule)]
    return tracer.graph, called, tracer._input_versions_at_beginning, output.root_tracer.graph


graph_ids = torch._higher_order_ops.wrap.uid  # of checkpointed parts: the partitioner saves values between two parts


def value_now(tensor: Any) -> Any:
    """The current value of a tensor of AOT autograd. A later in-place modification makes another value."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def holding(value: Any) -> Any:
    """A new tensor with a value that ``value_now`` has returned."""
    return FunctionalTensor.to_functional(value) if isinstance(value, torch.Tensor) else value
