"""Work on several streams: the simulated device detects missing synchronization."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator import DEVICE, LONG, backend
from cases import assert_same, repeated
from on_device import MATMULS, leaf
from on_device import POLICIES as PLAIN_POLICIES
from torch import Tensor, nn

from remat import policies, remat
from remat._core import host_memory
from remat.compat import checkpoint_wrapper

pytestmark = pytest.mark.cuda
SINES = policies.offload(policies.save_ops("aten.sin"))

LEFT: list[Tensor] = []
# What a region returns of a value `m` that is copied to the host, and how `m` changes after the region.
CHANGES: dict[str, tuple[Callable, Callable]] = {
    "a result": (lambda x, m, y: (m, y), lambda m, y: m.detach().mul_(3)),
    "a view of it": (lambda x, m, y: (m[1:], y), lambda m, y: m.detach().zero_()),
    "left in a list": (lambda x, m, y: (LEFT.append(m), y), lambda _, y: LEFT[-1].detach().mul_(3)),
    "in the region": (lambda x, m, y: (None, y * m.mul_(3)), lambda *_: None),
    "in a nested region": (lambda x, m, y: (None, remat(lambda x: m.mul_(3) * x.exp())(x) * y * m), lambda *_: None),
}


@pytest.mark.parametrize("change, with_a_gradient", [*((name, False) for name in CHANGES), ("a result", True)])
def test_a_copy_to_the_host_has_the_value_before_a_change(change: str, with_a_gradient: bool) -> None:
    then, later = CHANGES[change]

    def fn(x: Tensor) -> tuple[Any, Tensor]:
        m = (x * 1 if with_a_gradient else x.detach()).sin()
        return then(x, m, (x + m).cos())

    x = leaf(64, 64)
    remat(fn, policy=SINES)(x)  # this creates its streams
    with backend.stream(host_memory._side(x.device).out):
        backend._sleep(LONG)  # this delays the copies
    outs = remat(fn, policy=SINES)(x)
    later(*outs)
    found = torch.autograd.grad(outs[-1].sum(), x)[0]
    LEFT.clear()
    assert_same(found, torch.autograd.grad(fn(x)[-1].sum(), x)[0])


def test_an_offloaded_input_has_the_value_before_a_change() -> None:
    layer, x = checkpoint_wrapper(nn.Tanh(), offload_to_cpu=True), leaf(64, 64)
    with backend.stream(host_memory._side(x.device).out):
        backend._sleep(LONG)
    out = layer(h := x * 1)
    h.detach().zero_()
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(x.tanh().sum(), x))


def test_nothing_waits_for_copies_of_unchanged_values(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(host_memory.Offloaded, "settle", lambda self: waits.append(self))

    fn, x = repeated(lambda x: (x @ x).sin().cos(), 4), leaf(16, 16)
    assert_same(torch.autograd.grad(remat(fn, policy=SINES)(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))
    assert waits == []


def beside(fn: Callable, given: Tensor, side: torch.Stream) -> Tensor:
    """`fn(given)` on the side stream. The allocator is told later which streams use the tensors."""
    main = backend.current_stream()
    side.wait_stream(main)
    with backend.stream(side):
        result = fn(given)
    given.record_stream(side)
    main.wait_stream(side)
    result.record_stream(main)
    return result


def told_late(x: Tensor, side: torch.Stream) -> Tensor:
    return beside(lambda y: (y @ y).exp(), x.sin(), side)


def reads_what_is_not_saved(x: Tensor, side: torch.Stream) -> Tensor:
    return beside(lambda y: (y + 1).exp(), x * 2, side) * 3


def two_branches(x: Tensor, side: torch.Stream) -> Tensor:
    main = backend.current_stream()
    side.wait_stream(main)
    u = nn.functional.dropout(x.sin().cos().exp(), 0.5)
    with backend.stream(side):
        x.record_stream(side)
        v = nn.functional.dropout(x.cos().sin().exp() * 2, 0.5)
    main.wait_stream(side)
    v.record_stream(main)
    return u + v


def put_off(x: Tensor, side: torch.Stream) -> Tensor:
    """No backward needs ``z``, but the allocator gets it through `record_stream`."""
    main, host = backend.current_stream(), x.cpu()
    with backend.stream(side):
        y = host.to(DEVICE).sin()
        z = host.to(DEVICE) * 1
    main.wait_stream(side)
    y.record_stream(main)
    z.record_stream(main)
    return y + z


REGIONS = [told_late, reads_what_is_not_saved, two_branches, put_off]
POLICIES = [*PLAIN_POLICIES, SINES | MATMULS]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("anew", [False, True], ids=["one side stream", "a new one in each run"])
@pytest.mark.parametrize("fn", REGIONS, ids=lambda fn: fn.__name__)
def test_a_side_stream_in_a_region(fn: Callable, anew: bool, policy: policies.Policy | None) -> None:
    side = backend.Stream()
    region = lambda x: fn(x, backend.Stream() if anew else side)
    x = leaf(16, 16)
    torch.manual_seed(0)
    expected = torch.autograd.grad(fn(x, side).sum(), x)
    torch.manual_seed(0)
    out = remat(region, policy=policy)(x).sum()
    for keep in (True, False):
        assert_same(torch.autograd.grad(out, x, retain_graph=keep), expected)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_side_stream_in_a_nested_region(policy: policies.Policy | None) -> None:
    """The operands of the inner region are ready before it starts work on its side stream."""
    side = backend.Stream()
    inner = lambda y: beside(torch.sin, y, side)
    outer = lambda inner, x: inner(x.sin()) + x
    x = leaf(16, 16)
    expected = torch.autograd.grad(outer(inner, x).sum(), x)
    out = remat(lambda x: outer(remat(inner, policy=policy), x), policy=policy)(x).sum()
    assert_same(torch.autograd.grad(out, x), expected)


def test_record_stream_does_not_make_a_new_value() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x @ x
        z = y.sin()
        y.record_stream(backend.current_stream())
        return z.exp()

    x = leaf(32, 32)
    leaf(1).backward()  # after this the device's thread has released the previous graph
    before = backend.memory_allocated()
    out = remat(fn, policy=policies.save_matmuls)(x)
    assert backend.memory_allocated() - before == 2 * x.nbytes  # the product and the result
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(fn(x).sum(), x))


def on_a_device(x: Tensor) -> Tensor:
    y = x.to(DEVICE)
    return (y.sin() @ y.cos()).exp().sin().cpu().exp().sin()


def on_another_device(x: Tensor) -> Tensor:
    y = x.sin().to(f"{DEVICE}:1")
    return (y @ y).sin().exp().cos().to(x.device).exp().sin()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("where, fn", [("cpu", on_a_device), (f"{DEVICE}:0", on_another_device)])
def test_a_side_stream_around_a_region(where: str, fn: Callable, policy: policies.Policy | None) -> None:
    if fn is on_another_device and backend.device_count() < 2:
        pytest.skip("needs two devices")
    side = backend.Stream(f"{DEVICE}:{int(fn is on_another_device)}")
    x = torch.randn(16, 16).to(where).requires_grad_()
    expected = torch.autograd.grad(fn(x).sum(), x)
    devices = range(backend.device_count())
    for device in devices:
        side.wait_stream(backend.current_stream(device))
    with backend.stream(side), backend.device(0):
        out = remat(fn, policy=policy)(x).sum()
    for device in devices:
        backend.current_stream(device).wait_stream(side)
    assert_same(torch.autograd.grad(out, x), expected)
