"""Where a loop keeps its carry: the binomial rule, by which the fewest steps are computed again.

A run of ``count`` steps starts from a carry that is there, and may keep ``spare`` further ones. All steps but the last
are divided into segments: each is a region, which keeps the carry that it starts from. The last step is the first one
that a backward needs. When the backward comes to a segment, what the segments after it have kept is free again.

After A. Griewank and A. Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
"""

from __future__ import annotations

from math import comb


def segments(count: int, spare: int) -> list[tuple[int, int]]:
    """The segments before the last of ``count`` steps: of each how many steps, and how many carries it may keep."""
    found = []
    while count > 1:
        size = _first(count, spare)
        found.append((size, spare))
        count, spare = count - size, spare - 1
    return found


def depth(count: int, spare: int) -> int:
    """How many segments are in each other, and how often a step is computed again at most."""
    repeats = 0
    while _reach(spare + 1, repeats) < count:
        repeats += 1
    return repeats


def recomputed(count: int, checkpoints: int) -> int:
    """How many steps the backward of a loop of ``count`` steps computes again: the least possible number."""
    repeats = depth(count + 1, checkpoints)
    return repeats * (count + 1) - _reach(checkpoints + 2, repeats - 1)


def _first(count: int, spare: int) -> int:
    """The size of the first segment."""
    if spare == 0:
        return count - 1
    repeats = depth(count, spare)
    return max(1, _reach(spare + 1, repeats - 2), count - _reach(spare, repeats))


def _reach(carries: int, repeats: int) -> int:
    """How many steps can be reversed with so many carries, the first one among them, and so many repeats of a step."""
    return comb(carries + repeats, carries) if repeats >= 0 else 0
