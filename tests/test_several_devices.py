"""Regions where there is more than one device: which is current, and what is drawn where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn

from remat import policies, remat

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two devices"),
]
POLICIES = [None, policies.save_matmuls, policies.offload(policies.save_matmuls)]


def leaf(device: Any, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device).requires_grad_()


def states() -> list[Tensor]:
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def dropped(x: Tensor) -> Tensor:
    y = nn.functional.dropout(x.sin() @ x.cos(), 0.5)
    return y.exp().sin() * torch.rand(x.shape[-1], device=x.device)


def draws_alike(fn: Callable, *args: Tensor, policy: Any = None, forward: int = 0, backward: int = 0) -> None:
    """As without a region: values, gradients, generators, and the current device after the backward."""
    results = []
    for f in (fn, remat(fn, policy=policy)):
        torch.manual_seed(3)
        with torch.cuda.device(forward):
            out = f(*args)
        drawn = states()
        torch.manual_seed(9)
        between = states()
        with torch.cuda.device(backward):
            grads = torch.autograd.grad(out.sum(), args)
            assert torch.cuda.current_device() == backward
        assert_same(states(), between)
        results.append((out.detach(), grads, drawn))
    assert_same(results[1], results[0])
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("forward", [0, 1])
@pytest.mark.parametrize("where", ["cpu", "cuda:0", "cuda:1"])
def test_current_device(where: str, forward: int, backward: int, policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return (dropped(x) * torch.rand(4, device="cuda").to(x.device)).exp()

    draws_alike(fn, leaf(where, 4, 4), policy=policy, forward=forward, backward=backward)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("where", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("to", ["cuda:0", "cuda:1"])
def test_draws_on_a_device_of_no_argument(where: str, to: str, policy: Any) -> None:
    draws_alike(lambda x: dropped(x.to(to)).cos(), leaf(where, 4, 4), policy=policy)

    def fn(x: Tensor) -> Tensor:
        with torch.cuda.device(to):
            return (x.sin() * torch.rand(4, device="cuda").to(x.device)).exp()

    draws_alike(fn, leaf(where, 4, 4), policy=policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_two_devices_in_one_region(policy: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (dropped(x) * dropped(y).to(x.device)).cos()

    draws_alike(fn, leaf("cuda:0", 4, 4), leaf("cuda:1", 4, 4), policy=policy)


def test_a_region_changes_the_current_device() -> None:
    def fn(x: Tensor) -> Tensor:
        torch.cuda.set_device(1)
        y = x.sin() * torch.rand(4, device="cuda").to(x.device)
        torch.cuda.set_device(0)
        return y.exp()

    draws_alike(fn, leaf("cuda:0", 4))
    draws_alike(fn, leaf("cpu", 4))


def test_the_current_device_is_put_back_after_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        if next(runs):
            raise RuntimeError("in the recompute")
        return x.sin().exp()

    runs = iter([False, True])
    x = leaf("cpu", 4)
    with torch.cuda.device(1):
        out = remat(fn)(x).sum()
    with pytest.raises(RuntimeError, match="in the recompute"):
        out.backward()
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("wrap", [lambda f: f, remat, lambda f: remat(f, policy=policies.save_matmuls)])
def test_a_pipeline(wrap: Callable) -> None:
    """One forward, one backward, over two devices: F0 F1 B0 F2 B1 B2."""

    def run(wrap: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [leaf(f"cuda:{i}", 4, 4) for i in range(2)]
        inputs = [torch.randn(4, 4).to("cuda:0") for _ in range(3)]
        outs: dict[int, Tensor] = {}

        def forward(i: int) -> None:
            x = inputs[i]
            for weight in weights:
                x = wrap(lambda x, w: dropped(x @ w))(x.to(weight.device), weight)
            outs[i] = x.sum()

        for step in ("F0", "F1", "B0", "F2", "B1", "B2"):
            i = int(step[1])
            forward(i) if step[0] == "F" else outs.pop(i).backward()
        return [w.grad for w in weights if w.grad is not None]

    assert_same(run(wrap), run(lambda f: f))
