"""The values that a region in a compiled transform saves. A recompute gets them instead of computing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter

from .._core import private, private_compile
from .._core.facts import facts_of, mapped, tensors
from .._policy.judge import question
from .._policy.policy import Policy
from .._policy.verdict import RECOMPUTE, Verdict
from .tags import judge_named


class SavedValues:
    """The values of a graph's first run that a policy saves, those of random operations and of higher-order operators.

    Calls are identified by the graph's nodes: the n-th call of an operation by a node is the same in each run.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.values: dict[Hashable, tuple[Any, list]] = {}  # of a call: its result, and the tensors that it wrote to

    def run(self, graph: GraphModule, args: Any, again: bool) -> Any:
        """The graph's result, from these arguments."""
        with torch.fx.traceback.preserve_node_meta(), (_Recompute if again else _FirstRun)(self) as calls:
            return _Nodes(graph, calls).run(*args)


class _Nodes(Interpreter):
    """Runs a graph, and sets the current node of a mode."""

    def __init__(self, graph: GraphModule, calls: _Calls) -> None:
        super().__init__(graph)
        self.calls = calls

    def run_node(self, n: Any) -> Any:
        self.calls.node, self.calls.count = n.name, Counter()
        return super().run_node(n)


class _Calls(private.DispatchMode):
    """A mode that sees the operations of one run."""

    def __init__(self, saved: SavedValues) -> None:
        super().__init__()
        self.saved = saved
        self.node = ""
        self.count: Counter = Counter()

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        return True

    def key(self, op: Any) -> Hashable:
        self.count[op] += 1
        return self.node, op, self.count[op]


class _FirstRun(_Calls):
    """The mode of a first run, which saves values."""

    def __init__(self, saved: SavedValues) -> None:
        super().__init__(saved)
        self.made: dict[Any, tuple[Hashable, Any]] = {}  # by nodes of the trace, for names

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs, key, facts = kwargs or {}, self.key(op), facts_of(op)
        policy, values = self.saved.policy, self.saved.values
        for node, verdict in judge_named(policy, op, args):
            if node in self.made:
                self.save(self.made[node], verdict)
        result = op(*args, **kwargs)
        written = facts.written(args, kwargs)
        if isinstance(op, private.HigherOrderOperator) or facts.draws(args, kwargs):
            new = None if any(result is each for each in written) else result
            values[key] = mapped(private_compile.value_now, (new, written))
        elif not (facts.views or written) and (found := tensors(result)):
            node = private_compile.traced_node(found[0])
            made = self.made[node] = key, mapped(private_compile.value_now, (result, []))
            self.save(made, policy.judge(*question(op, args, kwargs, result), frozenset()))
        return result

    def save(self, made: tuple[Hashable, Any], verdict: Verdict) -> None:
        key, value = made
        if verdict is RECOMPUTE:
            self.saved.values.pop(key, None)
        else:
            self.saved.values[key] = value


class _Recompute(_Calls):
    """The mode of a recompute, which returns saved values."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs, found = kwargs or {}, self.saved.values.get(self.key(op))
        if found is None:
            return op(*args, **kwargs)
        result, written = mapped(private_compile.holding, found)
        own = facts_of(op).written(args, kwargs)
        for tensor, value in zip(own, written):
            tensor.copy_(value)
        return own[0] if result is None else result
