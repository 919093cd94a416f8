"""How long forward and backward take under policies, against torch's selective checkpoint.

    python -m benchmarks.speed_policies [--json] [--rounds N]

Each row is a pair of programs, run in turns on one thread; its figure is the ratio of the two median times. A shared
machine changes its speed all the time, so nothing else is worth comparing. The first two rows are all overhead: ten
products of 8x8 matrices, each followed by a `tanh`. The exit status is 1 if a ratio is over its limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.measure import gc_disabled
from benchmarks.policies import MATMULS, MM, Sizes, autograd_grad, block, torch_selective
from benchmarks.report import report, verdict
from remat import checkpoint_name, policies, remat

__all__ = ["CASES", "Case", "Row", "main", "table"]

DEPTH, WIDTH = 10, 8

Program: TypeAlias = Callable[[], Any]
Layers: TypeAlias = Callable[..., Tensor]


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """Products and nonlinear functions in turns."""
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def named_layers(x: Tensor, *weights: Tensor) -> Tensor:
    """The same with names."""
    for i, weight in enumerate(weights):
        x = checkpoint_name(torch.tanh(x @ weight), f"layer{i}")
    return x


def small(wrapped: Layers) -> Program:
    """Forward and backward of the layers, wrapped."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(WIDTH, WIDTH, generator=generator).requires_grad_() for _ in range(DEPTH + 1))

    def run() -> None:
        wrapped(x, *weights).sum().backward()

    return run


def transformer(wrap: Callable[..., Any]) -> Program:
    """Forward and backward of a transformer block, wrapped."""
    weights, x = Sizes().arguments()
    wrapped = wrap(block)
    return partial(autograd_grad(lambda weights, x: wrapped(weights, x).square().mean()), weights, x)


@dataclass(frozen=True)
class Case:
    """Two programs, each made anew for a measurement, and how long the first may take in terms of the second."""

    name: str
    remat: Callable[[], Program]
    torch: Callable[[], Program]
    limit: float

    def measure(self, rounds: int) -> Row:
        """Runs both, in turns."""
        programs = self.remat(), self.torch()
        times: tuple[list[float], list[float]] = [], []
        for program in programs * 10:  # what is learnt from the first calls
            program()
        for _ in range(rounds):
            for program, found in zip(programs, times):
                start = time.perf_counter()
                program()
                found.append(time.perf_counter() - start)
        ours, theirs = map(median, times)
        return Row(self.name, ours * 1e6, theirs * 1e6, self.limit)


@dataclass(frozen=True)
class Row:
    """The median microseconds of two programs, and the limit of their ratio."""

    name: str
    remat: float
    torch: float
    limit: float

    @property
    def ratio(self) -> float:
        """How long remat takes in terms of torch."""
        return self.remat / self.torch

    @property
    def passed(self) -> bool:
        """Whether it keeps to its limit."""
        return self.ratio <= self.limit

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "ratio": self.ratio, "passed": self.passed}


LAYER_NAMES = policies.save_only_these_names("layer*")

CASES: tuple[Case, ...] = (
    Case(
        "save_matmuls, 10 x (mm, tanh) 8x8",
        lambda: small(remat(layers, policy=policies.save_matmuls)),
        lambda: small(torch_selective([MM])(layers)),
        0.45,
    ),
    Case(
        "names, 10 x (mm, tanh) 8x8",
        lambda: small(remat(named_layers, policy=LAYER_NAMES)),
        lambda: small(torch_selective([torch.ops.aten.tanh.default])(layers)),
        0.35,
    ),
    Case(
        "save_matmuls, transformer block 2x128x256",
        lambda: transformer(partial(remat, policy=policies.save_matmuls)),
        lambda: transformer(torch_selective(MATMULS)),
        0.98,
    ),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':<{width}}{'remat, us':>12}{'torch, us':>12}{'ratio':>8}{'limit':>8}"]
    lines += [
        f"{row.name:<{width}}{row.remat:>12.0f}{row.torch:>12.0f}{row.ratio:>8.2f}{row.limit:>8.2f}  {verdict(row)}"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.speed_policies", description="How long policies take.")
    parser.add_argument("--rounds", type=int, default=200, help="how often each program runs")

    def rows(options: argparse.Namespace) -> list[Row]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with gc_disabled():
                return [case.measure(options.rounds) for case in CASES]
        finally:
            torch.set_num_threads(threads)

    return report(parser, rows, table, argv)


if __name__ == "__main__":
    sys.exit(main())
