"""Pictures of a training step: ``python docs/pictures.py`` writes docs/timeline.svg and docs/how-to/report.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import remat
from remat import PolicyLike, policies
from remat._measure.drawing import COLOURS, RIGHT, TOP, Axis, Curve, lines, standalone
from remat._measure.drawing import WIDTH as WIDTH_OF_CHART
from remat._measure.units import size_text

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


def timeline(found: remat.Report) -> str:
    """Live bytes over the operations of each row, with a legend."""
    labels = ["plain", "remat(block)", "remat(block, policy=save_matmuls | save_attention)"]
    rows = list(enumerate(zip(labels, found.rows)))
    curves = [Curve(label, row.timeline, i, row.forward_operations) for i, (label, row) in rows]
    operations = Axis("operations of a training step (a dot marks the end of the forward pass)", str)
    chart = lines(curves, operations, Axis("live bytes", size_text, 1024))
    texts = [
        f'<text x="{WIDTH_OF_CHART - RIGHT}" y="{TOP + 14 + 17 * i}" text-anchor="end" style="fill:{COLOURS[i]}">'
        f"{escape(label)}: peak {size_text(row.peak_bytes)}</text>"
        for i, (label, row) in rows
    ]
    return standalone(chart.replace("</svg>", "\n".join([*texts, "</svg>"])))


if __name__ == "__main__":
    found = report([None, policies.save_matmuls | policies.save_attention])
    docs = Path(__file__).parent
    (docs / "timeline.svg").write_text(timeline(found), encoding="utf-8")
    print(found)
    report(None).to_svg(docs / "how-to" / "report.svg")
