"""The record of a first run under a policy: its operations, the values that may be kept, and those that are.

A value may be kept if the policy says so, and is if it is needed: because autograd saved it, or because an operation
that has to run again reads it. Until the region ends that isn't known, so what may turn out to be needed is held.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ._determinism import user_line
from ._facts import facts_of
from ._leaves import If
from ._memory import Memory
from ._names import warn_of_unseen
from ._offload import Group
from ._plan import Plan, can_wait, plan
from ._policy import Policy, Verdict
from ._residual import Residual, memory
from ._state import unseen
from ._torch import (
    bottom,
    is_shared,
    is_wrapped,
    parts,
    selective_context,
)
from ._values import UNTOLD, Layout, Step, Storages, Value, layouts, new_tensors, template

DETACH = torch.ops.aten.detach.default


class Source(NamedTuple):
    """Where a tensor that autograd saved comes from: values, its layout if it is one of them, the steps so far."""

    values: Sequence[Value]
    layout: Layout | None
    after: int


class Record:
    """What is known of a region's first run."""

    def __init__(self, policy: Policy, memory: Memory, own_names: Iterable[str] = (), lines: bool = False) -> None:
        self.policy = policy
        self.memory = memory
        self.own_names = own_names  # that the region's own policy mentions, not that of a region around
        self.lines = lines  # note where each operation is called, not only where it may matter
        self.outer: tuple | None = None  # the hooks around the region, which keep what it keeps
        self.open = True  # the first run has not ended
        self.slots_tell = True  # what autograd saved is known
        self.lazy = True  # what nothing needs may be left out of a run again
        self.steps: list[Step] = []
        self.inputs: list[Value] = []  # of the operands and the captured tensors
        self.wanted: list[Value] = []  # what autograd saved
        self.makers: set[Any] = set()  # operations that are steps
        self.drawing: set[Any] = set()  # those of other libraries that were seen to draw random numbers
        self.views: set[Any] = set()  # those that made views alone at times, which are none
        self.named: dict[str, str] = {}  # all names that were given in the region, each with the line
        self.storages = Storages()
        self._slots: list[weakref.ref] = []
        self._held: dict[Value, None] = {}
        self._flags = False  # tensors themselves say whether they are differentiated, there are no levels above
        self._enough = 16  # held values, before the next look which of them are needed
        self._siblings: dict[Value, torch.Tensor] = {}  # saved results of operations with several, if one gets a name
        self._group: Group | None = None
        self._verdicts = _table(policy)
        self._by_name = bool(policy.mentioned_names)
        self._asks = _asks(policy)

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note which values come in."""
        for tensor in inputs:
            for part in parts(bottom(tensor)):
                value = self.storages.find(part)
                if value is None:
                    value = Value()
                    self.storages.bind(part, value)
                value.tracked |= is_wrapped(tensor) or tensor.requires_grad
                self._flags |= part.requires_grad
                self.inputs.append(value)

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Autograd saved a tensor, and a slot stands for it: if it may be kept, the slot keeps it."""
        values = [value for value in map(self.storages.find, parts(tensor)) if value is not None]
        plain = len(values) == 1 and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        slot.source = Source(values, Layout(tensor, 0) if plain else None, len(self.steps))
        self._slots.append(weakref.ref(slot))
        if plain and values[0].saveable:
            slot.residual = self._lend(values[0], tensor)
        elif plain and self._by_name and values[0].step is not None and len(self.steps[values[0].step].outs) > 1:
            self._siblings[values[0]] = tensor

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
            if value is None or value.step is None:
                continue  # it was there before
            value.names.setdefault(name, line)
            step = self.steps[value.step]
            step.line = step.line or line
            if step.question is not None:
                value.verdict = self.policy.judge(*step.question, frozenset(value.names))
            self._hold(value, part)
            for sibling in step.outs if value.saveable else ():  # else the operation would have to run for them
                if not sibling.saveable and not sibling.names and sibling in self._siblings:
                    sibling.verdict = value.verdict
                    self._hold(sibling, self._siblings[sibling])

    def _hold(self, value: Value, tensor: torch.Tensor) -> None:
        """More than slots may need it: it may have to be kept, if the policy says so."""
        if not value.saveable:
            value.held = None
        elif value.held is None and value.overwritten is None:
            value.held = tensor
            self._held[value] = None

    def _lend(self, value: Value, tensor: torch.Tensor | None) -> Residual:
        """Keep a value, for whoever owns what this returns."""
        residual = value.kept()
        if residual is None:
            assert value.step is not None and tensor is not None
            if self._group is None:
                self._group = Group()
            offload = value.verdict is Verdict.OFFLOAD
            step = self.steps[value.step]
            layout = next((layout for layout in layouts(step.result) if step.outs[layout.i] is value), None)
            with unseen():
                residual = Residual(tensor, step, layout, offload, self.outer, self._group)
            value.loan = weakref.ref(residual)
        return residual

    # --- the operations -----------------------------------------------------------------------------------------------

    def before_writing(self, func: Any, args: tuple, kwargs: dict) -> None:
        """An operation is about to write: copy what must not be lost."""
        for tensor in facts_of(func).written(args, kwargs):
            value = self.storages.get(tensor)
            if value.saveable and (value.held is not None or self._verdict(func) in (None, Verdict.RECOMPUTE)):
                with unseen():
                    value.held = memory(tensor).clone()
                self._held[value] = None

    def ran(self, func: Any, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """An operation has run, the ``draw``-th of those that draw random numbers."""
        facts = facts_of(func)
        new = new_tensors(result, self.storages)
        if not new and not facts.writes and not facts.observes:
            self.views.add(func)
            if func is DETACH:
                self.storages.get(args[0]).seen = True
            return
        self.makers.add(func)
        reads: list[tuple[Value, torch.Tensor]] = []
        key = self.storages.key(func, args, kwargs, draw, reads)
        step = Step(func, facts, len(self.steps), key, [value for value, _ in reads])
        step.result = template(result, new, [tensor for _, tensor in reads])
        if not torch.is_grad_enabled():
            self.lazy = False  # there, user code reads tensors in ways that can't be seen
        verdict = self._judge(step, args, kwargs, result)
        written, overwritten = facts.written(args, kwargs), []
        for tensor in written:
            before = self.storages.get(tensor)
            before.overwritten, before.loan = step.number, None
            overwritten.append(before)
        tracked = any(tensor.requires_grad if self._flags else value.tracked for value, tensor in reads)
        for tensor in (*new, *written):
            value = Value(step.number, verdict)
            value.tracked = tracked and (tensor.is_floating_point() or tensor.is_complex())
            step.outs.append(value)
            self.storages.bind(tensor, value)
        self.steps.append(step)
        self._saved_early(step, overwritten)
        if self.lines or verdict is not Verdict.RECOMPUTE:
            step.line = user_line()
        if verdict is not Verdict.RECOMPUTE:
            return
        for value, tensor in reads:
            self._hold(value, tensor)
        del reads, tensor
        if len(self._held) >= self._enough:
            self._let_go_of_unneeded()

    def _let_go_of_unneeded(self) -> None:
        """In the middle of a run: of what has been read, and whose readers have made nothing that is still there."""
        there = {value for value in self.storages.values() if value.held is None or _is_used(value)}
        saved = [value for ref in self._slots if (slot := ref()) is not None for value in slot.source.values]

        def may_be_kept(value: Value) -> bool:
            return _is_there(value) or (value in there and value.saveable)

        used = plan(self.steps, [*there, *saved, *self.wanted], may_be_kept, _always).used
        for value in [value for value in self._held if value not in used and not _is_used(value)]:
            value.held = None
            del self._held[value]
        self._enough = len(self._held) + max(16, len(self.steps) // 8)

    def _saved_early(self, step: Step, overwritten: list[Value]) -> None:
        """Autograd may save an argument before the operation fills it (``rrelu``): then it is what was written."""
        for ref in reversed(self._slots if overwritten else ()):
            slot = ref()
            if slot is not None and slot.source.after < step.number:
                break
            for before, value in zip(overwritten, step.outs[len(step.outs) - len(overwritten) :]):
                if slot is not None and slot.source.values == [before]:
                    slot.source = Source([value], slot.source.layout, step.number + 1)
                    slot.early = True

    def _judge(self, step: Step, args: tuple, kwargs: dict, result: Any) -> Verdict:
        """What the policy says of an operation's values as long as they have no names."""
        func = step.func
        if step.result is UNTOLD:
            return Verdict.RECOMPUTE
        ctx, args, kwargs = (selective_context(result), args, kwargs) if self._asks else (None, (), {})
        if self._by_name:
            step.question = ctx, func, args, kwargs
        verdict = self._verdict(func)
        return self.policy.judge(ctx, func, args, kwargs, frozenset()) if verdict is None else verdict

    def _verdict(self, func: Any) -> Verdict | None:
        """What it says of all unnamed values that an operation makes, if that can be said."""
        if func not in self._verdicts:
            self._verdicts[func] = self.policy.verdict_for(func)
        return self._verdicts[func]

    # --- the end of the first run -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Decide what else is kept, and let go of the rest."""
        self.open = False
        warn_of_unseen(self.own_names, self.named, self.memory)
        above = bool(self.wanted)
        slots = [slot for ref in self._slots if (slot := ref()) is not None]
        for slot in slots:  # saved before it got its name
            content = slot.source.values[0].held if slot.source.layout is not None else None
            if slot.residual is None and content is not None:
                slot.residual = self._lend(slot.source.values[0], content)
        missing = [slot.source for slot in slots if slot.residual is None]
        self.wanted += [value for source in missing for value in source.values]
        end = max((source.after for source in missing), default=0) if self.slots_tell and not above else len(self.steps)
        used = plan(self.steps[:end], self.wanted, _is_there, _always if self.slots_tell else _never).used
        for step in self.steps:
            step.question = None
            for value in step.outs:
                if value in used:
                    value.residual = value.kept() or self._lend(value, value.held)
        self.wanted += [value for slot in slots if slot.residual is not None for value in slot.source.values]
        if not missing and not above:  # then nothing will run again at first order
            for value in self.storages.values():
                value.constant = None
        self.let_go()
        self.storages = self.storages.outside()

    def let_go(self) -> None:
        """Drop what is only held: it has a history, which may lead to here."""
        for value in self._held:
            value.held = None
        self._held.clear()
        self._siblings.clear()
        self._slots.clear()

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
        return plan(self.steps[:end], wanted, available, can_wait if self.lazy else _never)


def _always(step: Step) -> bool:
    return True


def _never(step: Step) -> bool:
    return False


def _asks(policy: Policy) -> bool:
    """Whether it has predicates, which want the arguments of operations."""
    return isinstance(policy, If) or any(map(_asks, policy._parts()))


def _is_used(value: Value) -> bool:
    """Whether a held tensor is there for others too."""
    return value.held is not None and (sys.getrefcount(value.held) > 2 or is_shared(value.held))


def _is_there(value: Value) -> bool:
    return value.held is not None or value.kept() is not None


@functools.lru_cache(maxsize=256)
def _table(policy: Policy) -> dict[Any, Verdict | None]:
    """The policy's verdicts on operations, filled as they are met."""
    return {}
