"""Models to plan, and a check of their plans."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, training_step
from torch import Tensor, nn

import remat

LAYER = nn.TransformerEncoderLayer
X = torch.randn(8, 32, 32, generator=torch.Generator().manual_seed(0))


def layer(dropout: float = 0.0) -> nn.Module:
    return LAYER(32, 2, 128, dropout, batch_first=True)


def layers(count: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(*(layer(dropout) for _ in range(count)))


def squared(out: Tensor) -> Tensor:
    return out.square().mean()


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
    expected, plain, flops = training_step(model, run)
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = remat.nn.budget(fn, amount, x, loss=loss, cost="flops", where=where)
    assert_same([model.state_dict(), torch.get_rng_state()], [state, generator])
    found, peak, recomputed = training_step(model, run)
    assert_same(found, expected)
    # A copy of the generator's state counts in a first step.
    assert plan.peak - 6000 <= peak <= plan.peak <= plan.amount < plain and recomputed - flops == plan.flops
    assert plan.without == pytest.approx(plain, rel=off)
    return plan
