"""The record of a first run under a policy: its operations, what autograd saved of them, and the names of values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import compress
from operator import attrgetter
from typing import Any

import torch

from . import _torch
from ._determinism import Line, user_line
from ._facts import Facts, facts_of
from ._judge import Question, question
from ._keeping import NOWHERE, Keeping, Source
from ._memory import Memory
from ._parts import all_parts, is_plain, parts
from ._policy import Policy, Verdict
from ._program import END, UNSEEN, Entry, Program, Step
from ._residual import memory
from ._state import unseen
from ._torch import guard_of, is_wrapped
from ._values import UNTOLD, Layout, holder, is_as_it_lies, place_of, template

_requires_grad = attrgetter("requires_grad")
DETACH = torch.ops.aten.detach.default


class Record(Keeping):
    """What is known of a region's first run."""

    def __init__(self, policy: Policy, memory: Memory, own_names: Iterable[str] = (), lines: bool = False) -> None:
        super().__init__(policy, memory, own_names)
        self.all_lines = lines  # note where each operation is called, not only where it may matter
        self.drawing: set[Facts] = set()  # operations of other libraries that were seen to draw random numbers
        self.views: set[Facts] = set()  # those that made views alone at times, which are no steps
        self._flags = False  # tensors themselves say whether they are differentiated, there are no levels above
        self._versions: dict[int, int] = {}  # of the tensors that were met, where operations aren't seen
        self._last: Program | None = None  # what the last run did, if this one may do the same
        self._path: list[Step] = [END]  # its steps
        self.step = END  # what comes next of these
        self._sources: Iterator[Source] = iter(())  # what autograd saved of it
        self._questions: dict[int, Question] = {}  # for predicates, once more if a value gets a name
        self._siblings: dict[int, torch.Tensor] = {}  # saved results of operations with several, if one gets a name

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note which values come in."""
        tensors, storages, known = [*inputs], self.storages, self._programs.known
        self.offsets = storages.enter_all(tensors) if all_parts(tensors) is tensors else ()
        if self.offsets:
            self.inputs = [*range(len(tensors))]
            storages.tracked.update(compress(self.inputs, map(_requires_grad, tensors)))
            self._flags = bool(storages.tracked)
        else:
            for tensor in tensors:
                self._enter(tensor)
        if known and self._flags and known[0].offsets == self.offsets and not (self._judge.asks or self.all_lines):
            self._last, self._path, self._follows = known[0], known[0].path, True
            self._sources, self.step = iter(known[0].sources), self._path[0]

    def _enter(self, tensor: torch.Tensor) -> None:
        wrapped = is_wrapped(tensor)
        for part in parts(tensor):
            value = self.storages.enter(part)
            if wrapped or tensor.requires_grad:
                self.storages.tracked.add(value)
            self._flags |= part.requires_grad
            self.inputs.append(value)

    def look_away(self) -> bool:
        """Whether the first run's operations needn't be seen, by what the last one needed. From now on they aren't.

        If a policy goes by names alone and lets all be kept that autograd saves, nothing runs again. Should that be
        different this time, then all runs again for what is missing.
        """
        programs, judge = self._programs, self._judge
        if programs.complete and not programs.varies and judge.by_name_alone and self._flags and self.outer is None:
            self.watched, self._follows, self._sources = False, True, iter(programs.sources)
            self._last, self._path, self.step = None, [END], END
        return not self.watched

    def saved(self, tensor: torch.Tensor, slot: Any) -> None:
        """Autograd saved a tensor, and a slot stands for it: if it may be kept, the slot keeps it."""
        if self._follows:
            source = next(self._sources, NOWHERE)
            value = source.original
            if (
                value is not None and source.after == self.step.number and self.storages.originals[value]() is tensor
                if self.watched
                else self._is_of_unseen(source, tensor)
            ):
                slot.source = source
                self._slots.append((weakref.ref(slot), source))
                value, layout = source.value, source.layout
                if value is not None and layout is not None:
                    self.catch_up()
                    if value in self.saveable:
                        slot.residual = self._lend(value, tensor, layout.form)
                    elif not self.watched:
                        self.empty.add(value)
                return
        self.catch_up()
        self._follows, after = False, len(self.log)
        value, form = self.storages.look(tensor) if is_plain(tensor) else (None, None)
        if not self.watched and form is not None:
            value = self._met(tensor, value)
        if value is not None and form is not None and is_as_it_lies(form):
            may_be_kept = value in self.saveable or self._judge.by_name
            layout = Layout(0, form) if may_be_kept else None
            slot.source = Source([value], layout, after)
            if not self.watched:
                self._guard(slot.source, tensor)
            if value in self.saveable:
                slot.residual = self._lend(value, tensor, form)
            elif not self.watched:
                self.empty.add(value)
            elif self._judge.by_name and value in self.made and len(self.log[self.made[value]].outs) > 1:
                self._siblings[value] = tensor
            elif self.storages.originals[value]() is tensor:
                slot.source.original = value
        else:
            found = [(value, part) for part in parts(tensor) if (value := self.storages.find(part)) is not None]
            slot.source = Source([value for value, _ in found], None, after)
            for each in found:
                self._hold(*each)  # the function itself makes of it what was saved
        self._slots.append((weakref.ref(slot), slot.source))

    def needs(self, tensor: torch.Tensor) -> None:
        """Autograd at a level of torch.func saved a tensor, and will in a run again."""
        self.catch_up()
        for part in parts(tensor):
            value = self.storages.find(part)
            if value is not None:
                self.wanted.append(value)
                self._hold(value, part)

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """A tensor of the region was named."""
        self.catch_up()
        self.named.setdefault(name, line)
        for part in parts(tensor):
            value = self.storages.newest(part)
            if value is None:
                value = self.storages.find(part)
            if not self.watched:
                value = self._met(part, value)
            made = None if value is None else self.made.get(value)
            if value is None or made is None:
                continue  # it was there before
            self.names.setdefault(value, {}).setdefault(name, line)
            self.lines.setdefault(made, line)
            entry, verdict = self.log[made], self.saveable.get(value, Verdict.RECOMPUTE)
            func = entry.key[0]
            if self._judge.by_name and _is_judged(entry.result, facts_of(func)):
                asked = self._questions.get(made, (None, func, (), {}))
                verdict = self._judge.on(asked, frozenset(self.names[value]))
            self._decide(value, verdict)
            self._hold(value, part)
            # Otherwise the operation would have to run for its other results.
            for sibling in entry.outs if value in self.saveable else ():
                if sibling not in self.saveable and sibling not in self.names and sibling in self._siblings:
                    self._decide(sibling, verdict)
                    self._hold(sibling, self._siblings[sibling])

    def _met(self, tensor: torch.Tensor, value: int | None) -> int:
        """Where operations aren't seen: a storage that isn't known, or has changed, holds a new value."""
        version = _torch.version(tensor)
        if value is not None and self._versions.setdefault(value, version) == version:
            return value
        value = self.storages.number()
        self.storages.bind(tensor, value)
        self.storages.originals[value] = weakref.ref(tensor)
        self._made_unseen(value, version)
        return value

    def _made_unseen(self, value: int, version: int) -> None:
        self._versions[value] = version
        self.made[value] = len(self.log)
        self.log.append(UNSEEN)
        self._decide(value, self._judge.on((None, None, (), {})))

    def _guard(self, source: Source, tensor: torch.Tensor) -> None:
        """Where operations aren't seen: the source will do for such a tensor that is as new in the next run."""
        (value,) = source.values
        if self.storages.originals[value]() is tensor and tensor.storage_offset() == 0:
            source.original, source.guard = value, guard_of(tensor)

    def _is_of_unseen(self, source: Source, tensor: torch.Tensor) -> bool:
        """Where operations aren't seen, whether it is: a tensor that wasn't met holds a new value."""
        value, originals = source.original, self.storages.originals
        if value is None or value > len(originals):
            return False
        version = _torch.version(tensor)
        if value < len(originals):
            return originals[value]() is tensor and self._versions.get(value) == version
        if source.guard is None or not source.guard.check(tensor) or tensor.storage_offset() != 0:
            return False
        self.storages.unmet.append(value)
        originals.append(weakref.ref(tensor))
        self._made_unseen(value, version)
        return True

    def _decide(self, value: int, verdict: Verdict) -> None:
        if verdict is not Verdict.RECOMPUTE:
            self.saveable[value] = verdict
        else:
            self.saveable.pop(value, None)

    # --- the operations -----------------------------------------------------------------------------------------------

    def before_writing(self, facts: Facts, args: tuple, kwargs: dict) -> None:
        """An operation is about to write: copy what must not be lost."""
        self.catch_up()
        for tensor in facts.written(args, kwargs):
            value = self.storages.get(tensor)
            reads_it = self._judge.verdict_for(facts) in (None, Verdict.RECOMPUTE)
            if value in self.saveable and (reads_it or value in self._held):
                with unseen():
                    self._held[value] = memory(tensor).clone()

    def ran(self, func: Any, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """An operation has run, the ``draw``-th of those that draw random numbers."""
        self.catch_up()
        storages = self.storages
        count = len(storages.originals)
        new = storages.new(result)
        reads: list[int] = []
        read: list[torch.Tensor] = []
        if new or facts.writes or facts.observes:
            key = storages.key(func, draw, args, kwargs, reads, read)
            if count != len(storages.originals):
                new = storages.new(result)  # it may be a view of what is known only now
        if not new and not facts.writes and not facts.observes:
            self._made_a_view(facts, args)
            return
        number = len(self.log)
        outcome = template(result, new, read)
        verdict = self._verdict(number, facts, args, kwargs, result) if _is_judged(outcome, facts) else None
        if self._flags:
            differentiated = True in [tensor.requires_grad for tensor in read]
        else:
            differentiated = not storages.tracked.isdisjoint(reads)
        outs, overwritten, tracked = [], (), []
        for each in new:
            value = storages.number()
            storages.add(each, value)
            outs.append(value)
            if differentiated and _is_differentiable(each[0]):
                tracked.append(value)
        if facts.writes:
            overwritten = self._overwrite(facts.written(args, kwargs), differentiated, outs, tracked)
        storages.tracked.update(tracked)
        for value in outs:
            self.made[value] = number
            if verdict is not None:
                self.saveable[value] = verdict
        under = differentiated, torch.is_grad_enabled()
        self.log.append(Entry(key, tuple(reads), tuple(outs), overwritten, tuple(tracked), outcome, under, verdict))
        self._follows &= self.log[number] == self.step.entry
        self.step = self._path[min(number + 1, len(self._path) - 1)]
        if overwritten:
            self._saved_early(number, dict(zip(overwritten, outs[len(new) :])))
        if verdict is not None or self.all_lines:
            self.lines[number] = user_line()
        if verdict is None:
            for value, tensor in zip(reads, read):
                if value in self.saveable:
                    self._hold(value, tensor)
        if len(self._held) >= self._enough:
            self._let_go_of_unneeded()

    def goes_on(self, step: Step, args: tuple, result: Any) -> bool:
        """Whether an operation did what the last run's next step did, with the originals; noted is the result alone."""
        storages, originals = self.storages, self.storages.originals
        if (
            step.outs[0] != len(originals)
            or not storages.are_originals(step, args)
            or not step.guard.check(*args, result)  # type: ignore[union-attr]
            or torch.is_grad_enabled() is not step.graded
        ):
            return False
        storages.unmet.append(len(originals))
        originals.append(weakref.ref(result))
        self.step = step.next
        if step.to_hold or self.names:
            self._hold_what_it_read(step, args)
        return True

    def _hold_what_it_read(self, step: Step, args: tuple) -> None:
        held, to_hold = self._held, step.to_hold
        if self.names:  # these decide too
            self.catch_up()
            reads = step.operands if step.entry.verdict is None else ()
            to_hold = [(position, value) for position, value, _ in reads if value in self.saveable]
        for position, value in to_hold:
            if value not in held and value not in self.overwritten:
                held[value] = args[position]
        if len(held) >= self._enough:
            self._let_go_of_unneeded()

    def catch_up(self) -> None:
        """Note the steps that it went along."""
        start, end = len(self.log), self.step.number
        if self._last is None or start >= end:
            return
        if not start and end == len(self._path) - 1:
            self.log, self.made, self.lines = [*self._last.log], self._last.made.copy(), {**self._last.lines}
            self.saveable = self._last.saveable.copy()
            return
        for step in self._path[start:end]:
            value = step.outs[0]
            self.log.append(step.entry)
            self.made[value] = step.number
            if step.entry.verdict is not None:
                self.saveable[value] = step.entry.verdict
                self.lines[step.number] = self._last.lines[step.number]

    def ran_as(self, step: Step, args: tuple, kwargs: dict, result: Any) -> bool:
        """The same for a simple step by what is known of storages; it is noted in full."""
        self.catch_up()
        if not self._is_alike(step, args, kwargs, result):
            return False
        self.step = step.next
        self.catch_up()
        if step.entry.verdict is None:
            self._hold_what_it_read(step, args)
        return True

    def _is_alike(self, step: Step, args: tuple, kwargs: dict, result: Any) -> bool:
        """Whether it read and made the same. To compare is faster than to describe."""
        storages = self.storages
        if not storages.is_call_of(step, args, kwargs):
            return False
        entry, value = step.entry, step.outs[0]
        differentiated = False
        for position, _, _ in step.operands:
            if args[position].requires_grad:
                differentiated = True
                break
        storage, form = place_of(result)
        if (
            form != step.result.form
            or value != len(storages.originals)
            or entry.under != (differentiated, torch.is_grad_enabled())
            or storages.knows(result)
        ):
            return False
        storages.add((result, storage, step.result.form), storages.number())
        if step.guard is None and _is_of_tensors(step) and storages.are_originals(step, args):
            step.guard = guard_of(*args, result)
        return True

    def _made_a_view(self, facts: Facts, args: tuple) -> None:
        self.views.add(facts)
        if facts.func is DETACH:
            self.seen.add(self.storages.get(args[0]))
        if facts.reshapes:
            self.storages.forget(args[0])

    def _verdict(self, number: int, facts: Facts, args: tuple, kwargs: dict, result: Any) -> Verdict | None:
        """What becomes of the values that an operation has made, if they may be kept."""
        verdict = self._judge.verdict_for(facts)
        if self._judge.asks:
            asked = question(facts.func, args, kwargs, result)
            if self._judge.by_name:
                self._questions[number] = asked
            if verdict is None:
                verdict = self._judge.on(asked)
        return None if verdict is Verdict.RECOMPUTE else verdict

    def _overwrite(self, written: list[torch.Tensor], tracked: bool, outs: list[int], all_tracked: list[int]) -> tuple:
        """An operation wrote to these: their storages hold new values. Returns those of before."""
        storages = self.storages
        before = tuple([storages.get(tensor) for tensor in written])
        for value, tensor in zip(before, written):
            self.overwritten.add(value)
            self._loans.pop(value, None)
            if value in self._lent:
                self._lent[value].settle()  # its storage no longer holds it
            now = storages.number()
            storages.put(holder(tensor), now)
            storages.forget(tensor)
            outs.append(now)
            if tracked and _is_differentiable(tensor):
                all_tracked.append(now)
        return before

    def _saved_early(self, number: int, written: dict[int, int]) -> None:
        """Autograd may save an argument before the operation fills it (``rrelu``): then it is what was written."""
        self.wanted = [written.get(value, value) for value in self.wanted]
        for i in range(len(self._slots) - 1, -1, -1):
            ref, source = self._slots[i]
            slot = ref()
            if source.after < number:
                break
            if slot is not None and len(source.values) == 1 and source.values[0] in written:
                slot.source, slot.early = Source([written[source.values[0]]], source.layout, number + 1), True
                self._slots[i] = ref, slot.source

    def let_go(self) -> None:
        """Drop what is only held: it has a history, which may lead to here."""
        super().let_go()
        self._siblings.clear()
        self._questions.clear()


def _is_of_tensors(step: Step) -> bool:
    """Whether its arguments are dense tensors and nothing else."""
    return step.key[2] is None and not step.constants and all(form is not None for _, _, form in step.operands)


def _is_judged(result: Any, facts: Facts) -> bool:
    """Whether the policy has a say: not where the result can't be described, or is nothing yet."""
    return result is not UNTOLD and not facts.makes_nothing


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
