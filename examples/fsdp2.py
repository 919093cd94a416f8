"""Train a small transformer under FSDP2, without activation checkpointing and with it, and show what that saves.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Takes a few seconds, on CPUs (gloo) or on as many GPUs as there are processes (nccl). The losses of all steps must be
the same in all ways; on CPUs to the last bit. A table shows what a process keeps between forward and backward, and the
most that it holds in a step.
"""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import remat.nn
from benchmarks.measure import PeakMemory, gc_disabled
from remat import policies

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, BATCH, STEPS = 64, 64, 4, 4, 64, 4, 10


class Block(nn.Module):
    """One transformer block: attention, then a two-layer perceptron, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = split.movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Predicts the next token of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# What to do with the model before it is sharded.
WAYS: dict[str, Callable[[nn.Module], object]] = {
    "plain": lambda model: None,
    "remat": lambda model: remat.nn.apply(model, Block),
    "remat, save_matmuls": lambda model: remat.nn.apply(model, Block, policy=policies.save_matmuls),
}


def make_batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and those that follow: each process counts from other numbers, in steps of three."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (first + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def train(change: Callable[[nn.Module], object], mesh: DeviceMesh) -> tuple[list[float], int, int]:
    """Train a model that `change` has changed; return the losses, and of one more step the bytes kept and the peak."""
    device = torch.device(mesh.device_type)
    torch.manual_seed(0)
    model = Transformer().to(device)
    change(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(*make_batch(step, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    tokens, targets = make_batch(STEPS, device)
    with PeakMemory() as memory:
        loss = loss_of(tokens, targets)
        kept = memory.live
        loss.backward()
    return losses, kept, memory.peak


def main() -> int:
    """Train in all ways and print the table; return the exit status."""
    if "RANK" not in os.environ:
        sys.exit("Start it with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = dist.is_nccl_available() and torch.cuda.device_count() >= processes
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # threads that wait for each other are slow
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh = init_device_mesh("cuda" if on_gpus else "cpu", (dist.get_world_size(),))
    with gc_disabled():
        found = {name: train(change, mesh) for name, change in WAYS.items()}
    expected, most, _ = found["plain"]
    tolerance = 1e-3 if on_gpus else 0.0
    same = all(
        math.isclose(a, b, rel_tol=tolerance) for losses, _, _ in found.values() for a, b in zip(losses, expected)
    )
    if dist.get_rank() == 0:
        print(f"loss of {STEPS} steps: {expected[0]:.3f} -> {expected[-1]:.3f}")
        print(f"losses are {'the same' if same else 'NOT the same'}\n")
        print(f"{'one process, one step':24} {'kept, KiB':>10} {'peak, KiB':>10}")
        for name, (_, kept, peak) in found.items():
            print(f"{name:24} {kept / 1024:10.1f} {peak / 1024:10.1f}")
    dist.destroy_process_group()
    return 0 if same and found["remat"][1] < most and expected[-1] < expected[0] else 1


if __name__ == "__main__":
    sys.exit(main())
