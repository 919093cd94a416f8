"""Run a training loop written for `torch.utils.checkpoint` with torch's functions and with those of `remat.compat`.

The loop uses keyword arguments, dropout, selective checkpointing, `checkpoint_sequential` and a handler for
`CheckpointError`. Losses and parameters are the same to the last bit, and so is the peak. With `remat.compat`, the
model also works under `torch.func`.

    python examples/migrate_from_torch.py    # a few seconds
"""

import functools
from types import ModuleType

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import remat.compat

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 64, 64, 64, 8, 40


class Block(nn.Module):
    """A residual block around an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, dropout: float) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), dropout, self.training)


def save_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Save the results of matrix products, and recompute the rest."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Model(nn.Module):
    """Predicts each next token; `api` is `torch.utils.checkpoint` or `remat.compat`."""

    def __init__(self, api: ModuleType) -> None:
        super().__init__()
        self.api = api
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor, dropout: float) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        x = self.api.checkpoint(self.first, x, dropout=dropout, use_reentrant=False)
        contexts = functools.partial(self.api.create_selective_checkpoint_contexts, save_products)
        x = self.api.checkpoint(self.second, x, dropout=dropout, use_reentrant=False, context_fn=contexts)
        logits = self.api.checkpoint_sequential(self.head, 2, x, use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(api: ModuleType) -> tuple[list[float], Model]:
    """Train a new model; return the loss of every step, and the model."""
    torch.manual_seed(0)
    model, losses = Model(api), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        tokens = (torch.randint(VOCABULARY, (BATCH, 1)) + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        loss = model(tokens, dropout=0.1)
        optimizer.zero_grad()
        try:
            loss.backward()
        except api.CheckpointError as error:
            raise SystemExit(f"A checkpointed layer differs in the recompute: {error}") from error
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def main() -> None:
    found = []
    print(f"{STEPS} steps of training   {'first loss':>10} {'last loss':>10} {'peak, MiB':>10}  torch.func.grad")
    for name, api in (("torch.utils.checkpoint", torch.utils.checkpoint), ("remat.compat", remat.compat)):
        losses, model = train(api)
        tokens = torch.arange(BATCH * (LENGTH + 1)).unflatten(0, (BATCH, -1)) % VOCABULARY
        peak = remat.report(model, tokens, dropout=0.1, policies=[]).as_written.peak_bytes / 2**20
        try:
            grad(functional_call, argnums=1)(model, dict(model.named_parameters()), (tokens, 0.1))
            works = "works"
        except RuntimeError:
            works = "raises an error"
        print(f"{name:22} {losses[0]:11.4f} {losses[-1]:10.4f} {peak:10.2f}  {works}")
        found.append((losses, list(model.parameters())))
    (losses, before), (losses_after, after) = found
    same = losses == losses_after and all(map(torch.equal, before, after))
    print(f"\nlosses and trained parameters: {'the same to the last bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
