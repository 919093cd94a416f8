"""The recording of a first run under a policy: its operations, names, and the values that may have to be saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._core.facts import Facts, tensors
from .._core.known import Known
from .._core.lines import Line, user_line
from .._core.private import is_wrapped
from .._core.tensors import holder, is_differentiable, is_plain, parts
from .._policy.policy import Budget, Policy, Verdict
from .._policy.predicates import Question, question
from .._policy.warnings import Warned
from .._region.hooks import Hooks
from .choices import Choices
from .program import Log, Program, Step
from .saved import SavedValues, Saves, Source
from .values import Storages, is_as_it_lies, is_judged, place_of, template

_PROGRAMS = 16  # remembered for one function, one for each of its policies
_DETACH = torch.ops.aten.detach.default


class Verdicts:
    """The decisions of a policy in one first run."""

    def __init__(self, policy: Policy, own: Policy, warned: Warned) -> None:
        self.policy = policy
        self.own, self.warned = own, warned  # the region's own policy, without those of enclosing regions
        self.judges_names = policy.judges_names
        self.names: dict[int, dict[str, Line]] = {}  # the names of each value
        self.given: dict[str, Line] = {}  # all names that were given in the region
        self.around: list[Facts] = []  # operations on wrapper subclasses that are executing the current operation
        self._questions: dict[int, Question] = {}  # arguments for predicates, if they are called again with names

    def on_operation(self, made: Iterable[int], facts: Facts, args: tuple, kwargs: dict, result: Any) -> Verdict | None:
        """Return the verdict on an operation whose results these steps have made, or None if they are recomputed."""
        if facts in self.around:
            return None
        asked: Question = question(facts.func, args, kwargs, result) if self.policy.asks else (None, facts.func, (), {})
        if self.judges_names:
            self._questions.update(dict.fromkeys(made, asked))
        verdict = self.policy.verdict_for(facts.func) or self.policy.judge(*asked, frozenset())
        return None if verdict is Verdict.RECOMPUTE else verdict

    def on_name(self, value: int, number: int, step: Step, name: str, line: Line) -> Verdict | None:
        """Return the verdict on a value that got a name, or None if its names don't change the verdict."""
        names = self.names.setdefault(value, {})
        names.setdefault(name, line)
        if not (self.judges_names and is_judged(step.result, step.facts)):
            return None
        asked: Question = self._questions.get(number, (None, step.facts.func, (), {}))
        return self.policy.judge(*asked, frozenset(names))

    def release(self) -> None:
        """Drop the references to tensors."""
        self._questions.clear()


class Recording:
    """The state of a region's first run while it executes."""

    def __init__(self, policy: Policy, known: Known, own: Policy, warned: Warned) -> None:
        self.known = known
        self.verdicts = Verdicts(policy, own, warned)
        self.choices = Choices(policy, known) if isinstance(policy, Budget) else None
        self.has_slots = False  # whether autograd gets slots; otherwise it isn't known which values it saves
        self.storages = Storages()
        self.log = Log()
        self.saves = Saves()
        self.saved_values = SavedValues(self.log, self.saves)
        self.inputs: list[int] = []  # the values of the operands and the captured tensors
        self._last: Program | None = None  # the program of the last run, as long as this run equals it
        self._flags = False  # whether `requires_grad` shows what is differentiated, as no levels are above
        self._enough = 12  # the number of candidates at which it is checked which of them are needed
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
        if self._compares:
            self._last = self.known.programs.get(self.verdicts.policy)

    def with_slots(self, outer: Hooks | None) -> None:
        """Note that autograd gets slots, and which hooks around the region get what it saves."""
        self.has_slots = True
        self.saved_values.hooks = outer

    @property
    def _compares(self) -> bool:
        # A policy with predicates is not compared, as its predicate may be a new object in each call.
        return self._flags and not (self.verdicts.policy.asks or self.choices)

    def before_writing(self, facts: Facts, args: tuple, kwargs: dict) -> None:
        """Copy values that an operation is about to overwrite if they may have to be saved."""
        may_recompute = self.verdicts.policy.verdict_for(facts.func) in (None, Verdict.RECOMPUTE)
        for tensor in facts.written(args, kwargs):
            self.saved_values.copy_before_writing(self.storages.get(tensor), tensor, may_recompute)

    def ran(self, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """Record an operation that has run. ``draw`` is its index among those that draw random numbers."""
        number = len(self.log.steps)
        read: list[torch.Tensor] = []
        last = None if self._last is None else self._last.step(number)
        step = self._step(facts, args, kwargs, result, draw, read, last)
        if step is None:  # it only made views
            self.log.views.add(facts)
            if facts.func is _DETACH:
                self.log.exposed.add(self.storages.get(args[0]))
            return
        if step != last:
            self._last = None
        self.log.append(step)
        if self.choices is not None:
            self.choices.ran(facts, args, kwargs, result, self.storages)
        if step.overwritten:
            self.saves.on_overwrite(number, dict(zip(step.overwritten, step.outs[-len(step.overwritten) :])))
        if step.verdict is not None or self.choices is not None:
            self.log.lines[number] = user_line() if self._last is None else self._last.lines[number]
        self._allow(step)
        if not self.has_slots and step.verdict is not None and len(step.outs) > 1:
            for tensor in tensors(result):  # autograd may have saved any of them
                self.saved_values.hold(self.storages.get(tensor), tensor)
        if step.verdict is None or not step.tracked:  # it is recomputed, or it is saved only if something reads it
            for value, tensor in zip(step.reads, read):
                self.saved_values.hold(value, tensor)
        if len(self.saved_values.candidates) >= self._enough:
            self._drop_unneeded()

    def _step(
        self, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None, read: list, last: Step | None
    ) -> Step | None:
        """Return the step of an operation, or None if it only returned views; add the tensors that it has read.

        If the operation equals the step of the ``last`` program at its place, it is that step, and is not judged again.
        """
        storages = self.storages
        new = storages.new(result)
        acts = facts.writes or facts.observes
        if not new and not acts:
            return None
        key = storages.key(facts, draw, args, kwargs, read)
        new = [each for each in new if storages.at(each[1]) is None]  # it may be a view of an argument, known only now
        if not new and not acts:
            return None
        if self._flags:
            differentiated = any(tensor.requires_grad for tensor in read)
        else:
            differentiated = not storages.tracked.isdisjoint(key[-1])
        grad_mode = torch.is_grad_enabled()
        if last is not None and last.is_plain and last.key == key and len(new) == 1:
            tensor, storage = new[0]
            is_tracked = differentiated and is_differentiable(tensor)
            under = storages.count, place_of(tensor)[1], is_tracked, grad_mode
            if under == (last.outs[0], last.result.form, bool(last.tracked), last.grad_mode):
                storages.put(storage, storages.number())
                storages.tracked.update(last.tracked)
                return last
        number, outcome, verdict = len(self.log.steps), template(result, new, read), None
        if self.choices is not None:
            verdict = self.choices.verdict(number, key)
        elif is_judged(outcome, facts):
            verdict = self.verdicts.on_operation((number,), facts, args, kwargs, result)
        written = facts.written(args, kwargs)
        overwritten = tuple([storages.get(tensor) for tensor in written])
        for value in overwritten:
            self.saved_values.forget(value)
        outs: list[int] = []
        tracked: list[int] = []
        for tensor, storage in (*new, *((tensor, holder(tensor)) for tensor in written)):
            value = storages.number()
            storages.put(storage, value)
            outs.append(value)
            if differentiated and is_differentiable(tensor):
                tracked.append(value)
        storages.tracked.update(tracked)
        return Step(key, tuple(outs), overwritten, tuple(tracked), outcome, grad_mode, verdict)

    def ran_around(self, facts: Facts, args: tuple, kwargs: dict, result: Any, start: int) -> None:
        """Judge the results of an operation on wrapper subclasses, which has executed the steps since ``start``."""
        log = self.log
        found = [each for t in tensors((result, facts.written(args, kwargs))) for each in self.storages.inside(t)]
        made = {number for value, _ in found if (number := log.made.get(value, -1)) >= start}
        made = {number for number in made if is_judged(log.steps[number].result, facts)}
        if not made or self.choices is not None:
            return
        verdict = self.verdicts.on_operation(made, facts, args, kwargs, result)
        for number in made if verdict is not None else ():
            log.lines.setdefault(number, user_line())
            log.steps[number] = log.steps[number]._replace(verdict=verdict)
            self._allow(log.steps[number])

    def _allow(self, step: Step) -> None:
        if step.verdict is not None:
            for value in step.outs:
                self.saved_values.decide(value, step.verdict)

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Record that autograd saved a tensor and got a slot. If the policy allows it, the slot owns the residual."""
        log, after, judges_names = self.log, len(self.log.steps), self.verdicts.judges_names
        storage, form = place_of(tensor) if is_plain(tensor) else (tensor, None)
        value = self.storages.at(storage)
        if value is not None and form is not None and is_as_it_lies(form):
            allowed = value in self.saved_values.allowed
            self.saves.add(slot, Source((value,), form if allowed or judges_names else None, after))
            if allowed:
                slot.residual = self.saved_values.save(value, tensor)
            if judges_names and value in log.made and len(log.maker(value).outs) > 1:
                self._siblings[value] = tensor
        else:
            found = self.storages.inside(tensor)
            self.saves.add(slot, Source(tuple([value for value, _ in found]), None, after))
            for each in found:
                self.saved_values.hold(*each)  # a recompute makes the saved tensor from these values

    def needs(self, tensor: torch.Tensor) -> None:
        """Record that autograd saved a tensor at a torch.func level, as it will again in a recompute."""
        for value, part in self.storages.inside(tensor):
            self.saves.above.append(value)
            self.saved_values.hold(value, part)

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """Record the name of a tensor."""
        self.verdicts.given.setdefault(name, line)
        for value, part in self.storages.inside(tensor):
            if value in self.log.made:
                self._name(value, part, name, line)

    def _name(self, value: int, part: torch.Tensor, name: str, line: Line) -> None:
        log, saved_values, number = self.log, self.saved_values, self.log.made[value]
        step = log.steps[number]
        log.lines.setdefault(number, line)
        verdict = self.verdicts.on_name(value, number, step, name, line)
        if verdict is not None:
            saved_values.decide(value, verdict)
        if self._is_read(value):
            saved_values.hold(value, part)
        # Otherwise the operation would have to be recomputed for its other results.
        for sibling in step.outs if value in saved_values.allowed else ():
            if sibling not in saved_values.allowed and sibling not in self.verdicts.names and sibling in self._siblings:
                saved_values.decide(sibling, saved_values.allowed[value])
                saved_values.hold(sibling, self._siblings[sibling])

    def _is_read(self, value: int) -> bool:
        """Whether autograd has saved a value, or an operation that may be recomputed has read it."""
        allowed = self.saved_values.allowed
        for step in self.log.steps[self.log.made[value] + 1 :]:
            if value in step.reads and not (step.tracked and allowed.keys() >= {*step.outs}):
                return True
        return self.saves.has(value, self.log.made[value])

    def _drop_unneeded(self) -> None:
        """Drop candidates, in the middle of a run, that no living value and no saved tensor needs.

        Inside another region nothing is dropped: what is handed to it must not depend on what is alive.
        """
        values, count = self.saved_values, len(self.log.steps)
        if values.in_region:
            return
        alive = {value for value in self.storages.values() if value not in values.candidates}
        saved = [value for slot, source in self.saves.slots() if slot is not None for value in source.values]
        available = {value for value in values.allowed if value in alive} | values.available()
        program = self._last or Program(self.log, self.known.compiles)
        values.drop(program.used([*alive, *saved, *self.saves.above], count, available))
        held = len(values.candidates)
        self._enough = held + max(4, held, count // 16)

    def program(self) -> Program:
        """Return the program of this run, which has ended, and remember it."""
        compiles = self.known.compiles
        if self._last is not None and self._last.is_of(self.log, compiles):
            return self._last
        program, known = Program(self.log, compiles), self.known.programs
        if self._compares and program.lasts:
            if len(known) >= _PROGRAMS and self.verdicts.policy not in known:
                known.clear()
            known[self.verdicts.policy] = program
        return program

    def release(self) -> None:
        """Drop all references to tensors, whose autograd history may lead back to this object."""
        self.saved_values.release_all()
        self.verdicts.release()
        self._siblings.clear()
