"""Regions together with other features of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat import CaptureError, policies, remat

Wrap = Callable[[Callable], Callable]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def identity(fn: Callable) -> Callable:
    return fn


def gradients(fn: Callable, *args: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    return torch.autograd.grad(fn(*args).square().sum(), [t for t in args if t.requires_grad])


def region_in_checkpoint(wrap: Wrap, x: Tensor) -> Tensor:
    return checkpoint(lambda x: wrap(lambda h: (h * h).tanh())(x * 2).exp(), x, use_reentrant=False)


def checkpoint_in_region(wrap: Wrap, x: Tensor) -> Tensor:
    return wrap(lambda x: checkpoint(lambda h: (h * h).tanh(), x.sin(), use_reentrant=False).exp())(x)


def region_in_checkpoint_in_region(wrap: Wrap, x: Tensor) -> Tensor:
    inner, chain = wrap(lambda p, q: p * q + F.smooth_l1_loss(p * q, p, reduction="none")), wrap(lambda a: a.sin() * a)

    def body(a: Tensor) -> Tensor:
        b = a.sin()
        return checkpoint(chain, checkpoint(inner, b, b, use_reentrant=False), use_reentrant=False).cos()

    return wrap(body)(x)


def one_tensor_twice(wrap: Wrap, x: Tensor) -> Tensor:
    """Torch passes two tensors in its recompute."""

    def body(x: Tensor) -> Tensor:
        middle = x.sin()
        inner = wrap(lambda a, b: F.batch_norm(a, None, None, training=True) * middle.tanh())
        return checkpoint(inner, x, x, use_reentrant=False).tanh()

    return wrap(body)(x)


@pytest.mark.parametrize(
    "policy", [None, policies.save_ops("aten.mul"), policies.everything_saveable, policies.budget(0.5)]
)
@pytest.mark.parametrize(
    "program", [region_in_checkpoint, checkpoint_in_region, region_in_checkpoint_in_region, one_tensor_twice]
)
def test_with_torchs_checkpoint(program: Callable, policy: Any) -> None:
    x, wrap = leaf(4, 4), remat(policy=policy)
    for _ in range(2):  # a budget chooses in the first call
        assert_same(gradients(lambda x: program(wrap, x), x), gradients(lambda x: program(identity, x), x))


class Sub(torch.Tensor):
    """A subclass with the default `__torch_function__`, under which `backward` disables torch functions."""


def test_a_subclass_of_tensor() -> None:
    x, found = torch.randn(3), []
    for wrap in (remat, identity):
        y = x.as_subclass(Sub).detach().requires_grad_()
        wrap(lambda x: x.sin().exp().tanh())(y).sum().backward()
        found.append(y.grad.as_subclass(torch.Tensor))
    assert_same(*found)


def test_optimizer_steps_in_the_backward() -> None:
    """Each region captures all layers, and reads one."""
    results = []
    for wrap in (remat, identity):
        torch.manual_seed(0)
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
        results.append([p.detach() for p in layers.parameters()])
    assert_same(*results)


class Auxiliary(nn.Module):
    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.linear, self.detach, self.aux = nn.Linear(3, 3), detach, None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        aux = y.square().mean()
        self.aux = aux.detach() if self.detach else aux
        return y


def test_a_tensor_in_an_attribute_can_be_followed_by_plain_autograd_only() -> None:
    x = torch.ones(2, 3)
    attached, detached = remat(Auxiliary(False)), remat(Auxiliary(True))
    with pytest.raises(CaptureError, match=r"stored a tensor of shape \(\) in self.aux.*Return it"):
        torch.func.grad(lambda x: attached(x).sum() + attached.aux)(x)
    torch.func.grad(lambda x: detached(x).sum())(x)
    y = x.clone().requires_grad_()
    actual = torch.autograd.grad(attached(y).sum() + attached.aux, y)
    expected = torch.autograd.grad(attached.linear(y).sum() + attached.linear(y).square().mean(), y)
    assert_same(actual, expected, exact=False)


class Extra(nn.Linear):
    act = remat(torch.sin)  # a class attribute that is not a function

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_a_module_and_its_wrapper_are_one() -> None:
    net = nn.Sequential(Extra(3, 3), nn.Dropout(0.5))
    f = remat(net)
    assert isinstance(f, nn.Sequential) and len(f) == 2 and f[0] is net[0] and list(f) == list(net)
    f.scale = 5.0
    net.train(False)
    f.add_module("last", nn.Tanh())
    assert net.scale == 5.0 and not f.training and len(net) == 3
    assert list(f.state_dict()) == list(net.state_dict())
    f.load_state_dict(net.state_dict())
    assert net[0].seen == 3
    torch.nn.utils.parametrizations.weight_norm(f[0])
    x = torch.randn(2, 3)
    assert_same(f(x), net(x))
