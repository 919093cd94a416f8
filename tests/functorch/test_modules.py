"""Modules with rematerialized layers under `torch.func`: functional_call, ensembles, buffers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import Wrap, both, plain, through_autograd
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.checkpoint import checkpoint

from remat import nn as rematerialized
from remat import policies, remat

X = rand(3, 4, grad=False)


class Block(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
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
        self.last, self.wrap = Block(tied), wrap

    def head(self, x: Tensor) -> Tensor:
        return self.last(x) + self.last.first(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.wrap(lambda x: self.last.second(x).exp())(self.wrap(self.head)(x))


def make(wrap: Wrap, tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(wrap, tied).double()


def make_params(tied: bool = False) -> dict[str, Tensor]:
    named = make(plain, tied).named_parameters()
    return {name: rand(*p.shape, seed=i, grad=False) for i, (name, p) in enumerate(named)}


def loss(net: nn.Module) -> Callable[[dict, Tensor], Tensor]:
    return lambda params, x: functional_call(net, params, (x,)).sin().sum()


def detached(net: nn.Module) -> tuple[dict, dict]:
    return {n: p.detach() for n, p in net.named_parameters()}, {n: b.clone() for n, b in net.named_buffers()}


TRANSFORMS: dict[str, Callable[[Callable, dict], Any]] = {
    "grad": lambda f, params: grad(f, (0, 1))(params, X),
    "vmap(grad)": lambda f, params: vmap(grad(f), (None, 0))(params, X),
    "grad(vmap)": lambda f, params: grad(lambda p, x: vmap(f, (None, 0))(p, x).sum())(params, X),
    "jvp": lambda f, params: jvp(f, (params, X), (params, X)),
    "jacrev": lambda f, params: jacrev(f)(params, X),
    "hessian": lambda f, params: hessian(functools.partial(f, params))(X[0]),
    "hessian, of a parameter": lambda f, params: hessian(lambda b: f({**params, "last.first.bias": b}, X))(
        params["last.first.bias"]
    ),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_parameters_that_are_given(name: str, tied: bool) -> None:
    params = make_params(tied)
    both(lambda wrap: TRANSFORMS[name](loss(make(wrap, tied)), params))


@pytest.mark.parametrize(
    "transform", [grad, vmap, jacrev, lambda f: vmap(grad(f)), lambda f: grad(lambda x: vmap(f)(x).sum())]
)
def test_parameters_that_no_transform_follows_but_require_grad(transform: Callable) -> None:
    def program(wrap: Wrap) -> Any:
        net = make(wrap)
        out = transform(lambda x: net(x).sin().sum())(X)
        return torch.autograd.grad(out.cos().sum(), list(net.parameters()), allow_unused=True)

    both(program)


@pytest.mark.parametrize("tied", [False, True])
def test_autograd_after_the_module_got_its_parameters_back(tied: bool) -> None:
    """The recompute must use what `functional_call` had set."""

    def program(wrap: Wrap) -> Any:
        net = make(wrap, tied)
        params, before = make_params(tied), {name: p.clone() for name, p in net.named_parameters()}
        gradient = lambda *values: grad(loss(net))(dict(zip(params, values)), X)
        found = [
            through_autograd(lambda *values: loss(net)(dict(zip(params, values)), X), *params.values()),
            through_autograd(lambda *values: list(gradient(*values).values()), *params.values()),
        ]
        assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
        assert all(p.grad is None for p in net.parameters())
        return found

    both(program)


@pytest.mark.parametrize("tied", [False, True])
def test_ensemble(tied: bool) -> None:
    def program(wrap: Wrap) -> Any:
        nets = [Net(wrap, tied).double() for _ in range(3)]
        params, buffers = stack_module_state(nets)
        base = copy.deepcopy(nets[0]) if tied else copy.deepcopy(nets[0]).to("meta")  # `to` would untie them
        call = lambda params, buffers, x: functional_call(base, (params, buffers), (x,)).sin().sum()
        given = {name: p.detach() for name, p in params.items()}
        out = vmap(call, (0, 0, None))(params, buffers, X)
        return (
            torch.autograd.grad(out.sum(), list(params.values())),
            vmap(grad(call), (0, 0, None))(given, buffers, X),
            vmap(vmap(grad(call), (None, None, 0)), (0, 0, None))(given, buffers, X),
        )

    both(program)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", ["backward", "grad", "grad(grad)", "vmap(grad)"])
def test_statistics_given_as_arguments_are_updated_once(way: str, inside: bool) -> None:
    def program(wrap: Wrap) -> Any:
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()]
        net = (wrap(nn.Sequential(*layers)) if inside else nn.Sequential(wrap(nn.BatchNorm1d(4)))).double()
        params, buffers = detached(net)
        x, (_, before) = rand(2, 6, 4, grad=False), detached(net)
        call = lambda params, buffers, x: functional_call(net, (params, buffers), (x,)).sin().sum()
        squares = lambda *args: sum(g.square().sum() for g in grad(call)(*args).values())
        if way == "backward":
            found = through_autograd(lambda *values: call(dict(zip(params, values)), buffers, x[0]), *params.values())
        elif way == "vmap(grad)":
            if inside:
                pytest.skip("torch's gradients for the weight of a mapped batch norm are wrong")
            buffers = {name: torch.stack([b, b]) for name, b in buffers.items()}
            found = vmap(grad(call), (None, 0, 0))(params, buffers, x)
        else:
            found = grad(call if way == "grad" else squares)(params, buffers, x[0])
        assert_same(dict(net.named_buffers()), before)
        return found, buffers

    both(program)


def test_dropout_in_training() -> None:
    def program(wrap: Wrap) -> Any:
        net = nn.Sequential(wrap(nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Tanh())), nn.Tanh()).double()
        params, _ = detached(net)
        per_sample = vmap(grad(loss(net)), (None, 0), randomness="different")
        return grad(loss(net))(params, X), per_sample(params, X)

    both(program)


@pytest.mark.parametrize("policy", [policies.save_matmuls | policies.save_convolutions, policies.everything_saveable])
@pytest.mark.parametrize("kind", [nn.Linear, functools.partial(nn.Conv1d, kernel_size=1)])
def test_layers_before_an_activation_in_place(kind: Callable, policy: Any) -> None:
    net = nn.Sequential(kind(4, 4), nn.ReLU(inplace=True), kind(4, 4)).double()
    (params, _), x = detached(net), rand(4, 4, grad=False)
    product = lambda: jvp(
        grad(lambda params: functional_call(net, params, (x,)).square().sum()),
        (params,),
        ({name: p.cos() for name, p in params.items()},),
    )
    expected = product()
    rematerialized.apply(net, (nn.Linear, nn.Conv1d), policy=policy)
    assert_same(product(), expected, exact=False)


class Wrapped(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, self.second, self.wrap = nn.Linear(4, 4), nn.Linear(4, 4), wrap

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(lambda x: self.second(self.first(x).sin()))(x)


def test_expanded_weights() -> None:
    """Regions refuse them, torch's checkpoint computes wrong gradients, and `vmap(grad)` the right ones."""

    def expanded(wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        model = Wrapped(wrap)
        call_for_per_sample_grads(model)(X.float()).square().sum().backward()
        return [p.grad_sample for p in model.parameters()]

    with pytest.raises(RuntimeError, match="Expanded Weights") as error:
        expanded(remat)
    assert "`vmap(grad(loss))`" in error.value.__notes__[0]
    right, wrong = expanded(plain), expanded(lambda fn: lambda x: checkpoint(fn, x, use_reentrant=False))
    assert not torch.allclose(wrong[0], right[0], rtol=0.1)
    torch.manual_seed(0)
    model = Wrapped(remat)
    squared = lambda w, x: functional_call(model, w, (x,)).square().sum()
    found = vmap(grad(squared), (None, 0))(detached(model)[0], X.float())
    assert_same(list(found.values()), right, exact=False)
