"""A module whose forward changes every kind of state, and a function that reads this state."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class Careless(nn.Module):
    """A module whose forward changes every kind of state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        self.eval()
        self.register_forward_hook(print)
        self.norm.register_buffer("more", torch.ones(1))
        self.weight.register_hook(print)
        self.frozen.requires_grad_(True)
        self.mean += 1
        with torch.no_grad():
            self.frozen.mul_(2)
            OUTSIDE["table"].add_(1)
        (self.weight * 2).sum().backward()
        self.norm = nn.Identity()
        torch.set_grad_enabled(False)
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        if fails:
            raise ValueError("mine")
        torch.set_grad_enabled(True)
        return (x * self.weight).sin()


OUTSIDE = {"table": torch.zeros(3)}


def state_of(net: nn.Module) -> list[Any]:
    """All state of the module and of its surroundings that a user can read."""
    tensors = {**net.state_dict(keep_vars=True), "table": OUTSIDE["table"]}
    seen: list[Any] = [
        (name, t.requires_grad, t.grad, list(t._backward_hooks or ()), t.tolist()) for name, t in tensors.items()
    ]
    seen += [(name, m.training, dict(m._forward_hooks), type(m)) for name, m in net.named_modules()]
    seen += [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]
    return [*seen, torch.is_grad_enabled()]
