"""Programs: what the first run of a region did, in numbers, and what follows from that.

A first run only writes a log. What follows from a log (which values change later, what can be put off, which operations
have to run again) is the same for equal logs, so it is found once for all calls of a function that do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from ._facts import Facts, facts_of
from ._plan import Plan, plan
from ._torch import OpOverload
from ._values import UNTOLD, Layout

# What an operation did: what it has in common with those that make the same, the values that it read, those that it
# made (of new storages, then of those that it wrote to), those that it overwrote and those that are differentiated of
# what it made, its result, and whether grad mode was on.
Entry = tuple[tuple, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], Any, bool]

_KNOWN = 8  # programs of a function that are remembered
_PLANS = 64  # plans of a program


class Step:
    """An operation of a first run that made or changed a value; views aren't noted."""

    __slots__ = (
        "can_wait",
        "draws",
        "facts",
        "func",
        "is_simple",
        "key",
        "number",
        "outs",
        "reads",
        "result",
        "tracked",
    )

    def __init__(self, number: int, entry: Entry) -> None:
        self.number = number
        self.key, self.reads, self.outs, _, self.tracked, self.result, _ = entry
        self.func = self.key[0]
        self.facts = facts_of(self.func)
        self.draws = self.key[1] is not None
        self.is_simple = False  # it makes one tensor, which nothing changes later, and draws nothing
        self.can_wait = False  # it can be put off where nothing seems to need it, and be made up for if that was wrong


class Program:
    """A log, and what follows from it. Python code may have read the values ``seen`` in ways that can't be seen."""

    def __init__(self, log: list[Entry], seen: set[int]) -> None:
        self.log = log
        self.seen = seen
        self.steps = [Step(number, entry) for number, entry in enumerate(log)]
        self.lazy = all(entry[-1] for entry in log)  # else user code reads tensors in ways that can't be seen
        self.overwritten = {number for entry in log for number in entry[3]}
        # If not differentiated, or detached, user code may read it in ways that can't be seen.
        self.waiting = {number for step in self.steps for number in step.tracked if number not in seen}
        for step in self.steps:
            effects = step.facts.writes or step.facts.observes or step.draws
            step.is_simple = type(step.result) is Layout and not effects and self.overwritten.isdisjoint(step.outs)
            step.can_wait = (
                step.result is not UNTOLD
                and not effects
                and self.overwritten.isdisjoint(step.reads)
                and self.waiting.issuperset(step.outs)
            )
        self._plans: dict[tuple, Plan] = {}

    @functools.cached_property
    def makers(self) -> frozenset[Facts]:
        """The operations that are steps."""
        return frozenset(step.facts for step in self.steps)

    @functools.cached_property
    def by_key(self) -> dict[tuple, list[Step]]:
        """The steps by what they have in common with others that make the same."""
        found: dict[tuple, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.key, []).append(step)
        return found

    def plan(self, end: int, roots: Collection[int], available: Collection[int], leave: Callable[[Step], bool]) -> Plan:
        """What it takes to have the ``roots`` again after the first ``end`` steps (see ``_plan.py``)."""
        question = end, frozenset(roots), frozenset(available), leave
        found = self._plans.get(question)
        if found is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            found = self._plans[question] = plan(self.steps[:end], self.waiting, *question[1:])
        return found

    @property
    def lasts(self) -> bool:
        """Whether it may be remembered: it has plain values alone, and not a function that holds who knows what."""
        return all(isinstance(step.func, OpOverload) and _is_plain(step.key[1:]) for step in self.steps)


def program_of(log: list[Entry], seen: set[int], known: list[Program]) -> Program:
    """The program of a log: one of those that are known, else a new one, which is known from now on."""
    for program in known:
        if program.log == log and program.seen == seen:
            return program
    program = Program(log, seen)
    if program.lasts:
        known.insert(0, program)
        del known[_KNOWN:]
    return program


_PLAIN = (int, float, str, bool, type, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(item: Any) -> bool:
    return all(map(_is_plain, item)) if isinstance(item, tuple) else isinstance(item, _PLAIN)
