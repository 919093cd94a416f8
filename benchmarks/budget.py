"""Budgets: whether their predictions are true, and comparisons with presets and with one policy for all blocks.

    python -m benchmarks.budget [--json] [--output FILE] [--picture FILE]

*Blocks*: the bytes that a region saves and the FLOPs that it recomputes under `policies.budget`, predicted and
measured, under three transforms.
*Presets*: the FLOPs that a preset recomputes, and those of the best choice that saves no more bytes.
*Compiled*: the same for compiled code under torch's `activation_memory_budget`; the best choice is for eager code.
*Models*: the peak of a training step under `remat.nn.budget` and the FLOPs recomputed, and the FLOPs of the best single
policy for all blocks whose peak is within the budget.

Bytes and FLOPs are counted at the dispatcher, without tensors that existed before a call. The last column is the time
of the search for a block, or of `nn.budget` for a model. The exit status is 1 if a prediction is wrong, a reference is
better than remat, or a peak is above its budget.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.func import grad, vmap
from torch.nn import functional as F

import remat
from benchmarks.measure import PeakMemory, count_flops
from benchmarks.picture import new_axes, save
from benchmarks.report import KIB, parse, report, verdict
from remat import policies

__all__ = ["BLOCKS", "Row", "main"]

AMOUNTS = (0.2, 0.4, 0.6, 0.8)


class Residual(nn.Module):
    """Two convolutions with a norm between them, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [batch, 32, height, width]."""
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


def encoder(dropout: float = 0.0) -> nn.Module:
    """A transformer block."""
    return nn.TransformerEncoderLayer(64, 4, 256, dropout, batch_first=True)


def chain() -> nn.Module:
    """Linear layers with GELUs between them."""
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (encoder, (4, 64, 64)),
    "residual": (Residual, (4, 32, 16, 16)),
    "MLP chain": (chain, (4, 64, 64)),
    "transformer, dropout": (partial(encoder, 0.1), (4, 64, 64)),
}


def by_autograd(fn: Callable, x: Tensor, at_end: Callable[[], Any]) -> Any:
    """The gradient with respect to a block's input."""
    x = x.clone().requires_grad_()
    value = fn(x)
    at_end()
    return torch.autograd.grad(value.square().sum(), x)


def _loss(fn: Callable, at_end: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        value = fn(x)
        at_end()
        return value.square().sum()

    return loss


def by_grad(fn: Callable, x: Tensor, at_end: Callable[[], Any]) -> Any:
    """The gradient by `func.grad`."""
    return grad(_loss(fn, at_end))(x)


def per_sample(fn: Callable, x: Tensor, at_end: Callable[[], Any]) -> Any:
    """The gradient of each sample."""
    return vmap(grad(_loss(lambda x: fn(x[None]), at_end)), randomness="different")(x)


TRANSFORMS = {"autograd": by_autograd, "func.grad": by_grad, "vmap(grad)": per_sample}


@dataclass(frozen=True)
class Row:
    """A comparison of remat with a reference: a prediction, a preset, torch's compiler, or a budget and one policy."""

    table: str
    name: str
    reference_bytes: int
    bytes: int
    reference_flops: int
    flops: int
    milliseconds: float
    passed: bool

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


def live_and_flops(fn: Callable, transform: Callable, x: Tensor) -> tuple[int, int]:
    """The bytes that are alive at the end of the forward pass, and the FLOPs of the whole program."""
    alive = []
    with PeakMemory() as memory:
        transform(fn, x, lambda: alive.append(memory.live))
    return alive[-1], count_flops(lambda: transform(fn, x, lambda: None))


def predictions(name: str) -> list[Row]:
    """Compare predictions for a block under several budgets with measurements."""
    make, shape = BLOCKS[name]
    module, x = make().requires_grad_(False), torch.randn(shape)
    rows = []
    for how, transform in TRANSFORMS.items():
        nothing, _ = live_and_flops(remat.remat(partial(module)), transform, x)
        _, without = live_and_flops(module, transform, x)
        for amount in AMOUNTS:
            policy = policies.budget(amount)
            fn = remat.remat(partial(module), policy=policy)
            transform(fn, x, lambda: None)
            transform(fn, x, lambda: None)
            tradeoff, choice = fn._known.choices[policy][-1]  # type: ignore[attr-defined]
            live, flops = live_and_flops(fn, transform, x)
            saved, more = live - nothing, flops - without
            passed = (saved, more) == (choice.nbytes, choice.flops) and saved <= policy.nbytes(tradeoff.whole)
            label = f"{name}, {how}, {amount:.0%}"
            rows.append(Row("blocks", label, choice.nbytes, saved, choice.flops, more, search(module, x), passed))
    return rows


def search(module: nn.Module, x: Tensor) -> float:
    """The milliseconds that finding all choices takes: the time of `pareto` less that of a region with a policy."""

    def taken(fn: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
        return min(times)

    leaf = x.clone().requires_grad_()
    region = remat.remat(lambda x: module(x), policy=lambda ctx, op, *args, **kwargs: False)
    return 1e3 * max(0.0, taken(lambda: remat.pareto(module, leaf)) - taken(lambda: region(leaf)))


def presets(name: str) -> list[Row]:
    """Compare presets with the best choice that saves no more bytes."""
    make, shape = BLOCKS[name]
    module, x = make().requires_grad_(False), torch.randn(shape)
    curve = remat.pareto(module, x.clone().requires_grad_(), cost="flops")
    nothing, _ = live_and_flops(remat.remat(partial(module)), by_autograd, x)
    _, without = live_and_flops(module, by_autograd, x)
    rows = []
    for preset in (policies.save_matmuls, policies.save_matmuls_without_batch_dims, policies.save_attention):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            live, flops = live_and_flops(remat.remat(partial(module), policy=preset), by_autograd, x)
        saved, more = live - nothing, flops - without
        best = min((p for p in curve.points if p.nbytes <= saved), key=lambda p: p.flops)
        label = f"{name}, {preset!r}".replace("policies.", "")
        rows.append(Row("presets", label, saved, best.nbytes, more, best.flops, 0.0, best.flops <= more))
    return rows


def draw(path: Path) -> None:
    """Write all choices for a transformer block, and the presets, as SVG."""
    make, shape = BLOCKS["transformer"]
    curve = remat.pareto(make().requires_grad_(False), torch.randn(shape).requires_grad_(), cost="flops")
    axes = curve.plot(new_axes())
    for marker, row in zip("svD", presets("transformer")):
        label = row.name.partition(", ")[2]
        axes.plot(row.reference_bytes, row.reference_flops, marker, clip_on=False, label=label)
    axes.legend()
    save(axes, path)


def compiled(part: float) -> Row:
    """Compare a block compiled under `activation_memory_budget` with the best choice that saves no more bytes."""
    make, shape = BLOCKS["transformer"]
    module, x = make().requires_grad_(False), torch.randn(shape).requires_grad_()
    curve = remat.pareto(module, x, cost="flops")
    without = count_flops(lambda: by_autograd(module, x, lambda: None))
    saved: set[Any] = set()
    flops = [0]

    def forward(graph: Any, _: Any) -> Callable:
        (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        inputs = {storage_of(node) for node in graph.graph.nodes if node.op == "placeholder"}
        saved.update({*map(storage_of, results[1:])} - inputs - {storage_of(results[0])})
        return counted(graph)

    def counted(graph: Any, _: Any = None) -> Callable:
        def run(*args: Any) -> Any:
            found: list[Any] = []
            flops[0] += count_flops(lambda: found.append(graph.forward(*args)))
            return found[0]

        return run

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=forward, bw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    with torch._functorch.config.patch(activation_memory_budget=part):
        by_autograd(torch.compile(module, backend=backend), x.detach(), lambda: None)
    size, more = sum(storage.nbytes() for storage in saved), flops[0] - without
    best = min((point for point in curve.points if point.nbytes <= size), key=lambda point: point.flops)
    label = f"transformer, activation_memory_budget {part}"
    return Row("compiled", label, size, best.nbytes, more, best.flops, 0.0, best.flops <= more)


def storage_of(node: Any) -> Any:
    """The storage of a graph node's result."""
    return node.meta["val"].untyped_storage()


def models(part: float) -> Row:
    """Compare a budget for a model of eight blocks with the best single policy for all blocks."""
    x = torch.randn(16, 64, 64)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(encoder() for _ in range(8)), nn.Linear(64, 8))

    def peak(model: nn.Module) -> int:
        with PeakMemory() as memory:
            gradients = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
        del gradients
        return memory.peak

    kind, model = nn.TransformerEncoderLayer, make()
    start = time.perf_counter()
    found = remat.nn.budget(model, part, x, where=kind, loss=lambda out: out.square().mean(), cost="flops")
    seconds = time.perf_counter() - start
    curve = remat.pareto(make()[0], x.clone().requires_grad_(), cost="flops")  # type: ignore[index]
    single = curve.points[0]
    for point in curve.points:
        if peak(remat.nn.apply(make(), kind, policy=curve.at(point.nbytes))) <= found.amount:
            single = point
    real = peak(model)
    label = f"8 transformer blocks, {part:.0%} of the peak"
    passed = real <= found.amount and found.flops <= 8 * single.flops
    return Row("models", label, found.amount, real, 8 * single.flops, found.flops, seconds * 1e3, passed)


_HEADS = {
    "blocks": ("saved: predicted", "real", "recomputed: predicted", "real", "search, ms"),
    "presets": ("saved: preset", "budget", "recomputed: preset", "budget", ""),
    "compiled": ("saved: torch", "remat", "recomputed: torch", "remat", ""),
    "models": ("peak: budget", "real", "recomputed: one policy", "budget", "total, ms"),
}


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, in KiB and MFLOP."""
    width = max(len(row.name) for row in rows)
    lines: list[str] = []
    for name, heads in _HEADS.items():
        lines.append(f"{name:<{width}}" + "".join(f"{head:>{size}}" for head, size in zip(heads, (17, 9, 24, 9, 12))))
        lines += [
            f"{row.name:<{width}}{row.reference_bytes / KIB:>17.1f}{row.bytes / KIB:>9.1f}"
            f"{row.reference_flops / 1e6:>24.2f}{row.flops / 1e6:>9.2f}{row.milliseconds:>12.1f}  {verdict(row)}"
            for row in rows
            if row.table == name
        ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all rows and print the tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.budget", description="Budgets, compared with presets.")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the curve of the transformer block as SVG")
    options = parse(parser, argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.picture is not None:
        draw(options.picture)
    rows = [row for name in BLOCKS for row in predictions(name)]
    rows += [row for name in BLOCKS for row in presets(name)]
    rows += [compiled(part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    rows += [models(part) for part in (0.8, 0.6, 0.4)]
    return report(options, rows, table)


if __name__ == "__main__":
    sys.exit(main())
