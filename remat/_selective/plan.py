"""Plans: which steps a recompute runs, and which saved values it needs. Steps that no derivative needs are skipped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .values import UNDESCRIBED

if TYPE_CHECKING:
    from .program import Step


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
