"""Values that a backward pass has recomputed are released when it has used them, also where the graph is retained."""

from __future__ import annotations

from typing import Any

import torch
from cases import rand
from torch import Tensor

from benchmarks.measure import PeakMemory, gc_disabled
from remat import remat

N, KB = 32, 32 * 32 * 8  # a large matrix, and its bytes


def block(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh().sin().exp().tanh().sin()


def test_nothing_is_saved_between_passes_of_a_retained_graph() -> None:
    x, w, inner = rand(N, N), rand(N, N, seed=1), remat(block)
    for region in (
        inner,
        remat(lambda x, w: inner(inner(x, w).sin(), w)),
        remat(lambda x, w: inner(x, w) + block(w, x)),
    ):
        with gc_disabled(), PeakMemory() as memory:
            out = region(x, w)
            loss = out.sum()
            held = memory.live
            for inputs, keep in (((x, w), True), (x, True), ((x, w), False)):
                torch.autograd.grad(loss, inputs, retain_graph=keep)
                assert memory.live == held
            del out, loss
            assert memory.live == 0


def test_the_peak_of_a_retained_chain_is_that_of_one_region() -> None:
    """A value is released when another node reads its own, and all values of a region before the next is recomputed."""
    x, w = rand(N, N), rand(N, N, seed=1)
    region = remat(block)

    def peak(depth: int, **options: Any) -> float:
        h = x
        for _ in range(depth):
            h = region(h, w)
        loss = h.sum()
        with gc_disabled(), PeakMemory() as memory:
            torch.autograd.grad(loss, (x, w), **options)
        return memory.peak / KB

    assert peak(8) <= peak(4) + 1
    assert peak(8, retain_graph=True) <= peak(4, retain_graph=True) + 1 <= peak(4) + 3
