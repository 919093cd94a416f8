"""Which operations run again, and which kept values they need: what no derivative needs is not kept and not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ._values import UNTOLD

if TYPE_CHECKING:
    from ._program import Step


class Plan(NamedTuple):
    """The numbers of the steps that run, those of the steps that are given kept values, and these values."""

    run: set[int]
    given: set[int]
    used: set[int]


def plan(
    steps: Sequence[Step],
    waiting: Collection[int],
    roots: Collection[int],
    available: Collection[int],
    may_be_left: Callable[[Step], bool],
) -> Plan:
    """What it takes to have the ``roots`` again, if the ``available`` values need not be made.

    What nothing needs runs nevertheless if ``may_be_left`` says no of it. ``waiting`` are values that can come later.
    """
    needed = set(roots)
    result = Plan(set(), set(), set())
    draws_later = False
    for step in reversed(steps):
        wanted = not needed.isdisjoint(step.outs)
        writes, draws = step.facts.writes, step.draws
        if not wanted and not writes and not draws:
            if not may_be_left(step):
                result.run.add(step.number)
                needed.update(step.reads)
            continue
        # What changes its arguments must do so as a whole; else what can wait need not be there.
        whole = [value for value in step.outs if writes or value in needed or value not in waiting]
        there = all(value in available for value in whole)
        given = there and step.result is not UNTOLD
        if given and wanted:
            result.used.update(whole)
        # Generators must move as in the first run, as long as something still draws from them.
        must_draw = draws and draws_later
        if draws and not wanted:  # it can't wait, but it may be given what there is
            given = there and any(value in available for value in step.outs)
        if given and not must_draw:
            result.given.add(step.number)
        elif wanted or must_draw or not may_be_left(step):
            result.run.add(step.number)
            needed.update(step.reads)
            draws_later |= draws
    return result


def always(step: Step) -> bool:
    """Whatever nothing needs is left."""
    return True


def never(step: Step) -> bool:
    """What may have an effect that can't be seen runs."""
    return False


def can_wait(step: Step) -> bool:
    """What can be made up for is left."""
    return step.can_wait
