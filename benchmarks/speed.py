"""Time of rematerialized programs on one thread, against plain torch and other checkpoints.

    python -m benchmarks.speed [--json] [--output FILE] [--seconds 8]

A row compares two sides. Their programs run in turn, many times, and the row is the ratio of the two medians, so that
other work on the machine slows both sides alike. The garbage collector is off, as a full collection visits all objects
of torch and takes longer than most programs here. The C library keeps freed memory where it can; otherwise it would
return hundreds of pages to the system and request them again in some steps of the block. Every program is a forward and
a backward pass unless the row says otherwise. "Small" regions are 10 x (matmul, tanh) on 8 x 8, where nearly all time
is overhead; "the block" is the transformer block of `benchmarks.policies`. The exit status is 1 if a ratio is above its
limit.

remat is compared with torch's own checkpoints and Meta's `torch_remat`, in which a function marks what is saved. All
have their defaults: torch's and remat restore random generators for the recompute, `torch_remat` doesn't. Its rows are
skipped if it isn't installed.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.func import grad

from benchmarks import policies
from benchmarks.layers import arguments, layers, marked_products, named_layers
from benchmarks.measure import gc_disabled
from benchmarks.report import installed, parse, report, verdict
from benchmarks.wrappers import (
    MATMULS,
    MM,
    Fn,
    Wrapper,
    plain,
    torch_checkpoint,
    torch_remat_checkpoint,
    torch_selective,
)
from remat import remat, scan
from remat.policies import save_matmuls, save_only_these_names

__all__ = ["CASES", "Case", "Measurement", "Side", "main"]

Step: TypeAlias = Callable[[], Any]


# --- the programs ---------------------------------------------------------------------------------------------------


def forward(width: int, depth: int) -> Step:
    """The forward pass of the layers alone, in which autograd makes a graph."""
    leaves = [t.requires_grad_() for t in arguments(width, depth)]
    return lambda: layers(*leaves)


def by_autograd(wrap: Wrapper, width: int = 8, depth: int = 10, inside: Fn = layers) -> Step:
    """The gradient of the layers in one region."""
    fn = wrap(inside)
    leaves = [t.requires_grad_() for t in arguments(width, depth)]
    return lambda: torch.autograd.grad(fn(*leaves).sum(), leaves)


def by_marks(depth: int) -> Step:
    """The gradient of layers whose products `torch_remat` saves."""
    return by_autograd(torch_remat_checkpoint, depth=depth, inside=marked_products(depth))


def by_func(wrap: Wrapper, width: int = 8, depth: int = 10) -> Step:
    """The gradient of the layers by `torch.func.grad`."""
    fn = wrap(layers)
    tensors = arguments(width, depth)
    gradient = grad(lambda *args: fn(*args).sum(), argnums=tuple(range(len(tensors))))
    return lambda: gradient(*tensors)


def block(transform: str, wrap: Wrapper) -> Step:
    """The gradient of a transformer block."""
    weights, x = policies.Sizes().arguments()
    return partial(policies.program(transform, wrap), weights, x)


def encoder_layer() -> torch.nn.Module:
    """A small transformer layer."""
    return torch.nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True)


def mlp() -> torch.nn.Module:
    """A small MLP."""
    return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))


def modules(wrap: Wrapper, make: Callable[[], torch.nn.Module], batch: int) -> Step:
    """The gradient of four modules, each a region, one after the other."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(make() for _ in range(4))
    x, called = torch.randn(batch, 32, 32, requires_grad=True), list(map(wrap, model))

    def step() -> Any:
        out = x
        for each in called:
            out = each(out)
        return torch.autograd.grad(out.square().sum(), [x, *model.parameters()])

    return step


def chain(wrap: Wrapper, regions: int) -> Step:
    """The gradient of small regions, one after the other."""
    fn = wrap(layers)
    x, weight = (t.requires_grad_() for t in arguments(8, 1))

    def step() -> Any:
        out = x
        for _ in range(regions):
            out = fn(out, weight)
        return torch.autograd.grad(out.sum(), [x, weight])

    return step


def nested(wrap: Wrapper, levels: int) -> Step:
    """The gradient of nested regions, with an operation in each."""

    def inside(fn: Fn) -> Fn:
        return wrap(lambda x: fn(torch.sin(x)))

    fn: Fn = torch.tanh
    for _ in range(levels):
        fn = inside(fn)
    x = arguments(8, 0)[0].requires_grad_()
    return lambda: torch.autograd.grad(fn(x).sum(), [x])


def loop(step: Callable, carry: torch.Tensor, xs: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The loop that `scan` replaces."""
    for x in xs.unbind():
        carry, _ = step(carry, x)
    return carry, None


def recurrence(run: Callable, width: int, count: int) -> Step:
    """The gradient of a GRU cell that is called many times, with one row."""
    torch.manual_seed(0)
    cell, xs = torch.nn.GRUCell(width, width), torch.randn(count, 1, width)
    weights, h = list(cell.parameters()), torch.zeros(1, width)
    return lambda: torch.autograd.grad(run(lambda h, x: (cell(x, h), None), h, xs)[0].sum(), weights)


# --- the rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """Programs whose times are added up, and a factor."""

    programs: tuple[Callable[[], Step], ...]
    factor: float = 1.0


def side(program: Callable[..., Step], *args: Any, factor: float = 1.0) -> Side:
    """A side with one program."""
    return Side((partial(program, *args),), factor)


@dataclass(frozen=True)
class Measurement:
    """The times of a row's two sides, in microseconds, and the limit on their ratio."""

    name: str
    numerator_us: float
    denominator_us: float
    limit: float
    rounds: int

    @property
    def ratio(self) -> float:
        """The numerator's time divided by the denominator's."""
        return self.numerator_us / self.denominator_us

    @property
    def passed(self) -> bool:
        """Whether the ratio is within the limit."""
        return self.ratio <= self.limit

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {**asdict(self), "ratio": self.ratio, "passed": self.passed}


@dataclass(frozen=True)
class Case:
    """One row: `numerator` takes at most `limit` times as long as `denominator`."""

    name: str
    numerator: Side
    denominator: Side
    limit: float
    package: str | None = None  # another package that the row needs

    def measure(self, seconds: float) -> Measurement:
        """Run all programs in turn for about this time."""
        sides = self.numerator, self.denominator
        steps = [[make() for make in each.programs] for each in sides]
        times = [[[] for _ in each] for each in steps]
        _round(steps, times)  # the first round is slow
        for each in times:
            for taken in each:
                taken.clear()
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < 3 or time.perf_counter() < end:
            _round(steps, times)
            rounds += 1
        totals = [each.factor * sum(map(statistics.median, taken)) for each, taken in zip(sides, times)]
        return Measurement(self.name, totals[0] * 1e6, totals[1] * 1e6, self.limit, rounds)


def _round(steps: Sequence[Sequence[Step]], times: Sequence[Sequence[list[float]]]) -> None:
    for each, taken in zip(steps, times):
        for step, series in zip(each, taken):
            start = time.perf_counter()
            step()
            series.append(time.perf_counter() - start)


EVERY_THIRD = ("layer2", "layer5", "layer8")  # of ten

CASES: tuple[Case, ...] = (
    Case(
        "small region: remat / torch checkpoint",
        side(by_autograd, remat),
        side(by_autograd, torch_checkpoint),
        limit=1.0,
    ),
    Case("small region, func.grad: remat / plain", side(by_func, remat), side(by_func, plain), limit=2.95),
    Case(
        "8 nested regions: remat / torch checkpoint",
        side(nested, remat, 8),
        side(nested, torch_checkpoint, 8),
        limit=1.8,
    ),
    Case(
        "each of 800 regions / each of 50 regions",
        side(chain, remat, 800),
        side(chain, remat, 50, factor=800 / 50),
        limit=1.5,
    ),
    Case(
        "the block: remat / torch checkpoint",
        side(block, "autograd.grad", remat),
        side(block, "autograd.grad", torch_checkpoint),
        limit=1.02,
    ),
    Case(
        "4 encoder layers, width 32: remat / torch checkpoint",
        side(modules, remat, encoder_layer, 4),
        side(modules, torch_checkpoint, encoder_layer, 4),
        limit=1.5,
    ),
    Case(
        "4 MLPs, width 32: remat / torch checkpoint",
        side(modules, remat, mlp, 1),
        side(modules, torch_checkpoint, mlp, 1),
        limit=2.1,
    ),
    Case(
        "4 MLPs, width 32, save_matmuls: remat / torch selective",
        side(modules, remat(policy=save_matmuls), mlp, 1),
        side(modules, torch_selective(MATMULS), mlp, 1),
        limit=2.4,
    ),
    Case(
        "the block, func.grad: remat / plain",
        side(block, "func.grad", remat),
        side(block, "func.grad", plain),
        limit=1.38,
    ),
    Case(
        "the block: func.grad with remat / autograd with torch checkpoint",
        side(block, "func.grad", remat),
        side(block, "autograd.grad", torch_checkpoint),
        limit=1.12,
    ),
    Case(
        "small region, save_matmuls: remat / torch selective",
        side(by_autograd, remat(policy=save_matmuls)),
        side(by_autograd, torch_selective([MM])),
        limit=1.35,
    ),
    Case(
        "small region, 3 names: remat / torch selective, 10 products",
        side(by_autograd, remat(policy=save_only_these_names(*EVERY_THIRD)), 8, 10, named_layers),
        side(by_autograd, torch_selective([MM])),
        limit=1.6,
    ),
    Case(
        "the block, save_matmuls: remat / torch selective",
        side(block, "autograd.grad", remat(policy=save_matmuls)),
        side(block, "autograd.grad", torch_selective(MATMULS)),
        limit=1.12,
    ),
    Case(
        "6 layers 1024 wide: remat / (plain + a forward)",
        side(by_autograd, remat, 1024, 6),
        Side((partial(by_autograd, plain, 1024, 6), partial(forward, 1024, 6))),
        limit=1 / 0.97,
    ),
    *(
        Case(
            f"{count} steps of a GRU cell, width {width}: scan / plain loop",
            side(recurrence, scan, width, count),
            side(recurrence, loop, width, count),
            limit=limit,
        )
        for width, count, limit in ((8, 100, 5.0), (64, 200, 4.0), (256, 300, 3.0))
    ),
    Case(
        "small region: remat / torch_remat",
        side(by_autograd, remat),
        side(by_autograd, torch_remat_checkpoint),
        limit=1.0,
        package="torch_remat",
    ),
    Case(
        "10 saved matmuls: remat / torch_remat",
        side(by_autograd, remat(policy=save_matmuls)),
        side(by_marks, 10),
        limit=1.4,
        package="torch_remat",
    ),
)


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, from now on; return whether it can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in _KEEP)


_KEEP = ((-1, 2**31 - 1), (-4, 0))  # M_TRIM_THRESHOLD, M_MMAP_MAX of glibc


def table(measurements: Sequence[Measurement]) -> str:
    """The measurements as aligned text."""
    width = max(len(m.name) for m in measurements)
    head = f"{'forward and backward, one thread':<{width}}  {'us':>8} / {'us':<8}  {'ratio':>6}  {'limit':>6}"
    rows = [
        f"{m.name:<{width}}  {m.numerator_us:>8.0f} / {m.denominator_us:<8.0f}"
        f"  {m.ratio:>6.3f}  {m.limit:>6.2f}  {verdict(m)}"
        for m in measurements
    ]
    return "\n".join([head, *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases whose packages are installed and print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.speed", description="Time of rematerialized programs.")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds for each row (default: 8)")
    options = parse(parser, argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    with gc_disabled():
        rows = [case.measure(options.seconds) for case in CASES if installed(case.package, case.name)]
    return report(options, rows, table)


if __name__ == "__main__":
    sys.exit(main())
