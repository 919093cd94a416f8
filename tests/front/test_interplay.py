"""Regions together with other features of torch. Each test is for a bug that existed once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import leaked_bytes
from remat import CaptureError, MutationError, policies, remat


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def identity(fn: Callable) -> Callable:
    return fn


# --- torch's own checkpoint -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [lambda x: x.sin() + 1, lambda x: x * 2])
def test_inside_of_torch_checkpoint(before: Callable) -> None:
    x = leaf(3, 3)

    def f(wrap: Callable) -> Callable:
        return lambda x: wrap(lambda h: (h * h).tanh())(before(x)).exp()

    actual = torch.autograd.grad(checkpoint(f(remat), x, use_reentrant=False).sum(), x)
    same(actual, torch.autograd.grad(f(identity)(x).sum(), x))


def test_around_torch_checkpoint() -> None:
    x = leaf(3, 3)
    f = remat(lambda x: checkpoint(lambda h: (h * h).tanh(), x.sin(), use_reentrant=False).exp())
    same(torch.autograd.grad(f(x).sum(), x), torch.autograd.grad((x.sin() * x.sin()).tanh().exp().sum(), x))


@pytest.mark.parametrize(
    "policy", [policies.save_ops("aten.mul"), policies.everything_saveable, policies.budget(0), policies.budget(0.5)]
)
def test_a_region_in_torch_checkpoint_in_a_region_with_a_policy(policy: Any) -> None:
    """Torch recomputes the inner region outside of the outer one: it must save the same tensors with and without it."""
    x = leaf(4, 4)

    def two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        product = x * b
        loss = F.smooth_l1_loss(product, a, reduction="none")
        return product + loss * 0.5, loss

    def f(wrap: Callable) -> Callable:
        inner, chain = wrap(two), wrap(lambda a: (a * a).sin() * a)

        def body(a: Tensor) -> Tensor:
            b = a.sin()
            c = checkpoint(lambda p, q: sum(inner(p, q)), b, b, use_reentrant=False)
            return checkpoint(chain, c, use_reentrant=False).cos()

        return body

    g = remat(f(remat), policy=policy)
    expected = torch.autograd.grad(f(identity)(x).sum(), x)
    for _ in range(2):  # a budget chooses in the first call
        same(torch.autograd.grad(g(x).sum(), x), expected)


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_a_region_with_one_tensor_twice_in_torch_checkpoint_in_a_region(policy: Any) -> None:
    """Torch passes two tensors in its recompute: the region must save the same number of tensors."""
    x, y = leaf(4, 4), leaf(4, 4)

    def f(wrap: Callable) -> Callable:
        def body(x: Tensor, y: Tensor) -> Tensor:
            middle = y.sin()
            inner = wrap(lambda a, b: F.batch_norm(a, None, None, training=True) * middle.tanh())
            return checkpoint(inner, x, x, use_reentrant=False).tanh()

        return body

    found, expected = remat(f(partial(remat, policy=policy)))(x, y), f(identity)(x, y)
    same(torch.autograd.grad(found.sum(), [x, y]), torch.autograd.grad(expected.sum(), [x, y]))


# --- kinds of tensors -------------------------------------------------------------------------------------------------


class Sub(torch.Tensor):
    """A subclass with the default ``__torch_function__``, under which ``backward`` disables torch functions."""


def test_subclass() -> None:
    x = torch.randn(3)
    grads = []
    for wrap in (remat, identity):
        y = x.as_subclass(Sub).detach().requires_grad_()
        wrap(lambda x: x.sin().exp().tanh())(y).sum().backward()
        grads.append(y.grad.as_subclass(torch.Tensor))
    same(*grads)


def test_sparse_input_with_history() -> None:
    x = torch.eye(3).to_sparse().requires_grad_()
    w = leaf(3, 2)
    results = []
    for wrap in (remat, identity):
        out = wrap(lambda s, w: torch.sparse.mm(s, w).tanh().exp())(x * 2, w)
        results.append(torch.autograd.grad(out.sum(), w))
    same(*results)


def test_dropout_of_a_transposed_tensor_draws_the_same_mask() -> None:
    x = torch.arange(1, 17.0).view(2, 8)
    results = []
    for wrap in (remat, identity):
        torch.manual_seed(7)
        f = wrap(lambda x: F.dropout(x.t() * 1, 0.5))
        results.append(torch.func.grad_and_value(lambda x: f(x).square().sum())(x))
    same(*results)


# --- requires_grad ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_inputs_require_grad_beside_a_parameter(transform: Callable) -> None:
    w, z = leaf(3, 3), torch.randn(2, 3)

    def force(x: Tensor) -> Tensor:
        return torch.autograd.grad(((x @ w).tanh() ** 2).sum(), x, create_graph=True)[0]

    def branch(x: Tensor) -> Tensor:
        return (x @ w).sin() if x.requires_grad else (x @ w).sin().detach() * 2

    for f in (force, branch):
        actual, expected = (transform(lambda x: wrap(f)(x).sum())(z) for wrap in (remat, identity))
        torch.testing.assert_close(actual, expected)


# --- captured tensors that change and aren't read ---------------------------------------------------------------------


def test_change_of_a_buffer_that_is_not_read() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module.register_buffer("seen", torch.zeros(()))
    x = leaf(2, 3)
    loss = remat(module)(x).sum()
    module.seen.add_(1)
    same(torch.autograd.grad(loss, x), torch.autograd.grad(module(x).sum(), x))


class Steps(nn.Module):
    """A module whose regions capture all layers, and read one each."""

    def __init__(self, wrap: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.step = wrap(self._step)

    def _step(self, i: int, x: Tensor) -> Tensor:
        return self.layers[i](x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = self.step(i, x)
        return x


def test_optimizer_steps_in_the_backward() -> None:
    results = []
    for wrap in (remat, identity):
        model = Steps(wrap)

        def update(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        model(torch.ones(2, 3)).sum().backward()
        results.append([p.detach() for p in model.parameters()])
    same(*results)


def test_change_of_a_tensor_that_only_an_intermediate_operation_reads() -> None:
    w = torch.ones(3)
    x = leaf(3)
    loss = remat(lambda x: (x.sin() + w).exp())(x).sum()  # autograd saves neither w nor the sum
    w.mul_(2)
    with pytest.raises(MutationError, match="closure variable 'w'"):
        loss.backward()


# --- tensors that leave a region other than as results ----------------------------------------------------------------


class Auxiliary(nn.Module):
    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.detach = detach
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aux = y.square().mean()
        if self.detach:
            self.aux = self.aux.detach()
        return y


def test_a_tensor_in_an_attribute_under_a_transform() -> None:
    x = torch.ones(2, 3)
    attached, detached = remat(Auxiliary(False)), remat(Auxiliary(True))
    with pytest.raises(CaptureError, match=r"stored a tensor of shape \(\) in self.aux.*Return it"):
        torch.func.grad(lambda x: attached(x).sum() + attached.aux)(x)
    torch.func.grad(lambda x: detached(x).sum())(x)
    y = x.clone().requires_grad_()
    actual = torch.autograd.grad(attached(y).sum() + attached.aux, y)  # plain autograd follows it
    expected = torch.autograd.grad(attached.linear(y).sum() + attached.linear(y).square().mean(), y)
    torch.testing.assert_close(actual, expected)


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_a_returned_object_makes_no_cycle() -> None:
    f = remat(lambda x: (x.sin().exp(), Box(x.detach().cos())))
    assert leaked_bytes(lambda: torch.func.grad(lambda x: f(x)[0].sum())(torch.ones(64))) == 0


# --- modules ----------------------------------------------------------------------------------------------------------


def test_a_module_and_its_wrapper_are_one() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    f = remat(net)
    assert isinstance(f, nn.Sequential) and len(f) == 2 and f[0] is net[0] and list(f) == list(net)
    f.scale = 5.0
    assert net.scale == 5.0
    net.train(False)
    assert not f.training
    f.add_module("last", nn.Tanh())
    assert len(net) == 3
    torch.nn.utils.parametrizations.weight_norm(f[0])
    x = torch.randn(2, 3)
    same(f(x), net(x))
    hooked = copy.deepcopy(f)
    assert hooked.scale == 5.0 and hooked[0] is not f[0]


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_extra_state_and_pickles() -> None:
    f, plain = remat(Extra()), Extra()
    assert list(f.state_dict()) == list(plain.state_dict())
    f.load_state_dict(plain.state_dict())
    assert f.seen == 3
    x = torch.randn(2, 3)
    same(pickle.loads(pickle.dumps(f))(x), plain(x))


def test_a_forward_set_on_the_module() -> None:
    linear = nn.Linear(3, 3)
    linear.forward = lambda x: F.linear(x, linear.weight).sin().exp()
    x = leaf(2, 3)
    same(torch.autograd.grad(remat(linear)(x).sum(), x), torch.autograd.grad(linear(x).sum(), x))


def test_lazy_and_traced_modules() -> None:
    with pytest.raises(TypeError, match="LazyLinear is lazy: call it once"):
        remat(nn.LazyLinear(3))
    linear, x = nn.Linear(3, 3), leaf(2, 3)
    traced = remat(torch.jit.trace(linear, x))
    same(torch.autograd.grad(traced(x).sin().sum(), x), torch.autograd.grad(linear(x).sin().sum(), x))


class WithBuiltin:
    act = remat(torch.sin)


def test_class_attributes_that_are_not_functions() -> None:
    same(WithBuiltin().act(torch.ones(2)), torch.ones(2).sin())
