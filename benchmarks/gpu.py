"""Memory and time of a transformer's training step with remat, torch's checkpoints and torch's compiler.

    python -m benchmarks.gpu [--json] [--output FILE] [--picture FILE.svg] [--device cpu --layers 2 --width 64 ...]

The step is the forward and backward pass of decoder blocks (causal attention, an MLP) with a mean of squares as loss.
All rows have the same weights and input. Each row's step and the plain step are timed in pairs, many times; the row's
ratio is the median of the ratios of the pairs. Its memory is the most that is allocated in a step, with the weights'
gradients, without weights and input. On a GPU, CUDA events measure the time and torch's caching allocator counts the
bytes. On the CPU, for which the sizes must be much smaller, everything runs on one thread.

"names" saves the projections to queries, keys and values, and the attention's result. "offload" saves them in host
memory; torch's counterpart, `save_on_cpu`, offloads everything that the plain block saves. On the CPU this spares no
memory, so the picture omits it. "budget" is the part of its usual residuals that torch's compiler may save.

Compiled code rounds differently, so losses and gradients are compared with those in a more exact type. The exit status
is 1 if a row's error is more than twice the plain step's. Without a GPU and `--device cpu`, nothing is measured.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import allocated_bytes, count_flops, gc_disabled
from benchmarks.picture import draw
from benchmarks.report import MIB, environment, parse, report, verdict
from benchmarks.wrappers import (
    ATTENTION,
    MATMULS,
    MM,
    Fn,
    Wrapper,
    plain,
    torch_checkpoint,
    torch_selective,
    torch_selective_by_count,
)
from remat import checkpoint_name, policies, remat

__all__ = ["CANDIDATES", "Block", "Candidate", "Row", "main", "measure", "table"]

# The type of the reference results, for each type that a step may have.
EXACT = {"bfloat16": torch.float32, "float16": torch.float32, "float32": torch.float64}


class Block(nn.Module):
    """A decoder block: causal attention, then an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, time, width)` to the same shape."""
        qkv = checkpoint_name(self.qkv(self.norm1(x)), "qkv")
        heads = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in qkv.chunk(3, dim=-1))
        mixed = checkpoint_name(F.scaled_dot_product_attention(*heads, is_causal=True), "attention")
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# --- the rows ---------------------------------------------------------------------------------------------------------

Build: TypeAlias = Callable[[Sequence[Block], str], Fn]
NAMED = policies.save_only_these_names("qkv", "attention")


def eager(wrap: Wrapper) -> Build:
    """The wrapped blocks, one after the other."""

    def build(blocks: Sequence[Block], backend: str) -> Fn:
        wrapped = [wrap(block) for block in blocks]

        def network(x: Tensor) -> Tensor:
            for block in wrapped:
                x = block(x)
            return x

        return network

    return build


def compiled(wrap: Wrapper = plain, budget: float = 1.0) -> Build:
    """The network compiled as a whole, with an `activation_memory_budget`: 1 is torch's default."""

    def build(blocks: Sequence[Block], backend: str) -> Fn:
        compiler = torch._dynamo.lookup_backend(backend)

        # Each row has its own backend: rows with the same one would share compiled code.
        def within_budget(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                return compiler(graph, inputs)

        return torch.compile(eager(wrap)(blocks, backend), backend=within_budget, fullgraph=True)

    return build


def torch_offload(fn: Fn) -> Fn:
    """The function, with all tensors that autograd saves in host memory."""

    def offloaded(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
            return fn(x)

    return offloaded


@dataclass(frozen=True)
class Candidate:
    """One way to run the blocks: who offers it, and what it saves."""

    family: str
    policy: str
    build: Build


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("plain", "none", eager(plain)),
    Candidate("remat", "full", eager(remat)),
    Candidate("remat", "save_matmuls", eager(partial(remat, policy=policies.save_matmuls))),
    Candidate("remat", "names", eager(partial(remat, policy=NAMED))),
    Candidate("remat", "offload", eager(partial(remat, policy=policies.offload(NAMED)))),
    Candidate("torch", "full", eager(torch_checkpoint)),
    Candidate("torch", "save_matmuls", eager(torch_selective(MATMULS))),
    Candidate("torch", "names", eager(torch_selective_by_count((MM, 0), *((op, 0) for op in ATTENTION)))),
    Candidate("torch", "offload", eager(torch_offload)),
    Candidate("torch.compile", "none", compiled()),
    Candidate("torch.compile", "budget 0.5", compiled(budget=0.5)),
    Candidate("torch.compile", "budget 0.2", compiled(budget=0.2)),
    Candidate("torch.compile of remat", "full", compiled(remat)),
    Candidate("torch.compile of remat", "save_matmuls", compiled(partial(remat, policy=policies.save_matmuls))),
)


@dataclass(frozen=True)
class Row:
    """The costs of a step, and the errors of its loss and gradients."""

    family: str
    policy: str
    peak_bytes: int
    ms: float
    ratio: float
    loss_error: float
    gradient_error: float
    tolerance: float
    recomputed_flops: int | None = None  # more than the plain step's; None for compiled code

    @property
    def passed(self) -> bool:
        """Whether the errors are within the tolerance."""
        return self.loss_error <= self.tolerance and self.gradient_error <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {**asdict(self), "passed": self.passed}


# --- measuring --------------------------------------------------------------------------------------------------------


class Step:
    """A forward and a backward pass of a candidate."""

    def __init__(self, net: Fn, blocks: nn.ModuleList, x: Tensor) -> None:
        self.net, self.blocks, self.x = net, blocks, x

    def __call__(self) -> Tensor:
        loss = self.net(self.x).float().square().mean()
        loss.backward()
        return loss.detach()

    def free_gradients(self) -> None:
        """Free the gradients."""
        self.blocks.zero_grad(set_to_none=True)

    def results(self) -> list[Tensor]:
        """The loss and the gradients."""
        loss = self()
        gradients = [parameter.grad for parameter in self.blocks.parameters()]
        self.free_gradients()
        return [loss, *gradients]

    def peak_bytes(self) -> int:
        """The most bytes that a step has allocated at once."""
        if not self.x.is_cuda:
            peak = allocated_bytes(self)
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        self.free_gradients()
        return peak

    def flops(self) -> int:
        """The number of floating-point operations of a step."""
        flops = count_flops(self)
        self.free_gradients()
        return flops

    def ms(self) -> float:
        """The milliseconds that a step takes."""
        if not self.x.is_cuda:
            start = time.perf_counter()
            self()
            taken = (time.perf_counter() - start) * 1e3
        else:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            events[0].record()
            self()
            events[1].record()
            torch.cuda.synchronize()
            taken = events[0].elapsed_time(events[1])
        self.free_gradients()
        return taken


def error(actual: Tensor, expected: Tensor) -> float:
    """The relative error of a tensor."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def exact_results(blocks: nn.ModuleList, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The loss and the gradients in a more exact type, computed in little memory."""
    blocks = copy.deepcopy(blocks).to(dtype)
    return Step(eager(remat)(blocks, ""), blocks, x.to(dtype)).results()


def measure(options: argparse.Namespace, candidates: Sequence[Candidate] = CANDIDATES) -> list[Row]:
    """Measure all candidates. The first one is the plain step that the others are compared with."""
    torch.compiler.reset()  # earlier compilations count towards the limit of recompilations
    torch.manual_seed(0)
    where = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers)).to(**where)
    x = torch.randn(options.batch, options.time, options.width, **where)
    steps = [Step(each.build(blocks, options.backend), blocks, x) for each in candidates]

    exact = exact_results(blocks, x, EXACT[options.dtype])
    errors = [[error(*pair) for pair in zip(step.results(), exact)] for step in steps]
    del exact
    with gc_disabled():
        peaks = [step.peak_bytes() for step in steps]
        counted = [
            None if each.family.startswith("torch.compile") else step.flops() for each, step in zip(candidates, steps)
        ]
        rounds = [[(steps[0].ms(), step.ms()) for step in steps] for _ in range(options.rounds)]
    return [
        Row(
            family=candidate.family,
            policy=candidate.policy,
            peak_bytes=peak,
            ms=statistics.median(own for _, own in pairs),
            ratio=statistics.median(own / first for first, own in pairs),
            loss_error=off[0],
            gradient_error=max(off[1:]),
            tolerance=2 * max(errors[0]),
            recomputed_flops=None if flops is None else flops - (counted[0] or 0),
        )
        for candidate, peak, flops, pairs, off in zip(candidates, peaks, counted, zip(*rounds), errors)
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    names = [f"{row.family}: {row.policy}" for row in rows]
    width = max(map(len, names))
    head = f"{'one training step':<{width}}  {'peak, MiB':>10}  {'ms':>9}  {'ratio':>6}  {'gradient error':>16}"
    lines = [
        f"{name:<{width}}  {row.peak_bytes / MIB:>10.1f}  {row.ms:>9.2f}  {row.ratio:>6.3f}"
        f"  {row.gradient_error:>16.1e}  {verdict(row)}"
        for name, row in zip(names, rows)
    ]
    return "\n".join([head, *lines])


def title(options: argparse.Namespace) -> str:
    """The picture's title: sizes, device and version."""
    about = environment()
    device = about["gpu"] if options.device == "cuda" else f"one thread of a CPU ({about['cpu']})"
    sizes = f"{options.layers} blocks, width {options.width}, {options.heads} heads, {options.batch} x {options.time}"
    return f"{sizes}, {options.dtype}\n{device}, torch {about['torch']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all candidates and print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Memory against time of a training step.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for name, default in {"layers": 24, "width": 1024, "heads": 16, "batch": 8, "time": 1024, "rounds": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--dtype", choices=EXACT, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: inductor)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory against time into this SVG file")
    options = parse(parser, argv)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("benchmarks.gpu: no GPU, so nothing was measured (--device cpu runs small sizes)", file=sys.stderr)
        return 0
    if not on_gpu:
        torch.set_num_threads(1)
    rows = measure(options)
    if options.picture is not None:
        draw([row for row in rows if on_gpu or row.policy != "offload"], options.picture, title(options))
    return report(options, rows, table)


if __name__ == "__main__":
    sys.exit(main())
