"""Programs to measure: the model of the README, layers with names, and a module that changes every kind of state."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from cases import rand
from torch import Tensor, nn
from torch.func import grad, vmap

import remat

Params = dict[str, Tensor]


def layer(w: Params, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ w["up"]) @ w["down"]


def loss(params: list[Params], x: Tensor) -> Tensor:
    """A model whose layers are regions."""
    for w in params:
        x = remat.remat(layer)(w, x)
    return x.square().mean()


def readme() -> tuple[list[Params], Tensor]:
    """The arguments of `loss`, none of which requires grad."""
    params = [{"up": rand(8, 32, grad=False), "down": rand(32, 8, seed=1, grad=False)} for _ in range(4)]
    return params, rand(16, 8, seed=2, grad=False)


def per_sample(fn: Callable) -> Callable:
    return vmap(grad(lambda params, sample: fn(params, sample[None])), in_dims=(None, 0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(*(Block() for _ in range(4))), torch.randn(128, 64)


class Careless(nn.Module):
    """A module whose forward changes every kind of state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.grad = torch.ones(3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("moved", torch.zeros(3))
        self.register_buffer("reshaped", torch.ones(3))
        self.register_buffer("grown", torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        self.eval()
        self.register_forward_hook(print)
        self.norm.register_buffer("more", torch.ones(1))
        self.weight.register_hook(print)
        self.frozen.requires_grad_(True)
        self.mean.add_(1).mul_(2)
        self.moved.data = torch.ones(3)
        self.reshaped.unsqueeze_(0)
        self.grown += 1
        self.grown.untyped_storage().resize_(48)
        x += 1
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
    hooks = {name: list(t._backward_hooks or ()) for name, t in tensors.items()}
    seen: list[Any] = [(name, id(t), t.requires_grad, id(t.grad), t.tolist()) for name, t in tensors.items()]
    seen += [(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in tensors.values()]
    seen += [t.grad.tolist() for t in tensors.values() if t.grad is not None]
    seen += [(name, m.training, dict(m._forward_hooks), type(m)) for name, m in net.named_modules()]
    seen += [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]
    return [*seen, hooks, torch.is_grad_enabled()]
