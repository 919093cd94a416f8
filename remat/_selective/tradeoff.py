"""All that a region may keep, and what its recompute costs then: the choices that no other beats in both.

What has to be there for a backward is kept, or its step is recomputed, which needs what that reads. One pass backwards
over the steps takes both ways at each value that is needed and may be kept. What is before a step depends on the state
there alone (what is needed so far, and whether the recompute has begun), so of the ways to a state only those matter
that no other beats in both bytes and cost. The result is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from .program import Step


class Choice(NamedTuple):
    """Steps whose results are kept: the bytes that takes, and what the steps cost that are recomputed."""

    nbytes: int
    cost: float
    steps: frozenset[int]
    flops: int = 0
    beside: int = 0  # of the bytes those that autograd did not save: they come on top when it all is recomputed


class Problem(NamedTuple):
    """The steps of a program, what may be kept of them, and what a backward needs."""

    steps: Sequence[Step]
    costs: Sequence[float]
    sizes: Mapping[int, int]  # of values
    keepable: Collection[int]  # values
    roots: Mapping[int, int]  # the values that autograd saved, each with how many steps had run then
    stays: Collection[int]  # steps that run in each recompute, once it has come to them


# What is needed so far; of that what only steps that stay read; what the backward needs and the choice keeps, as far as
# the recompute hasn't begun; whether it has; whether a later step of it draws random numbers.
_State = tuple[frozenset[int], frozenset[int], frozenset[int], bool, bool]
_Label = tuple[int, float, Any]  # bytes, cost, the steps that are kept as a linked list
_Way = TypeVar("_Way", bound=tuple)
MOST_WAYS = 20_000
_ROUNDING = 1e-9  # of costs, which are added in another order on each way


class TooMany(Exception):
    """There are too many states to go through all of them."""


def pareto(problem: Problem) -> list[Choice]:
    """The choices that no other beats, the one that keeps the least first.

    Raises:
        TooMany: there are more than ``MOST_WAYS`` ways at one step.
    """
    none: frozenset[int] = frozenset()
    made = {value: step for step in problem.steps for value in step.outs}
    saved = defaultdict(list)
    for value, after in problem.roots.items():
        if value in made:
            saved[after].append(value)
    ways: dict[_State, list[_Label]] = {(none, none, none, False, False): [(0, 0.0, None)]}
    for number in range(len(problem.steps), -1, -1):
        for value in saved[number]:
            ways = _merged(_at_root(ways, value, value in problem.keepable))
        if number:
            step = problem.steps[number - 1]
            reads = frozenset(value for value in step.reads if value in made)
            ways = _merged(_at_step(ways, step, reads, problem))
    best = best_of((label for labels in ways.values() for label in labels), _ROUNDING)
    return [Choice(nbytes, cost, frozenset(_listed(kept))) for nbytes, cost, kept in best]


def _at_root(ways: dict[_State, list[_Label]], value: int, keepable: bool) -> Iterable[tuple[_State, list[_Label]]]:
    """Autograd has saved a value here."""
    for (needed, low, promised, begun, draws), labels in ways.items():
        if keepable and not begun:
            yield (needed, low, promised | {value}, False, draws), labels
        yield (needed | {value}, low - {value}, promised, True, draws), labels


def _at_step(
    ways: dict[_State, list[_Label]], step: Step, reads: frozenset[int], problem: Problem
) -> Iterable[tuple[_State, list[_Label]]]:
    """A step is kept, or runs, or isn't needed."""
    outs, stays = frozenset(step.outs), step.number in problem.stays
    for (needed, low, promised, begun, draws), labels in ways.items():
        wanted, kept = needed & outs, promised & outs
        rest = needed - outs, low - outs, promised - outs
        if not (wanted or kept or low & outs or (stays and begun)):
            yield (*rest, begun, draws), labels
            continue
        must_draw = step.draws and draws  # generators move as they did, as long as something draws from them
        whole = outs if step.is_whole and begun else wanted | kept
        may_keep = kept or (wanted and all(value in problem.keepable for value in whole))
        if may_keep:
            nbytes = sum(problem.sizes[value] for value in whole)
            keeping = [(size + nbytes, cost, (step.number, before)) for size, cost, before in labels]
            if not must_draw:
                yield (*rest, begun, draws), keeping
            elif kept:
                yield _running(rest, reads, True, begun, True), _dearer(keeping, problem.costs[step.number])
        if not kept:
            after = _running(rest, reads, bool(wanted), begun, draws or step.draws)
            yield after, _dearer(labels, problem.costs[step.number])


def _running(rest: tuple, reads: frozenset[int], wanted: bool, begun: bool, draws: bool) -> _State:
    """The state before a step that runs. What a step reads that only has to run is needed only if it isn't there."""
    needed, low, promised = rest
    if wanted:
        return needed | reads, low - reads, promised, begun, draws
    return needed, low | (reads - needed), promised, begun, draws


def _dearer(labels: list[_Label], cost: float) -> list[_Label]:
    return [(nbytes, before + cost, kept) for nbytes, before, kept in labels]


def _merged(found: Iterable[tuple[_State, list[_Label]]]) -> dict[_State, list[_Label]]:
    ways: dict[_State, list[_Label]] = {}
    for state, labels in found:
        ways[state] = ways[state] + labels if state in ways else labels
    ways = {state: best_of(labels, _ROUNDING) for state, labels in ways.items()}
    if sum(map(len, ways.values())) > MOST_WAYS:
        raise TooMany
    return ways


def best_of(ways: Iterable[_Way], margin: float = 0.0) -> list[_Way]:
    """Of tuples that begin with bytes and cost, those that no other beats in both; the fewest bytes come first."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        if not found or way[1] < found[-1][1] - margin:
            found.append(way)
    return found


def _listed(kept: Any) -> Iterable[int]:
    while kept is not None:
        number, kept = kept
        yield number
