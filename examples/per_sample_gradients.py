"""Clip the gradient of each sample of a batch, as differentially private training does, for a convolutional network.

`vmap(grad(loss))` computes one gradient per sample, and saves the intermediate results of the whole batch. With `remat`
on each residual block it saves only the blocks' inputs and recomputes the rest. `torch.utils.checkpoint` can't be used
here: it raises an error under `torch.func.grad`.

    python examples/per_sample_gradients.py    # a few seconds
"""

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

import remat

CHANNELS, BLOCKS, CLASSES, BATCH, SIZE, CLIP = 8, 8, 10, 32, 16, 1.0
Params = dict[str, list[Tensor] | Tensor]


@remat.remat  # the one added line
def block(w1: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    """A residual block of two convolutions with group norm, for one image: `(channels, height, width)`."""
    h = F.conv2d(F.gelu(F.group_norm(x[None], 2)), w1, padding=1)
    return x + F.conv2d(F.gelu(F.group_norm(h, 2)), w2, padding=1)[0]


def loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
    """The cross-entropy of one image."""
    x = F.conv2d(image[None], params["stem"], padding=1)[0]
    for w1, w2 in zip(params["first"], params["second"]):
        x = block(w1, w2, x)
    return F.cross_entropy(x.mean((-2, -1)) @ params["head"], label)


def per_sample(loss):
    """Return a function that computes the gradient of each sample of a batch."""
    return vmap(grad(loss), in_dims=(None, 0, 0))


def leaves(grads: Params) -> list[Tensor]:
    return [grads["stem"], *grads["first"], *grads["second"], grads["head"]]


def clipped_mean(grads: Params) -> tuple[list[Tensor], Tensor]:
    """Scale each sample's gradient to a norm of at most `CLIP`; return the mean, and the norms before clipping."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in leaves(grads)]).sum(0).sqrt()
    scale = (CLIP / norms).clamp(max=1)
    return [torch.tensordot(scale, g, dims=1) / len(scale) for g in leaves(grads)], norms


def main() -> None:
    torch.manual_seed(0)

    def weights(*shape: int) -> Tensor:
        return torch.randn(shape) / (shape[-1] * shape[-2] * CHANNELS) ** 0.5

    params = {
        "stem": weights(CHANNELS, 3, 3, 3),
        "first": [weights(CHANNELS, CHANNELS, 3, 3) for _ in range(BLOCKS)],
        "second": [weights(CHANNELS, CHANNELS, 3, 3) for _ in range(BLOCKS)],
        "head": torch.randn(CHANNELS, CLASSES),
    }
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.randint(CLASSES, (BATCH,))

    # `remat.report` runs the loss as written and with all regions disabled.
    report = remat.report(loss, params, images, labels, transform=per_sample, policies=[])
    print(f"{'per-sample gradients':24} {'peak, MiB':>10}")
    for label, costs in (("plain", report.plain), ("remat on each block", report.as_written)):
        print(f"{label:24} {costs.peak_bytes / 2**20:10.2f}")

    grads = per_sample(loss)(params, images, labels)
    with remat.disable_remat():
        expected = per_sample(loss)(params, images, labels)
    difference = max((a - b).abs().max().item() for a, b in zip(leaves(expected), leaves(grads)))
    mean, norms = clipped_mean(grads)
    print(f"\nlargest difference of a gradient: {difference:.1e}")
    print(f"gradient norms of {BATCH} samples: {norms.min():.3f} to {norms.max():.3f}")
    norm = torch.stack([g.square().sum() for g in mean]).sum().sqrt()
    print(f"norm of the mean of the clipped gradients: {norm:.3f}, at most {CLIP}")


if __name__ == "__main__":
    main()
