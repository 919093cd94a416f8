"""``PYTHONPATH=. python docs/pictures.py`` draws docs/hvp.svg, docs/timeline.svg and docs/how-to/report.svg."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from torch.func import grad, jvp
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import remat
from benchmarks.measure import PeakMemory, gc_disabled
from benchmarks.wrappers import Wrapper, plain, torch_checkpoint
from remat import PolicyLike, policies

WIDTH, HEADS, DEPTH, BATCH, TIME, TOKENS = 128, 4, 8, 8, 128, 256


class Block(nn.Module):
    """A block of a decoder: attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


def report(choice: list[PolicyLike] | None) -> remat.Report:
    """A training step of a small transformer: plain, and with its blocks as regions under policies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, TOKENS))
    tokens, targets = torch.randint(0, TOKENS, (2, BATCH, TIME))
    return remat.report(
        model,
        tokens,
        where=Block,
        policies=choice,
        loss=lambda logits: cross_entropy(logits.flatten(0, 1), targets.flatten()),
    )


def timeline(found: remat.Report, axes: Axes) -> None:
    """Live bytes over the operations of each row; a dot marks the end of the forward pass."""
    labels = ["plain", "remat(block)", "remat(block, policy=save_matmuls | save_attention)"]
    for label, row in zip(labels, found.rows):
        mib = [nbytes / 2**20 for nbytes in row.timeline]
        end = row.forward_operations - 1
        axes.plot(mib, "-o", markevery=[end], label=f"{label}: peak {row.peak_bytes / 2**20:.1f} MiB")
    axes.set_xlabel("operations of a training step (a dot marks the end of the forward pass)")
    axes.set_ylabel("live memory, MiB")
    axes.set(xlim=0, ylim=(0, 1.25 * found.plain.peak_bytes / 2**20))  # with space for the legend
    axes.grid(alpha=0.3)
    axes.legend()


def hessian_product(wrap: Wrapper) -> Callable[[], Any]:
    """The Hessian-vector product of the README's program, with wider layers."""
    torch.manual_seed(0)
    ws, x = torch.randn(8, 256, 256) / 16, torch.randn(1024, 256)

    @wrap
    def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x @ w)
        return x

    def loss(ws: torch.Tensor) -> torch.Tensor:
        h = x
        for w in ws.unbind():
            h = layer(w, h)
        return h.square().mean()

    return lambda: jvp(grad(loss), (ws,), (ws,))[1]


class Timeline(PeakMemory):
    """The live bytes after each operation, and its time."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[float, float]] = []

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        super().after(func, args, kwargs, result)
        self.points.append((time.perf_counter(), self.total / 2**20))


def over_time(axes: Axes) -> None:
    """Live bytes of a Hessian-vector product over time: without regions, with remat, and with torch's checkpoint."""
    for label, wrap in {"plain": plain, "remat": remat.remat, "torch.utils.checkpoint": torch_checkpoint}.items():
        step, memory = hessian_product(wrap), Timeline()
        try:
            step()
        except RuntimeError:
            axes.plot([], [], " ", label=f"{label}: raises an error")
            continue
        with gc_disabled(), memory:
            step()
        start = memory.points[0][0]
        milliseconds, mib = zip(*((1000 * (when - start), nbytes) for when, nbytes in memory.points))
        axes.plot(milliseconds, mib, label=f"{label}: peak {max(mib):.1f} MiB")
    axes.set(xlabel="time, ms", ylabel="live memory, MiB", xlim=0, ylim=(0, 1.25 * axes.get_ylim()[1]))
    axes.grid(alpha=0.3)
    axes.legend()


def save(axes: Axes, path: Path) -> None:
    """Write a picture as SVG, the same each time, with text as text."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "remat"}):
        axes.figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    torch.set_num_threads(1)
    docs = Path(__file__).parent
    axes = Figure((7.2, 3.6), layout="constrained").subplots()
    over_time(axes)
    save(axes, docs / "hvp.svg")
    found = report([None, policies.save_matmuls | policies.save_attention])
    print(found)
    axes = Figure((7.2, 4), layout="constrained").subplots()
    timeline(found, axes)
    save(axes, docs / "timeline.svg")
    axes = Figure((7.2, 4), layout="constrained").subplots()
    save(report(None).plot(axes), docs / "how-to" / "report.svg")
