"""The search for plans finds the Pareto front of all plans of small chains, whose memory is replayed step by step."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import nn

from remat._planning.items import NO_WORK, Item, Option, Work
from remat._planning.solver import Solver
from remat._planning.trace import Call

Entry = tuple[list[Item], Any]  # the calls, and an option or the plan of a region around them


def item(numbers: random.Random, index: int, container: Any, depth: int = 0) -> Item:
    """An item with random bytes and costs."""

    some = lambda most=20: numbers.randrange(most)
    call = Call(None, 0)
    if numbers.random() < 0.8:
        container, overwrites = container if numbers.random() < 0.8 else None, numbers.random() < 0.2
        call = Call(nn.Identity(), 0)
        call.container, call.index, call.overwrites = container, index, overwrites
    found = Item(call, key=(index, depth, numbers.random()))
    found.keep, found.gradients, found.waiting, found.held, found.given = some(), some(5), some(5), some(4), some(5)
    found.work, found.bare = Work(some() + 1, 0), some() + found.given
    if call.module and depth == 0 and numbers.random() < 0.5:
        inner = object()
        found.items = [item(numbers, i, inner, 1) for i in range(numbers.randrange(1, 3))]
        found.gradients = sum(each.gradients for each in found.items)
        found.work = Work(sum(each.work.cost for each in found.items), 0)
        found.items[-1].waiting = found.waiting
    else:
        ends = Work(some(int(found.work.cost) + 1) if found.keep else 0, 0)
        found.options.append(Option(found.keep, found.keep + some(), found.keep + some(), NO_WORK, ends))
    for _ in range(numbers.randrange(3) if call.module else 0):
        keep = found.given + some()
        ends = Work(some(int(found.work.cost) + 1), 0)
        found.options.append(Option(keep, keep + some(), keep + some(), Work(some(), 0), ends, 1, frozenset()))
    return found


def plans(items: Sequence[Item], in_row: bool = False) -> Iterator[list[Entry]]:
    """All plans of a chain."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for option in first.options:
        yield from ([([first], option), *plan] for plan in plans(rest, in_row))
    if first.items:
        yield from plans([*first.items, *rest], in_row)
        for inner in plans(first.items) if not first.call.overwrites else ():
            yield from ([([first], inner), *plan] for plan in plans(rest, in_row))
    n = 1
    while not (first.call.overwrites or in_row) and n < len(items) and items[n].follows(items[n - 1]):
        n += 1
        for inner in plans(items[:n], in_row=True):
            yield from ([(list(items[:n]), inner), *plan] for plan in plans(items[n:]))


def replayed(plan: Sequence[Entry], wait: int = 0, inside: bool = False, later: int = 0) -> tuple[int, float]:
    """The peak and the cost of a plan: its forward from left to right, then its backward."""
    peak, cost, now = 0, 0.0, 0
    kept: list[tuple[int, Entry]] = []
    for i, (calls, how) in enumerate(plan):
        is_last = all(not (each.call.module or each.keep) for others, _ in plan[i + 1 :] for each in others)
        waits = wait + later if inside else 0
        if isinstance(how, Option):
            forward, keep = how.forward, how.keep
            cost += how.recompute.cost
            cost += (how.ends if is_last else calls[0].work).cost if inside else 0
        else:
            keep = calls[0].given
            forward = max(call.bare + call.held + (keep if j else 0) for j, call in enumerate(calls))
            cost += sum(call.work.cost for call in calls) if inside and not is_last else 0
        peak = max(peak, now + forward + waits)
        kept.append((now, (calls, how)))
        now += keep
    for before, (calls, how) in reversed(kept):
        if isinstance(how, Option):
            peak = max(peak, before + how.backward + later)
        else:
            inner_peak, inner_cost = replayed(how, calls[-1].waiting, True, later)
            peak, cost = max(peak, before + inner_peak), cost + inner_cost
        later += sum(call.gradients for call in calls)
    return peak, cost


@pytest.mark.parametrize("seed", range(60))
def test_the_front_is_that_of_all_plans(seed: int) -> None:
    numbers, container = random.Random(seed), object()
    items = [item(numbers, i, container) for i in range(numbers.randrange(1, 5))]
    best: list[tuple[int, float]] = []
    for value in sorted(replayed(plan) for plan in plans(items)):
        if not best or value[1] < best[-1][1]:
            best.append(value)
    chain = Solver(longest_row=9).list_of(items)
    found = chain.plans
    assert list(zip(found.peak.tolist(), found.cost.tolist())) == best
    for number, (peak, _) in enumerate(best):
        assert chain.cheapest(peak) == number and chain.cheapest(best[0][0] - 1) == -1
        calls = [id(call) for calls, *_ in chain.chosen(number, items) for call in calls]
        every = [each for top in items for each in top.everything()]
        assert set(calls) <= {id(each) for each in every if each.call.module}
        assert chain.largest(number, items)[0] in every and peak >= 0
