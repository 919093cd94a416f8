"""The same for programs that are too long for all choices: those that are best for some price of a byte.

For a fixed price the best choice is a minimum cut. Its nodes are values that are needed and steps that run; an edge
costs what keeping the value does, or running the step, and one that can't be cut says that one thing takes another.
What is found are the corners of the convex hull of all choices. Between two of them there may be better ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise
from typing import Any

from .tradeoff import Choice, Problem

_CUTS = 48  # at most, which bounds the time
_NEVER = float("inf")


def hull(problem: Problem) -> list[Choice]:
    """The choices that are best for some price, the one that keeps the least first."""
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
    """The best choice at this price of a byte, in units of the cost; None is a price at which nothing is kept."""
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
        if step.is_whole:  # its results are kept together
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
            graph.edge(("reach", number), ("run", number), _NEVER)  # what is kept of it may be of no use
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
    kept = {value for value, step in made.items() if ("need", value) in chosen and ("run", step.number) not in chosen}
    cost = sum(problem.costs[step.number] for step in steps if ("run", step.number) in chosen)
    numbers = frozenset(made[value].number for value in kept)
    return Choice(sum(problem.sizes[value] for value in kept), cost, numbers)


_SOURCE, _SINK = "source", "sink"


class _Graph:
    """A network, whose minimum cut is found by Dinic's algorithm."""

    def __init__(self) -> None:
        self._capacity: dict[Any, dict[Any, float]] = defaultdict(dict)

    def edge(self, start: Any, end: Any, capacity: float) -> None:
        """Add an edge."""
        self._capacity[start][end] = self._capacity[start].get(end, 0.0) + capacity
        self._capacity[end].setdefault(start, 0.0)

    def on_the_side_of_the_source(self) -> set[Any]:
        """The nodes that the source still reaches when the flow is as large as it can be."""
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
        """One path to the sink, by edges that lead a level on: whether there was one."""
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
