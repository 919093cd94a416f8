"""What a region takes in memory beside the tensors that it keeps, against torch's own checkpoints and `torch_remat`.

    python -m benchmarks.overhead [--json] [--output FILE]

The region is 10 x (matmul, tanh) on 8 x 8. Many of them are alive between forward and backward; a row shows, for each,
the bytes that Python allocated (as `tracemalloc` counts them) and the objects that the garbage collector has to look
at, both after a collection and less those of the layers without a region. The data of tensors is not among the bytes,
but the Python objects of those that a region holds are. Nor is what C++ allocates: the nodes of autograd and the places
for what they save are there with and without a region.

Each row keeps the same tensors on all sides: none but the inputs, each matmul's result, or each `tanh`'s, which remat
knows by name. There is no limit to miss. The column of `torch_remat` is empty where it isn't installed.
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
    """What one region takes beyond what the same function takes without."""

    python_bytes: float
    objects: float


def overhead(fn: Fn) -> Overhead:
    """That of `fn`, a function that computes what `layers` does."""
    region, without = (_alive_per_call(each) for each in (fn, layers))
    return Overhead(region[0] - without[0], region[1] - without[1])


def _alive_per_call(fn: Fn) -> tuple[float, float]:
    """Python's bytes, and objects of the collector, as long as a result of `fn` is alive."""
    leaves = [t.requires_grad_() for t in arguments(WIDTH, DEPTH)]
    for _ in range(3):  # until nothing is new any more
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
    """A policy, and what a region under it takes."""

    policy: str
    remat: Overhead
    torch: Overhead
    torch_remat: Overhead | None
    passed: bool = True

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """The layers in a region that keeps the same by each of the three; the last is made when it is measured."""

    policy: str
    remat: Fn
    torch: Fn
    torch_remat: Callable[[], Fn]

    def measure(self) -> Row:
        """Runs them all."""
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
    head = f"{'a region beside its tensors':<28}{'bytes of Python':>36}{'objects of the collector':>36}"
    return "\n".join(
        [
            head,
            f"{'':<28}{columns}{columns}",
            *(f"{row.policy:<28}{_cells(row, 'python_bytes')}{_cells(row, 'objects')}" for row in rows),
        ]
    )


def _cells(row: Row, figure: str) -> str:
    """One figure of all that are compared."""
    each = (row.remat, row.torch, row.torch_remat)
    return "".join(f"{'-' if one is None else format(getattr(one, figure), '.0f'):>12}" for one in each)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description="What a region takes beside its tensors.")
    return report(parse(parser, argv), [case.measure() for case in CASES], table)


if __name__ == "__main__":
    sys.exit(main())
