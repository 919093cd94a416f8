"""The search for plans: for each peak of memory the lowest cost of the recompute.

``plans`` of a list of items are the Pareto-optimal pairs of peak and cost, where the peak is that of the forward and
the backward of the list alone. It follows from the plans of shorter lists. This is the recursion for chains whose
stages can be recomputed together: Gruslys et al., "Memory-Efficient Backpropagation Through Time", 2016; Beaumont et
al., "Optimal Checkpointing for Heterogeneous Chains", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .items import Item, Option

_MOST_PLANS = 300  # of a list; others are left out, so that the search stays linear in the items


class Way(NamedTuple):
    """What happens to the first item of a list: its option, or the list inside of it, as a region or as it is."""

    option: Option | None
    inside: List | None
    rest: List


class Plans(NamedTuple):
    """The Pareto-optimal plans of a list, by increasing peak; each with its way, and the plans that it consists of."""

    peak: torch.Tensor
    cost: torch.Tensor
    way: torch.Tensor
    inner: torch.Tensor
    rest: torch.Tensor


@dataclass(eq=False)
class List:
    """Items that follow one another. Equal lists are one object.

    Attributes:
        item, rest: the first item, and the list of the others; None for the empty list.
        wait: the bytes of gradients that wait at its end while its forward runs: that of a recompute.
        is_inside: whether it is inside of a region, so that its forward runs again.
        is_silent: whether nothing in it is kept, so that a recompute does not run it.
        gradients: the bytes of gradients of parameters that its backward makes.
        plans, ways: what the search has found.
    """

    item: Item | None
    rest: List | None
    wait: int
    is_inside: bool
    is_silent: bool = True
    gradients: int = 0
    plans: Plans | None = None
    ways: list[Way] = field(default_factory=list)


class Solver:
    """Finds the plans of lists of items."""

    def __init__(self) -> None:
        self._lists: dict[tuple, List] = {}

    def list_of(self, items: Sequence[Item], wait: int = 0, is_inside: bool = False) -> List:
        """Return the list of these items."""
        key = None, wait, is_inside
        if key not in self._lists:
            zero = torch.zeros(1, dtype=torch.int64)
            empty = List(None, None, wait, is_inside)
            empty.plans = Plans(zero, zero.double(), zero, zero, zero)
            self._lists[key] = empty
        return self._with(items, self._lists[key])

    def _with(self, items: Sequence[Item], rest: List) -> List:
        """Return the list of these items and then the rest."""
        for item in reversed(items):
            key = item.signature, id(rest)
            if key not in self._lists:
                is_silent = rest.is_silent and not (item.call or item.keep or item.ends)
                gradients = rest.gradients + item.gradients
                self._lists[key] = List(item, rest, rest.wait, rest.is_inside, is_silent, gradients)
            rest = self._lists[key]
        return rest

    def plans(self, items: List) -> Plans:
        """Return the plans of a list."""
        todo = [items]
        while todo[-1].plans is None and todo[-1].rest is not None:
            todo.append(todo[-1].rest)
        for each in reversed(todo):  # the shortest first
            if each.plans is None:
                each.plans = self._solve(each)
        assert items.plans is not None
        return items.plans

    def _solve(self, items: List) -> Plans:
        item, rest = items.item, items.rest
        assert item is not None and rest is not None
        found = []
        if item.items:  # as it is, with regions inside
            opened = self._with(item.items, rest)
            plans = self.plans(opened)
            found.append(self._numbered(items, Way(None, None, opened), plans.peak, plans.cost))
            found.append(self._region(items, item, rest))
        else:
            found.append(self._simple(items, None, item.keep, item.forward, item.backward, 0.0, item.ends))
        for option in item.options:
            o = option
            found.append(self._simple(items, option, o.keep, o.forward, o.backward, o.cost, o.ends))
        columns = [torch.cat(column) for column in zip(*found)]
        return Plans(*_pareto(columns))

    def _numbered(
        self, items: List, way: Way, peak: torch.Tensor, cost: torch.Tensor, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Plans that begin in one way. ``parts`` are the numbers of the plans inside, and of those of the rest."""
        number = torch.full_like(peak, len(items.ways))
        items.ways.append(way)
        if not parts:
            parts = torch.zeros_like(peak), torch.arange(len(peak))
        return peak, cost, number, *parts

    def _simple(
        self, items: List, option: Option | None, keep: int, forward: int, backward: int, cost: float, ends: float
    ) -> tuple[torch.Tensor, ...]:
        """The plans in which the first item runs as it is, or is a region without inner regions."""
        item, rest = items.item, items.rest
        assert item is not None and rest is not None and rest.plans is not None
        if items.is_inside:  # its forward is a part of a recompute, which ends at the last value that is kept
            cost += ends if rest.is_silent else item.cost
        need = max(forward + items.wait, backward + rest.gradients)
        peak = (rest.plans.peak + keep).clamp(min=need)
        return self._numbered(items, Way(option, None, rest), peak, rest.plans.cost + cost)

    def _region(self, items: List, item: Item, rest: List) -> tuple[torch.Tensor, ...]:
        """The plans in which the first item is a region with regions inside."""
        inside = self.list_of(item.items, item.waiting, is_inside=True)
        inner, outer = self.plans(inside), self.plans(rest)
        need = item.bare + item.held + items.wait
        inner_peak, outer_peak = (inner.peak + rest.gradients).clamp(min=need), outer.peak + item.given
        # For each peak the best plans of both.
        peak = torch.unique(torch.cat([inner_peak, outer_peak]))
        i = torch.searchsorted(inner_peak, peak, right=True) - 1
        j = torch.searchsorted(outer_peak, peak, right=True) - 1
        possible = (i >= 0) & (j >= 0)
        peak, i, j = peak[possible], i[possible], j[possible]
        cost = inner.cost[i] + outer.cost[j]
        if items.is_inside and not rest.is_silent:
            cost = cost + item.cost
        return self._numbered(items, Way(None, inside, rest), peak, cost, i, j)

    def chosen(self, items: List, number: int) -> list[tuple[Item, Option | None]]:
        """Return the regions of one plan of a list, each with its option, None if it has regions inside."""
        found: list[tuple[Item, Option | None]] = []
        while items.item is not None:
            assert items.plans is not None
            way = items.ways[int(items.plans.way[number])]
            if way.option is not None:
                found.append((items.item, way.option))
            elif way.inside is not None:
                found.append((items.item, None))
                found += self.chosen(way.inside, int(items.plans.inner[number]))
            number, items = int(items.plans.rest[number]), way.rest
        return found


def _pareto(columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The Pareto-optimal rows of the columns, of which the first two are peak and cost, by increasing peak."""
    peak, cost = columns[:2]
    order = cost.argsort(stable=True)
    order = order[peak[order].argsort(stable=True)]
    lowest = cost[order].cummin(0).values
    is_better = torch.ones_like(order, dtype=torch.bool)
    is_better[1:] = lowest[1:] < lowest[:-1]
    order = order[is_better]
    if len(order) > _MOST_PLANS:
        order = order[torch.linspace(0, len(order) - 1, _MOST_PLANS).round().long().unique()]
    return [column[order] for column in columns]
