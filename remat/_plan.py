"""Which operations run again, and which kept values they need: what no derivative needs is not kept and not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ._values import UNTOLD, Step, Value


class Plan(NamedTuple):
    """The numbers of the steps that run, those of the steps that are given kept values, and these values."""

    run: set[int]
    given: set[int]
    used: dict[Value, None]


def plan(
    steps: Sequence[Step],
    roots: Iterable[Value],
    available: Callable[[Value], object],
    may_be_left: Callable[[Step], bool],
) -> Plan:
    """What it takes to have the ``roots`` again, if the ``available`` values need not be made.

    What nothing needs runs nevertheless if ``may_be_left`` says no of it.
    """
    needed = set(roots)
    result = Plan(set(), set(), {})
    draws_later = False
    for step in reversed(steps):
        wanted = not needed.isdisjoint(step.outs)
        if not wanted and not step.draws and not step.facts.writes:
            if not may_be_left(step):
                result.run.add(step.number)
                needed.update(step.reads)
            continue
        # What changes its arguments must do so as a whole; else what can wait need not be there.
        whole = [value for value in step.outs if step.facts.writes or value in needed or not value.can_wait]
        there = all(map(available, whole))
        given = there and step.result is not UNTOLD
        if given and wanted:
            result.used.update(dict.fromkeys(whole))
        # Generators must move as in the first run, as long as something still draws from them.
        must_draw = step.draws and draws_later
        if step.draws and not wanted:  # it can't wait, but it may be given what there is
            given = there and any(map(available, step.outs))
        if given and not must_draw:
            result.given.add(step.number)
        elif wanted or must_draw or not may_be_left(step):
            result.run.add(step.number)
            needed.update(step.reads)
            draws_later |= step.draws
    return result


def can_wait(step: Step) -> bool:
    """Whether an operation that nothing seems to need can be put off, and be made up for if that was wrong."""
    if step.result is UNTOLD or step.facts.writes or step.facts.observes or step.draws:
        return False
    return all(value.overwritten is None for value in step.reads) and all(value.can_wait for value in step.outs)
