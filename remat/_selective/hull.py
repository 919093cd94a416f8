"""The choices for programs that are too long for an exact search: those that are optimal for some price of a byte.

For a fixed price the optimal choice is a minimum cut. The nodes are values that are needed and steps that run. Cutting
an edge costs what saving the value, or running the step, costs. An edge that can't be cut expresses a dependency.
The result is the corners of the convex hull of all choices. Between two corners there may be further optimal choices.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise
from typing import Any

from .tradeoff import Choice, Problem

_CUTS = 48  # the most minimum cuts that are computed, which bounds the time
_NEVER = float("inf")


def hull(problem: Problem) -> list[Choice]:
    """Return the choices that are optimal for some price, by increasing bytes."""
    ends = _best(problem, 0.0), _best(problem, None)
    found, left = [*ends], _CUTS
    spans = deque([ends])
    while spans and left:
        more, less = spans.popleft()  # more bytes at less cost, less bytes at more cost
        if more.nbytes <= less.nbytes or less.cost <= more.cost:
            continue
        price = (less.cost - more.cost) / (more.nbytes - less.nbytes)
        middle, left = _best(problem, price), left - 1
        if all(_priced(middle, price) < _priced(end, price) * (1 - 1e-9) for end in (more, less)):
            found.append(middle)
            spans += [(more, middle), (middle, less)]
    return sorted(set(found), key=lambda choice: (choice.nbytes, choice.cost))


def _priced(choice: Choice, price: float) -> float:
    return choice.cost + price * choice.nbytes


def _best(problem: Problem, price: float | None) -> Choice:
    """Return the optimal choice at this price of a byte, in units of the cost. At the price None nothing is saved."""
    graph = _Graph()
    steps = problem.steps
    made = {value: step for step in steps for value in step.outs}
    total = sum(problem.costs) + 1.0
    per_byte = total if price is None else price
    drawn = None
    for step in steps:
        runs = "run", step.number
        graph.edge(runs, _SINK, problem.costs[step.number] + total * 1e-12)
        for value in step.reads:
            if value in made:
                graph.edge(runs, ("need", value), _NEVER)
        for value in step.outs:
            keepable = value in problem.keepable
            graph.edge(("need", value), runs, per_byte * problem.sizes[value] if keepable else _NEVER)
        if step.is_whole:  # its results are saved together
            for value, other in zip(step.outs, step.outs[1:]):
                graph.edge(("need", value), ("need", other), _NEVER)
                graph.edge(("need", other), ("need", value), _NEVER)
        if step.draws:
            if drawn is not None:
                graph.edge(runs, drawn, _NEVER)
            drawn = runs
    stays, reached = sorted(problem.stays), None
    for number in stays:
        if steps[number].draws and problem.roots.keys().isdisjoint(steps[number].outs):
            graph.edge(("reach", number), ("run", number), _NEVER)  # its results, if not needed, aren't saved
        for value in steps[number].outs:
            graph.edge(("reach", number), ("need", value), _NEVER)
        if reached is not None:
            graph.edge(("reach", number), reached, _NEVER)
        reached = "reach", number
    for value, after in problem.roots.items():
        if value in made:
            graph.edge(_SOURCE, ("need", value), _NEVER)
            before = [number for number in stays if number < after]
            if before:
                graph.edge(("run", made[value].number), ("reach", before[-1]), _NEVER)
    chosen = graph.on_the_side_of_the_source()
    saved = {value for value, step in made.items() if ("need", value) in chosen and ("run", step.number) not in chosen}
    cost = sum(problem.costs[step.number] for step in steps if ("run", step.number) in chosen)
    numbers = frozenset(made[value].number for value in saved)
    return Choice(sum(problem.sizes[value] for value in saved), cost, numbers)


_SOURCE, _SINK = "source", "sink"


class _Graph:
    """A flow network, and Dinic's algorithm for its minimum cut."""

    def __init__(self) -> None:
        self._capacity: dict[Any, dict[Any, float]] = defaultdict(dict)

    def edge(self, start: Any, end: Any, capacity: float) -> None:
        """Add an edge."""
        self._capacity[start][end] = self._capacity[start].get(end, 0.0) + capacity
        self._capacity[end].setdefault(start, 0.0)

    def on_the_side_of_the_source(self) -> set[Any]:
        """Maximize the flow, and return the nodes that the source still reaches in the residual network."""
        while _SINK in (levels := self._levels()):
            edges = {node: iter(ends) for node, ends in self._capacity.items()}
            while self._push(levels, edges):
                pass
        return set(levels)

    def _levels(self) -> dict[Any, int]:
        levels, queue = {_SOURCE: 0}, deque([_SOURCE])
        while queue:
            node = queue.popleft()
            for end, capacity in self._capacity[node].items():
                if capacity > 0 and end not in levels:
                    levels[end] = levels[node] + 1
                    queue.append(end)
        return levels

    def _push(self, levels: dict[Any, int], edges: dict[Any, Any]) -> bool:
        """Augment the flow along one path of edges to the next level. Return whether there was such a path."""
        path = [_SOURCE]
        while path[-1] != _SINK:
            node = path[-1]
            for end in edges[node]:
                if self._capacity[node][end] > 0 and levels.get(end) == levels[node] + 1:
                    path.append(end)
                    break
            else:
                path.pop()
                if not path:
                    return False
        flow = min(self._capacity[start][end] for start, end in pairwise(path))
        for start, end in pairwise(path):
            if flow != _NEVER:
                self._capacity[start][end] -= flow
                self._capacity[end][start] += flow
        for node in path[:-1]:
            edges[node] = iter(self._capacity[node])
        return flow != _NEVER
