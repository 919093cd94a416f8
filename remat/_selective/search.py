"""The search for the choices of saved values that are Pareto-optimal in bytes and cost of the recompute.

A value that the backward pass needs is saved, or its step is recomputed, which needs the values that the step reads.
One pass backwards over the steps branches at each value that is needed and can be saved. What is best before a step
depends only on the state there: the needed values, and whether the recompute reaches it. So only the Pareto-optimal
ways to each state are continued. If these are too many, the search is repeated for some prices of a byte, and continues
only the best ways at each price: that finds the corners of the convex hull of all choices.
"""

from __future__ import annotations

import math
import timeit
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .._core.devices import is_capturing, streams_for
from .._core.facts import Facts, flops, mapped, tensors
from .._core.state import unseen
from ..errors import PolicyError
from .program import Program
from .values import form_of

Cost = Callable[[Any, tuple, dict, Any], float]  # of one call: the operator, its arguments, its result

# Approximate FLOPs and bytes per second of each kind of device. Only the ratio matters.
_ROOFLINES = {"cpu": (50e9, 20e9), "cuda": (100e12, 2e12), "mps": (5e12, 200e9), "xpu": (50e12, 1e12)}
_COLLECTIVES = {"c10d", "_c10d_functional"}  # all processes must run them equally often
_REPEATS = 3
_times: dict[Any, float] = {}  # the measured ones, in microseconds
_MOST_TIMES = 4096


def cost_of(cost: str | Cost, facts: Facts, args: tuple, kwargs: dict, result: Any) -> float:
    """Return the cost of this call: FLOPs, microseconds, or the result of the user's function."""
    func = facts.func
    if callable(cost):
        return _by_function(cost, func, args, kwargs, result)
    if facts.makes_nothing:
        return 0.0
    if cost == "flops":
        return float(flops(func, args, kwargs, result))
    runs_once = facts.writes or facts.foreign or facts.draws(args, kwargs) or func.namespace in _COLLECTIVES
    if cost == "time" and not (runs_once or is_capturing()):
        return _measured(func, args, kwargs)
    return _roofline(func, args, kwargs, result)


def _by_function(cost: Cost, func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """Return the result of the user's function. PolicyError if it is no cost, or a TypeError, which operators hide."""
    try:
        with unseen(), torch.no_grad():
            number = float(cost(func, args, kwargs, result))
    except TypeError as error:
        raise PolicyError(f"The cost function of a budget failed for {func}: {error}") from error
    if not 0 <= number < math.inf:
        raise PolicyError(f"The cost of {func} must be finite and not negative; the function returned {number}.")
    return number


def _roofline(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """Return the microseconds of the computation or of the memory traffic, whichever takes longer."""
    touched = tensors((args, kwargs, result))
    kind = next((tensor.device.type for tensor in touched), "cpu")
    per_second, bandwidth = _ROOFLINES.get(kind, _ROOFLINES["cuda"])
    moved = sum(tensor.numel() * tensor.element_size() for tensor in touched)
    return max(flops(func, args, kwargs, result) / per_second, moved / bandwidth) * 1e6


def _measured(func: Any, args: tuple, kwargs: dict) -> float:
    """Return the shortest of a few runs in microseconds. The caller excludes operations with effects.

    An operator is measured once for each form of its arguments, so a second call of a function measures nothing.
    """
    key = func, repr(mapped(lambda t: form_of(t) or (t.shape, t.layout, t.dtype, t.device), (args, kwargs)))
    if key in _times:
        return _times[key]
    streams = streams_for(tensors((args, kwargs)))

    def run() -> None:
        func(*args, **kwargs)
        for stream in streams:
            stream.synchronize()

    if len(_times) >= _MOST_TIMES:
        _times.clear()
    with unseen(), torch.no_grad():
        _times[key] = min(timeit.repeat(run, number=1, repeat=_REPEATS)) * 1e6
    return _times[key]


class Choice(NamedTuple):
    """The steps whose results are saved, the bytes of these results, and the cost of the recomputed steps."""

    nbytes: int
    cost: float
    steps: frozenset[int]
    flops: int = 0


class Problem(NamedTuple):
    """A program, which of its values can be saved, and which the backward pass needs."""

    program: Program
    costs: Sequence[float]  # of the steps
    sizes: Mapping[int, int]  # of values, in bytes
    keepable: Collection[int]  # values that can be saved
    roots: Mapping[int, int]  # the values that autograd saved, each with the number of steps that had run then


# The needed values; those read only by steps whose results nothing needs; those that autograd saved after the end of
# the recompute and that the choice saves; whether the recompute reaches this step; whether it draws numbers later.
_State = tuple[frozenset[int], frozenset[int], frozenset[int], bool, bool]
_Label = tuple[int, float, tuple[int, ...]]  # bytes, cost, the saved steps
_Found = tuple[_State, list[_Label]]
_Ways = dict[_State, list[_Label]]
_Way = TypeVar("_Way", bound=tuple)
MOST_WAYS = 500_000  # to all steps, which take some seconds
_MOST_STATES = 100  # that are continued at one price
_PRICES = 48  # the most prices that are tried
_ROUNDING = 1e-9  # of costs: each way adds them in another order


def corners(problem: Problem) -> list[Choice]:
    """Return the choices that are optimal for some price of a byte, by increasing bytes, or nearly so."""

    def best(price: float) -> Choice:
        return min(pareto(problem, price), key=_priced(price))

    ends = best(0.0), best(sum(problem.costs) + 1.0)
    found, spans, prices = [*ends], deque([ends]), _PRICES
    while spans and prices:
        more, less = spans.popleft()  # more bytes at less cost, less bytes at more cost
        if more.nbytes > less.nbytes and more.cost < less.cost:
            middle, prices = best((less.cost - more.cost) / (more.nbytes - less.nbytes)), prices - 1
            if middle[:2] not in (more[:2], less[:2]):
                found.append(middle)
                spans += [(more, middle), (middle, less)]
    return best_of(found, _ROUNDING)


def pareto(problem: Problem, price: float | None = None) -> list[Choice]:
    """Return the Pareto-optimal choices, by increasing bytes; with a price of a byte, only the cheapest ones.

    Without a price it returns none if there are more than ``MOST_WAYS`` ways at all steps.
    """
    none: frozenset[int] = frozenset()
    made = {value: step for step in problem.program.steps for value in step.outs}
    saved = defaultdict(list)
    for value, after in problem.roots.items():
        if value in made:
            saved[after].append(value)
    ways: _Ways = {(none, none, none, False, False): [(0, 0.0, ())]}
    count = 0
    for number in range(len(problem.program.steps), -1, -1):
        for value in saved[number]:
            ways = _merged(_at_root(ways, value, value in problem.keepable), price)
        if number:
            reads = frozenset(value for value in problem.program.reads[number - 1] if value in made)
            ways = _merged(_at_step(ways, number - 1, reads, problem), price)
        count += sum(map(len, ways.values()))
        if price is None and count > MOST_WAYS:
            return []
    best = best_of((label for labels in ways.values() for label in labels), _ROUNDING)
    return [Choice(nbytes, cost, frozenset(steps)) for nbytes, cost, steps in best]


def _at_root(ways: _Ways, value: int, keepable: bool) -> Iterable[_Found]:
    """Branch where autograd has saved a value: the choice saves the value, or a recompute makes it."""
    for (needed, low, promised, begun, draws), labels in ways.items():
        if keepable and not begun:
            yield (needed, low, promised | {value}, False, draws), labels
        yield (needed | {value}, low - {value}, promised, True, draws), labels


def _at_step(ways: _Ways, number: int, reads: frozenset[int], problem: Problem) -> Iterable[_Found]:
    """Branch at a step: its results are saved, or it runs, or it isn't needed."""
    step, cost = problem.program.steps[number], problem.costs[number]
    outs, stays = frozenset(step.outs), number not in problem.program.skippable
    for (needed, low, promised, begun, draws), labels in ways.items():
        wanted, saved, unread = needed & outs, promised & outs, low & outs
        needed, low, promised = needed - outs, low - outs, promised - outs
        if not (wanted or saved or unread or (stays and begun)):
            yield (needed, low, promised, begun, draws), labels
            continue
        must_draw = step.draws and draws  # generators must advance as in the first run if a later step draws
        whole = outs if step.is_whole and begun else wanted | saved
        if saved or (wanted and all(value in problem.keepable for value in whole)):
            nbytes = sum(problem.sizes[value] for value in whole)
            saving = [(size + nbytes, spent, (*before, number)) for size, spent, before in labels]
            if not must_draw:
                yield (needed, low, promised, begun, draws), saving
            elif saved:
                yield (needed | reads, low - reads, promised, begun, True), _dearer(saving, cost)
        if not saved:
            # If nothing needs the results of a step that runs, its operands aren't saved for it.
            read = (needed | reads, low - reads) if wanted else (needed, low | (reads - needed))
            yield (*read, promised, begun, draws or step.draws), _dearer(labels, cost)


def _dearer(labels: list[_Label], cost: float) -> list[_Label]:
    return [(nbytes, before + cost, steps) for nbytes, before, steps in labels]


def _merged(found: Iterable[_Found], price: float | None) -> _Ways:
    """Return the Pareto-optimal ways to each state; with a price, the cheapest way to each of the cheapest states."""
    ways: _Ways = {}
    for state, labels in found:
        ways[state] = ways[state] + labels if state in ways else labels
    if price is not None:
        priced = _priced(price)
        cheapest = {state: [min(labels, key=priced)] for state, labels in ways.items()}
        return dict(sorted(cheapest.items(), key=lambda way: priced(way[1][0]))[:_MOST_STATES])
    return {state: best_of(labels, _ROUNDING) for state, labels in ways.items()}


def _priced(price: float) -> Callable[[tuple], float]:
    return lambda way: way[1] + price * way[0]


def best_of(ways: Iterable[_Way], margin: float = 0.0) -> list[_Way]:
    """Return the Pareto-optimal ones of tuples that begin with bytes and cost, by increasing bytes."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        if not found or way[1] < found[-1][1] - margin:
            found.append(way)
    return found
