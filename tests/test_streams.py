"""Work on several streams: the simulated device finds what is left to chance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import assert_same
from torch import Tensor

from remat import _offload, policies, remat

pytestmark = pytest.mark.cuda
SINES = policies.offload(policies.save_ops("aten.sin"))
LONG = 10**9  # cycles: the device is busy for about half a second


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


# --- copies to the host, and changes in place -------------------------------------------------------------------------

LEFT: list[Tensor] = []


def result(x: Tensor) -> tuple[Tensor, ...]:
    m = x.detach().sin()
    return m, (x + m).cos()


def result_with_a_gradient(x: Tensor) -> tuple[Tensor, ...]:
    m = (x * 1).sin()
    return m, (x + m).cos()


def view_of_a_value(x: Tensor) -> tuple[Tensor, ...]:
    m = x.detach().sin()
    return m[1:], (x + m).cos()


def left_in_a_list(x: Tensor) -> tuple[Tensor, ...]:
    m = x.detach().sin()
    LEFT.append(m)
    return ((x + m).cos(),)


def changed_in_the_region(x: Tensor) -> tuple[Tensor, ...]:
    m = x.detach().sin()
    y = (x + m).cos()
    return (y * m.mul_(3),)


def changed_in_a_nested_region(x: Tensor) -> tuple[Tensor, ...]:
    m = x.detach().sin()
    y = (x + m).cos()
    z = remat(lambda x: m.mul_(3) * x.exp())(x)
    return (y * m * z,)


def changed_argument_of_a_nested_region(x: Tensor) -> tuple[Tensor, ...]:
    m = x.detach().sin()
    y = (x + m).cos()
    z = remat(lambda m, x: m.mul_(3) * x.exp())(m, x)
    return (y * m * z,)


CHANGES: dict[Callable, Callable] = {
    result: lambda m, y: m.mul_(3),
    result_with_a_gradient: lambda m, y: m.detach().mul_(3),
    view_of_a_value: lambda m, y: m.zero_(),
    left_in_a_list: lambda y: LEFT[-1].mul_(3),
    changed_in_the_region: lambda y: None,
    changed_in_a_nested_region: lambda y: None,
    changed_argument_of_a_nested_region: lambda y: None,
}


@pytest.mark.parametrize("fn", CHANGES, ids=lambda fn: fn.__name__)
def test_a_copy_to_the_host_has_the_value_of_before_a_change(fn: Callable) -> None:
    x = leaf(64, 64)
    remat(fn, policy=SINES)(x)  # its streams are there now
    with torch.cuda.stream(_offload._side(x.device).out):
        torch.cuda._sleep(LONG)  # the copies come late
    outs = remat(fn, policy=SINES)(x)
    CHANGES[fn](*outs)
    found = torch.autograd.grad(outs[-1].sum(), x)[0]
    LEFT.clear()
    assert_same(found, torch.autograd.grad(fn(x)[-1].sum(), x)[0])


def test_nothing_waits_for_copies_of_what_nobody_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(_offload.Offloaded, "settle", lambda self: waits.append(self))

    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ x).sin().cos()
        return x

    x = leaf(16, 16)
    found = torch.autograd.grad(remat(fn, policy=SINES)(x).sum(), x)
    assert_same(found, torch.autograd.grad(fn(x).sum(), x))
    assert waits == []
