"""The recording of a first run under a policy: its operations, names, and the values that may have to be saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from .._core import private
from .._core.facts import Facts, tensors
from .._core.known import Known
from .._core.lines import Line, user_line
from .._core.state import state
from .._core.tensors import holder, is_differentiable, is_plain, parts
from .._policy.policy import Budget, Policy, Verdict
from .._policy.predicates import AnswerLog, Question, question
from .._policy.warnings import Warned
from .._region.hooks import Hooks, of_region
from .choices import Choices
from .program import Log, Program, Step
from .saved import SavedValues, Saves, Source
from .values import Storages, is_as_it_lies, place_of, template

_PROGRAMS = 16  # remembered for one function, one for each of its policies
_requires_grad = attrgetter("requires_grad")
_DETACH = torch.ops.aten.detach.default


class Judge:
    """The decisions of a policy in one first run."""

    def __init__(self, policy: Policy, own: Policy, warned: Warned) -> None:
        self.policy = policy
        self.own, self.warned = own, warned  # the region's own policy, without those of enclosing regions
        self.judges_names = policy.judges_names
        self.names = defaultdict[int, set[str]](set)  # the names of each value
        self.given: set[str] = set()  # all names that were given in the region
        self.around: list[Facts] = []  # operations on wrapper subclasses that are executing the current operation
        self._questions: dict[int, Question] = {}  # about the operations of steps, if a name may ask again
        logs = state.logs if policy.predicates else ()
        self._answers = [each for each in logs if isinstance(each, AnswerLog)]  # those in the regions around it

    def on_operation(self, made: Iterable[int], facts: Facts, args: tuple, kwargs: dict, result: Any) -> Verdict:
        """Return the verdict on an operation whose results these steps have made."""
        if facts in self.around:
            return Verdict.RECOMPUTE
        predicates = self.policy.predicates
        asked = question(facts.func, args, kwargs, result) if predicates else _about(facts)
        verdict = self.policy.verdict_for(facts.func) or self._judge(asked)
        if self.judges_names:
            if predicates and asked.answers.keys() >= {*map(id, predicates)}:  # nothing needs the arguments any more
                asked = _about(facts)._replace(answers=asked.answers)
            self._questions.update(dict.fromkeys(made, asked))
        return verdict

    def on_names(self, value: int, number: int, step: Step) -> Verdict:
        """Return the verdict on a value with the names that it has now."""
        return self._judge(self._questions.get(number, _about(step.facts)), self.names[value])

    def _judge(self, asked: Question, names: Iterable[str] = ()) -> Verdict:
        ask = partial(self.policy.judge, asked, frozenset(names))
        for answers in self._answers:
            ask = partial(answers.verdict, asked.op, ask)
        return ask()


def _about(facts: Facts) -> Question:
    """The question about an operation for a policy without predicates."""
    return Question(None, facts.func, (), {}, {})


class Recording:
    """The state of a region's first run while it executes."""

    def __init__(self, policy: Policy, known: Known, own: Policy, warned: Warned) -> None:
        self.known = known
        self.judge = Judge(policy, own, warned)
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
            wrapped = private.is_wrapped(tensor)
            for part in parts(tensor):
                value = self.storages.find(part)
                if value is None:
                    value = self.storages.put(holder(part))
                if wrapped or tensor.requires_grad:
                    self.storages.tracked.add(value)
                self._flags |= part.requires_grad
                self.inputs.append(value)
        if self._compares:
            self._last = self.known.programs.get(self.judge.policy)

    def with_slots(self, outer: Hooks | None) -> None:
        """Note that autograd gets slots, and which hooks around the region get what it saves."""
        self.has_slots = True
        self.saved_values.hooks = outer

    @property
    def _compares(self) -> bool:
        # A policy with predicates is not compared, as its predicate may be a new object in each call.
        return self._flags and not (self.judge.policy.predicates or self.choices)

    def before_writing(self, facts: Facts, args: tuple, kwargs: dict) -> None:
        """Copy values that an operation is about to overwrite if they may have to be saved."""
        may_recompute = self.judge.policy.verdict_for(facts.func) in (None, Verdict.RECOMPUTE)
        for tensor in facts.written(args, kwargs):
            self.saved_values.copy_before_writing(self.storages.get(tensor), tensor, may_recompute)

    def ran(self, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """Record an operation that has run. ``draw`` is its index among those that draw random numbers."""
        log, last, saved_values, number = self.log, self._last, self.saved_values, len(self.log.steps)
        expected = last.steps[number] if last is not None and number < len(last.steps) else None
        read: list[torch.Tensor] = []
        step = self._step(facts, args, kwargs, result, draw, read, expected)
        if step is None:  # it only made views
            if facts.func is _DETACH:
                log.exposed.add(self.storages.get(args[0]))
            return
        if self.choices is not None:
            verdict = self.choices.ran(step, args, kwargs, result, self.storages)
        elif last is not None and step == expected:
            verdict = last.verdicts.get(number, Verdict.RECOMPUTE)
        else:
            last = self._last = None
            verdict = Verdict.RECOMPUTE
            if step.is_judged:
                verdict = self.judge.on_operation([number], facts, args, kwargs, result)
        log.append(step)
        for value in step.overwritten:
            saved_values.forget(value, facts.updates_statistics)  # autograd has saved them before
        if verdict is not Verdict.RECOMPUTE or self.choices is not None:
            log.lines[number] = user_line() if last is None else last.lines[number]
        if verdict is not Verdict.RECOMPUTE:
            self._allow(number, verdict)
            if not self.has_slots and len(step.outs) > 1:
                for tensor in tensors(result):  # autograd may have saved any of them
                    saved_values.hold(self.storages.get(tensor), tensor)
        if self._may_run_again(step):
            for value, tensor in zip(step.reads, read):
                saved_values.hold(value, tensor)
        if len(saved_values.candidates) >= self._enough:
            self._drop_unneeded()

    def _step(
        self, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None, read: list, expected: Step | None
    ) -> Step | None:
        """Return the step of an operation: ``expected`` if equal, None if it only made views. Add what it has read."""
        storages = self.storages
        if facts.views and not storages.new(result):
            return None
        key = storages.key(facts, draw, args, kwargs, read)
        new = storages.new(result)  # not views of arguments that were unknown so far
        if not (new or facts.writes or facts.observes):
            return None
        differentiated = any(map(_requires_grad, read)) if self._flags else not storages.tracked.isdisjoint(key[-1])
        written = facts.written(args, kwargs)
        overwritten = tuple(map(storages.get, written))
        outs: tuple[int, ...] = ()
        tracked: tuple[int, ...] = ()
        for tensor, storage, _ in (*new, *zip(written, map(holder, written), [None] * len(written))):
            value = storages.put(storage)
            outs += (value,)
            if differentiated and is_differentiable(tensor):
                tracked += (value,)
        storages.tracked.update(tracked)
        first = next(((0, form) for _, _, form in new), None)
        step = Step(key, outs, overwritten, tracked, first, torch.is_grad_enabled())
        if new and step == expected:  # it has one new result, of the expected layout
            return expected
        return step._replace(result=template(result, new, read))

    def ran_around(self, facts: Facts, args: tuple, kwargs: dict, result: Any, start: int) -> None:
        """Judge the results of an operation on wrapper subclasses, which has executed the steps since ``start``."""
        log = self.log
        found = [each for t in tensors((result, facts.written(args, kwargs))) for each in self.storages.inside(t)]
        made = {number for value, _ in found if (number := log.made.get(value, -1)) >= start}
        made = {number for number in made if log.steps[number].is_judged}
        if not made or self.choices is not None:
            return
        verdict = self.judge.on_operation(made, facts, args, kwargs, result)
        if verdict is Verdict.RECOMPUTE:
            return
        for number in made:
            log.lines.setdefault(number, user_line())
            self._allow(number, verdict)

    def _allow(self, number: int, verdict: Verdict) -> None:
        self.log.verdicts[number] = verdict
        for value in self.log.steps[number].outs:
            self.saved_values.decide(value, verdict)

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Record that autograd saved a tensor and got a slot. If the policy allows it, the slot owns the residual."""
        log, after, judges_names = self.log, len(self.log.steps), self.judge.judges_names
        storage, form = place_of(tensor) if is_plain(tensor) else (tensor, None)
        value = self.storages.at(storage)
        if value is not None and is_as_it_lies(form):
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
        self.judge.given.add(name)
        for value, part in self.storages.inside(tensor):
            if value in self.log.made:
                self._name(value, part, name, line)

    def _name(self, value: int, part: torch.Tensor, name: str, line: Line) -> None:
        log, saved_values, number = self.log, self.saved_values, self.log.made[value]
        step = log.steps[number]
        log.lines.setdefault(number, line)
        self.judge.names[value].add(name)
        if self.judge.judges_names and step.is_judged:
            saved_values.decide(value, self.judge.on_names(value, number, step))
        if value in saved_values.allowed and self._is_read(value):
            saved_values.hold(value, part)
        # Otherwise the operation would have to be recomputed for its other results.
        for sibling in step.outs if value in saved_values.allowed else ():
            if sibling not in saved_values.allowed and sibling not in self.judge.names and sibling in self._siblings:
                saved_values.decide(sibling, saved_values.allowed[value])
                saved_values.hold(sibling, self._siblings[sibling])

    def _is_read(self, value: int) -> bool:
        """Whether autograd has saved a value, or a step that a recompute may execute has read it."""
        made = self.log.made[value]
        reading = (step for step in self.log.steps[made + 1 :] if value in step.reads)
        return any(map(self._may_run_again, reading)) or self.saves.has(value, made)

    def _may_run_again(self, step: Step) -> bool:
        """Whether a recompute may execute a step: not all results are saved, or only if something reads them."""
        return not step.tracked or not self.saved_values.allowed.keys() >= {*step.outs}

    def _drop_unneeded(self) -> None:
        """Drop candidates, in the middle of a run, that no living value and no saved tensor needs.

        Inside another region nothing is dropped: what is handed to it must not depend on what is alive.
        """
        values, count = self.saved_values, len(self.log.steps)
        if of_region(values.hooks) is not None:
            return
        alive = {value for value in self.storages.values() if value not in values.candidates}
        saved = [value for _, source in self.saves.slots() for value in source.values]
        available = {value for value in values.allowed if value in alive} | values.available()
        program = self._last or Program(self.log, self.known.compiles)
        needed = program.used([*alive, *saved, *self.saves.above], count, available)
        # A dropped value becomes a candidate again when it is read.
        values.candidates = {value: tensor for value, tensor in values.candidates.items() if value in needed}
        held = len(values.candidates)
        self._enough = held + max(4, held, count // 16)

    def program(self) -> Program:
        """Return the program of this run, which has ended, and remember it."""
        compiles = self.known.compiles
        if self._last is not None and self._last.is_of(self.log, compiles):
            return self._last
        program, known = Program(self.log, compiles), self.known.programs
        if self._compares and program.owns_no_tensors:
            if len(known) >= _PROGRAMS and self.judge.policy not in known:
                known.clear()
            known[self.judge.policy] = program
        return program
