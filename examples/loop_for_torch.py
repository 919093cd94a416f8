"""A training loop that was written for `torch.utils.checkpoint`: a character model on Python's standard library.

It uses what such loops use: keyword arguments, dropout, selective checkpointing, `checkpoint_sequential`, early stop
switched off for one layer, and a handler for `CheckpointError`. `migrate_from_torch.py` runs it as it is, and
with the import changed.
"""

import functools
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH = 128, 64, 4, 64, 16


class Block(nn.Module):
    """A transformer block: attention, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, dropout: float) -> Tensor:
        query, key, value = self.query_key_value(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        heads = (t.transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.project(mixed), dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), dropout, self.training)


def keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Keep the results of matrix products, and run the rest again."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Model(nn.Module):
    """Predicts each next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(),
            nn.Linear(WIDTH, VOCABULARY),
        )  # fmt: skip

    def forward(self, text: Tensor, dropout: float) -> Tensor:
        full, selective, unstopped = self.blocks
        x = self.embedding(text) + self.position
        x = checkpoint(full, x, dropout=dropout, use_reentrant=False)
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
        x = checkpoint(selective, x, dropout=dropout, use_reentrant=False, context_fn=contexts)
        with set_checkpoint_early_stop(False):
            x = checkpoint(unstopped, x, dropout=dropout, use_reentrant=False, determinism_check="none")
        return checkpoint_sequential(self.head, 3, x, use_reentrant=False)


@functools.cache
def load_text() -> Tensor:
    """The standard library's top-level modules as ASCII codes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:2_000_000]
    return torch.frombuffer(bytearray(text.encode("ascii", errors="replace")), dtype=torch.uint8).long()


def train(steps: int) -> tuple[list[float], Model]:
    """Train a new model; returns the loss of every step, and the model."""
    torch.manual_seed(0)
    text, model = load_text(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        batch = text[starts + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(batch[:, :-1], dropout=0.1).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        try:
            loss.backward()
        except CheckpointError as error:
            raise SystemExit(f"A checkpointed layer did something else in its second run: {error}") from error
        optimizer.step()
        losses.append(loss.item())
    return losses, model


if __name__ == "__main__":
    losses, _ = train(steps=100)
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
