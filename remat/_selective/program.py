"""Programs: the steps of a region's first run, and what is derived from them.

A first run only writes a log. Everything else (which values are overwritten, which steps can be skipped, which steps a
recompute runs) is a function of the log, so it is computed once for equal logs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Set
from typing import Any, NamedTuple

import torch

from .._core.facts import Facts
from .._core.lines import Line
from .._core.private import OpOverload
from .._policy.policy import Verdict
from .values import UNDESCRIBED, Form, Layout


class Step(NamedTuple):
    """An operation of a first run that made or changed a value, or returned no tensor. Views are not steps."""

    key: tuple  # equal for operations that compute the same result (see `Storages.key`)
    outs: tuple[int, ...]  # the values that it made: in new storages, then in storages that it wrote to
    overwritten: tuple[int, ...]  # the values that it overwrote
    tracked: tuple[int, ...]  # the values in `outs` that are differentiated
    result: Any  # the description of its result
    grad_mode: bool

    @property
    def facts(self) -> Facts:
        return self.key[0]

    @property
    def draws(self) -> bool:
        return self.key[1] is not None

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that it read."""
        return self.key[-1]

    @property
    def is_judged(self) -> bool:
        """Whether the policy decides about its result: not if it can't be described, or is uninitialized memory."""
        return self.result is not UNDESCRIBED and not self.facts.makes_nothing

    @property
    def is_whole(self) -> bool:
        """Whether it changes its operands, so that it runs for all of its results or for none."""
        return bool(self.facts.writes) and not self.facts.updates_statistics


class Log:
    """The steps so far, and what is known about the values that they made."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.verdicts: dict[int, Verdict] = {}  # on the results of the steps when they ran, if these may be saved
        self.lines: dict[int, Line] = {}  # the lines that called the operations
        self.made: dict[int, int] = {}  # for each value the number of the step that made it
        self.overwritten: set[int] = set()
        self.in_inputs: set[int] = set()  # values that were written to an input
        self.exposed: set[int] = set()  # detached values, which Python can read without a dispatch mode seeing it
        self.drawing: set[Facts] = set()  # operations of other libraries that have drawn random numbers

    def append(self, step: Step) -> None:
        """Add the next step."""
        for value, before in zip(step.outs[::-1], step.overwritten[::-1]):
            if before not in self.made or before in self.in_inputs:
                self.in_inputs.add(value)
        self.made.update(dict.fromkeys(step.outs, len(self.steps)))
        self.overwritten.update(step.overwritten)
        self.steps.append(step)

    def maker(self, value: int) -> Step:
        """Return the step that made a value."""
        return self.steps[self.made[value]]

    def form(self, value: int) -> Form | None:
        """Return the form that a value was made in, or None if it isn't one of the results that can be described."""
        maker = self.maker(value)
        results = maker.result if type(maker.result) in (tuple, list) else (maker.result,)
        return next((item.form for item in results if isinstance(item, Layout) and maker.outs[item.i] == value), None)


class Plan(NamedTuple):
    """The numbers of the steps that run, of the steps that are restored from saved values, and of these values."""

    run: set[int]
    restored: set[int]
    used: set[int]


class Program:
    """The steps of a first run, and what is derived from them."""

    def __init__(self, log: Log, compiles: bool) -> None:
        self.steps, self.exposed = [*log.steps], {*log.exposed}
        self.verdicts, self.lines = {**log.verdicts}, {**log.lines}
        # Nothing is skipped under no_grad, where user code can read tensors undetected, as compiled code can.
        self.lazy = not compiles and all(step.grad_mode for step in self.steps)
        self.overwritten = {*log.overwritten}
        if self.overwritten:  # a recompute may match any of several equal steps, and overwrite the result of that step
            self.overwritten |= self._equal_to(self.overwritten)
        # Where nothing is skipped an operand is made although only its shape is read.
        self.reads = [() if self.lazy and step.facts.reads_nothing else step.reads for step in self.steps]
        # User code can read a value undetected if it is not differentiated, or is detached.
        self.dispensable = {value for step in self.steps for value in step.tracked if value not in log.exposed}
        # The steps that a recompute may skip if nothing needs their results.
        self.skippable = frozenset(filter(self._can_be_skipped, range(len(self.steps)) if self.lazy else ()))
        self._plans: dict[tuple, Plan] = {}

    def _equal_to(self, values: Collection[int]) -> set[int]:
        """Return the values that are computed by the same operations on the same values as these values."""
        first: dict[tuple, tuple[int, ...]] = {}
        same: dict[int, int] = {}  # for each value the first of all values that are computed so
        for step in self.steps:
            key = step.key[:-1], tuple([same.get(value, value) for value in step.reads])
            same.update(zip(step.outs, first.setdefault(key, step.outs)))
        wanted = {same.get(value, value) for value in values}
        return {value for value, each in same.items() if each in wanted}

    def _can_be_skipped(self, number: int) -> bool:
        """Whether a read of a step's results, if it is skipped, is detected, and it has no other effect."""
        step = self.steps[number]
        facts = step.facts
        return (
            step.result is not UNDESCRIBED
            and not (facts.observes or step.draws)
            and (not facts.writes or facts.updates_statistics)
            and self.overwritten.isdisjoint(set(self.reads[number]).difference(step.overwritten))
            and self.dispensable.issuperset(step.outs)
        )

    def is_of(self, log: Log, compiles: bool) -> bool:
        """Whether it is the program of this log."""
        return self.steps == log.steps and self.exposed == log.exposed and not (self.lazy and compiles)

    @functools.cached_property
    def makers(self) -> frozenset[Facts]:
        """The operations of the steps."""
        return frozenset(step.facts for step in self.steps)

    @functools.cached_property
    def by_key(self) -> dict[tuple, list[int]]:
        """The numbers of the steps, by their keys."""
        found: dict[tuple, list[int]] = {}
        for number, step in enumerate(self.steps):
            found.setdefault(step.key, []).append(number)
        return found

    @property
    def owns_no_tensors(self) -> bool:
        """Whether it can be remembered: its keys have only plain values, and no functions, which may own tensors."""
        return all(isinstance(step.facts.func, OpOverload) and _is_plain(step.key[1:]) for step in self.steps)

    def plan(self, roots: Collection[int], end: int, available: Collection[int], whole: bool = False) -> Plan:
        """Return the plan of a recompute of the ``roots`` that ends after ``end`` steps, with these saved values."""
        return self._plan(roots, end, available, frozenset() if whole else self.skippable)

    def used(self, roots: Collection[int], end: int, available: Collection[int], whole: bool = False) -> set[int]:
        """Return which of the available values are saved for such a recompute."""
        # If the program isn't lazy, a recompute skips nothing, but to save the operands of all steps may be too much.
        skippable = self.skippable if self.lazy else frozenset(range(end))
        return self._plan(roots, end, available, frozenset() if whole else skippable).used

    def _plan(self, roots: Collection[int], end: int, available: Collection[int], skippable: Set[int]) -> Plan:
        question = frozenset(roots), end, frozenset(available), skippable
        if (known := self._plans.get(question)) is not None:
            return known
        needed = set(roots)
        result = Plan(set(), set(), set())
        draws_later = False
        for number in range(end - 1, -1, -1):
            step = self.steps[number]
            wanted = not needed.isdisjoint(step.outs)
            if not wanted and number in skippable:
                continue
            draws = step.draws
            # A step that changes its arguments is restored as a whole. Of others, unneeded dispensable results are
            # skipped. Not where nothing may be skipped: autograd may save any of them, and then reads it undetected.
            in_part = wanted and not step.is_whole and skippable
            whole = [value for value in step.outs if not in_part or value in needed or value not in self.dispensable]
            is_saved = step.result is not UNDESCRIBED and all(value in available for value in whole)
            is_saved = is_saved and any(value in available for value in step.outs)
            if is_saved and (wanted or not draws):
                result.used.update(whole)
            # Generators must advance as in the first run if a later step draws from them.
            if is_saved and not (draws and draws_later):
                result.restored.add(number)
            else:
                result.run.add(number)
                needed.update(self.reads[number])
                draws_later |= draws
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[question] = result
        return result


_PLANS = 64
_PLAIN = (int, float, str, bool, type, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(item: Any) -> bool:
    return all(map(_is_plain, item)) if isinstance(item, tuple) else isinstance(item, _PLAIN)
