"""Where a loop saves its carry: the binomial schedule, which recomputes the fewest steps.

A run of ``count`` steps starts from a carry that is saved already, and may save ``spare`` more. All steps but the last
are divided into segments: each is a region, which saves the carry that it starts from. The last step is the first one
that a backward needs. When the backward comes to a segment, the carries of the segments after it have been freed.

After A. Griewank and A. Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
"""

from __future__ import annotations

from math import comb


def segments(count: int, spare: int) -> list[tuple[int, int]]:
    """Divide all steps but the last into segments: the number of steps of each, and of carries that it may save."""
    found = []
    while count > 1:
        size = _first(count, spare)
        found.append((size, spare))
        count, spare = count - size, spare - 1
    return found


def depth(count: int, spare: int) -> int:
    """The number of nested segments, which is also the most times that a step is recomputed."""
    repeats = 0
    while _reach(spare + 1, repeats) < count:
        repeats += 1
    return repeats


def recomputed(count: int, checkpoints: int) -> int:
    """The number of steps that the backward of a loop of ``count`` steps recomputes: the least possible number."""
    repeats = depth(count + 1, checkpoints)
    return repeats * (count + 1) - _reach(checkpoints + 2, repeats - 1)


def _first(count: int, spare: int) -> int:
    """The size of the first segment."""
    if spare == 0:
        return count - 1
    repeats = depth(count, spare)
    return max(1, _reach(spare + 1, repeats - 2), count - _reach(spare, repeats))


def _reach(carries: int, repeats: int) -> int:
    """The number of steps that can be reversed with so many carries, including the first, and repeats of a step."""
    return comb(carries + repeats, carries) if repeats >= 0 else 0
