"""The memory overhead of a region, without its saved tensors, against torch's own checkpoints and `torch_remat`.

    python -m benchmarks.overhead [--json] [--output FILE]

The region is 10 x (matmul, tanh) on 8 x 8. Many regions are alive between forward and backward. A row shows, for each
of them, the bytes that Python has allocated (as `tracemalloc` counts them) and the objects that the garbage collector
tracks, both after a collection and less those of the layers without a region. The bytes contain the Python objects of
saved tensors, but not their data, nor what C++ allocates: autograd's nodes and their slots for saved tensors exist with
and without a region.

All sides of a row save the same tensors: the inputs only, each matmul's result, or each `tanh`'s, which remat selects
by name. There are no limits. The column of `torch_remat` is empty if it isn't installed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.layers import arguments, layers, marked_products, marked_tanhs, named_layers
from benchmarks.report import installed, parse, report
from benchmarks.wrappers import MM, Fn, torch_checkpoint, torch_remat_checkpoint, torch_selective
from remat import remat
from remat.policies import save_matmuls, save_only_these_names

__all__ = ["CASES", "Case", "Overhead", "Row", "main", "overhead"]

WIDTH, DEPTH, REGIONS = 8, 10, 100


@dataclass(frozen=True)
class Overhead:
    """The memory of one region, less that of the same function without it."""

    python_bytes: float
    objects: float


def overhead(fn: Fn) -> Overhead:
    """The overhead of `fn`, a function that computes the same as `layers`."""
    region, without = (_alive_per_call(each) for each in (fn, layers))
    return Overhead(region[0] - without[0], region[1] - without[1])


def _alive_per_call(fn: Fn) -> tuple[float, float]:
    """The Python bytes and tracked objects that are alive as long as a result of `fn` is."""
    leaves = [t.requires_grad_() for t in arguments(WIDTH, DEPTH)]
    for _ in range(3):  # warm up
        torch.autograd.grad(fn(*leaves).sum(), leaves)
    tracemalloc.start()
    try:
        before = _alive()
        results = [fn(*leaves) for _ in range(REGIONS)]
        after = _alive()
    finally:
        tracemalloc.stop()
    del results
    return (after[0] - before[0]) / REGIONS, (after[1] - before[1]) / REGIONS


def _alive() -> tuple[int, int]:
    gc.collect()
    return tracemalloc.get_traced_memory()[0], len(gc.get_objects())


@dataclass(frozen=True)
class Row:
    """A policy, and the overhead of a region under it."""

    policy: str
    remat: Overhead
    torch: Overhead
    torch_remat: Overhead | None
    passed: bool = True

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """The layers in regions that save the same tensors. That of `torch_remat` is made when it is measured."""

    policy: str
    remat: Fn
    torch: Fn
    torch_remat: Callable[[], Fn]

    def measure(self) -> Row:
        """Measure all regions."""
        theirs = None
        if installed("torch_remat", f"{self.policy}: torch_remat"):
            theirs = overhead(torch_remat_checkpoint(self.torch_remat()))
        return Row(self.policy, overhead(self.remat), overhead(self.torch), theirs)


CASES: tuple[Case, ...] = (
    Case("none", remat(layers), torch_checkpoint(layers), lambda: layers),
    Case(
        "save_matmuls",
        remat(layers, policy=save_matmuls),
        torch_selective([MM])(layers),
        partial(marked_products, DEPTH),
    ),
    Case(
        "names",
        remat(named_layers, policy=save_only_these_names("layer*")),
        torch_selective([torch.ops.aten.tanh.default])(layers),
        partial(marked_tanhs, DEPTH),
    ),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    columns = "".join(f"{name:>12}" for name in ("remat", "torch", "torch_remat"))
    head = f"{'overhead of one region':<28}{'Python bytes':>36}{'objects tracked by GC':>36}"
    return "\n".join(
        [
            head,
            f"{'':<28}{columns}{columns}",
            *(f"{row.policy:<28}{_cells(row, 'python_bytes')}{_cells(row, 'objects')}" for row in rows),
        ]
    )


def _cells(row: Row, figure: str) -> str:
    """One figure of all three libraries."""
    each = (row.remat, row.torch, row.torch_remat)
    return "".join(f"{'-' if one is None else format(getattr(one, figure), '.0f'):>12}" for one in each)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases and print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description="Memory overhead of a region.")
    return report(parse(parser, argv), [case.measure() for case in CASES], table)


if __name__ == "__main__":
    sys.exit(main())
