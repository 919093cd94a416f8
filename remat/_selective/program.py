"""Programs: the log of a region's first run, and what is derived from it.

A first run only writes a log. Everything else (which values are overwritten, which steps can be skipped, which steps a
recompute runs) is a function of the log, so it is computed once for equal logs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch

from .._core.facts import Facts, facts_of
from .._core.private import OpOverload
from .log import Entry, Log
from .plan import CanSkip, Plan, plan
from .values import UNDESCRIBED, Layout


class Step:
    """An operation of a first run that made or changed a value, or returned no tensor. Views are not steps."""

    __slots__ = (
        "can_be_skipped", "constants", "count", "draws", "entry", "facts", "func", "is_simple", "is_whole", "key",
        "number", "operands", "outs", "reads", "result",
    )  # fmt: skip

    def __init__(self, number: int, entry: Entry, lazy: bool) -> None:
        self.number = number
        self.entry = entry
        self.key, self.outs, self.result = entry.key, entry.outs, entry.result
        self.func = self.key[0]
        self.facts = facts_of(self.func)
        # The values whose content it needs. If no step can be skipped, all operands count: better restored than run.
        self.reads = () if self.facts.reads_nothing and lazy else entry.reads
        self.draws = self.key[1] is not None
        # It changes its operands, so if it runs for one of its results, it runs for all.
        self.is_whole = bool(self.facts.writes) and not self.facts.updates_statistics
        self.operands: list[tuple[int, int, tuple | None]] = []  # position, value, form
        self.constants: list[tuple[int, Any]] = []  # position, pattern
        self.count = 0
        rest = iter(self.key[3:])
        for item in rest:
            if type(item) is int:
                self.operands.append((self.count, item, next(rest)))
            else:
                self.constants.append((self.count, item))
            self.count += 1
        # A simple step has only tensors and constants as arguments, returns one new tensor, and has no other effect.
        acts = self.facts.writes or self.facts.observes or self.facts.foreign or self.draws
        self.is_simple = (
            not acts
            and type(self.result) is Layout
            and type(self.func) is OpOverload
            and len(self.operands) == len(entry.reads)
        )
        self.can_be_skipped = False  # whether it can be skipped if nothing needs it: a read of its results is detected


class Program:
    """A log, and what is derived from it."""

    def __init__(self, log: Log) -> None:
        self.log, entries = log, log.entries
        self.lazy = all(entry.under[1] for entry in entries)  # under no_grad user code can read tensors undetected
        self.steps = [Step(number, entry, self.lazy) for number, entry in enumerate(entries)]
        self.overwritten = {*log.overwritten}
        if self.overwritten:  # a recompute may match any of several equal steps, and overwrite the result of that step
            self.overwritten |= self._equal_to(self.overwritten)
        # User code can read a value undetected if it is not differentiated, or is detached.
        self.dispensable = {value for entry in entries for value in entry.tracked if value not in log.exposed}
        for step in self.steps:
            step.can_be_skipped = (
                step.result is not UNDESCRIBED
                and not (step.facts.observes or step.draws)
                and (not step.facts.writes or step.facts.updates_statistics)
                and self.overwritten.isdisjoint(set(step.reads).difference(step.entry.overwritten))
                and self.dispensable.issuperset(step.outs)
            )
        self._plans: dict[tuple, Plan] = {}

    def _equal_to(self, values: Collection[int]) -> set[int]:
        """Return the values that are computed by the same operations on the same values as these values."""
        first: dict[tuple, tuple[int, ...]] = {}
        same: dict[int, int] = {}  # for each value the first of all values that are computed so
        for step in self.steps:
            same.update(zip(step.outs, first.setdefault(_renamed(step.key, same), step.outs)))
        wanted = {same.get(value, value) for value in values}
        return {value for value, each in same.items() if each in wanted}

    def step(self, number: int) -> Step | None:
        """Return the step with this number, or None if there are fewer steps."""
        return self.steps[number] if number < len(self.steps) else None

    def starts_with(self, number: int, entry: Entry) -> bool:
        """Whether the step with this number has this entry."""
        return number < len(self.steps) and self.steps[number].entry == entry

    def is_of(self, log: Log) -> bool:
        """Whether this log is equal to the program's."""
        return self.log.entries == log.entries and self.log.exposed == log.exposed

    @functools.cached_property
    def makers(self) -> frozenset[Facts]:
        """The operations of the steps."""
        return frozenset(step.facts for step in self.steps)

    @functools.cached_property
    def by_key(self) -> dict[tuple, list[Step]]:
        """The steps, by their keys."""
        found: dict[tuple, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.key, []).append(step)
        return found

    def plan(self, roots: Collection[int], end: int, available: Collection[int], leave: CanSkip) -> Plan:
        """Return the plan of a recompute of these values, which ends after the first ``end`` steps."""
        question = frozenset(roots), end, frozenset(available), leave
        found = self._plans.get(question)
        if found is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            found = self._plans[question] = plan(self.steps[:end], self.dispensable, roots, available, leave)
        return found

    @property
    def lasts(self) -> bool:
        """Whether it can be remembered: its keys have only plain values, and no functions, which may own tensors."""
        return all(isinstance(step.func, OpOverload) and _is_plain(step.key[1:]) for step in self.steps)


def _renamed(key: tuple, names: dict[int, int]) -> tuple:
    """Return a step's key with the numbers of its values replaced."""
    renamed, rest = [*key[:2], _renamed_in(key[2], names)], iter(key[3:])
    for item in rest:
        renamed += (names.get(item, item), next(rest)) if type(item) is int else (_renamed_in(item, names),)
    return tuple(renamed)


def _renamed_in(pattern: Any, names: dict[int, int]) -> Any:
    if not isinstance(pattern, tuple):
        return pattern
    if len(pattern) == 2 and type(pattern[0]) is int:  # the pattern of a tensor
        return names.get(pattern[0], pattern[0]), pattern[1]
    return tuple([_renamed_in(item, names) for item in pattern])


_PLANS = 64
_PLAIN = (int, float, str, bool, type, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(item: Any) -> bool:
    return all(map(_is_plain, item)) if isinstance(item, tuple) else isinstance(item, _PLAIN)
