"""Modules with rematerialized layers under `torch.func`: functional_call, ensembles, buffers."""

import copy
import functools
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from both import Wrap, X, both, summed, through_autograd
from cases import SineAndCosine, assert_same, plain, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

from remat import RematError, policies, remat
from remat import nn as remat_nn


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


def make_params(tied: bool) -> dict[str, Tensor]:
    named = Net(plain, tied).named_parameters()
    return {name: rand(*p.shape, seed=i, grad=False) for i, (name, p) in enumerate(named)}


def detached(net: nn.Module) -> tuple[dict, dict]:
    return {n: p.detach() for n, p in net.named_parameters()}, {n: b.clone() for n, b in net.named_buffers()}


loss = lambda net: lambda params, x: functional_call(net, params, (x,)).sin().sum()
through_params = lambda fn, params: through_autograd(lambda *each: fn(dict(zip(params, each))), *params.values())
BIAS = "last.first.bias"
# The last two run a backward after the module got its own parameters back.
TRANSFORMS: dict[str, Callable[[Callable, dict], Any]] = {
    "grad": lambda f, params: grad(f, (0, 1))(params, X),
    "vmap(grad)": lambda f, params: vmap(grad(f), (None, 0))(params, X),
    "grad(vmap)": lambda f, params: grad(summed(vmap(f, (None, 0))))(params, X),
    "jvp": lambda f, params: jvp(f, (params, X), (params, X)),
    "jacrev": lambda f, params: jacrev(f)(params, X),
    "hessian": lambda f, params: hessian(functools.partial(f, params))(X[0]),
    "hessian, of a parameter": lambda f, params: hessian(lambda b: f({**params, BIAS: b}, X))(params[BIAS]),
    "autograd": lambda f, params: through_params(lambda p: f(p, X), params),
    "autograd(grad)": lambda f, params: through_params(lambda p: list(grad(f)(p, X).values()), params),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_parameters_that_are_given(name: str, tied: bool) -> None:
    def program(wrap: Wrap) -> Any:
        net = Net(wrap, tied).double()
        before = detached(net)[0]
        found = TRANSFORMS[name](loss(net), make_params(tied))
        assert_same(detached(net)[0], before)
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
        return (
            torch.autograd.grad(summed(vmap(call, (0, 0, None)))(params, buffers, X), list(params.values())),
            vmap(vmap(grad(call), (None, None, 0)), (0, 0, None))(given, buffers, X),
        )

    both(program)


@pytest.mark.parametrize("way", ["backward", "grad", "grad(grad)", "vmap(grad)"])
def test_statistics_and_dropout(way: str) -> None:
    """Statistics that are given are updated once; those of the module are not."""

    def program(wrap: Wrap) -> Any:
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Dropout(), nn.Tanh())
        net = nn.Sequential(wrap(nn.BatchNorm1d(4, affine=False)), wrap(layers)).double()
        (params, buffers), (_, before) = detached(net), detached(net)
        x = rand(2, 6, 4, grad=False)
        call = lambda params, buffers, x: functional_call(net, (params, buffers), (x,)).sin().sum()
        if way == "backward":
            found = through_params(lambda p: call(p, buffers, x[0]), params)
        elif way == "vmap(grad)":
            buffers = {name: torch.stack([b, b]) for name, b in buffers.items()}
            found = vmap(grad(call), (None, 0, 0), randomness="different")(params, buffers, x)
        else:
            squares = lambda *args: sum(g.square().sum() for g in grad(call)(*args).values())
            found = grad(call if way == "grad" else squares)(params, buffers, x[0])
        assert_same(detached(net)[1], before)
        return found, buffers

    both(program)


@pytest.mark.parametrize("transform", [grad, lambda f: lambda p: jvp(grad(f), (p,), (p,))[1]])
def test_the_models_own_parameters_give_the_result_no_history(transform: Callable) -> None:
    """The region finds them in the model that it captures, but reads those that it gets as arguments."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    params = {name: torch.stack([p, p]) for name, p in detached(net)[0].items()}

    def program(wrap: Wrap) -> Any:
        region = wrap(lambda params: functional_call(net, params, (X,)))
        found = vmap(transform(lambda params: region(params).sin().sum()))(params)
        assert not any(each.requires_grad for each in found.values())
        return found

    both(program)


@pytest.mark.parametrize("differentiates", [False, True])
def test_a_recurrent_network_twice_in_a_region(differentiates: bool) -> None:
    """Its list of weights keeps leaves of the first call's graph, which the region around it hasn't made."""

    class Twice(nn.GRU):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            step = self.wrap(lambda x: nn.GRU.forward(self, x[None])[0][0])
            return step(step(x - grad(lambda x: x.sin().sum())(x) if differentiates else x))

    net = Twice(4, 4).double()
    params = dict(net.named_parameters())

    def program(wrap: Wrap) -> Any:
        net.wrap = wrap
        region = wrap(lambda params: functional_call(net, params, (X,)))
        return jvp(grad(lambda params: region(params).sin().sum()), (params,), (params,))[1]

    both(program)


def test_hessian_vector_product_of_products_that_an_activation_overwrites() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).double()
    params = detached(net)[0]
    hvp = lambda net: jvp(grad(lambda params: loss(net)(params, X)), (params,), (params,))[1]
    assert_same(hvp(remat_nn.apply(copy.deepcopy(net), nn.Linear, policy=policies.save_matmuls)), hvp(net))


def test_gradients_of_a_dataclass_that_torch_knows() -> None:
    # The names of the fields that are given contain those of others.
    Node: Any = make_dataclass("Node", [(name, Any, None) for name in ("ab", "cd", "a", "b")])
    torch.export.register_dataclass(Node)
    fn = lambda n: ((n.a * 3 if n.ab is None else n.ab) * (n.b if n.cd is None else n.cd)).sin().cos().sum()
    both(lambda wrap: vars(grad(wrap(fn))(Node(ab=X, cd=X.cos()))))


def sine(x: Tensor) -> Tensor:
    """An autograd Function."""
    return SineAndCosine.apply(x)[0]


def test_an_autograd_function_without_grad_mode() -> None:
    """torch enables grad mode below the level of the `grad`, where a region has its only graph."""

    def fn(x: Tensor, cut: bool) -> Tensor:
        with torch.set_grad_enabled(cut):
            scale = sine(x.detach() if cut else x)
        return (scale * x).sum()

    with pytest.raises(RematError, match=r"calls SineAndCosine, .* within `torch.no_grad\(\)`.* detached arguments"):
        vmap(grad(remat(lambda x: fn(x, cut=False))))(X)
    both(lambda wrap: vmap(grad(wrap(lambda x: fn(x, cut=True))))(X))
    both(lambda wrap: vmap(grad(summed(wrap(lambda x: grad(lambda x: fn(x, cut=False))(x) * x))))(X))


def test_an_autograd_function_without_grad_mode_has_no_second_derivative() -> None:
    """Nor has an operation. In plain torch a Function has one: see docs/reference/limits.md."""

    second = lambda wrap, fn: grad(summed(grad(wrap(lambda x: (torch.no_grad()(fn)(x) * x).sum()))))(X)
    assert_same(second(remat, sine), second(plain, torch.sin))
    assert_same(second(plain, sine), X.cos())


WITH_COPIES: dict[str, Callable[[Callable, dict], Any]] = {
    "jvp": lambda f, p: jvp(f, (p,), (p,), has_aux=True),
    "jvp(grad)": lambda f, p: jvp(grad(f, has_aux=True), (p,), (p,), has_aux=True),
    "hessian": lambda f, p: hessian(lambda params: f(params)[0])(p),
    "jacfwd(grad)": lambda f, p: jacfwd(grad(f, has_aux=True), has_aux=True)(p),
}


@pytest.mark.parametrize("name", WITH_COPIES)
def test_batch_norm_changes_copies_of_its_buffers_once(name: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    params, buffers = detached(net)

    def program(wrap: Wrap) -> Any:
        region = wrap(lambda state, x: functional_call(net, state, (x,)))

        def loss(params: dict) -> tuple[Tensor, dict]:
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            return region({**params, **copies}, X).sin().sum(), copies

        return WITH_COPIES[name](loss, params)

    both(program)
