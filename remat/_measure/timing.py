"""The time of a program's steps, each beside a step of another way to run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, NamedTuple

from .._core.devices import accelerators_of
from .observer import gc_disabled
from .program import Program

_ROUNDS = 7


class Way(NamedTuple):
    """How a program can run: what it calls in place of its function, and in which context."""

    fn: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]]


def relative_times(program: Program, ways: Sequence[Way]) -> list[float]:
    """The time of a step each way, in parts of the first way's: the median over rounds that run all of them."""
    rounds = []
    with program.preserved() as overwritten:
        program.run(ways[0].fn)
    for i in range(_ROUNDS + 1):
        with gc_disabled():
            seconds = [_seconds(program, way, overwritten) for way in ways]
        if i:  # the first is a warm-up
            rounds.append([each / seconds[0] for each in seconds])
    return [median(ratios) for ratios in zip(*rounds)]


def _seconds(program: Program, way: Way, overwritten: Any) -> float:
    devices = accelerators_of(program.inputs()).values()
    with program.preserved(overwritten), way.context():
        for device in devices:
            device.synchronize()
        start = time.perf_counter()
        program.run(way.fn)
        for device in devices:
            device.synchronize()
        return time.perf_counter() - start
