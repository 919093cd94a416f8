"""What comes into a first run under a policy, what autograd saves of it, and what is named."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import compress, takewhile
from typing import Any

import torch

from ._bulk import gone, requires_grad
from ._determinism import Line, user_line
from ._facts import Facts, facts_of, tensors
from ._judge import Question, question
from ._keeping import NOWHERE, Keeping, Source
from ._memory import Memory
from ._parts import all_parts, is_plain, parts
from ._policy import Policy, Verdict
from ._torch import is_wrapped
from ._values import UNTOLD, Layout, is_as_it_lies
from ._warnings import Told


class Saved(Keeping):
    """The part of a record that is told from tensors and not from operations."""

    def __init__(self, policy: Policy, memory: Memory, own: Policy, told: Told, lines: bool) -> None:
        super().__init__(policy, memory, own, told)
        self.all_lines = lines  # note where each operation is called, not only where it may matter
        self._learns = False  # views are noted, for the next run
        self._flags = False  # tensors themselves say whether they are differentiated, there are no levels above
        self._questions: dict[int, Question] = {}  # for predicates, once more if a value gets a name
        self.outside: list[Facts] = []  # operations on tensors made of others, which run those that come by
        self._siblings: dict[int, torch.Tensor] = {}  # saved results of operations with several, if one gets a name

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note which values come in."""
        tensors, storages, known = [*inputs], self.storages, self._programs.known
        self.offsets = storages.enter_all(tensors) if all_parts(tensors) is tensors else ()
        if self.offsets:
            self.inputs = [*range(len(tensors))]
            storages.tracked.update(compress(self.inputs, map(requires_grad, tensors)))
            self._flags = bool(storages.tracked)
        else:
            for tensor in tensors:
                self._enter(tensor)
        # What is handed to a region around must be the same in each run, also where the last program was another one.
        follows = self._flags and not self.in_region and not (self._judge.asks or self.all_lines)
        if known and follows and known[0].offsets == self.offsets:
            self._last, self._path, self.follows = known[0], known[0].path, True
            self._sources, self.step = iter(known[0].sources), known[0].start.next
            self._learns = known[0].learns > 0
            known[0].learns -= self._learns

    def _enter(self, tensor: torch.Tensor) -> None:
        wrapped = is_wrapped(tensor)
        for part in parts(tensor):
            value = self.storages.enter(part)
            if wrapped or tensor.requires_grad:
                self.storages.tracked.add(value)
            self._flags |= part.requires_grad
            self.inputs.append(value)

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Autograd saved a tensor, and a slot stands for it: if it may be kept, the slot keeps it."""
        if self.follows:
            source = next(self._sources, NOWHERE)
            if (
                source.known is not None
                and source.after == self.step.number
                and self.storages.known.get(source.known, gone)() is tensor
            ):
                slot.source = source
                self._slots.append((weakref.ref(slot), source))
                value, layout = source.value, source.layout
                if value is not None and layout is not None:
                    self.catch_up()
                    if value in self.saveable:
                        slot.residual = self._lend(value, tensor, layout.form)
                return
        self.catch_up()
        after = len(self.log)
        value, form = self.storages.look(tensor) if is_plain(tensor) else (None, None)
        if value is not None and form is not None and is_as_it_lies(form):
            may_be_kept = value in self.saveable or self._judge.by_name
            layout = Layout(0, form) if may_be_kept else None
            slot.source = Source([value], layout, after)
            if value in self.saveable:
                slot.residual = self._lend(value, tensor, form)
            if self._judge.by_name and value in self.made and len(self.log[self.made[value]].outs) > 1:
                self._siblings[value] = tensor
            else:
                slot.source.known = self.storages.known_as(tensor)
        else:
            found = [(value, part) for part in parts(tensor) if (value := self.storages.find(part)) is not None]
            slot.source = Source([value for value, _ in found], None, after)
            for each in found:
                self._hold(*each)  # the function itself makes of it what was saved
        self._retold |= slot.source.known is not None
        self._slots.append((weakref.ref(slot), slot.source))

    def needs(self, tensor: torch.Tensor) -> None:
        """Autograd at a level of torch.func saved a tensor, and will in a run again."""
        self.catch_up()
        for part in parts(tensor):
            value = self.storages.find(part)
            if value is not None:
                self.wanted.append(value)
                self._hold(value, part)

    def ran_outside(self, facts: Facts, args: tuple, kwargs: dict, result: Any, start: int) -> None:
        """An operation on tensors made of others has run, by the steps since ``start``: its results are judged too."""
        self.catch_up()
        found = [part for tensor in tensors((result, facts.written(args, kwargs))) for part in parts(tensor)]
        values = [value for part in found if (value := self.storages.find(part)) is not None]
        made = {number for value in values if (number := self.made.get(value, -1)) >= start}
        made = {number for number in made if is_judged(self.log[number].result, facts)}
        if not made or facts in self.outside:
            return
        asked = question(facts.func, args, kwargs, result) if self._judge.asks else (None, facts.func, (), {})
        verdict = self._judge.verdict_for(facts) or self._judge.on(asked)
        if verdict is Verdict.RECOMPUTE:
            return
        self.told.operators |= self.own.verdict_for(facts.func) not in (None, Verdict.RECOMPUTE)
        for number in made:
            self._questions[number] = asked
            self.lines.setdefault(number, user_line())
            entry = self.log[number] = self.log[number]._replace(verdict=verdict)
            self.saveable.update(dict.fromkeys(entry.outs, verdict))

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """A tensor of the region was named."""
        self.catch_up()
        self.named.setdefault(name, line)
        for part in parts(tensor):
            value = self.storages.newest(part)
            if value is None:
                value = self.storages.find(part)
            made = None if value is None else self.made.get(value)
            if value is None or made is None:
                continue  # it was there before
            self.names.setdefault(value, {}).setdefault(name, line)
            self.lines.setdefault(made, line)
            entry, verdict = self.log[made], self.saveable.get(value, Verdict.RECOMPUTE)
            func = entry.key[0]
            if self._judge.by_name and is_judged(entry.result, facts_of(func)):
                asked = self._questions.get(made, (None, func, (), {}))
                verdict = self._judge.on(asked, frozenset(self.names[value]))
            self._decide(value, verdict)
            if self._is_read(value):
                self._hold(value, part)
            for operand in entry.reads:
                if operand in self._held and not self._is_read(operand):
                    del self._held[operand]
            # Otherwise the operation would have to run for its other results.
            for sibling in entry.outs if value in self.saveable else ():
                if sibling not in self.saveable and sibling not in self.names and sibling in self._siblings:
                    self._decide(sibling, verdict)
                    self._hold(sibling, self._siblings[sibling])

    def _is_read(self, value: int) -> bool:
        """Whether autograd has saved a value, or an operation has read it that may have to run again."""
        made, saveable = self.made[value], self.saveable
        for entry in self.log[made + 1 :]:
            if value in entry.reads and not (entry.tracked and all(out in saveable for out in entry.outs)):
                return True
        if value in self.wanted:
            return True
        since = takewhile(lambda slot: slot[1].after > made, reversed(self._slots))
        return any(value in source.values for _, source in since)

    def _decide(self, value: int, verdict: Verdict) -> None:
        if verdict is not Verdict.RECOMPUTE:
            self.saveable[value] = verdict
        else:
            self.saveable.pop(value, None)

    def let_go(self) -> None:
        """Drop what is only held: it has a history, which may lead to here."""
        super().let_go()
        self._siblings.clear()
        self._questions.clear()


def is_judged(result: Any, facts: Facts) -> bool:
    """Whether the policy has a say: not where the result can't be described, or is nothing yet."""
    return result is not UNTOLD and not facts.makes_nothing
