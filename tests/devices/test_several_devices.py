"""Regions with more than one device: the current device, and the generators of all devices."""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerator import DEVICE, backend
from cases import assert_same
from on_device import POLICIES, leaf, states
from torch import Tensor, nn

from remat import is_recomputing, override, policies, remat

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.is_available() and backend.device_count() < 2, reason="needs two devices"),
]


def dropped(x: Tensor) -> Tensor:
    y = nn.functional.dropout(x.sin() @ x.cos(), 0.5)
    return y.exp().sin() * torch.rand(x.shape[-1], device=x.device)


def draws_alike(fn: Callable, *args: Tensor, policy: Any = None, forward: int = 0, backward: int = 0) -> None:
    """Check values, gradients, generators, and the current device after the backward against a run without regions."""
    results = []
    for f in (fn, remat(fn, policy=policy)):
        torch.manual_seed(3)
        with backend.device(forward):
            out = f(*args)
        drawn = states()
        torch.manual_seed(9)
        between = states()
        with backend.device(backward):
            grads = torch.autograd.grad(out.sum(), args)
            assert backend.current_device() == backward
        assert_same(states(), between)
        results.append((out.detach(), grads, drawn))
    assert_same(results[1], results[0])
    assert backend.current_device() == 0


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("forward", [0, 1])
@pytest.mark.parametrize("where", ["cpu", f"{DEVICE}:0", f"{DEVICE}:1"])
def test_current_device(where: str, forward: int, backward: int, policy: Any) -> None:
    fn = lambda x: (dropped(x) * torch.rand(4, device=DEVICE).to(x.device)).exp()
    draws_alike(fn, leaf(4, 4, device=where), policy=policy, forward=forward, backward=backward)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("where", ["cpu", f"{DEVICE}:0", f"{DEVICE}:1"])
@pytest.mark.parametrize("to", [f"{DEVICE}:0", f"{DEVICE}:1"])
def test_draws_on_a_device_without_arguments(where: str, to: str, policy: Any) -> None:
    draws_alike(lambda x: dropped(x.to(to)).cos(), leaf(4, 4, device=where), policy=policy)

    def fn(x: Tensor) -> Tensor:
        with backend.device(to):
            return (x.sin() * torch.rand(4, device=DEVICE).to(x.device)).exp()

    draws_alike(fn, leaf(4, 4, device=where), policy=policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_two_devices_in_one_region(policy: Any) -> None:
    fn = lambda x, y: (dropped(x) * dropped(y).to(x.device)).cos()
    draws_alike(fn, leaf(4, 4, device=f"{DEVICE}:0"), leaf(4, 4, device=f"{DEVICE}:1"), policy=policy)


def test_the_current_device_is_restored_after_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        if next(runs):
            raise RuntimeError("in the recompute")
        return x.sin().exp()

    runs = iter([False, True])
    x = leaf(4, device="cpu")
    with backend.device(1):
        out = remat(fn)(x).sum()
    with pytest.raises(RuntimeError, match="in the recompute"):
        out.backward()
    assert backend.current_device() == 0


class Pauses:
    """While it is entered, the recomputes of two devices overlap: the one of device 1 is always half a step ahead."""

    on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *exception: Any) -> None:
        self.on = False

    def __call__(self, x: Tensor) -> None:
        if self.on:
            time.sleep(0.02 if x.device.index else 0.04)


pauses = Pauses()
captured: dict[str, Tensor] = {}


class Holder(nn.Module):
    held: Tensor

    def forward(self, x: Tensor) -> Tensor:
        pauses(x)
        y = (x * self.held.to(x.device)).sin()
        pauses(x)
        return y


def draws_in_python(x: Tensor) -> Tensor:
    pauses(x)
    a = random.random()
    pauses(x)
    return (x * a).sin() * random.random()


def reads_a_dict(x: Tensor) -> Tensor:
    pauses(x)
    y = (x * captured["held"].to(x.device)).sin()
    pauses(x)
    return y


holder = Holder()


@pytest.mark.parametrize("policy", [None, policies.save_matmuls])
@pytest.mark.parametrize("fn", [draws_in_python, reads_a_dict, holder])
def test_recomputes_in_two_threads(fn: Callable, policy: Any) -> None:
    results = []
    for wrap in (lambda f: f, lambda f: remat(f, policy=policy)):
        random.seed(0)
        torch.manual_seed(0)
        p = torch.ones(3, requires_grad=True)
        captured["held"] = holder.held = held = p * 2
        xs = [torch.arange(1.0, 4, device=f"{DEVICE}:{i}", requires_grad=True) for i in range(2)]
        loss = sum(wrap(fn)(x).sum().cpu() for x in xs)
        before = random.getstate(), torch.get_rng_state().tolist()
        with pauses:
            grads = torch.autograd.grad(loss, [*xs, p], allow_unused=True)
        assert (random.getstate(), torch.get_rng_state().tolist()) == before
        assert captured["held"] is held and holder.held is held and held.grad_fn is not None
        results.append(grads)
    assert_same(results[1], results[0])


def test_a_backward_over_both_devices_in_a_recompute() -> None:
    """The inner backward needs the thread of the other device, which waits for its own recompute."""

    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            other = y.to(f"{DEVICE}:{1 - x.device.index}").sin()
            pauses(x)
            inner = remat(lambda t: t.sin().exp())(other).to(x.device)
            g = torch.autograd.grad((inner * y.cos()).sum(), y)[0]
        return (x * g).sin()

    xs = [torch.arange(1.0, 4, device=f"{DEVICE}:{i}", requires_grad=True) for i in range(2)]
    expected = torch.autograd.grad(sum(fn(x).sum().cpu() for x in xs), xs)
    loss = sum(remat(fn)(x).sum().cpu() for x in xs)
    with pauses:
        assert_same(torch.autograd.grad(loss, xs), expected)


class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: list[bool]) -> Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.noted.append(is_recomputing())
        return grad * 1, None


@pytest.mark.parametrize("where", ["cpu", f"{DEVICE}:0", f"{DEVICE}:1"])
@pytest.mark.parametrize("to", ["cpu", f"{DEVICE}:0", f"{DEVICE}:1"])
def test_is_recomputing_in_a_backward_inside(where: str, to: str) -> None:
    noted: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.to(to).detach().requires_grad_()
            g = torch.autograd.grad(Notes.apply(y.sin(), noted).sum(), y)[0].to(x.device)
        return (x * g).sin()

    x = leaf(4, device=where)
    out = remat(fn)(x).sum()
    assert noted == [False]
    out.backward()
    assert noted == [False, True] and not is_recomputing()
    Notes.apply(leaf(4, device=to), noted).sum().backward()
    assert noted == [False, True, False]  # it is not recomputing any longer in the thread of the device


class RunsARegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Callable) -> Tensor:
        ctx.save_for_backward(x)
        ctx.region = region
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return grad * torch.autograd.grad(ctx.region(y).sum(), y)[0], None


@pytest.mark.parametrize("where", ["cpu", f"{DEVICE}:0", f"{DEVICE}:1"])
@pytest.mark.parametrize("around", ["forward", "backward"])
def test_override_around_a_forward_applies_in_the_threads_of_devices(where: str, around: str) -> None:
    """It applies to regions that a recompute calls there. Around the backward it applies to regions called directly."""
    ends: list[str] = []

    def inner(x: Tensor) -> Tensor:
        y = x.sin().exp().sin()
        ends.append("recompute" if is_recomputing() else "forward")
        return y

    x = leaf(4, device=where)

    def gradient(fn: Callable) -> Tensor:
        ends.clear()
        with override(early_stop=False) if around == "forward" else nullcontext():
            out = remat(lambda x: fn(x).sin())(x).sum()
        with override(early_stop=False) if around == "backward" else nullcontext():
            return torch.autograd.grad(out, x)[0]

    expected = gradient(inner)
    assert_same(gradient(remat(inner)), expected)
    assert ends == ["forward", "recompute", *["recompute"] * (around == "forward")]
    out = RunsARegion.apply(x, remat(inner)).sum()
    ends.clear()
    with override(early_stop=False):
        out.backward()
    assert ends == ["forward", "recompute"]
