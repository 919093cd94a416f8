"""Notes a first run under a policy while it goes on: what runs, what autograd saves, what is named and what is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._core.facts import Facts, facts_of, tensors
from .._core.known import Known
from .._core.layout import holder
from .._core.lines import Line, user_line
from .._core.parts import is_differentiable, is_plain, parts
from .._core.private import is_wrapped
from .._core.state import unseen
from .._policy.budget import Budget
from .._policy.judge import Question, judge_of, question
from .._policy.policy import Policy, Verdict
from .._policy.warnings import Told
from .choices import Choices
from .keep import Keep
from .last_run import LastRun
from .log import Entry, Log
from .plan import always, can_be_left
from .program import Program
from .residual import as_bytes
from .saves import Saves, Source
from .storages import Storages
from .values import Layout, is_as_it_lies, is_judged, template

DETACH = torch.ops.aten.detach.default


class Recording:
    """What is noted of a region's first run while it goes on."""

    def __init__(self, policy: Policy, known: Known, own: Policy, told: Told) -> None:
        self.policy = policy
        self.known = known
        self.own, self.told = own, told  # the region's own policy, without that of a region around
        self.in_region = False  # the hooks around are those of a region
        self.storages = Storages()
        self.log = Log()
        self.keep = Keep(self.log)
        self.inputs: list[int] = []  # the values of the operands and the captured tensors
        self.results: set[int | None] = set()  # the values of what the region returns, when it has ended
        self.saves = Saves()
        self.names: dict[int, dict[str, Line]] = {}  # those of values
        self.named: dict[str, Line] = {}  # all names that were given in the region
        self.drawing: set[Facts] = set()  # operations of other libraries that were seen to draw random numbers
        self.views: set[Facts] = set()  # those that made views alone at times, which are no steps
        self.choices = Choices(policy, known) if isinstance(policy, Budget) else None
        self._judge = judge_of(policy)
        self._last: LastRun | None = None
        self._flags = False  # tensors themselves say whether they are differentiated, there are no levels above
        self._questions: dict[int, Question] = {}  # for predicates, once more if a value gets a name
        self.around: list[Facts] = []  # operations on tensors made of others, which run those that come by
        self._siblings: dict[int, torch.Tensor] = {}  # saved results of operations with several, if one gets a name

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note which values come in."""
        for tensor in inputs:
            wrapped = is_wrapped(tensor)
            for part in parts(tensor):
                value = self.storages.enter(part)
                if wrapped or tensor.requires_grad:
                    self.storages.tracked.add(value)
                self._flags |= part.requires_grad
                self.inputs.append(value)
        # A predicate may be made for this run alone.
        if self._flags and not (self._judge.asks or self.choices):
            self._last = LastRun(self.known.programs, self._judge)

    # --- operations ---------------------------------------------------------------------------------------------------

    def before_writing(self, facts: Facts, args: tuple, kwargs: dict) -> None:
        """An operation is about to write: copy what must not be lost."""
        held = self.keep.held
        for tensor in facts.written(args, kwargs):
            value = self.storages.get(tensor)
            self.keep.before_writing(value)
            reads_it = self._judge.verdict_for(facts) in (None, Verdict.RECOMPUTE)
            if value in self.log.saveable and (reads_it or value in held):
                with unseen():
                    held[value] = as_bytes(tensor).clone()

    def ran(self, func: Any, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """An operation has run, the ``draw``-th of those that draw random numbers."""
        number, read = len(self.log), list[torch.Tensor]()
        last = self._last
        entry = last.entry(number, self.storages, func, args, kwargs, result, read) if last is not None else None
        if entry is None:
            entry = self._entry(facts, args, kwargs, result, draw, read)
            if entry is None:
                self._made_a_view(facts, args)
                return
            if last is not None:
                last.compare(number, entry)
        self.log.append(entry)
        if self.choices is not None:
            self.choices.ran(func, facts, args, kwargs, result, self.storages)
        if entry.overwritten:
            self.saves.are_filled(number, dict(zip(entry.overwritten, entry.outs[-len(entry.overwritten) :])))
        if entry.verdict is not None or self.choices is not None:
            self.log.lines[number] = (last and last.line(number)) or user_line()
        if entry.holds:
            for value, tensor in zip(entry.reads, read):
                if value in self.log.saveable:
                    self.keep.hold(value, tensor)
        if len(self.keep.held) >= self.keep.enough:
            self._let_go_of_unneeded()

    def _entry(
        self, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None, read: list
    ) -> Entry | None:
        """What the operation did; None if it made views alone. Adds the tensors that it has read."""
        storages, reads = self.storages, list[int]()
        count, new = storages.count, storages.new(result)
        acts = facts.writes or facts.observes
        if new or acts:
            key = storages.key(facts.func, draw, args, kwargs, reads, read)
            if count != storages.count:
                new = storages.new(result)  # it may be a view of what is known only now
        if not new and not acts:
            return None
        number = len(self.log)
        outcome = template(result, new, read)
        judged = is_judged(outcome, facts) and facts not in self.around
        if self.choices is not None:
            verdict = self.choices.verdict(number, key)
        else:
            verdict = self._verdict(number, facts, args, kwargs, result) if judged else None
        if self._flags:
            differentiated = any(tensor.requires_grad for tensor in read)
        else:
            differentiated = not storages.tracked.isdisjoint(reads)
        outs, tracked = list[int](), list[int]()
        for each in new:
            value = storages.number()
            storages.add(each, value)
            outs.append(value)
            if differentiated and is_differentiable(each[0]):
                tracked.append(value)
        overwritten = self._overwrite(facts.written(args, kwargs), differentiated, outs, tracked)
        storages.tracked.update(tracked)
        under = differentiated, torch.is_grad_enabled()
        return Entry(key, tuple(reads), tuple(outs), overwritten, tuple(tracked), outcome, under, verdict)

    def _verdict(self, number: int, facts: Facts, args: tuple, kwargs: dict, result: Any) -> Verdict | None:
        """What becomes of the values that an operation has made, if they may be kept."""
        verdict = self._judge.verdict_for(facts)
        if self._judge.asks:
            asked = question(facts.func, args, kwargs, result)
            if self._judge.judges_names:
                self._questions[number] = asked
            if verdict is None:
                verdict = self._judge.on(asked)
        return None if verdict is Verdict.RECOMPUTE else verdict

    def _overwrite(self, written: list[torch.Tensor], tracked: bool, outs: list[int], all_tracked: list[int]) -> tuple:
        """An operation wrote to these: their storages hold new values. Returns those of before."""
        storages = self.storages
        before = tuple([storages.get(tensor) for tensor in written])
        for value, tensor in zip(before, written):
            self.keep.is_overwritten(value)
            now = storages.number()
            storages.put(holder(tensor), now)
            storages.forget(tensor)
            outs.append(now)
            if tracked and is_differentiable(tensor):
                all_tracked.append(now)
        return before

    def _made_a_view(self, facts: Facts, args: tuple) -> None:
        self.views.add(facts)
        if facts.func is DETACH:
            self.log.exposed.add(self.storages.get(args[0]))
        if facts.reshapes:
            self.storages.forget(args[0])

    def ran_around(self, facts: Facts, args: tuple, kwargs: dict, result: Any, start: int) -> None:
        """An operation on tensors made of others has run, by the steps since ``start``: its results are judged too."""
        log = self.log
        found = [part for tensor in tensors((result, facts.written(args, kwargs))) for part in parts(tensor)]
        values = [value for part in found if (value := self.storages.find(part)) is not None]
        made = {number for value in values if (number := log.made.get(value, -1)) >= start}
        made = {number for number in made if is_judged(log.entries[number].result, facts)}
        if not made or facts in self.around or self.choices is not None:
            return
        asked = question(facts.func, args, kwargs, result) if self._judge.asks else (None, facts.func, (), {})
        verdict = self._judge.verdict_for(facts) or self._judge.on(asked)
        if verdict is Verdict.RECOMPUTE:
            return
        self.told.operators |= self.own.verdict_for(facts.func) not in (None, Verdict.RECOMPUTE)
        for number in made:
            self._questions[number] = asked
            log.lines.setdefault(number, user_line())
            entry = log.entries[number] = log.entries[number]._replace(verdict=verdict)
            log.saveable.update(dict.fromkeys(entry.outs, verdict))

    # --- what autograd saves ------------------------------------------------------------------------------------------

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Autograd saved a tensor, and a slot stands for it: if it may be kept, the slot keeps it."""
        log, after = self.log, len(self.log)
        value, form = self.storages.look(tensor) if is_plain(tensor) else (None, None)
        if value is not None and form is not None and is_as_it_lies(form):
            may_be_kept = value in log.saveable or self._judge.judges_names
            self.saves.add(slot, Source((value,), Layout(0, form) if may_be_kept else None, after))
            if value in log.saveable:
                slot.residual = self.keep.keep(value, tensor, form)
            if self._judge.judges_names and value in log.made and len(log.maker(value).outs) > 1:
                self._siblings[value] = tensor
        else:
            found = [(value, part) for part in parts(tensor) if (value := self.storages.find(part)) is not None]
            self.saves.add(slot, Source(tuple([value for value, _ in found]), None, after))
            for each in found:
                self.keep.hold(*each)  # the function itself makes of it what was saved

    def needs(self, tensor: torch.Tensor) -> None:
        """Autograd at a level of torch.func saved a tensor, and will in a recompute."""
        for part in parts(tensor):
            value = self.storages.find(part)
            if value is not None:
                self.saves.above.append(value)
                self.keep.hold(value, part)

    # --- names --------------------------------------------------------------------------------------------------------

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """A tensor of the region was named."""
        self.named.setdefault(name, line)
        log, held = self.log, self.keep.held
        for part in parts(tensor):
            value = self.storages.find(part)
            made = None if value is None else log.made.get(value)
            if value is None or made is None:
                continue  # it was there before
            self.names.setdefault(value, {}).setdefault(name, line)
            log.lines.setdefault(made, line)
            entry, verdict = log.entries[made], log.saveable.get(value, Verdict.RECOMPUTE)
            func = entry.key[0]
            if self._judge.judges_names and is_judged(entry.result, facts_of(func)):
                asked = self._questions.get(made, (None, func, (), {}))
                verdict = self._judge.on(asked, frozenset(self.names[value]))
            log.decide(value, verdict)
            if self._is_read(value):
                self.keep.hold(value, part)
            for operand in entry.reads:
                if operand in held and not self._is_read(operand):
                    del held[operand]
            # Otherwise the operation would have to run for its other results.
            for sibling in entry.outs if value in log.saveable else ():
                if sibling not in log.saveable and sibling not in self.names and sibling in self._siblings:
                    log.decide(sibling, verdict)
                    self.keep.hold(sibling, self._siblings[sibling])

    def _is_read(self, value: int) -> bool:
        """Whether autograd has saved a value, or an operation has read it that may have to be recomputed."""
        log, made = self.log, self.log.made[value]
        for entry in log.entries[made + 1 :]:
            if value in entry.reads and not (entry.tracked and all(out in log.saveable for out in entry.outs)):
                return True
        return self.saves.has(value, made)

    # --- what is needed -----------------------------------------------------------------------------------------------

    def _let_go_of_unneeded(self) -> None:
        """In the middle of a run: of what has been read, and whose readers have made nothing that is still there.

        What is handed to a region around must not depend on what is still there.
        """
        if self.in_region:
            return
        keep, count = self.keep, len(self.log)
        there = {value for value in self.storages.values() if value not in keep.held}
        saved = [value for slot, source in self.saves.slots() if slot is not None for value in source.values]
        available = {value for value in self.log.saveable if value in there} | keep.there()
        program = Program(self.log) if self._last is None else self._last.program(self.log)
        # A recompute leaves out none of what isn't lazy, which may be a lot.
        leave = can_be_left if program.lazy and not self.known.compiles else always
        keep.drop(program.plan([*there, *saved, *self.saves.above], count, available, leave).used)
        keep.enough = len(keep.held) + max(4, len(keep.held), count // 16)

    # --- the end ------------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """What follows from the log."""
        return Program(self.log) if self._last is None else self._last.close(self.log)

    def let_go(self) -> None:
        """Drop what is only held: it has a history, which may lead to here."""
        self.keep.let_go()
        self._siblings.clear()
        self._questions.clear()
