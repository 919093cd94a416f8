"""Modules whose members change in a region or after it, and activations that they store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from benchmarks.measure import PeakMemory, gc_disabled
from remat import policies, remat

Wrap = Callable[[Any], Any]
WAYS: dict[str, Wrap] = {
    "no policy": remat,
    "nested, with a policy": lambda fn: remat(remat(fn, policy=policies.save_matmuls)),
}
numbers = partial(rand, dtype=torch.float32)
every_way = pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)


def same_as_plain(run: Callable[[Wrap], Any], wrap: Wrap) -> None:
    """`run` creates everything that it uses, and returns results."""
    results = []
    for each in (wrap, lambda fn: fn):
        torch.manual_seed(0)
        results.append((run(each), torch.rand(1)))
    assert_same(*results)


class Grows(nn.Module):
    """Makes members in its first call: a layer, a buffer, and entries of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Linear | None = None
        self.layers, self.weights = nn.ModuleDict(), nn.ParameterDict()
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer, self.scale = nn.Linear(4, 4), torch.rand(4)
            self.register_buffer("shift", torch.rand(4))
            self.layers["a"], self.weights["a"] = nn.Linear(4, 4), nn.Parameter(torch.rand(4))
        h = F.dropout(self.layer(x) * self.scale + self.shift).tanh()
        return self.layers["a"](h) * self.weights["a"]


@every_way
def test_members_made_in_the_first_call(wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        module, x = Grows(), numbers(3, 4)
        out = wrap(module)(x)
        held = [*module.parameters(), *module.buffers()]
        out.square().sum().backward()
        assert all(a is b for a, b in zip(held, [*module.parameters(), *module.buffers()], strict=True))
        return out, x.grad, [p.grad for p in module.parameters()], list(module.state_dict())

    same_as_plain(run, wrap)


@every_way
def test_layers_that_are_removed_or_added_between_forward_and_backward(wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        layers = [nn.Linear(4, 4) for _ in range(4)]
        model, x = nn.Sequential(*layers), numbers(3, 4)
        out = wrap(model)(x)
        del model[1]
        model.append(nn.Tanh())
        out.square().sum().backward()
        assert [type(layer) for layer in model] == [nn.Linear] * 3 + [nn.Tanh] and list(model._modules) == list("0123")
        return x.grad, [p.grad for layer in layers for p in layer.parameters()]

    same_as_plain(run, wrap)


class Stores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(32, 32), torch.zeros(())
        self.list: list[Any] = []
        self.dict: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        self.seen = h.square().mean()
        self.dict["seen"], self.list[:] = h.square().mean(), [h.exp().mean()]
        return h.sin()


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_stored_activations_do_not_accumulate(policy: Any) -> None:
    region = remat(Stores(), policy=policy)
    live = []
    with gc_disabled(), PeakMemory() as memory:
        for _ in range(12):
            region(torch.ones(64, 32)).sum().backward()
            region.zero_grad()
            live.append(memory.live)
    assert live[-1] == live[4] and live[-1] <= 8 * 64 * 32 * 4


@every_way
def test_stored_activations_have_their_derivatives(wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        module, x = Stores(), numbers(3, 32)
        region, total = wrap(module), 0
        for _ in range(2):
            total = total + region(x).sum() + module.seen + module.dict["seen"] + module.list[0]
        return torch.autograd.grad(total, [x, *module.parameters()])

    same_as_plain(run, wrap)


class KeepsItsLast(nn.Module):
    """Stores its result, as feature extractors do. Nothing reads it."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sin()
        return self.last


@every_way
@pytest.mark.parametrize("transform", ["inside", "none", "grad", "vmap"])
def test_activations_that_are_stored_under_vmap(transform: str, wrap: Wrap) -> None:
    """After `vmap` nothing can read them, and a later region must not either."""

    def run(wrap: Wrap) -> list[Tensor]:
        keeps, linear, x = KeepsItsLast(), nn.Linear(4, 4), numbers(3, 4)
        if transform == "inside":
            region = wrap(lambda a: linear(vmap(keeps)(torch.stack([a, a.cos()])).sum(0)))
        else:
            vmap(keeps)(numbers(7, 3, 4))
            region = wrap(lambda a: linear(a) * len(vars(keeps)))
        if transform == "grad":
            return [grad(lambda a: region(a).sum())(x.detach()) for _ in range(2)]
        call = vmap(region) if transform == "vmap" else region
        return [torch.autograd.grad(call(x).sum(), (x, linear.weight)) for _ in range(2)]

    same_as_plain(run, wrap)
