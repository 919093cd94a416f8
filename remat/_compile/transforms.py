"""A region in a ``torch.func`` transform that is compiled.

Dynamo lifts the region's function to a graph whose arguments are everything that it reads. While AOT autograd traces,
the region is taken through the levels by the rules of the func lowering; below them is ``_compile/bottom.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from .._core import private, private_compile
from .._core.known import Known
from .._functorch import lowering as functorch
from .._functorch.bottom import is_refused_change
from .._functorch.levels import apply
from .._functorch.tape import Call
from .._policy.policy import Policy, as_policy
from .._region.arguments import take_apart
from .._region.options import Options
from .._region.outputs import Outputs
from .._region.run import Run
from .bottom import run_at_bottom
from .breaks import nodes
from .saved_values import SavedValues


def call(fn: Callable, args: tuple, kwargs: dict, policy: Any, context_fn: Any = None) -> Any:
    """Call ``fn`` as a region while Dynamo traces."""
    number = 0
    if policy is not None or context_fn is not None:
        number = _number(policy, context_fn) if private_compile.TAKES_OBJECTS_AS_CONSTANTS else _INLINE
    if number == _UNKNOWN:
        private_compile.graph_break("The policy of a region in a torch.func transform is created in compiled code.")
    if number == _INLINE:
        return fn(*args, **kwargs)
    return private_compile.lifted(functools.partial(_lowered, number), lambda *inputs: fn(*inputs, **kwargs), *args)


_policies: list[Policy] = [as_policy(None)]  # of compiled code, which refers to them by number
_UNKNOWN, _INLINE = -1, -2


@private_compile.constant  # so that it is called while Dynamo traces, with the policy itself
def _number(policy: Any, context_fn: Any) -> int:
    if context_fn is not None:
        first, again = context_fn()
        if (type(first), type(again)) != private.SelectiveModes:
            return _INLINE
        policy = first.policy_fn
    try:
        repr(policy)
    except AttributeError:  # Dynamo has not set its attributes yet
        return _UNKNOWN
    policy = as_policy(policy)
    if policy not in _policies:
        _policies.append(policy)
    return _policies.index(policy)


def _lowered(number: int, graph: GraphModule) -> Callable:
    """The function that AOT autograd calls, of the graph that Dynamo has lifted."""
    return functools.partial(_run_safely, _policies[number], graph)


def _run_safely(policy: Policy, graph: GraphModule, *args: Any) -> Any:
    """The same. The graph around it disables saved-tensor hooks, and enables them only if nothing raises."""
    try:
        return _run(policy, graph, *args)
    except BaseException:
        private.hooks_enable()
        raise


def _run(policy: Policy, graph: GraphModule, *args: Any) -> Any:
    """Run the graph as a region, or inline it where that is not possible."""
    kinds = tuple(interpreter.key().value for interpreter in private.interpreter_stack() or ())
    if private.JVP in kinds or _has_levels(graph) or (len(kinds) > 1 and any(map(_acts_on_one_level, nodes(graph)))):
        return _inlined(graph, args)
    if not private_compile.functionalizing():  # a backend runs Dynamo's trace as it is
        return functorch.call(
            Interpreter(graph).run, Options(policy=policy, determinism_check="none"), Known(), args, {}
        )
    region = TracedRegion(graph, SavedValues(policy), kinds, args)
    try:
        outs = apply(region, region.operands, Call(None, run_at_bottom))
    except RuntimeError as error:
        if not is_refused_change(error):
            raise
        return _inlined(graph, args)
    return region.outputs.build(outs, region.operands)


def _inlined(graph: GraphModule, args: tuple) -> Any:
    with torch.fx.traceback.preserve_node_meta():
        return Interpreter(graph).run(*args)


def _has_levels(graph: GraphModule) -> bool:
    """Whether the graph contains transforms, whose levels Dynamo has numbered."""
    return any("functorch" in (getattr(node.target, "__module__", None) or "") for node in nodes(graph))


def _acts_on_one_level(node: Any) -> bool:
    """Whether an operation may act on one level only: an autograd Function, or another higher-order operator."""
    return isinstance(node.target, private.HigherOrderOperator) or node.target in ("detach_", "register_hook")


class TracedRegion:
    """One call of a graph, with the interface of a ``Region`` that the rules of the levels use."""

    is_pullback = uses_func = ran = graded = False
    mapped = True  # the randomness mode of a ``vmap`` level applies even if no operand is batched

    def __init__(self, graph: GraphModule, saved: SavedValues, kinds: tuple, args: tuple) -> None:
        self.graph, self.saved, self.kinds = graph, saved, kinds
        self.given, self.operands = take_apart(args, {})
        self.known = Known()
        self.changed: dict[int, Any] = {}  # the old values of operands that the first run has changed
        self.outputs = Outputs(Options(determinism_check="none"))

    root = property(lambda self: self)

    def before(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operands of a recompute, with their values before the first run, which may have changed buffers."""
        changed = self.changed
        return [private_compile.holding(changed[i]) if i in changed else t for i, t in enumerate(operands)]

    def run(self, operands: Any, run: Run) -> list[torch.Tensor]:
        """Run the graph, and return the new tensors among the results."""
        args, _ = self.given.filled(operands)
        again, self.ran = self.ran, True
        result = self.saved.run(self.graph, args, again)
        return self.outputs.compare(result, operands) if again else self.outputs.record(result, operands)

    call_again = run

    def check_result(self, result: Any) -> None:
        """Do nothing: all runs are of one graph."""
