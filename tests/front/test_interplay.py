"""Regions together with other features of torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Wrap, assert_same, assert_same_results, plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat import policies, remat


def region_in_checkpoint_in_region(wrap: Wrap, x: Tensor) -> Tensor:
    """`selective/test_programs.py` has a region in a checkpoint, and a checkpoint in a region."""
    inner, chain = wrap(lambda p, q: p * q + F.smooth_l1_loss(p * q, p, reduction="none")), wrap(lambda a: a.sin() * a)

    def body(a: Tensor) -> Tensor:
        b = a.sin()
        return checkpoint(chain, checkpoint(inner, b, b, use_reentrant=False), use_reentrant=False).cos()

    return wrap(body)(x)


@pytest.mark.parametrize(
    "policy", [None, policies.save_ops("aten.mul"), policies.everything_saveable, policies.budget(0.5)]
)
def test_with_torchs_checkpoint(policy: Any) -> None:
    x, wrap = torch.randn(4, 4, requires_grad=True), remat(policy=policy)
    for _ in range(2):  # a budget chooses in the first call
        found, expected = (region_in_checkpoint_in_region(each, x).square().sum() for each in (wrap, plain))
        assert_same(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


def test_optimizer_steps_in_the_backward() -> None:
    """Each region captures all layers, and reads one."""

    def program(wrap: Wrap) -> list[Tensor]:
        layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        step, x = wrap(lambda i, x: layers[i](x).tanh()), torch.ones(2, 3)

        def update(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in layers.parameters():
            p.register_post_accumulate_grad_hook(update)
        for i in range(3):
            x = step(i, x)
        x.sum().backward()
        return [p.detach() for p in layers.parameters()]

    assert_same_results(program, remat, plain)
