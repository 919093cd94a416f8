"""Choose the policy with the fastest training step among those that fit in a memory budget.

`remat.report` runs the model under each policy. It counts the bytes saved, the peak and the FLOPs recomputed. With
`time=True` it also measures the time of a step, as where kernels are small, a policy may take more time than it saves.

    python examples/choose_policy.py [MiB]    # some ten seconds; default: 25 MiB for a training step
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from remat import checkpoint_name, policies

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 4, 4, 128, 4


class Block(nn.Module):
    """A transformer block that names two of its values, so that policies can select them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = checkpoint_name(self.query_key_value(self.norm1(x)), "query_key_value")
        query, key, value = (t.transpose(1, 2) for t in split.unflatten(-1, (3, HEADS, -1)).unbind(-3))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        hidden = checkpoint_name(self.up(self.norm2(x)), "hidden")
        return x + self.down(F.gelu(hidden))


CANDIDATES = [
    None,
    policies.save_only_these_names("hidden"),
    policies.save_attention | policies.save_only_these_names("query_key_value"),
    policies.save_matmuls,
    policies.save_matmuls | policies.save_attention,
]


def main() -> None:
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 25.0
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    x = torch.randn(BATCH, LENGTH, WIDTH)

    report = remat.report(model, x, where=Block, policies=CANDIDATES, time=True)
    print(f"{report}\n")
    fitting = [row for row in report.policies if row.peak_bytes <= budget * 2**20]
    if not fitting:
        sys.exit(f"No policy keeps a training step within {budget} MiB.")
    best = min(fitting, key=lambda row: row.time)
    print(f"within {budget} MiB: {best.label}")
    print(remat.check(model, x, where=Block, policy=best.policy))

    remat.nn.apply(model, Block, policy=best.policy)
    print("\nwhat the model saves with this policy:")
    remat.print_saved_residuals(model, x)


if __name__ == "__main__":
    main()
