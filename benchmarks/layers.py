"""Layers of a matrix product and a `tanh` each, between which nothing needs to be kept, in several spellings."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.wrappers import Fn
from remat import checkpoint_name

__all__ = ["arguments", "layers", "marked_products", "marked_tanhs", "named_layers"]


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """As anybody writes them."""
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def named_layers(x: Tensor, *weights: Tensor) -> Tensor:
    """With a name for each result."""
    for i, weight in enumerate(weights):
        x = checkpoint_name(torch.tanh(x @ weight), f"layer{i}")
    return x


def marked_products(depth: int) -> Fn:
    """With each product in a region that `torch_remat` keeps.

    The regions are made once, which is faster than to make them in each call. The `tanh` beside them runs again, and
    so its input has to be announced: that is faster than a region of its own.
    """
    import torch_remat

    products = [torch_remat.region(torch.mm, f"product{i}", recompute=False) for i in range(depth)]

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for product, weight in zip(products, weights):
            x = product(x, weight)
            torch_remat.recompute_needs_tensor(x)
            x = torch.tanh(x)
        return x

    return layers


def marked_tanhs(depth: int) -> Fn:
    """With each `tanh` in such a region: its backward needs its result, which is kept without being announced."""
    import torch_remat

    tanhs = [torch_remat.region(torch.tanh, f"tanh{i}", recompute=False) for i in range(depth)]

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for tanh, weight in zip(tanhs, weights):
            x = tanh(x @ weight)
        return x

    return layers


def arguments(width: int, depth: int) -> list[Tensor]:
    """An input and weights."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(1 + depth)]
