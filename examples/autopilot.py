"""Train a model that does not fit into memory: `remat.nn.budget` chooses what is recomputed, by one line.

The process gets a limit of memory, as a GPU has one. A plain step fails; with the plan for a budget it trains.

    python examples/autopilot.py
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat

LIMIT = 220 * 2**20  # bytes beyond what the process has when the model is made
BUDGET = "125MiB"  # of tensors in a step; the process needs some memory besides


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int = 128, count: int = 16) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Parameter(torch.randn(256, width) / 50)
        self.blocks, self.head = nn.ModuleList([Block(width, 4) for _ in range(count)]), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text[:, :-1]) + self.positions[: text.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def limit_memory(nbytes: int) -> None:
    """Let the process have only this much more memory than now."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: freed tensors go back to the system at once
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # of data
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def main() -> None:
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def batch() -> Tensor:
        return torch.stack([text[i : i + 257] for i in torch.randint(len(text) - 257, (8,)).tolist()])

    limit_memory(LIMIT)
    try:
        model(batch()).backward()
    except RuntimeError as error:
        print("A plain step does not fit:", str(error).rpartition("DefaultCPUAllocator: ")[2])
    optimizer.zero_grad()

    plan = remat.nn.budget(model, BUDGET, batch())  # the one line
    print(plan)
    for step in range(8):
        loss = model(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
