"""A budget for a model on a device: peaks are those of its allocator; an amount may be a part of its free memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerator import DEVICE, backend
from torch import Tensor, nn

import remat

pytestmark = pytest.mark.cuda


def model() -> nn.Module:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))

    return nn.Sequential(*(block() for _ in range(6))).to(DEVICE)


def step(module: nn.Module, x: Tensor) -> tuple[list[Any], int]:
    """The gradients of a step, and the peak of the device's allocator beyond what it had before."""
    module.zero_grad()
    torch.manual_seed(1)
    backend.synchronize()
    backend.reset_peak_memory_stats()
    before = backend.memory_allocated()
    module(x).square().mean().backward()
    backend.synchronize()
    return [p.grad for p in module.parameters()], backend.max_memory_allocated() - before


def test_the_peak_of_the_allocator_is_within_the_amount() -> None:
    module, x = model(), torch.randn(8, 32, 32, device=DEVICE)
    step(module, x)  # kernels may take memory that they keep
    expected, plain = step(module, x)
    plan = remat.nn.budget(module, 0.5, x, loss=lambda out: out.square().mean())
    found, peak = step(module, x)
    assert all(map(torch.equal, found, expected))
    assert peak <= plan.amount < plain and plan.regions and plan.without == pytest.approx(plain, rel=0.1)


@pytest.mark.skipif(not hasattr(backend, "mem_get_info"), reason="the backend does not tell its free memory")
def test_an_amount_is_a_part_of_the_free_memory() -> None:
    module, x = model(), torch.randn(8, 32, 32, device=DEVICE)
    free = backend.mem_get_info()[0]
    assert remat.nn.budget(module, "50%", x).amount == pytest.approx(free / 2, rel=0.2)
    assert remat.nn.budget(module, None, x).amount == pytest.approx(free, rel=0.2)
    with pytest.raises(remat.PolicyError, match="On a CPU a budget needs an amount"):
        remat.nn.budget(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), None, torch.randn(2, 3))
