"""The record of a first run under a policy: its operations, what autograd saved of them, and the names of values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ._determinism import Line, user_line
from ._facts import Facts
from ._judge import Judge
from ._keeping import Keeping
from ._memory import Memory
from ._policy import Policy, Verdict
from ._residual import memory
from ._state import unseen
from ._storages import Reads
from ._torch import bottom, is_plain, is_wrapped, parts
from ._values import Layout, Step, Value, holder, template

DETACH = torch.ops.aten.detach.default


class Source(NamedTuple):
    """Where a tensor that autograd saved comes from: values, its layout if it is one of them, the steps so far."""

    values: Sequence[Value]
    layout: Layout | None
    after: int


class Record(Keeping):
    """What is known of a region's first run."""

    def __init__(self, policy: Policy, memory: Memory, own_names: Iterable[str] = (), lines: bool = False) -> None:
        super().__init__(policy, memory, own_names)
        self.lines = lines  # note where each operation is called, not only where it may matter
        self.inputs: list[Value] = []  # of the operands and the captured tensors
        self.makers: set[Any] = set()  # operations that are steps
        self.drawing: set[Any] = set()  # those of other libraries that were seen to draw random numbers
        self.views: set[Any] = set()  # those that made views alone at times, which are none
        self._flags = False  # tensors themselves say whether they are differentiated, there are no levels above
        self._judge = Judge(policy)

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
        after = len(self.steps)
        value, form = self.storages.look(tensor) if is_plain(tensor) else (None, None)
        if value is not None and form is not None and not (form[4] or form[5]):
            may_be_kept = value.saveable or self._judge.by_name
            slot.source = Source([value], Layout(tensor, 0, form) if may_be_kept else None, after)
            if value.saveable:
                slot.residual = self._lend(value, tensor)
            elif self._judge.by_name and value.step is not None and len(self.steps[value.step].outs) > 1:
                self._siblings[value] = tensor
        else:
            found = [(part, value) for part in parts(tensor) if (value := self.storages.find(part)) is not None]
            slot.source = Source([value for _, value in found], None, after)
            for part, value in found:
                self._hold(value, part)  # the function itself makes of it what was saved
        self._slots.append((weakref.ref(slot), slot.source))

    def needs(self, tensor: torch.Tensor) -> None:
        """Autograd at a level of torch.func saved a tensor, and will in a run again."""
        for part in parts(bottom(tensor)):
            value = self.storages.find(part)
            if value is not None:
                self.wanted.append(value)
                self._hold(value, part)

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """A tensor of the region was named."""
        self.named.setdefault(name, line)
        for part in parts(bottom(tensor)):
            value = self.storages.find(part)
            if value is None or value.step is None:
                continue  # it was there before
            if name not in value.names:
                value.names = {**value.names, name: line}
            step = self.steps[value.step]
            step.line = step.line or line
            value.verdict = self._judge.again(step, value)
            self._hold(value, part)
            for sibling in step.outs if value.saveable else ():  # else the operation would have to run for them
                if not sibling.saveable and not sibling.names and sibling in self._siblings:
                    sibling.verdict = value.verdict
                    self._hold(sibling, self._siblings[sibling])

    # --- the operations -----------------------------------------------------------------------------------------------

    def before_writing(self, func: Any, facts: Facts, args: tuple, kwargs: dict) -> None:
        """An operation is about to write: copy what must not be lost."""
        for tensor in facts.written(args, kwargs):
            value = self.storages.get(tensor)
            reads_it = self._judge.verdict_for(func) in (None, Verdict.RECOMPUTE)
            if value.saveable and (reads_it or value.held is not None):
                with unseen():
                    value.held = memory(tensor).clone()
                self._held[value] = None

    def ran(self, func: Any, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """An operation has run, the ``draw``-th of those that draw random numbers."""
        storages = self.storages
        new, strangers = storages.new(result), storages.strangers
        reads: Reads = []
        if new or facts.writes or facts.observes:
            key = storages.key(func, args, kwargs, draw, reads)
            if strangers != storages.strangers:
                new = storages.new(result)  # it may be a view of what is known only now
        if not new and not facts.writes and not facts.observes:
            self.views.add(func)
            if func is DETACH:
                storages.get(args[0]).seen = True
            return
        self.makers.add(func)
        step = Step(func, facts, len(self.steps), key, [value for value, _ in reads])
        step.result = template(result, new, [tensor for _, tensor in reads])
        if not torch.is_grad_enabled():
            self.lazy = False  # there, user code reads tensors in ways that can't be seen
        verdict = self._judge.of(step, args, kwargs, result)
        tracked = any(tensor.requires_grad if self._flags else value.tracked for value, tensor in reads)
        written = facts.written(args, kwargs) if facts.writes else []
        overwritten = [storages.get(tensor) for tensor in written]
        for before in overwritten:
            before.overwritten, before.loan = step.number, None
        for tensor, storage, _ in (*new, *[(tensor, holder(tensor), None) for tensor in written]):
            value = Value(step.number, verdict, tracked and (tensor.is_floating_point() or tensor.is_complex()))
            step.outs.append(value)
            storages.put(storage, value)
        self.steps.append(step)
        if overwritten:
            self._saved_early(step, overwritten)
        if self.lines or verdict is not Verdict.RECOMPUTE:
            step.line = user_line()
        if verdict is Verdict.RECOMPUTE:
            for each in reads:
                self._hold(*each)
        if len(self._held) >= self._enough:
            self._let_go_of_unneeded()

    def _saved_early(self, step: Step, overwritten: list[Value]) -> None:
        """Autograd may save an argument before the operation fills it (``rrelu``): then it is what was written."""
        written = dict(zip(overwritten, step.outs[len(step.outs) - len(overwritten) :]))
        self.wanted = [written.get(value, value) for value in self.wanted]
        for i in range(len(self._slots) - 1, -1, -1):
            ref, source = self._slots[i]
            slot = ref()
            if source.after < step.number:
                break
            if slot is not None and len(source.values) == 1 and source.values[0] in written:
                slot.source, slot.early = Source([written[source.values[0]]], source.layout, step.number + 1), True
                self._slots[i] = ref, slot.source
