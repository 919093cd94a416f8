"""The recording of a first run under a policy: its operations, names, and the values that may have to be saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._core.facts import Facts, facts_of, tensors
from .._core.known import Known
from .._core.lines import Line, user_line
from .._core.private import is_wrapped
from .._core.state import unseen
from .._core.tensors import as_bytes, holder, is_differentiable, is_plain, parts
from .._policy.judge import Question, judge_of, question
from .._policy.policy import Budget, Policy, Verdict
from .._policy.warnings import Warned
from .choices import Choices
from .program import Entry, Log, Program, always, can_be_skipped
from .saved import SavedValues, Saves, Source
from .values import Layout, Storages, is_as_it_lies, is_judged, template

_PROGRAMS = 16  # remembered for one function, one for each of its policies


class LastRun:
    """The comparison of a run with the program of the last one. ``programs`` are those of the function, by judge."""

    def __init__(self, programs: dict[Any, Program], judge: Any) -> None:
        self._programs, self._judge = programs, judge
        self._program = programs.get(judge)  # None as soon as this run differs from it

    def entry(
        self, number: int, storages: Storages, func: Any, args: tuple, kwargs: dict, result: Any, read: list
    ) -> Entry | None:
        """Return the entry of an operation that is simple and equal to the last run's next one; extend ``read``."""
        step = None if self._program is None else self._program.step(number)
        if step is None or step.func is not func or not step.is_simple or not storages.is_call_of(step, args, kwargs):
            return None
        operands = [args[position] for position, _, _ in step.operands]
        differentiated = any(tensor.requires_grad for tensor in operands)
        new = storages.new(result)
        if (
            len(new) != 1
            or new[0][2] != step.result.form
            or step.outs[0] != storages.count
            or step.entry.under != (differentiated, torch.is_grad_enabled())
        ):
            return None
        tensor, storage, _ = new[0]
        storages.add((tensor, storage, step.result.form), storages.number())  # reuse the step's equal form
        read += operands
        return step.entry

    def compare(self, number: int, entry: Entry) -> None:
        """Compare the entry of an operation that `entry` has not recognized."""
        if self._program is not None and not self._program.starts_with(number, entry):
            self._program = None

    def line(self, number: int) -> Line | None:
        """Return the line that called this operation in the last run, or None if this run differs from it."""
        return None if self._program is None else self._program.log.lines[number]

    def program(self, log: Log) -> Program:
        """Return the program of this run so far. It is the last run's if the two have not differed."""
        return Program(log) if self._program is None else self._program

    def close(self, log: Log) -> Program:
        """Return the program of this run, which has ended, and remember it."""
        if self._program is not None and self._program.is_of(log):
            return self._program
        program = Program(log)
        if program.lasts:
            if len(self._programs) >= _PROGRAMS and self._judge not in self._programs:
                self._programs.clear()
            self._programs[self._judge] = program
        return program


DETACH = torch.ops.aten.detach.default


class Recording:
    """The state of a region's first run while it executes."""

    def __init__(self, policy: Policy, known: Known, own: Policy, warned: Warned) -> None:
        self.policy = policy
        self.known = known
        self.own, self.warned = own, warned  # the region's own policy, without those of enclosing regions
        self.has_slots = True  # otherwise it isn't known which values autograd saves
        self.in_region = False  # whether the hooks around belong to an enclosing region
        self.storages = Storages()
        self.log = Log()
        self.saved_values = SavedValues(self.log)
        self.inputs: list[int] = []  # the values of the operands and the captured tensors
        self.results: list[tuple[int | None, torch.Tensor]] = []  # of the region and their values, when it has ended
        self.saves = Saves()
        self.names: dict[int, dict[str, Line]] = {}  # the names of each value
        self.named: dict[str, Line] = {}  # all names that were given in the region
        self.drawing: set[Facts] = set()  # operations of other libraries that have drawn random numbers
        self.views: set[Facts] = set()  # operations of which a call only returned views, so that it is not a step
        self.choices = Choices(policy, known) if isinstance(policy, Budget) else None
        self._judge = judge_of(policy)
        self._last: LastRun | None = None
        self._flags = False  # whether `requires_grad` shows what is differentiated, as no levels are above
        self._questions: dict[int, Question] = {}  # arguments for predicates, if they are called again with names
        self.around: list[Facts] = []  # operations on wrapper subclasses that are executing the current operation
        self._siblings: dict[int, torch.Tensor] = {}  # saved results of operations with several results

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Record the values of the inputs."""
        for tensor in inputs:
            wrapped = is_wrapped(tensor)
            for part in parts(tensor):
                value = self.storages.enter(part)
                if wrapped or tensor.requires_grad:
                    self.storages.tracked.add(value)
                self._flags |= part.requires_grad
                self.inputs.append(value)
        # A policy with predicates is not compared, as its predicate may be a new object in each call.
        if self._flags and not (self._judge.asks or self.choices):
            self._last = LastRun(self.known.shared.programs, self._judge)

    # --- operations ---------------------------------------------------------------------------------------------------

    def before_writing(self, facts: Facts, args: tuple, kwargs: dict) -> None:
        """Copy values that an operation is about to overwrite if they may have to be saved."""
        held = self.saved_values.held
        for tensor in facts.written(args, kwargs):
            value = self.storages.get(tensor)
            self.saved_values.before_writing(value)
            reads_it = self._judge.verdict_for(facts) in (None, Verdict.RECOMPUTE)
            if value in self.log.saveable and (reads_it or value in held):
                with unseen():
                    held[value] = as_bytes(tensor).clone()

    def ran(self, func: Any, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """Record an operation that has run. ``draw`` is its index among those that draw random numbers."""
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
            self.saves.on_overwrite(number, dict(zip(entry.overwritten, entry.outs[-len(entry.overwritten) :])))
        if entry.verdict is not None or self.choices is not None:
            self.log.lines[number] = (last and last.line(number)) or user_line()
        if not self.has_slots and entry.verdict is not None and len(entry.outs) > 1:
            for tensor in tensors(result):  # autograd may have saved any of them
                self.saved_values.hold(self.storages.get(tensor), tensor)
        if entry.holds:
            for value, tensor in zip(entry.reads, read):
                if value in self.log.saveable:
                    self.saved_values.hold(value, tensor)
        if len(self.saved_values.held) >= self.saved_values.enough:
            self._drop_unneeded()

    def _entry(
        self, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None, read: list
    ) -> Entry | None:
        """Return the entry of an operation, or None if it only returned views; add the tensors that it has read."""
        storages, reads = self.storages, list[int]()
        count, new = storages.count, storages.new(result)
        acts = facts.writes or facts.observes
        if new or acts:
            key = storages.key(facts.func, draw, args, kwargs, reads, read)
            if count != storages.count:
                new = storages.new(result)  # the result may be a view of an argument that was unknown until now
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
        """Return the verdict on the results of an operation, or None if they are recomputed."""
        verdict = self._judge.verdict_for(facts)
        if self._judge.asks:
            asked = question(facts.func, args, kwargs, result)
            if self._judge.judges_names:
                self._questions[number] = asked
            if verdict is None:
                verdict = self._judge.on(asked)
        return None if verdict is Verdict.RECOMPUTE else verdict

    def _overwrite(self, written: list[torch.Tensor], tracked: bool, outs: list[int], all_tracked: list[int]) -> tuple:
        """Number the new values of storages that an operation wrote to. Return the overwritten values."""
        storages = self.storages
        before = tuple([storages.get(tensor) for tensor in written])
        for value, tensor in zip(before, written):
            self.saved_values.on_overwrite(value)
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
        """Judge the results of an operation on wrapper subclasses, which has executed the steps since ``start``."""
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
        self.warned.operators |= self.own.verdict_for(facts.func) not in (None, Verdict.RECOMPUTE)
        for number in made:
            self._questions[number] = asked
            log.lines.setdefault(number, user_line())
            entry = log.entries[number] = log.entries[number]._replace(verdict=verdict)
            log.saveable.update(dict.fromkeys(entry.outs, verdict))

    # --- what autograd saves ------------------------------------------------------------------------------------------

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Record that autograd saved a tensor and got a slot. If the policy allows it, the slot owns the residual."""
        log, after = self.log, len(self.log)
        value, form = self.storages.look(tensor) if is_plain(tensor) else (None, None)
        if value is not None and form is not None and is_as_it_lies(form):
            may_be_kept = value in log.saveable or self._judge.judges_names
            self.saves.add(slot, Source((value,), Layout(0, form) if may_be_kept else None, after))
            if value in log.saveable:
                slot.residual = self.saved_values.save(value, tensor, form)
            if self._judge.judges_names and value in log.made and len(log.maker(value).outs) > 1:
                self._siblings[value] = tensor
        else:
            found = [(value, part) for part in parts(tensor) if (value := self.storages.find(part)) is not None]
            self.saves.add(slot, Source(tuple([value for value, _ in found]), None, after))
            for each in found:
                self.saved_values.hold(*each)  # a recompute makes the saved tensor from these values

    def needs(self, tensor: torch.Tensor) -> None:
        """Record that autograd saved a tensor at a torch.func level, as it will again in a recompute."""
        for part in parts(tensor):
            value = self.storages.find(part)
            if value is not None:
                self.saves.above.append(value)
                self.saved_values.hold(value, part)

    # --- names --------------------------------------------------------------------------------------------------------

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """Record the name of a tensor."""
        self.named.setdefault(name, line)
        log, held = self.log, self.saved_values.held
        for part in parts(tensor):
            value = self.storages.find(part)
            made = None if value is None else log.made.get(value)
            if value is None or made is None:
                continue  # the value is not made in the region
            self.names.setdefault(value, {}).setdefault(name, line)
            log.lines.setdefault(made, line)
            entry, verdict = log.entries[made], log.saveable.get(value, Verdict.RECOMPUTE)
            func = entry.key[0]
            if self._judge.judges_names and is_judged(entry.result, facts_of(func)):
                asked = self._questions.get(made, (None, func, (), {}))
                verdict = self._judge.on(asked, frozenset(self.names[value]))
            log.decide(value, verdict)
            if self._is_read(value):
                self.saved_values.hold(value, part)
            for operand in entry.reads:
                if operand in held and not self._is_read(operand):
                    del held[operand]
            # Otherwise the operation would have to be recomputed for its other results.
            for sibling in entry.outs if value in log.saveable else ():
                if sibling not in log.saveable and sibling not in self.names and sibling in self._siblings:
                    log.decide(sibling, verdict)
                    self.saved_values.hold(sibling, self._siblings[sibling])

    def _is_read(self, value: int) -> bool:
        """Whether autograd has saved a value, or an operation that may be recomputed has read it."""
        log, made = self.log, self.log.made[value]
        for entry in log.entries[made + 1 :]:
            if value in entry.reads and not (entry.tracked and all(out in log.saveable for out in entry.outs)):
                return True
        return self.saves.has(value, made)

    # --- what is needed -----------------------------------------------------------------------------------------------

    def _drop_unneeded(self) -> None:
        """Drop candidates, in the middle of a run, that no living value and no saved tensor needs.

        Inside another region nothing is dropped: what is handed to it must not depend on what is alive.
        """
        if self.in_region:
            return
        values, count = self.saved_values, len(self.log)
        alive = {value for value in self.storages.values() if value not in values.held}
        saved = [value for slot, source in self.saves.slots() if slot is not None for value in source.values]
        available = {value for value in self.log.saveable if value in alive} | values.there()
        program = Program(self.log) if self._last is None else self._last.program(self.log)
        # If the program isn't lazy, a recompute skips nothing, but to save the operands of all steps may be too much.
        leave = can_be_skipped if program.lazy and not self.known.compiles else always
        values.drop(program.plan([*alive, *saved, *self.saves.above], count, available, leave).used)
        values.enough = len(values.held) + max(4, len(values.held), count // 16)

    # --- the end ------------------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """Return the program of the log, which is complete."""
        return Program(self.log) if self._last is None else self._last.close(self.log)

    def release(self) -> None:
        """Drop all references to tensors, whose autograd history may lead back to this object."""
        self.saved_values.release_all()
        self._siblings.clear()
        self._questions.clear()
