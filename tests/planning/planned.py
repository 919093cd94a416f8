"""Models to plan, and a check of their plans."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn

import remat
from benchmarks.measure import FlopCount
from remat._measure.allocated import Allocated

LAYER = nn.TransformerEncoderLayer
X = torch.randn(8, 32, 32, generator=torch.Generator().manual_seed(0))


def layer(dropout: float = 0.0) -> nn.Module:
    return LAYER(32, 2, 128, dropout, batch_first=True)


def layers(count: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(*(layer(dropout) for _ in range(count)))


def squared(out: Tensor) -> Tensor:
    return out.square().mean()


def step(model: nn.Module, run: Callable[[], Tensor]) -> tuple[list[Any], int, int]:
    """The gradients after a step, its peak, and its FLOPs."""
    for count in (Allocated(()), FlopCount()):
        model.zero_grad()
        torch.manual_seed(1)
        with count:
            run().backward()
        if isinstance(count, Allocated):
            peak = count.peak
    return [p.grad for p in model.parameters()], peak, count.flops


def fitted(
    fn: Any,
    amount: Any,
    x: Tensor = X,
    loss: Callable = squared,
    of: nn.Module | None = None,
    where: Any = None,
    off: float = 0.05,
) -> Any:
    """Return a plan for ``fn``, after assertions that a step is as it says, and that planning changes nothing else.

    The predicted peak without regions may be ``off`` by this part.
    """
    model, run = fn if of is None else of, lambda: loss(fn(x))
    expected, plain, flops = step(model, run)
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = remat.nn.budget(fn, amount, x, loss=loss, cost="flops", where=where)
    assert_same([model.state_dict(), torch.get_rng_state()], [state, generator])
    found, peak, recomputed = step(model, run)
    assert_same(found, expected)
    # A copy of the generator's state counts in a first step.
    assert plan.peak - 6000 <= peak <= plan.peak <= plan.amount < plain and recomputed - flops == plan.flops
    assert plan.without == pytest.approx(plain, rel=off)
    return plan
