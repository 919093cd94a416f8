"""What a recompute runs, and which kept values it needs: what no derivative needs is not kept and not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .values import UNTOLD

if TYPE_CHECKING:
    from .program import Step


Leave: TypeAlias = "Callable[[Step], bool]"  # whether a step that nothing needs may be left out


class Plan(NamedTuple):
    """The numbers of the steps that run, those of the steps that are given kept values, and these values."""

    run: set[int]
    given: set[int]
    used: set[int]


def plan(
    steps: Sequence[Step],
    dispensable: Collection[int],
    roots: Collection[int],
    available: Collection[int],
    may_be_left: Leave,
) -> Plan:
    """What it takes to have the ``roots`` again, if the ``available`` values need not be made.

    What nothing needs runs nevertheless if ``may_be_left`` says no of it. ``dispensable`` values can be left out.
    """
    needed = set(roots)
    result = Plan(set(), set(), set())
    draws_later = False
    for step in reversed(steps):
        wanted = not needed.isdisjoint(step.outs)
        if not wanted and may_be_left(step):
            continue
        draws = step.draws
        # What changes its arguments must do so as a whole; else what can be left out need not be there.
        in_part = (wanted or draws) and not step.is_whole
        whole = [value for value in step.outs if not in_part or value in needed or value not in dispensable]
        given = step.result is not UNTOLD and all(value in available for value in whole)
        given = given and any(value in available for value in step.outs)
        if given and (wanted or not draws):
            result.used.update(whole)
        # Generators must move as in the first run, as long as something still draws from them.
        must_draw = draws and draws_later
        if given and not must_draw:
            result.given.add(step.number)
        else:
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


def can_be_left(step: Step) -> bool:
    """What nothing seems to need is left, if it would show that something does."""
    return step.can_be_left
