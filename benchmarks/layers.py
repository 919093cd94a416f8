"""Layers of a matrix product and a `tanh` each, written in several ways."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.wrappers import Fn
from remat import checkpoint_name

__all__ = ["arguments", "layers", "marked_products", "marked_tanhs", "named_layers"]


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """The layers without names or marks."""
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def named_layers(x: Tensor, *weights: Tensor) -> Tensor:
    """The layers with a name for each result."""
    for i, weight in enumerate(weights):
        x = checkpoint_name(torch.tanh(x @ weight), f"layer{i}")
    return x


def marked_products(depth: int) -> Fn:
    """The layers with each product in a region of `torch_remat` whose result is saved.

    The regions are made once, which is faster than making them in each call. The `tanh` is recomputed, so its input
    must be announced, which is faster than another region.
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
    """The layers with each `tanh` in such a region. Its backward reads its result, so nothing must be announced."""
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
