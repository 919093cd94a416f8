"""A region in a ``torch.func`` transform that is compiled.

Dynamo lifts the region's function to a graph whose arguments are everything that it reads. While AOT autograd traces,
the region is taken through the levels by the rules of the func lowering. In this one graph a recompute is a second copy
of the region, made to depend on the cotangents, as a compiler could otherwise move it to the first run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .._core import private
from .._core.facts import facts_of, mapped, tensors
from .._core.known import Known
from .._core.tensors import as_leaf, is_recorded
from .._functorch import lowering as functorch
from .._functorch.bottom import Call, is_refused_change
from .._functorch.derived import Pullback, Tensors, transforms_of
from .._functorch.levels import apply
from .._policy.policy import RECOMPUTE, Policy, Verdict, as_policy
from .._policy.predicates import question
from .._region.arguments import Outputs, take_apart
from .._region.guards import CHANGED
from .._region.hooks import hooks_allowed
from .._region.options import Options
from .._region.region import Run
from ..errors import MutationError
from .graphs import judge, judge_named, nodes


class _Nodes(Interpreter):
    """Runs a graph, and tells the mode its nodes."""

    def __init__(self, graph: GraphModule, calls: _Calls) -> None:
        super().__init__(graph)
        self.calls = calls

    def run_node(self, n: Any) -> Any:
        self.calls.begin(n)
        return super().run_node(n)


class _Calls(private.DispatchMode):
    """A mode that sees the operations of one run: the first saves ``values``, a recompute returns them.

    They are the values that a policy saves, those of random operations and of higher-order operators. Calls are
    identified by the graph's nodes: the n-th call of an operation by a node is the same in each run.
    """

    def __init__(self, policy: Policy, values: dict[Hashable, tuple[Any, list]], again: bool) -> None:
        super().__init__()
        self.policy = policy
        self.values = values  # of a call: its result, and the tensors that it wrote to
        self.again = again
        self.made: dict[Any, tuple[Hashable, Any]] = {}  # in a first run, by nodes of the trace, for names

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        return True

    def begin(self, node: Any) -> None:
        self.node, self.count = node, Counter[Any]()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count[op] += 1
        call = self.recompute if self.again else self.first
        return call((self.node, op, self.count[op]), op, args, kwargs or {})

    def first(self, key: Hashable, op: Any, args: tuple, kwargs: dict) -> Any:
        for node, verdict in judge_named(self.policy, op, args):
            if node in self.made:
                self.save(self.made[node], verdict)
        result, facts = op(*args, **kwargs), facts_of(op)
        written = facts.written(args, kwargs)
        if isinstance(op, private.HigherOrderOperator) or facts.draws(args, kwargs):
            new = None if any(result is each for each in written) else result
            self.values[key] = mapped(private.value_now, (new, written))
        elif not (facts.views or written) and (found := tensors(result)):
            made = self.made[private.traced_node(found[0])] = key, mapped(private.value_now, (result, []))
            self.save(made, self.policy.judge(question(op, args, kwargs, result)))
        return result

    def save(self, made: tuple[Hashable, Any], verdict: Verdict) -> None:
        key, value = made
        if verdict is RECOMPUTE:
            self.values.pop(key, None)
        else:
            self.values[key] = value

    def recompute(self, key: Hashable, op: Any, args: tuple, kwargs: dict) -> Any:
        if key not in self.values:
            return op(*args, **kwargs)
        result, written = mapped(private.holding, self.values[key])
        own = facts_of(op).written(args, kwargs)
        for tensor, value in zip(own, written):
            tensor.copy_(value)
        return own[0] if result is None else result


class TracedCall(Call):
    """A call of a region in a trace."""

    def at_bottom(self, region: Any, operands: Tensors, wanted: Sequence[bool]) -> list:
        """Run a region, or a transform of it, on tensors of AOT autograd."""
        root = region.root
        run = partial(_again, region) if root.ran else partial(region.run, run=Run())
        recorded = torch.is_grad_enabled() and any(map(is_recorded, operands))
        if recorded and not region.uses_func:
            run = partial(_checkpointed, run, root.policy)
        if root.ran:
            return run(operands)
        before = list(map(private.value_now, operands))
        if recorded or not wanted:
            outs = run(operands)
        else:  # with grad mode the same kernels are chosen as in a recompute, which is differentiated
            with torch.enable_grad():
                outs = run([as_leaf(t) if each else t for t, each in zip(operands, wanted)])
            outs = [t.detach() for t in outs]
        root.note_changes(operands, before)
        return outs


def _again(region: Any, operands: Tensors) -> list:
    """A recompute, on operands that depend on the cotangents."""
    count = next((len(each.needs) for each in transforms_of(region) if isinstance(each, Pullback)), len(operands))
    return region.run([*after(region.root.before(operands[:count]), operands[count:]), *operands[count:]], Run())


def after(tensors: Tensors, others: Tensors) -> list[torch.Tensor]:
    """These tensors, made to depend on the others by plain operations, which every backend supports."""
    known = [t.detach().reshape(-1)[:1].reshape(()) for t in others if t.numel()]
    if not known:
        return list(tensors)
    condition = reduce(torch.logical_and, [t == t for t in known])
    return [torch.where(condition, t, t) for t in tensors]


def _checkpointed(run: Callable, policy: Any, operands: Tensors) -> list:
    """A run as a checkpointed part of the graph, for the partitioner, if autograd differentiates below all levels."""

    def contexts() -> tuple:
        first, again = create_selective_checkpoint_contexts(partial(judge, policy))
        first.ac_graph_id = next(private.graph_ids)
        return first, again

    with hooks_allowed():
        return private.original_checkpoint(
            lambda *tensors: run(list(tensors)),
            *operands,
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=False,
            context_fn=contexts,
        )


def call(fn: Callable, args: tuple, kwargs: dict, policy: Any, context_fn: Any = None) -> Any:
    """Call ``fn`` as a region while Dynamo traces."""
    number = 0
    if policy is not None or context_fn is not None:
        number = _number(policy, context_fn) if private.TAKES_OBJECTS_AS_CONSTANTS else _INLINE
    if number == _UNKNOWN:
        private.graph_break("The policy of a region in a torch.func transform is created in compiled code.")
    if number == _INLINE:
        return fn(*args, **kwargs)
    return private.lifted(partial(_lowered, number), lambda *inputs: fn(*inputs, **kwargs), *args)


_policies: list[Policy] = [as_policy(None)]  # of compiled code, which refers to them by number
_UNKNOWN, _INLINE = -1, -2


@private.constant  # so that it is called while Dynamo traces, with the policy itself
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

    def run(*args: Any) -> Any:
        try:
            return _run(_policies[number], graph, *args)
        except BaseException:
            private.hooks_enable()  # the graph around it has disabled them, and enables them only if nothing raises
            raise

    return run


def _run(policy: Policy, graph: GraphModule, *args: Any) -> Any:
    """Run the graph as a region, or inline it where that is not possible."""
    kinds = tuple(interpreter.key().value for interpreter in private.interpreter_stack() or ())
    targets = [node.target for node in nodes(graph)]
    # Transforms in the graph, whose levels Dynamo has numbered.
    has_levels = any("functorch" in (getattr(target, "__module__", None) or "") for target in targets)
    # Operations that may act on one level only: an autograd Function, or another higher-order operator.
    one_level = (isinstance(t, private.HigherOrderOperator) or t in ("detach_", "register_hook") for t in targets)
    if private.JVP in kinds or has_levels or (len(kinds) > 1 and any(one_level)):
        return _inlined(graph, args)
    if not private.functionalizing():  # a backend runs Dynamo's trace as it is
        options = Options(policy=policy, determinism_check="none")
        return functorch.call(Interpreter(graph).run, options, Known(), args, {})
    region = TracedRegion(graph, policy, kinds, args)
    try:
        outs = apply(region, region.operands, TracedCall(orders_below=0))  # no `Watch` sees what it calls
    except RuntimeError as error:
        if not is_refused_change(error):
            raise
        return _inlined(graph, args)
    return region.outputs.build(outs, region.operands)


def _inlined(graph: GraphModule, args: tuple) -> Any:
    with torch.fx.traceback.preserve_node_meta():
        return Interpreter(graph).run(*args)


class TracedRegion:
    """One call of a graph, with the interface of a ``Region`` that the rules of the levels use."""

    uses_func = ran = graded = False

    def __init__(self, graph: GraphModule, policy: Policy, kinds: tuple, args: tuple) -> None:
        self.graph, self.policy, self.kinds = graph, policy, kinds
        self.given, self.operands = take_apart(args, {})
        self.values: dict[Hashable, tuple[Any, list]] = {}  # saved by the first run
        self.changed: dict[int, Any] = {}  # the old values of operands that the first run has changed
        self.outputs = Outputs(Options(determinism_check="none"))

    root = property(lambda self: self)

    def note_changes(self, operands: Tensors, before: list) -> None:
        """Note which operands the first run has changed: buffers. One that is differentiated must not change."""
        now = map(private.value_now, operands)
        self.changed = {i: old for i, (old, new) in enumerate(zip(before, now)) if old is not new}
        if any(is_recorded(operands[i]) for i in self.changed):
            raise MutationError(f"An argument or a captured tensor {CHANGED}")

    def before(self, operands: Tensors) -> list[torch.Tensor]:
        """The operands of a recompute, with their values before the first run."""
        return [private.holding(self.changed[i]) if i in self.changed else t for i, t in enumerate(operands)]

    def run(self, operands: Any, run: Run) -> list[torch.Tensor]:
        """Run the graph, and return the new tensors among the results."""
        args, _ = self.given.filled(operands)
        again, self.ran = self.ran, True
        with torch.fx.traceback.preserve_node_meta(), _Calls(self.policy, self.values, again) as calls:
            result = _Nodes(self.graph, calls).run(*args)
        return self.outputs.compare(result, operands) if again else self.outputs.record(result, operands)
