"""Modules with rematerialized layers under `torch.func`: functional_call, ensembles, buffers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from benchmarks.measure import count_ops, peak_bytes
from remat import nn as rematerialized
from remat import policies, remat

Wrap = Callable[[Callable], Callable]
X = rand(3, 4, grad=False)


def plain(fn: Callable) -> Callable:
    return fn


class Block(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("scale", torch.ones(4))
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x).tanh()).sin()) * self.scale


class Net(nn.Module):
    """Layers rematerialized as modules, by a bound method, and by a closure over `self`."""

    def __init__(self, wrap: Wrap, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([wrap(Block(tied)) for _ in range(2)])
        self.last = Block(tied)
        self.wrap = wrap

    def head(self, x: Tensor) -> Tensor:
        return self.last(x) + self.last.first(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.wrap(self.head)(x)
        return self.wrap(lambda x: self.last.second(x).exp())(x)


def make(wrap: Wrap, tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(wrap, tied).double()


def make_params(tied: bool = False) -> dict[str, Tensor]:
    named = make(plain, tied).named_parameters()
    return {name: rand(*p.shape, seed=i, grad=False) for i, (name, p) in enumerate(named)}


def loss(wrap: Wrap, tied: bool = False) -> Callable[[dict, Tensor], Tensor]:
    net = make(wrap, tied)
    return lambda params, x: functional_call(net, params, (x,)).sin().sum()


def both(program: Callable[[Wrap], Any]) -> None:
    assert_same(program(remat), program(plain), exact=False)


def test_names_match_the_plain_module() -> None:
    assert list(make(remat).state_dict()) == list(make(plain).state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_transforms(tied: bool) -> None:
    params = make_params(tied)
    both(lambda wrap: grad(loss(wrap, tied), argnums=(0, 1))(params, X))
    both(lambda wrap: vmap(grad(loss(wrap, tied)), in_dims=(None, 0))(params, X))
    both(lambda wrap: grad(total(vmap(loss(wrap, tied), in_dims=(None, 0))))(params, X))
    both(lambda wrap: jvp(loss(wrap, tied), (params, X), (params, X)))
    both(lambda wrap: jacrev(loss(wrap, tied))(params, X))
    both(lambda wrap: hessian(functools.partial(loss(wrap, tied), params))(X[0]))


def total(call: Callable) -> Callable:
    return lambda params, x: call(params, x).sum()


def test_hessian_by_a_parameter() -> None:
    params = make_params()

    def of_bias(wrap: Wrap) -> Callable:
        call = loss(wrap)
        return lambda bias: call({**params, "last.first.bias": bias}, X)

    both(lambda wrap: hessian(of_bias(wrap))(params["last.first.bias"]))


@pytest.mark.parametrize("tied", [False, True])
def test_autograd_after_the_module_got_its_parameters_back(tied: bool) -> None:
    """The recompute must use what `functional_call` had set."""
    values = make_params(tied)

    def run(wrap: Wrap) -> tuple:
        params = {name: p.clone().requires_grad_() for name, p in values.items()}
        net, x = make(wrap, tied), X.clone().requires_grad_()
        before = {name: p.clone() for name, p in net.named_parameters()}
        out = functional_call(net, params, (x,)).sin().sum()
        first = torch.autograd.grad(out, [*params.values(), x], create_graph=True)
        total = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(total, [*params.values(), x], allow_unused=True)
        assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
        assert all(p.grad is None for p in net.parameters())
        return [g.detach() for g in first], second

    both(run)


def test_the_modules_own_parameters() -> None:
    """Captured parameters that no transform tracks, but that require grad."""

    def run(wrap: Wrap, transform: Callable) -> list:
        net = make(wrap)
        out = transform(lambda x: net(x).sin().sum())(X)
        return list(torch.autograd.grad(out.cos().sum(), list(net.parameters()), allow_unused=True))

    for transform in (grad, vmap, jacrev, lambda f: vmap(grad(f)), lambda f: grad(vmap_sum(f))):
        both(lambda wrap: run(wrap, transform))


def vmap_sum(f: Callable) -> Callable:
    return lambda x: vmap(f)(x).sum()


@pytest.mark.parametrize("tied", [False, True])
def test_ensemble(tied: bool) -> None:
    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(0)
        nets = [Net(wrap, tied).double() for _ in range(3)]
        params, buffers = stack_module_state(nets)
        base = copy.deepcopy(nets[0])
        if not tied:  # `to` would untie them
            base = base.to("meta")

        def call(params: dict, buffers: dict, x: Tensor) -> Tensor:
            return functional_call(base, (params, buffers), (x,)).sin().sum()

        plain_params = {name: p.detach() for name, p in params.items()}
        out = vmap(call, in_dims=(0, 0, None))(params, buffers, X)
        grads = vmap(grad(call), in_dims=(0, 0, None))(plain_params, buffers, X)
        per_sample = vmap(vmap(grad(call), in_dims=(None, None, 0)), in_dims=(0, 0, None))
        through = torch.autograd.grad(out.sum(), list(params.values()))
        return out.detach(), grads, per_sample(plain_params, buffers, X), through

    both(run)


NORMS: dict[str, Callable[[Wrap], nn.Module]] = {
    "region": lambda wrap: nn.Sequential(wrap(nn.BatchNorm1d(4))),
    "inside": lambda wrap: wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())),
}
WAYS = ("backward", "grad", "grad of grad")


@pytest.mark.parametrize("module", NORMS)
@pytest.mark.parametrize("way", WAYS)
def test_statistics_given_as_arguments_are_updated_once(way: str, module: str) -> None:
    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(0)
        net = NORMS[module](wrap).double()
        params = {name: p.detach() for name, p in net.named_parameters()}
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        x = rand(6, 4, grad=False)
        before = {name: b.clone() for name, b in net.named_buffers()}

        def call(params: dict, buffers: dict) -> Tensor:
            return functional_call(net, (params, buffers), (x,)).sin().sum()

        def squares(params: dict, buffers: dict) -> Tensor:
            return sum(g.square().sum() for g in grad(call)(params, buffers).values())

        if way == "backward":
            leaves = [p.clone().requires_grad_() for p in params.values()]
            out = call(dict(zip(params, leaves)), buffers)
            found = torch.autograd.grad(out, leaves)
        else:
            found = grad(call if way == "grad" else squares)(params, buffers)
        assert_same(dict(net.named_buffers()), before)
        return found, buffers

    both(run)


def test_statistics_per_sample() -> None:
    """Each model of an ensemble has its own statistics."""

    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(0)
        net = NORMS["region"](wrap).double()
        params = {name: p.detach() for name, p in net.named_parameters()}
        buffers = {name: torch.stack([b, b]) for name, b in net.named_buffers()}

        def call(params: dict, buffers: dict, x: Tensor) -> Tensor:
            return functional_call(net, (params, buffers), (x,)).sin().sum()

        x = rand(2, 6, 4, grad=False)
        return vmap(grad(call), in_dims=(None, 0, 0))(params, buffers, x), buffers

    both(run)


def test_dropout_in_training() -> None:
    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(0)
        net = nn.Sequential(wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Tanh())), nn.Tanh())
        net = net.double()
        params = {name: p.detach() for name, p in net.named_parameters()}
        call = lambda p, x: functional_call(net, p, (x,)).sum()
        per_sample = vmap(grad(call), in_dims=(None, 0), randomness="different")
        return grad(call)(params, X), per_sample(params, X), torch.get_rng_state()

    both(run)


def test_memory_and_ops() -> None:
    params, x = make_params(), rand(64, 4, grad=False)
    peaks = {wrap: peak_bytes(grad(loss(wrap)), params, x) for wrap in (plain, remat)}
    assert peaks[remat] < 0.8 * peaks[plain]
    before, after = (count_ops(grad(loss(wrap)), params, x) for wrap in (plain, remat))
    assert after["aten.tanh"] == 2 * before["aten.tanh"] == 6
    assert after["aten.tanh_backward"] == before["aten.tanh_backward"]


@pytest.mark.parametrize("policy", [policies.save_matmuls | policies.save_convolutions, policies.everything_saveable])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_layers_before_an_activation_in_place(layer: str, policy: Any) -> None:
    kind = {"linear": nn.Linear, "convolution": nn.Conv1d}[layer]
    torch.manual_seed(0)
    net = nn.Sequential(kind(4, 4, 1), nn.ReLU(inplace=True), kind(4, 4, 1)).double()
    params = {name: p.detach() for name, p in net.named_parameters()}
    x = rand(4, 4, grad=False)

    def products() -> Any:
        gradient = grad(lambda params: functional_call(net, params, (x,)).square().sum())
        return jvp(gradient, (params,), ({name: p.cos() for name, p in params.items()},))

    expected = products()
    rematerialized.apply(net, kind, policy=policy)
    assert_same(products(), expected, exact=False)
