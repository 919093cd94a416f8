"""Programs: what the first run of a region did, in numbers, and what follows from that.

A first run only writes a log. What follows from a log (which values change later, what can be left out, which
operations a recompute runs) is the same for equal logs, so that of the last log is found once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch

from .._core.facts import Facts, facts_of
from .._core.private import OpOverload
from .log import Entry, Log
from .plan import Leave, Plan, plan
from .values import UNTOLD, Layout


class Step:
    """An operation of a first run that made or changed a value; views aren't noted."""

    __slots__ = (
        "can_be_left", "constants", "count", "draws", "entry", "facts", "func", "is_simple", "is_whole", "key",
        "number", "operands", "outs", "reads", "result",
    )  # fmt: skip

    def __init__(self, number: int, entry: Entry, lazy: bool) -> None:
        self.number = number
        self.entry = entry
        self.key, self.outs, self.result = entry.key, entry.outs, entry.result
        self.func = self.key[0]
        self.facts = facts_of(self.func)
        # Whose content it needs. Where nothing can be left out, it is there in any case, and best by being kept.
        self.reads = () if self.facts.reads_nothing and lazy else entry.reads
        self.draws = self.key[1] is not None
        # It changes what it reads: if it runs for one of its results, then for all.
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
        # It has tensors for arguments, and else constants; it makes a tensor, and does nothing else.
        acts = self.facts.writes or self.facts.observes or self.facts.foreign or self.draws
        self.is_simple = (
            not acts
            and type(self.result) is Layout
            and type(self.func) is OpOverload
            and len(self.operands) == len(entry.reads)
        )
        self.can_be_left = False  # where nothing seems to need it; that something reads it would show


class Program:
    """A log, and what follows from it."""

    def __init__(self, log: Log) -> None:
        self.log, entries = log, log.entries
        self.lazy = all(entry.under[1] for entry in entries)  # else user code reads tensors in ways that can't be seen
        self.steps = [Step(number, entry, self.lazy) for number, entry in enumerate(entries)]
        self.overwritten = {*log.overwritten}
        if self.overwritten:  # a recompute may take any of equal steps for the one whose result it then overwrites
            self.overwritten |= self._equal_to(self.overwritten)
        # If not differentiated, or detached, user code may read it in ways that can't be seen.
        self.dispensable = {value for entry in entries for value in entry.tracked if value not in log.exposed}
        for step in self.steps:
            step.can_be_left = (
                step.result is not UNTOLD
                and not (step.facts.observes or step.draws)
                and (not step.facts.writes or step.facts.updates_statistics)
                and self.overwritten.isdisjoint(set(step.reads).difference(step.entry.overwritten))
                and self.dispensable.issuperset(step.outs)
            )
        self._plans: dict[tuple, Plan] = {}

    def _equal_to(self, values: Collection[int]) -> set[int]:
        """The values that are computed as these are, by the same operations in the same way."""
        first: dict[tuple, tuple[int, ...]] = {}
        same: dict[int, int] = {}  # the first value of those that are
        for step in self.steps:
            same.update(zip(step.outs, first.setdefault(_renamed(step.key, same), step.outs)))
        wanted = {same.get(value, value) for value in values}
        return {value for value, each in same.items() if each in wanted}

    def step(self, number: int) -> Step | None:
        """The step of this number, if there are as many."""
        return self.steps[number] if number < len(self.steps) else None

    def starts_with(self, number: int, entry: Entry) -> bool:
        """Whether this is what its operation of this number did."""
        return number < len(self.steps) and self.steps[number].entry == entry

    def is_of(self, log: Log) -> bool:
        """Whether it is what follows from this log."""
        return self.log.entries == log.entries and self.log.exposed == log.exposed

    @functools.cached_property
    def makers(self) -> frozenset[Facts]:
        """The operations that are steps."""
        return frozenset(step.facts for step in self.steps)

    @functools.cached_property
    def by_key(self) -> dict[tuple, list[Step]]:
        """The steps by their keys."""
        found: dict[tuple, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.key, []).append(step)
        return found

    def plan(self, roots: Collection[int], end: int, available: Collection[int], leave: Leave) -> Plan:
        """What it takes to have these values again after the first ``end`` steps."""
        question = frozenset(roots), end, frozenset(available), leave
        found = self._plans.get(question)
        if found is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            found = self._plans[question] = plan(self.steps[:end], self.dispensable, roots, available, leave)
        return found

    @property
    def lasts(self) -> bool:
        """Whether it may be remembered: it has plain values alone, and not a function that holds who knows what."""
        return all(isinstance(step.func, OpOverload) and _is_plain(step.key[1:]) for step in self.steps)


def _renamed(key: tuple, names: dict[int, int]) -> tuple:
    """A key, equal for calls that make the same result, with other numbers for the values."""
    renamed, rest = [*key[:2], _renamed_in(key[2], names)], iter(key[3:])
    for item in rest:
        renamed += (names.get(item, item), next(rest)) if type(item) is int else (_renamed_in(item, names),)
    return tuple(renamed)


def _renamed_in(pattern: Any, names: dict[int, int]) -> Any:
    if not isinstance(pattern, tuple):
        return pattern
    if len(pattern) == 2 and type(pattern[0]) is int:  # of a tensor
        return names.get(pattern[0], pattern[0]), pattern[1]
    return tuple([_renamed_in(item, names) for item in pattern])


_PLANS = 64
_PLAIN = (int, float, str, bool, type, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(item: Any) -> bool:
    return all(map(_is_plain, item)) if isinstance(item, tuple) else isinstance(item, _PLAIN)
