"""The private names of torch that only the compile lowering uses, each with its reason, as in ``private.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._subclasses.functional_tensor
import torch.fx.experimental.proxy_tensor as _proxy_tensor
import torch.utils._pytree as _torch_pytree

F = TypeVar("F", bound=Callable)
tree_map = _torch_pytree.tree_map  # Dynamo traces it, and not optree's
FunctionalTensor = torch._subclasses.functional_tensor.FunctionalTensor  # what AOT autograd traces with


def said_of_node() -> dict[str, Any]:
    """What ``torch.fx.traceback.annotate`` has said of the node that runs now; it has no getter."""
    return torch.fx.traceback.current_meta.get("custom") or {}


def traced_node(tensor: torch.Tensor) -> Any:
    """The node of a tensor in the graph that AOT autograd takes of operations now; None if it takes none."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return None
    torch._sync(tensor)
    proxy = _proxy_tensor.get_proxy_slot(torch._from_functional_tensor(tensor.elem), mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


def traced_by_torch(function: Any) -> bool:
    """Whether torch calls its checkpoint of this, which traces a region that Dynamo has seen."""
    owner = getattr(function, "__self__", function)
    return getattr(owner, "__module__", None) in ("torch._higher_order_ops.wrap", "torch.fx.interpreter")


def functionalizing() -> bool:
    """Whether AOT autograd runs the function: at first without a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


# A function with its tensors as arguments, for a function that Dynamo doesn't look into: while AOT autograd traces.
lifted = torch._higher_order_ops.wrap.dynamo_bypassing_wrapper
# What a constant function is given, it is given as Dynamo has it: in 2.11 not if that is a policy.
TAKES_OBJECTS_AS_CONSTANTS = torch.__version__ >= "2.12"


def constant(fn: F) -> F:
    """As ``torch.compiler.assume_constant_result``, which imports Dynamo: that takes as long as to import torch."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def graph_break(reason: str) -> None:
    """Have Dynamo break the graph."""
    torch._dynamo.graph_break(msg=reason)


graph_ids = torch._higher_order_ops.wrap.uid  # of checkpointed parts: the partitioner saves what is between two


def value_now(tensor: Any) -> Any:
    """What a tensor of AOT autograd holds now: whatever changes the tensor in place later makes another value."""
    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def holding(value: Any) -> Any:
    """A new tensor that holds such a value."""
    return FunctionalTensor.to_functional(value) if isinstance(value, torch.Tensor) else value
