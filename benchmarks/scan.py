"""Costs of a loop by `remat.scan`, against the plain loop and regions by hand.

    python -m benchmarks.scan [--json] [--output FILE] [--most 10000]

The loop is a recurrence, h = tanh(h * a + x * b), whose carry h takes 64 KiB. A row is a forward and a backward pass
over a number of steps: the peak of live tensor bytes in carries, the number of steps that the backward recomputes, and
the time. The variants are the plain loop; a region for each step; regions of about the square root of the number of
steps, in which each step is a region; `scan` with its default; with the base-2 logarithm of n as the number of
checkpoints; and with Equinox's default, floor(-1.5 + sqrt(2 n + 0.25)) + 1. `benchmarks.speed` has smaller steps.

The exit status is 1 if `scan` recomputes more steps than the least possible number, or saves too much: carries, and by
default 1 MiB in several steps.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import peak_bytes
from benchmarks.report import parse, report, verdict
from remat import remat, scan

__all__ = ["WAYS", "Row", "main", "measure"]

SIZE = 16 * 1024
UNIT = 4 * SIZE
ONE_STEP = 8  # the memory of a step, its backward, and tensors outside of the loop, in carries
Step = Callable[[Tensor, Tensor], tuple[Tensor, None]]


def plain(step: Step, h: Tensor, xs: Tensor) -> Tensor:
    """The plain loop."""
    for x in xs.unbind():
        h, _ = step(h, x)
    return h


def one_each(step: Step, h: Tensor, xs: Tensor) -> Tensor:
    """A region for each step."""
    return plain(remat(step), h, xs)


def by_hand(step: Step, h: Tensor, xs: Tensor) -> Tensor:
    """Regions that contain a region for each step."""
    part = remat(partial(one_each, step))
    for each in xs.split(max(1, math.isqrt(len(xs)))):
        h = part(h, each)
    return h


def by_scan(step: Step, h: Tensor, xs: Tensor, checkpoints: int | None = None) -> Tensor:
    """The loop by `scan`."""
    return scan(step, h, xs, checkpoints=checkpoints)[0]


def equinox(count: int) -> int:
    """Equinox's default number of checkpoints for `count` steps."""
    return math.floor(-1.5 + math.sqrt(2 * count + 0.25)) + 1


def checkpoints(way: str, count: int) -> int | None:
    """The number of checkpoints of a variant of `scan`."""
    return {"scan, logarithm": count.bit_length(), "scan, Equinox's number": equinox(count)}.get(way)


WAYS = (
    "plain", "a region for each step", "square root by hand", "scan", "scan, logarithm", "scan, Equinox's number"
)  # fmt: skip


def least(count: int, spare: int) -> int:
    """The least number of steps that a backward recomputes, by Griewank and Walther's formula."""
    n, s, r = count + 1, spare + 1, 0
    while math.comb(s + r, s) < n:
        r += 1
    return r * n - math.comb(s + r, s + 1)


@dataclass(frozen=True)
class Row:
    """One variant of the loop with `count` steps."""

    way: str
    count: int
    peak: float  # in carries
    recomputed: int  # steps
    seconds: float
    passed: bool

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


def measure(way: str, count: int) -> Row:
    """Run forward and backward twice: once for the peak and the number of steps, once for the time."""
    calls = list[int]()
    a, b = (torch.full((SIZE,), value, requires_grad=True) for value in (0.9, 0.1))
    h, xs = torch.ones(SIZE, requires_grad=True), torch.linspace(-1, 1, count)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(h * a + x * b), None

    def counted(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        calls.append(1)  # a recompute may add to a list; numbers are restored
        return step(h, x)

    runs = {"plain": plain, "a region for each step": one_each, "square root by hand": by_hand}
    spare = checkpoints(way, count)
    run = runs.get(way, partial(by_scan, checkpoints=spare))

    def train(step: Step) -> Any:
        return torch.autograd.grad(run(step, h, xs).sum(), (h, a, b))

    peak = peak_bytes(train, counted) / UNIT
    recomputed = len(calls) - count
    start = time.perf_counter()
    train(step)
    seconds = time.perf_counter() - start
    passed = spare is None or (recomputed == least(count, spare) and peak <= min(spare, count) + ONE_STEP)
    if way == "scan":
        most = count.bit_length()
        passed = recomputed <= least(count, most) and peak <= most + ONE_STEP + 2**20 / UNIT
    return Row(way, count, peak, recomputed, seconds, passed)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = f"{'steps':>6}  {'':<24}{'peak, carries':>14}{'recomputed per step':>23}{'ms':>10}{'/ plain':>10}"
    time_of = {row.count: row.seconds for row in rows if row.way == "plain"}
    lines = [
        f"{row.count:>6}  {row.way:<24}{row.peak:>14.1f}{row.recomputed / row.count:>23.2f}{row.seconds * 1e3:>10.1f}"
        f"{row.seconds / time_of[row.count]:>10.2f}  {verdict(row)}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all variants and print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.scan", description="Loops by remat.scan, and by hand.")
    parser.add_argument("--most", type=int, default=10_000, help="steps of the longest loop (default: 10000)")
    options = parse(parser, argv)
    torch.set_num_threads(1)
    counts = [count for count in (10, 100, 1_000, 10_000) if count <= options.most]
    return report(options, [measure(way, count) for count in counts for way in WAYS], table)


if __name__ == "__main__":
    sys.exit(main())
