"""A lower bound of the cost of every plan: how much less another choice of regions could recompute at most.

When the backward of an item starts, what the items before it keep, the gradients made by then, and the least that the
item itself needs must fit. What each item keeps can be lowered, at the price of its cheapest choices, even by parts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from .items import Item

Step = tuple[float, int]  # the price of a byte, and how many bytes less are kept for it


def lower_bound(chain: Sequence[Item], least: Callable[[Item], int], amount: int) -> float:
    """Return a cost that no plan of the chain within the amount is below. ``least`` is the least peak of an item."""
    items = list(_flat(chain))
    later = sum(item.gradients for item in items)
    bound, kept, steps = 0.0, 0, list[Step]()
    for item in items:
        later -= item.gradients
        bound = max(bound, _cost(steps, kept + least(item) + later - amount))
        keep, own = _prices(item)
        kept += keep
        for step in own:
            insort(steps, step)
    return bound


def _flat(chain: Sequence[Item]) -> list[Item]:
    """The items, with those inside of the ones that are no regions on their own in their place."""
    return [each for item in chain for each in ([item] if item.options or not item.items else _flat(item.items))]


def _cost(steps: Sequence[Step], nbytes: int) -> float:
    """The cost to keep so many bytes less, the cheapest first."""
    cost = 0.0
    for price, count in steps:
        if nbytes <= 0:
            break
        cost += price * min(count, nbytes)
        nbytes -= count
    return cost


def _prices(item: Item) -> tuple[int, list[Step]]:
    """What an item keeps at no cost, and the prices at which it keeps less, the lowest first."""
    points = [(option.keep, option.recompute.cost) for option in item.options]
    if item.items:
        inner = [_prices(each) for each in item.items]
        keep, cost = sum(base for base, _ in inner), 0.0
        points.append((keep, cost))
        for price, count in sorted(step for _, own in inner for step in own):
            keep, cost = keep - count, cost + price * count
            points.append((keep, cost))
    # Inside of a region around it, it keeps nothing, but runs once more, perhaps only up to what it keeps there.
    again = [min(item.work.cost, o.ends.cost) + o.recompute.cost for o in item.options]
    return _hull([*points, (0, min([item.work.cost, *again]))])


def _hull(points: Sequence[tuple[int, float]]) -> tuple[int, list[Step]]:
    """The lower convex hull of points of bytes and cost, from the fewest bytes at the lowest cost."""
    cost_now, keep = min((cost, nbytes) for nbytes, cost in points)
    bytes_now, steps = keep, list[Step]()
    while fewer := [point for point in points if point[0] < bytes_now]:
        price, nbytes = min(((cost - cost_now) / (bytes_now - nbytes), nbytes) for nbytes, cost in fewer)
        steps.append((price, bytes_now - nbytes))
        bytes_now, cost_now = nbytes, cost_now + price * (bytes_now - nbytes)
    return keep, steps
