"""Programs: the log of a region's first run, and what is derived from it.

A first run only writes a log. Everything else (which values are overwritten, which steps can be skipped, which steps a
recompute runs) is a function of the log, so it is computed once for equal logs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._core.facts import Facts, facts_of
from .._core.lines import Line
from .._core.private import OpOverload
from .._policy.policy import Verdict
from .values import UNDESCRIBED, Layout, layouts


class Entry(NamedTuple):
    """The record of one operation of a first run."""

    key: tuple  # equal for operations that compute the same result
    reads: tuple[int, ...]  # the values that it read
    outs: tuple[int, ...]  # the values that it made: in new storages, then in storages that it wrote to
    overwritten: tuple[int, ...]  # the values that it overwrote
    tracked: tuple[int, ...]  # the values in `outs` that are differentiated
    result: Any  # the description of its result
    under: tuple[bool, bool]  # whether an operand required grad, whether grad mode was on
    verdict: Verdict | None  # the verdict on its results as long as they have no names

    @property
    def holds(self) -> bool:
        """Whether its operands may have to be saved: its results can't be saved, or only if something reads them."""
        return self.verdict is None or not self.tracked


class Log:
    """The entries of all operations, and what is known about the values that they made."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.lines: dict[int, Line] = {}  # the lines that called the operations
        self.made: dict[int, int] = {}  # for each value the number of the operation that made it
        self.saveable: dict[int, Verdict] = {}  # the values that the policy allows to be saved
        self.overwritten: set[int] = set()
        self.exposed: set[int] = set()  # detached values, which Python can read without a dispatch mode seeing it

    def __len__(self) -> int:
        return len(self.entries)

    def append(self, entry: Entry) -> None:
        """Add the entry of the next operation."""
        number, verdict = len(self.entries), entry.verdict
        for value in entry.outs:
            self.made[value] = number
            if verdict is not None:
                self.saveable[value] = verdict
        if entry.overwritten:
            self.overwritten.update(entry.overwritten)
        self.entries.append(entry)

    def maker(self, value: int) -> Entry:
        """Return the operation that made a value."""
        return self.entries[self.made[value]]

    def layout(self, value: int) -> Layout | None:
        """Return the layout of the result that a value was made as, or None if the result can't be described."""
        maker = self.maker(value)
        return next((layout for layout in layouts(maker.result) if maker.outs[layout.i] == value), None)

    def decide(self, value: int, verdict: Verdict) -> None:
        """Set the verdict on a value that has got a name."""
        if verdict is not Verdict.RECOMPUTE:
            self.saveable[value] = verdict
        else:
            self.saveable.pop(value, None)


CanSkip: TypeAlias = "Callable[[Step], bool]"  # whether a step may be skipped if nothing needs its results


class Plan(NamedTuple):
    """The numbers of the steps that run, of the steps that are restored from saved values, and of these values."""

    run: set[int]
    restored: set[int]
    used: set[int]


def plan(
    steps: Sequence[Step],
    dispensable: Collection[int],
    roots: Collection[int],
    available: Collection[int],
    may_be_left: CanSkip,
) -> Plan:
    """Plan a recompute of the ``roots``, where the ``available`` values are saved.

    A step whose results nothing needs is skipped if ``may_be_left`` allows it. ``dispensable`` values can be skipped.
    """
    needed = set(roots)
    result = Plan(set(), set(), set())
    draws_later = False
    for step in reversed(steps):
        wanted = not needed.isdisjoint(step.outs)
        if not wanted and may_be_left(step):
            continue
        draws = step.draws
        # A step that changes its arguments is restored as a whole. Of others, unneeded dispensable results are skipped.
        # Not where nothing may be skipped: autograd may save any of them, and then reads it undetected.
        in_part = (wanted or draws) and not step.is_whole and may_be_left is not never
        whole = [value for value in step.outs if not in_part or value in needed or value not in dispensable]
        is_saved = step.result is not UNDESCRIBED and all(value in available for value in whole)
        is_saved = is_saved and any(value in available for value in step.outs)
        if is_saved and (wanted or not draws):
            result.used.update(whole)
        # Generators must advance as in the first run if a later step draws from them.
        must_draw = draws and draws_later
        if is_saved and not must_draw:
            result.restored.add(step.number)
        else:
            result.run.add(step.number)
            needed.update(step.reads)
            draws_later |= draws
    return result


def always(step: Step) -> bool:
    """Whether a step may be skipped: any that nothing needs."""
    return True


def never(step: Step) -> bool:
    """No step may be skipped, as it may have an effect that isn't recorded."""
    return False


def can_be_skipped(step: Step) -> bool:
    """Skip a step if a read of its placeholder results would be detected."""
    return step.can_be_skipped


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
