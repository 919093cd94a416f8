"""Clip the gradient of each sample of a batch, as differentially private training does, for a convolutional network.

`vmap(grad(loss))` computes one gradient per sample, and saves the intermediate results of the whole batch. With `remat`
on each residual block it saves only the blocks' inputs and recomputes the rest. `torch.utils.checkpoint` can't be used
here: it raises an error under `torch.func.grad`.

    python examples/per_sample_gradients.py    # a few seconds
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import remat

CHANNELS, BLOCKS, CLASSES, BATCH, SIZE, CLIP = 8, 8, 10, 32, 16, 1.0


class Block(nn.Module):
    """A residual block of two convolutions with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, CHANNELS), nn.GroupNorm(2, CHANNELS)
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(nn.functional.gelu(self.norm1(x)))
        return x + self.conv2(nn.functional.gelu(self.norm2(h)))


def per_sample(loss):
    """Return a function that computes the gradient of each sample of a batch."""
    return vmap(grad(loss), in_dims=(None, 0, 0))


def clipped_mean(grads: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Scale each sample's gradient to a norm of at most `CLIP`; return the mean, and the norms before clipping."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    scale = (CLIP / norms).clamp(max=1)
    return {name: torch.tensordot(scale, g, dims=1) / len(scale) for name, g in grads.items()}, norms


def main() -> None:
    torch.manual_seed(0)
    blocks = (Block() for _ in range(BLOCKS))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), *blocks, head)
    remat.nn.apply(model, Block)  # the one added line
    params = {name: p.detach() for name, p in model.named_parameters()}
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(CLASSES, (BATCH,))

    def loss(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        """The cross-entropy of one image."""
        return nn.functional.cross_entropy(functional_call(model, params, (image[None],)), label[None])

    # `remat.report` runs the loss as written and with all regions disabled.
    report = remat.report(loss, params, images, labels, transform=per_sample, policies=[])
    print(f"{'per-sample gradients':24} {'peak, MiB':>10}")
    for label, costs in (("plain", report.plain), ("remat on each block", report.as_written)):
        print(f"{label:24} {costs.peak_bytes / 2**20:10.2f}")

    grads = per_sample(loss)(params, images, labels)
    with remat.disable_remat():
        expected = per_sample(loss)(params, images, labels)
    difference = max((expected[name] - g).abs().max().item() for name, g in grads.items())
    mean, norms = clipped_mean(grads)
    print(f"\nlargest difference of a gradient: {difference:.1e}")
    print(f"gradient norms of {BATCH} samples: {norms.min():.3f} to {norms.max():.3f}")
    norm = torch.stack([g.square().sum() for g in mean.values()]).sum().sqrt()
    print(f"norm of the mean of the clipped gradients: {norm:.3f}, at most {CLIP}")


if __name__ == "__main__":
    main()
