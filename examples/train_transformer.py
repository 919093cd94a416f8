"""Train a small transformer without activation checkpointing, and with it, which takes one added line.

The line is `remat.nn.apply(model, Block)`. A table shows loss, memory and time before and after; the losses are the
same to the last bit.

    python examples/train_transformer.py    # about ten seconds
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 64, 4, 8, 64, 8, 30


class Block(nn.Module):
    """A transformer block: attention, then an MLP, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        heads = (t.transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.project(mixed), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class Transformer(nn.Module):
    """Predicts each next token; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_batch() -> Tensor:
    """Return sequences that count up from a random number, in steps of one to four."""
    first, stride = torch.randint(VOCABULARY, (BATCH, 1)), torch.randint(1, 5, (BATCH, 1))
    return (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def train(with_remat: bool) -> tuple[Transformer, list[float], float]:
    """Train a new model; return it, the loss of every step, and the seconds per step."""
    torch.manual_seed(0)
    model = Transformer()
    if with_remat:
        remat.nn.apply(model, Block)  # the one added line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, start = [], time.perf_counter()
    for _ in range(STEPS):
        loss = model(make_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses, (time.perf_counter() - start) / STEPS


def main() -> None:
    before, losses, seconds = train(with_remat=False)
    after, losses_after, seconds_after = train(with_remat=True)
    report = remat.report(after, make_batch(), policies=[])
    without, with_remat = report.plain, report.as_written

    print(f"{STEPS} steps                {'before':>12} {'after':>12}")
    print(f"first loss              {losses[0]:12.4f} {losses_after[0]:12.4f}")
    print(f"last loss               {losses[-1]:12.4f} {losses_after[-1]:12.4f}")
    print(f"saved for backward, MiB {without.saved_bytes / 2**20:12.2f} {with_remat.saved_bytes / 2**20:12.2f}")
    print(f"peak of a step, MiB     {without.peak_bytes / 2**20:12.2f} {with_remat.peak_bytes / 2**20:12.2f}")
    print(f"time of a step, ms      {seconds * 1e3:12.1f} {seconds_after * 1e3:12.1f}")
    same = losses == losses_after and all(map(torch.equal, before.parameters(), after.parameters()))
    print(f"A step recomputes a forward pass. At width {WIDTH} kernels are small, so it takes longer than that.")
    print(f"losses and trained parameters: {'the same to the last bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
