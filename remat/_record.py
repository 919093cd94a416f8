"""The record of a first run under a policy: its operations, the values that may be kept, and those that are.

A value may be kept if the policy says so, and is if it is needed: because autograd saved it, or because an operation
that has to run again reads it. Until the region ends that isn't known, so what may turn out to be needed is held.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ._determinism import user_line
from ._memory import Memory
from ._names import warn_of_unseen
from ._offload import Group
from ._plan import Plan, plan
from ._policy import Policy, Verdict
from ._residual import Residual
from ._state import state
from ._torch import TorchDispatchMode, bottom, is_wrapper_call, parts, selective_context, without_torch_function
from ._values import UNTOLD, Layout, Step, Storages, Value, facts_of, flat, new_tensors, template


class Source(NamedTuple):
    """Where a tensor that autograd saved comes from: values, its layout if it is one of them, the steps so far."""

    values: Sequence[Value]
    layout: Layout | None
    after: int


class Record:
    """What is known of a region's first run."""

    def __init__(self, policy: Policy, memory: Memory, lines: bool = False) -> None:
        self.policy = policy
        self.memory = memory
        self.steps: list[Step] = []
        self.inputs: list[Value] = []  # of the operands and the captured tensors
        self.storages = Storages()
        self.makers: set[Any] = set()  # operations that are steps
        self.views: set[Any] = set()  # those that made views alone at times, which are none
        self.named: dict[str, str] = {}  # all names that were given in the region, each with the line
        self.lines = lines  # note where each operation is called, not only where it may matter
        self.open = True  # the first run has not ended
        self.slots_tell = True  # what autograd saved is known
        self.lazy = True  # what nothing needs may be left out of a run again
        self.wanted: list[Value] = []  # what autograd saved
        self._slots: list[weakref.ref] = []
        self._held: dict[Value, None] = {}
        self._verdicts = _table(policy)
        self._by_name = bool(policy.mentioned_names)

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note which values come in."""
        self.inputs = [self.storages.get(part) for tensor in inputs for part in parts(bottom(tensor))]

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Autograd saved a tensor, and a slot stands for it."""
        values = [value for value in map(self.storages.find, parts(tensor)) if value is not None]
        plain = len(values) == 1 and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        slot.source = Source(values, Layout(tensor, 0) if plain else None, len(self.steps))
        self._slots.append(weakref.ref(slot))
        if plain:
            self._hold(values[0], tensor)

    def needs(self, tensor: torch.Tensor) -> None:
        """Autograd at a level of torch.func saved a tensor, and will in a run again."""
        for part in parts(bottom(tensor)):
            value = self.storages.find(part)
            if value is not None:
                self.wanted.append(value)
                self._hold(value, part)

    def name(self, tensor: torch.Tensor, name: str, line: str) -> None:
        """A tensor of the region was named."""
        self.named.setdefault(name, line)
        for part in parts(bottom(tensor)):
            value = self.storages.find(part)
            if value is not None and value.step is not None:  # else it was there before
                value.names.setdefault(name, line)
                step = self.steps[value.step]
                step.line = step.line or line
                if step.question is not None:
                    value.verdict = self.policy.judge(*step.question, frozenset(value.names))
                self._hold(value, part)

    def _hold(self, value: Value, tensor: torch.Tensor) -> None:
        """It may have to be kept, if the policy says so."""
        if not value.saveable:
            value.held = None
        elif value.held is None and value.overwritten is None:
            value.held = tensor
            self._held[value] = None

    # --- the operations -----------------------------------------------------------------------------------------------

    def before_writing(self, func: Any, args: tuple, kwargs: dict) -> None:
        """An operation is about to write: copy what must not be lost."""
        for tensor in facts_of(func).written(args, kwargs):
            value = self.storages.get(tensor)
            if value.saveable and (value.held is not None or self._verdicts.get(func) in (None, Verdict.RECOMPUTE)):
                value.held = flat(tensor).clone()
                self._held[value] = None

    def ran(self, func: Any, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """An operation has run, the ``draw``-th of those that draw random numbers."""
        facts = facts_of(func)
        new = new_tensors(result, self.storages)
        if not new and not facts.writes and not facts.observes:
            self.views.add(func)
            return
        self.makers.add(func)
        reads: list[tuple[Value, torch.Tensor]] = []
        key = self.storages.key(func, args, kwargs, draw, reads)
        step = Step(func, facts, len(self.steps), key, [value for value, _ in reads])
        step.result = template(result, new, [tensor for _, tensor in reads])
        if not torch.is_grad_enabled():
            self.lazy = False  # there, user code reads tensors in ways that can't be seen
        verdict = self._judge(step, args, kwargs, result)
        written = facts.written(args, kwargs)
        for tensor in written:
            self.storages.get(tensor).overwritten = step.number
        for tensor in (*new, *written):
            value = Value(step.number, verdict)
            step.outs.append(value)
            self.storages.bind(tensor, value)
        self.steps.append(step)
        if self.lines or verdict is not Verdict.RECOMPUTE:
            step.line = user_line()
        if verdict is not Verdict.RECOMPUTE:
            return
        for value, tensor in reads:
            self._hold(value, tensor)

    def _judge(self, step: Step, args: tuple, kwargs: dict, result: Any) -> Verdict:
        """What the policy says of an operation's values as long as they have no names."""
        if step.result is UNTOLD:
            return Verdict.RECOMPUTE
        func = step.func
        if func not in self._verdicts:
            self._verdicts[func] = self.policy.verdict_for(func)
        verdict = self._verdicts[func]
        if verdict is not None:
            step.question = None, func, (), {}
            return verdict
        question = selective_context(result), func, args, kwargs
        if self._by_name:
            step.question = question
        return self.policy.judge(*question, frozenset())

    # --- the end of the first run -------------------------------------------------------------------------------------

    def close(self, outer: tuple | None = None) -> None:
        """Decide what is kept, and let go of the rest. The hooks around the region, if any, keep it."""
        self.open = False
        warn_of_unseen(self.policy.mentioned_names, self.named, self.memory)
        slots = [slot for ref in self._slots if (slot := ref()) is not None]
        direct = {id(slot) for slot in slots if slot.source.layout and slot.source.values[0].held is not None}
        shown = {slot.source.values[0] for slot in slots if id(slot) in direct}
        hidden = [value for slot in slots if id(slot) not in direct for value in slot.source.values]
        ends = [slot.source.after for slot in slots if id(slot) not in direct]
        end = max(ends, default=0) if self.slots_tell and not self.wanted else len(self.steps)
        used = self._plan([*self.wanted, *hidden], end, _is_held).used
        residuals, group = {}, Group()
        for step in self.steps:
            step.question = None
            for value in step.outs:
                if value in used or value in shown:
                    assert value.held is not None
                    residual = Residual(value, step, outer, group)
                    value.loan = weakref.ref(residual)
                    value.residual = residual if value in used else None
                    residuals[value] = residual  # slots own the others
        for slot in slots:
            self.wanted += slot.source.values
            if id(slot) in direct:
                slot.residual = residuals[slot.source.values[0]]
        for value in self._held:
            value.held = None
        self._held.clear()
        self._slots.clear()
        self.storages = self.storages.outside()

    def close_without_slots(self) -> None:
        """The same where it isn't known what autograd saved: whatever has to run again may be needed."""
        self.lazy = self.slots_tell = False
        self.close()

    def keep_all(self) -> None:
        """The slots will be gone: keep what they own."""
        for value in self.wanted:
            value.residual = value.kept()

    # --- runs again ---------------------------------------------------------------------------------------------------

    def plan(self, slots: Iterable[Any] | None = None) -> Plan:
        """What runs again to fill these slots, or all that there were."""
        if slots is None:
            return self._plan(self.wanted, len(self.steps), Value.kept)
        sources = [slot.source for slot in slots]
        wanted = [value for source in sources for value in source.values]
        return self._plan(wanted, max(source.after for source in sources), Value.kept)

    def _plan(self, wanted: Iterable[Value], end: int, available: Callable[[Value], Any]) -> Plan:
        return plan(self.steps[:end], wanted, available, self.lazy)

    def residuals(self) -> list[Residual]:
        """All that is kept now."""
        kept = (value.kept() for step in self.steps for value in step.outs)
        return [residual for residual in kept if residual is not None]


def _is_held(value: Value) -> bool:
    return value.held is not None


@functools.lru_cache(maxsize=256)
def _table(policy: Policy) -> dict[Any, Verdict | None]:
    """The policy's verdicts on operations, filled as they are met."""
    return {}


class Recorder(TorchDispatchMode):
    """Notes the operations of a first run in a record."""

    supports_higher_order_operators = True

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if is_wrapper_call(types):
            return NotImplemented  # what it runs on the tensors inside comes by
        kwargs = kwargs or {}
        record = self.record
        if state.filling:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.writes:
            with without_torch_function():
                record.before_writing(func, args, kwargs)
        result = func(*args, **kwargs)
        draw = self.draws if facts.draws(args, kwargs) else None
        self.draws += draw is not None
        with without_torch_function():
            record.ran(func, args, kwargs, result, draw)
        return result

    def __enter__(self) -> Recorder:
        state.records.append(self.record)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.records.pop()
