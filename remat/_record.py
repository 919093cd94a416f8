"""The record of a first run under a policy: its operations, compared with those of the last run or described."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ._determinism import user_line
from ._facts import Facts
from ._judge import question
from ._keeping import Source
from ._memory import Memory
from ._policy import Policy, Verdict
from ._program import Entry, Step
from ._residual import memory
from ._saved import Saved, is_judged
from ._state import unseen
from ._torch import DispatchMode, OpOverload, guard_of
from ._values import holder, place_of, template
from ._warnings import Told

DETACH = torch.ops.aten.detach.default


class RegionMode(DispatchMode):
    """One that sees the operations of a region with a policy."""

    record: Record

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        known = self.record.memory.known
        known.compiles |= super().ignore_compile_internals()
        return known.compiles


class Record(Saved):
    """What is known of a region's first run."""

    def __init__(self, policy: Policy, memory: Memory, own: Policy, told: Told, lines: bool = False) -> None:
        super().__init__(policy, memory, own, told, lines)
        self.drawing: set[Facts] = set()  # operations of other libraries that were seen to draw random numbers
        self.views: set[Facts] = set()  # those that made views alone at times, which are no steps

    def before_writing(self, facts: Facts, args: tuple, kwargs: dict) -> None:
        """An operation is about to write: copy what must not be lost."""
        self.catch_up()
        for tensor in facts.written(args, kwargs):
            value = self.storages.get(tensor)
            if value in self._lent:
                self._lent[value].before_writing()
            reads_it = self._judge.verdict_for(facts) in (None, Verdict.RECOMPUTE)
            if value in self.saveable and (reads_it or value in self._held):
                with unseen():
                    self._held[value] = memory(tensor).clone()

    def ran(self, func: Any, facts: Facts, args: tuple, kwargs: dict, result: Any, draw: int | None) -> None:
        """An operation has run, the ``draw``-th of those that draw random numbers."""
        self.catch_up()
        storages = self.storages
        count = storages.count
        new = storages.new(result)
        reads: list[int] = []
        read: list[torch.Tensor] = []
        if new or facts.writes or facts.observes:
            key = storages.key(func, draw, args, kwargs, reads, read)
            if count != storages.count:
                new = storages.new(result)  # it may be a view of what is known only now
        if not new and not facts.writes and not facts.observes:
            self._made_a_view(facts, args, kwargs, result)
            return
        number = len(self.log)
        outcome = template(result, new, read)
        judged = is_judged(outcome, facts) and facts not in self.outside
        verdict = self._verdict(number, facts, args, kwargs, result) if judged else None
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
        step = self._path[min(number, len(self._path) - 1)]
        self.follows = self.follows and self.log[number] == step.entry
        self.step = step.next
        if self.follows and step.guard is None and step.layouts:
            self._guard_step(step, args, [each[0] for each in new])
        if overwritten:
            self._saved_early(number, dict(zip(overwritten, outs[len(new) :])))
        if verdict is not None or self.all_lines:
            self.lines[number] = user_line()
        if self.log[number].holds:
            for value, tensor in zip(reads, read):
                if value in self.saveable:
                    self._hold(value, tensor)
        if len(self._held) >= self._enough:
            self._let_go_of_unneeded()

    def goes_on(self, step: Step, args: tuple, result: Any) -> bool:
        """Whether an operation did what the last run's next step did, with known tensors; noted is the result alone."""
        storages = self.storages
        value, check = storages.count, step.guard.check  # type: ignore[union-attr]
        if (
            not self.follows
            or step.outs[0] != value
            or not storages.are_originals(step, args)
            or torch.is_grad_enabled() is not step.graded
        ):
            return False
        if step.is_bare:
            if not check(*args, result):
                return False
            storages.known[value] = weakref.ref(result)
            storages.unmet[value] = step.result.form
            storages.count = value + 1
        else:
            results = (result,) if step.is_simple else result
            if not check(*step.pick(args), *results):
                return False
            for value, layout, each in zip(step.outs, step.layouts, results):
                storages.is_made(value, each, layout.form)
            storages.count = value + 1
        self.step = step.next
        if step.to_hold or self.names:
            self._hold_what_it_read(step, args)
        return True

    def _hold_what_it_read(self, step: Step, args: tuple) -> None:
        held, to_hold = self._held, step.to_hold
        if self.names or not self.follows:  # these decide too, or what made it was another operation
            self.catch_up()
            reads = step.operands if step.entry.holds else ()
            to_hold = [(position, value) for position, value, _ in reads if value in self.saveable]
        for position, value in to_hold:
            if value not in held and value not in self.overwritten:
                held[value] = args[position]
        if len(held) >= self._enough:
            self._let_go_of_unneeded()

    def ran_as(self, step: Step, args: tuple, kwargs: dict, result: Any) -> bool:
        """The same for a simple step by what is known of storages; it is noted in full."""
        self.catch_up()
        if not self._is_alike(step, args, kwargs, result):
            return False
        self.step = step.next
        self.catch_up()
        if step.entry.holds:
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
            or value != storages.count
            or entry.under != (differentiated, torch.is_grad_enabled())
            or storages.knows(result)
        ):
            return False
        storages.add((result, storage, step.result.form), storages.number())
        if step.guard is None and step.layouts:
            self._guard_step(step, args, [result])
        return True

    def _guard_step(self, step: Step, args: tuple, results: list[torch.Tensor]) -> None:
        """From now on it is gone along, as long as it reads these tensors."""
        sees = [known for tensor in step.pick(args) if (known := self.storages.known_as(tensor)) is not None]
        if len(sees) == len(step.operands):
            step.sees = sees  # first, as other threads ask for the guard
            step.guard = guard_of(*step.pick(args), *results)

    def _made_a_view(self, facts: Facts, args: tuple, kwargs: dict, result: Any) -> None:
        self.views.add(facts)
        step = self.step
        if step.is_view:
            if step.func is facts.func:  # of something else, or another part
                self.step = step.next
        elif (
            self._last is not None
            and self._learns
            and self.follows
            and facts.views
            and not kwargs
            and _is_told(facts, args, result)
        ):
            source = self.storages.known_as(args[0])
            value, form = self.storages.look(result)
            if source is not None and value is not None and form is not None:
                view = self._last.note(facts.func, len(self.log), args, source, value, form)
                self.storages.is_shown(view, result)
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


def _is_told(facts: Facts, args: tuple, result: Any) -> bool:
    """Whether the first argument and numbers tell what view is made, and nothing else comes of it."""
    if facts.func is DETACH or facts.reshapes or facts.foreign or type(facts.func) is not OpOverload:
        return False
    return isinstance(result, torch.Tensor) and isinstance(args[0], torch.Tensor) and all(map(_is_number, args[1:]))


def _is_number(item: Any) -> bool:
    return all(map(_is_number, item)) if type(item) is list else type(item) in (int, bool, type(None), torch.dtype)


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
