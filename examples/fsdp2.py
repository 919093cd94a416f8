"""Train a small transformer under FSDP2, without and with activation checkpointing, and compare the memory.

    torchrun --nproc-per-node 2 examples/fsdp2.py    # a few seconds

It runs on GPUs (nccl) if there is one for each process, otherwise on CPUs (gloo). All variants must have the same
losses, on CPUs to the last bit. A table shows what a process saves for its backward pass, and its peak in one step.
"""

import math
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import TransformerEncoderLayer as Block
from torch.nn import functional as F

import remat
from remat import policies

VOCABULARY, WIDTH, BLOCKS, LENGTH, BATCH, STEPS = 64, 64, 6, 64, 4, 10


class Transformer(nn.Module):
    """Predicts each next token; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(
            Block(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True) for _ in range(BLOCKS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


# How each variant changes the model before it is sharded.
WAYS: dict[str, Callable[[nn.Module], object]] = {
    "plain": lambda model: None,
    "remat": lambda model: remat.nn.apply(model, Block),
    "remat, save_matmuls": lambda model: remat.nn.apply(model, Block, policy=policies.save_matmuls),
}


def train(change: Callable[[nn.Module], object], mesh: DeviceMesh) -> tuple[list[float], int, int]:
    """Train a model after `change(model)`; return its losses, and the bytes saved and the peak of one more step."""
    torch.manual_seed(0)
    model = Transformer().to(mesh.device_type)
    change(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())  # each process has its own batches
    losses = []
    for _ in range(STEPS):
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        tokens = ((first + 3 * torch.arange(LENGTH + 1)) % VOCABULARY).to(mesh.device_type)
        loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    costs = remat.report(model, tokens, policies=[]).as_written
    return losses, costs.saved_bytes, costs.peak_bytes


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("Start it with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    on_gpus = dist.is_nccl_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # threads that wait for each other are slow
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh = init_device_mesh("cuda" if on_gpus else "cpu", (dist.get_world_size(),))
    found = {name: train(change, mesh) for name, change in WAYS.items()}
    expected, near = found["plain"][0], 1e-3 if on_gpus else 0.0
    same = all(math.isclose(a, b, rel_tol=near) for losses, _, _ in found.values() for a, b in zip(losses, expected))
    if dist.get_rank() == 0:
        print(f"loss of {STEPS} steps: {expected[0]:.3f} -> {expected[-1]:.3f}")
        print(f"losses are {'the same' if same else 'NOT the same'}\n")
        print(f"{'one process, one step':24} {'saved, KiB':>10} {'peak, KiB':>10}")
        for name, (_, saved, peak) in found.items():
            print(f"{name:24} {saved / 1024:10.1f} {peak / 1024:10.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
