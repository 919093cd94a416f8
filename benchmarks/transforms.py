"""What regions cost under each transform, and at each width: time, peak memory, and recomputed forwards.

    python -m benchmarks.transforms [--json] [--output FILE] [--picture FILE.svg] [--device cuda]
        [--widths 64 512] [--seconds 4]

The program is that of the README: layers of four products and `tanh`, each a region, with 1024 rows. A row compares a
derivative of it with the same one without regions: the ratio of the times and of the peaks, and the recomputed FLOPs in
forwards of the whole program. Under plain autograd torch's checkpoint is measured as well; with products saved, the
policy `save_matmuls` and torch's selective checkpoint. Both sides of a row run in turn on one thread, and their medians
are compared. On a GPU each step ends when its kernels have. At small widths nearly all of the time is overhead:
`--picture` draws the ratios over the width.

The exit status is 1 if a row recomputes more forwards than its limit.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from benchmarks.measure import count_flops, gc_disabled, peak_bytes
from benchmarks.picture import new_axes, save
from benchmarks.report import MIB, parse, report, verdict
from benchmarks.speed import Case, Side, Step, keep_freed_memory
from benchmarks.wrappers import MM, Wrapper, plain, torch_checkpoint, torch_selective
from remat import remat
from remat.policies import save_matmuls

__all__ = ["CASES", "Measurement", "Transform", "main", "measure", "table"]

LAYERS, ROWS = 8, 1024


def backward(loss: Callable[..., Tensor], ws: Tensor, x: Tensor) -> Any:
    ws = ws.requires_grad_()
    return torch.autograd.grad(loss(ws, x), ws)


def gradient(loss: Callable[..., Tensor], ws: Tensor, x: Tensor) -> Any:
    return grad(loss)(ws, x)


def per_sample(loss: Callable[..., Tensor], ws: Tensor, x: Tensor) -> Any:
    return vmap(grad(loss, argnums=1), in_dims=(None, 0))(ws, x)


def hessian_product(loss: Callable[..., Tensor], ws: Tensor, x: Tensor) -> Any:
    return jvp(lambda p: grad(loss)(p, x), (ws,), (ws,))[1]


def forward_mode(loss: Callable[..., Tensor], ws: Tensor, x: Tensor) -> Any:
    return jvp(lambda p: loss(p, x), (ws,), (ws,))


def grad_of_grad(loss: Callable[..., Tensor], ws: Tensor, x: Tensor) -> Any:
    return grad(lambda p: grad(loss)(p, x).norm())(ws)


@dataclass(frozen=True)
class Transform:
    """A row: a derivative, what wraps each layer, and the most forwards that it may recompute."""

    name: str
    run: Callable[..., Any]
    wrap: Wrapper
    limit: float

    def step(self, width: int, device: str, wrap: Wrapper) -> Step:
        """Make the step of a program of this width."""
        torch.manual_seed(0)
        ws = torch.randn(LAYERS, width, width, device=device) / width**0.5
        x = torch.randn(ROWS, width, device=device)

        def layer(w: Tensor, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(x @ w)
            return x

        layer = wrap(layer)

        def loss(ws: Tensor, x: Tensor) -> Tensor:
            for w in ws.unbind():
                x = layer(w, x)
            return x.square().mean()

        def step() -> Any:
            result = self.run(loss, ws, x)
            if x.is_cuda:
                torch.cuda.synchronize()
            return result

        return step


MATMULS = remat(policy=save_matmuls)
CASES = (
    Transform(".backward()", backward, remat, 1.0),
    Transform(".backward(), torch's checkpoint", backward, torch_checkpoint, 1.0),
    Transform(".backward(), save_matmuls", backward, MATMULS, 0.0),
    Transform(".backward(), torch's selective checkpoint", backward, torch_selective([MM]), 0.0),
    Transform("grad", gradient, remat, 1.0),
    Transform("per-sample gradients of the input", per_sample, remat, 1.0),
    Transform("Hessian-vector product", hessian_product, remat, 3.0),
    Transform("Hessian-vector product, save_matmuls", hessian_product, MATMULS, 0.0),
    Transform("jvp", forward_mode, remat, 0.0),
    Transform("grad of grad", grad_of_grad, remat, 7.0),
)


@dataclass(frozen=True)
class Measurement:
    """The figures of a row, as ratios to the program without regions; peaks in bytes."""

    name: str
    width: int
    time: float
    plain_peak: int
    peak: int
    forwards: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether it recomputes no more than its limit."""
        return self.forwards <= self.limit + 0.005

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {**asdict(self), "passed": self.passed}


def measure(case: Transform, width: int, seconds: float, device: str = "cpu") -> Measurement:
    """Measure a row."""
    ours, theirs = case.step(width, device, case.wrap), case.step(width, device, plain)
    one = replace(case, run=lambda loss, ws, x: loss(ws, x)).step(width, device, plain)
    more = count_flops(ours) - count_flops(theirs)
    peaks = peak_bytes(theirs), peak_bytes(ours)
    with gc_disabled():
        timed = Case(case.name, Side((lambda: ours,)), Side((lambda: theirs,)), limit=float("inf")).measure(seconds)
    return Measurement(case.name, width, timed.ratio, *peaks, more / count_flops(one), case.limit)


def table(rows: Sequence[Measurement]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| width | | time | peak, MiB | forwards recomputed | |", "|---|---|---|---|---|---|"]
    for row in rows:
        peaks = f"{row.plain_peak / MIB:.1f} -> {row.peak / MIB:.1f}"
        lines.append(f"| {row.width} | {row.name} | {row.time:.2f} | {peaks} | {row.forwards:.2f} | {verdict(row)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Measurement], path: Path) -> None:
    """Draw the ratios of the times over the width."""
    axes = new_axes()
    for name in dict.fromkeys(row.name for row in rows):
        points = [(row.width, row.time) for row in rows if row.name == name]
        axes.plot(*zip(*points), "--" if "torch" in name else "-", marker="o", markersize=4, label=name)
    axes.set(xlabel=f"width, {ROWS} rows", ylabel="time of a step / without regions", ylim=(0.8, None))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda width, _: f"{width:.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(axes, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rows at all widths, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.transforms", description="The cost of regions under transforms.")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512], help="of the layers (default: 64 512)")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds for the times of each row (default: 4)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the times over the width into this SVG file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parse(parser, argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = []
    for width, case in itertools.product(options.widths, CASES):
        print(f"width {width}: {case.name}", file=sys.stderr, flush=True)
        rows.append(measure(case, width, options.seconds, options.device))
    if options.picture is not None:
        draw(rows, options.picture)
    return report(options, rows, table)


if __name__ == "__main__":
    sys.exit(main())
