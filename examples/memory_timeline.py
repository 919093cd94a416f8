"""Draw the live memory of one training step: plain, with `remat` on each block, and with `remat` under a policy.

Without checkpointing, memory rises through the forward pass, as every intermediate result is saved, and falls through
the backward pass. With it, only the blocks' inputs are saved; the backward pass recomputes one block at a time.

    python examples/memory_timeline.py [PICTURE.png]    # a few seconds; the picture needs matplotlib
"""

import sys
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from remat import policies

COLUMNS, BARS = 64, " ▁▂▃▄▅▆▇█"


class Block(nn.Module):
    """A residual block: a norm, and two linear layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def draw(timeline: tuple[int, ...], top: int) -> str:
    """Return the live bytes as a row of `COLUMNS` bars; a bar of full height is `top` bytes."""
    edges = [round(i * len(timeline) / COLUMNS) for i in range(COLUMNS + 1)]
    highest = [max(timeline[a : max(b, a + 1)]) for a, b in pairwise(edges)]
    return "".join(BARS[-(-bytes_ * (len(BARS) - 1) // top)] for bytes_ in highest)


def save_picture(timelines: dict[str, tuple[int, ...]], path: str) -> None:
    """Write the timelines as a picture, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("Install matplotlib to get a picture.")
        return
    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for label, timeline in timelines.items():
        axes.plot([i / len(timeline) for i in range(len(timeline))], [n / 2**20 for n in timeline], label=label)
    axes.set(xlabel="part of the training step", ylabel="live memory, MiB", ylim=0)
    axes.legend()
    pyplot.savefig(path, dpi=150)
    print(f"Wrote {path}.")


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(12)))
    x = torch.randn(512, 128)

    report = remat.report(model, x, where=Block, policies=[None, policies.save_matmuls])
    top = report.plain.peak_bytes
    print("live memory, from the first operation of a training step to the last\n")
    for row in report.rows:
        print(f"{row.label:14} {draw(row.timeline, top)} peak {row.peak_bytes / 2**20:5.1f} MiB")

    print(f"\n{report}\n")
    for policy in (None, policies.save_matmuls):
        print(remat.check(model, x, where=Block, policy=policy))
    if len(sys.argv) > 1:
        save_picture(report.timeline, sys.argv[1])


if __name__ == "__main__":
    main()
