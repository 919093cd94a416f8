"""The search for plans: for each peak of memory the lowest cost of the recompute.

``plans`` of a list of items are the Pareto-optimal pairs of peak and cost, where the peak is that of the forward and
the backward of the list alone. It follows from the plans of shorter lists. This is the recursion for chains whose
stages can be recomputed together: Gruslys et al., "Memory-Efficient Backpropagation Through Time", 2016; Beaumont et
al., "Optimal Checkpointing for Heterogeneous Chains", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .items import Item, Option

MOST_PLANS = 2000  # of a list; others are left out, so that the search stays linear in the items


class Way(NamedTuple):
    """What happens to the first items of a list: the option of one, or a region around some and the list inside.

    Without both, the items inside of the first one take its place.
    """

    size: int  # the number of these items
    option: Option | None
    inside: List | None
    rest: List


# The calls in a region, its option unless it saves only its inputs, and whether it has regions inside.
Planned = tuple[tuple[Item, ...], Option | None, bool]


class Plans(NamedTuple):
    """The Pareto-optimal plans of a list, by increasing peak; each with its way, and the plans that it consists of."""

    peak: torch.Tensor
    cost: torch.Tensor
    flops: torch.Tensor
    way: torch.Tensor
    inner: torch.Tensor
    rest: torch.Tensor


def _inside(calls: Sequence[Item]) -> Sequence[Item]:
    """The items inside of a region around one call, or around calls that their container makes one after another."""
    return calls if len(calls) > 1 else calls[0].items


def _forward(calls: Sequence[Item]) -> int:
    """The most bytes in the forward of a region around these calls. It keeps only the first call's arguments."""
    return max(call.bare + call.held + (calls[0].given if i else 0) for i, call in enumerate(calls))


@dataclass(eq=False)
class List:
    """Items that follow one another. Equal lists are one object.

    Attributes:
        item, rest: the first item, and the list of the others; None for the empty list.
        wait: the bytes of gradients that wait at its end while its forward runs: that of a recompute.
        is_inside: whether it is inside of a region, so that its forward is recomputed.
        is_row: whether that region is around just these calls, so that no other region is around some of them.
        is_silent: whether nothing in it is kept, so that a recompute does not run it.
        gradients: the bytes of gradients of parameters that its backward makes.
        ways: how its first items can run.
        plans: the best of its plans.
    """

    item: Item | None
    rest: List | None
    wait: int
    is_inside: bool
    is_row: bool
    is_silent: bool = True
    gradients: int = 0
    ways: list[Way] = field(default_factory=list)
    plans: Plans = field(init=False)

    def cheapest(self, peak: int) -> int:
        """The number of the cheapest plan up to a peak; -1 if there is none."""
        return int(torch.searchsorted(self.plans.peak, peak, right=True)) - 1

    def _steps(self, number: int, chain: Sequence[Item]) -> Iterator[tuple[tuple[Item, ...], Way, int]]:
        """Go through a plan, for this chain: the calls, their way, and the number of the plan inside."""
        items, todo = self, list(reversed(chain))
        while todo:
            way = items.ways[int(items.plans.way[number])]
            calls = tuple(todo.pop() for _ in range(way.size))
            if way.option is None and way.inside is None:
                todo += reversed(calls[0].items)
            yield calls, way, int(items.plans.inner[number])
            number, items = int(items.plans.rest[number]), way.rest

    def chosen(self, number: int, chain: Sequence[Item]) -> list[Planned]:
        """Return the regions of a plan of this chain, each followed by those inside of it."""
        found: list[Planned] = []
        for calls, way, inner in self._steps(number, chain):
            if way.option is not None and way.option.steps is not None:
                found.append((calls, way.option, False))
            elif way.inside is not None:
                inside = way.inside.chosen(inner, _inside(calls))
                found += [(calls, None, bool(inside)), *inside]
        return found

    def largest(self, number: int, chain: Sequence[Item]) -> tuple[Item, bool]:
        """Return the item of the chain that needs the peak of a plan, and whether it does in the backward."""
        peak, kept = int(self.plans.peak[number]), 0
        for calls, way, inner in self._steps(number, chain):
            if way.option is not None:
                backward = way.option.backward + way.rest.gradients
                if kept + max(backward, way.option.forward + self.wait) >= peak:
                    return calls[0], kept + backward >= peak
                kept += way.option.keep
            elif way.inside is not None:
                if kept + int(way.inside.plans.peak[inner]) + way.rest.gradients >= peak:
                    return way.inside.largest(inner, _inside(calls))[0], True
                if kept + _forward(calls) + self.wait >= peak:
                    return calls[0], False
                kept += calls[0].given
        raise AssertionError("no item of the plan has its peak")


class Solver:
    """Finds the plans of lists of items, up to a peak. A region is around at most ``longest_row`` calls."""

    def __init__(self, longest_row: int = 0, limit: float = math.inf, most_plans: int = MOST_PLANS) -> None:
        self._longest_row, self._limit, self._most_plans = longest_row, limit, most_plans
        self._lists: dict[tuple, List] = {}

    def list_of(self, items: Sequence[Item], wait: int = 0, is_inside: bool = False, is_row: bool = False) -> List:
        """Return the list of these items, with its plans."""
        key = wait, is_inside, is_row
        if key not in self._lists:
            zero = torch.zeros(1, dtype=torch.int64)
            self._lists[key] = List(None, None, *key)
            self._lists[key].plans = Plans(zero, zero.double(), zero, zero, zero, zero)
        return self._with(items, self._lists[key])

    def _with(self, items: Sequence[Item], rest: List) -> List:
        """Return the list of these items and then the rest."""
        for item in reversed(items):
            key = item.signature, id(rest)
            made = self._lists.get(key)
            if made is None:
                is_silent = rest.is_silent and item.call.module is None and not item.keep
                gradients = rest.gradients + item.gradients
                made = List(item, rest, rest.wait, rest.is_inside, rest.is_row, is_silent, gradients)
                made.plans = self._solve(made, item, rest)
                self._lists[key] = made
            rest = made
        return rest

    def _solve(self, items: List, item: Item, rest: List) -> Plans:
        """Return the plans of a list, which begins with this item."""
        found: list[tuple[torch.Tensor, ...]] = []
        if item.items:  # as it is, with regions inside
            opened = self._with(item.items, rest)
            plans = opened.plans
            way = torch.full_like(plans.peak, len(items.ways))
            items.ways.append(Way(1, None, None, opened))
            found.append((*plans[:3], way, torch.zeros_like(way), torch.arange(len(way))))
            if not item.call.overwrites:
                found.append(self._region(items, [item], rest))
        calls, after = [item], rest
        longest = 1 if item.call.overwrites or items.is_row else self._longest_row
        while len(calls) < longest and after.item and after.rest and after.item.follows(calls[-1]):
            calls.append(after.item)
            after = after.rest
            found.append(self._region(items, calls, after))
        if item.options:
            found.append(self._simple(items, item, rest))
        columns = [torch.cat(column) for column in zip(*found)]
        return Plans(*self._pareto(columns))

    def _simple(self, items: List, item: Item, rest: List) -> tuple[torch.Tensor, ...]:
        """The plans in which the first item runs by one of its options."""
        plans, rows = rest.plans, []
        for option in item.options:
            cost, flops = option.recompute
            if items.is_inside:  # its forward is a part of a recompute, which ends at the last value that is kept
                again = option.ends if rest.is_silent else item.work
                cost, flops = cost + again.cost, flops + again.flops
            need = max(option.forward + items.wait, option.backward + rest.gradients)
            rows.append((option.keep, need, cost, flops, len(items.ways)))
            items.ways.append(Way(1, option, None, rest))
        keeps, needs, costs, counts, ways = (torch.tensor(column).unsqueeze(1) for column in zip(*rows))
        peak = torch.maximum(plans.peak + keeps, needs)
        number = torch.arange(len(plans.peak)).expand_as(peak)
        found = peak, plans.cost + costs, plans.flops + counts, ways.expand_as(peak), torch.zeros_like(peak), number
        return tuple(column.flatten() for column in found)

    def _region(self, items: List, calls: Sequence[Item], rest: List) -> tuple[torch.Tensor, ...]:
        """The plans in which a region with regions inside is around the first items."""
        inside = self.list_of(_inside(calls), calls[-1].waiting, is_inside=True, is_row=len(calls) > 1)
        inner, outer = inside.plans, rest.plans
        inner_peak = (inner.peak + rest.gradients).clamp(min=_forward(calls) + items.wait)
        outer_peak = outer.peak + calls[0].given
        # For each peak the best plans of both.
        peak = torch.unique(torch.cat([inner_peak, outer_peak]))
        i = torch.searchsorted(inner_peak, peak, right=True) - 1
        j = torch.searchsorted(outer_peak, peak, right=True) - 1
        possible = (i >= 0) & (j >= 0)
        peak, i, j = peak[possible], i[possible], j[possible]
        cost, flops = inner.cost[i] + outer.cost[j], inner.flops[i] + outer.flops[j]
        if items.is_inside and not rest.is_silent:  # its forward is a part of a recompute
            cost += sum(call.work.cost for call in calls)
            flops += sum(call.work.flops for call in calls)
        way = torch.full_like(peak, len(items.ways))
        items.ways.append(Way(len(calls), None, inside, rest))
        return peak, cost, flops, way, i, j

    def _pareto(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The Pareto-optimal rows of the columns, of which the first two are peak and cost, by increasing peak."""
        within = columns[0] <= max(self._limit, int(columns[0].min()))
        columns = [column[within] for column in columns]
        peak, cost = columns[:2]
        order = cost.argsort(stable=True)
        order = order[peak[order].argsort(stable=True)]
        lowest = cost[order].cummin(0).values
        is_better = torch.ones_like(order, dtype=torch.bool)
        is_better[1:] = lowest[1:] < lowest[:-1]
        order = order[is_better]
        if len(order) > self._most_plans:
            # The least peak, and the cheapest plan in each of equal ranges of the others.
            above = (peak[order] - peak[order[0]]).double()
            part = (above * ((self._most_plans - 1) / above[-1])).ceil()
            order = order[torch.cat([part[1:] > part[:-1], torch.ones(1, dtype=torch.bool)])]
        return [column[order] for column in columns]
