"""Tests of the simulated device itself."""

import pytest
import torch
from accelerator import DEVICE, backend

from device import races

pytestmark = pytest.mark.cuda


def test_races_are_found() -> None:
    side = backend.Stream()
    x = torch.ones(4, device=DEVICE)
    side.wait_stream(backend.current_stream())
    with backend.stream(side):
        y = x * 2
    z = y + 1
    assert len(races()) == 1  # the sum reads before the side stream has written
    del y
    assert len(races()) == 1  # memory of the side stream is freed while the main stream reads it
    host = torch.ones(4).pin_memory()
    with backend.stream(side):
        x.copy_(host, non_blocking=True)
    _ = x + z
    assert len(races()) == 1
    backend.synchronize()
    assert races() == []


def test_memory_is_counted_for_each_device() -> None:
    before = [backend.memory_allocated(i) for i in range(2)]
    x = torch.ones(256, device=f"{DEVICE}:1")
    y = x.expand(8, 256)
    assert [backend.memory_allocated(i) for i in range(2)] == [before[0], before[1] + 1024]
    del x, y
    assert [backend.memory_allocated(i) for i in range(2)] == before


def test_generators_count() -> None:
    torch.manual_seed(1)
    first, state = torch.rand(3, device=DEVICE), backend.get_rng_state()
    second = torch.rand(3, device=DEVICE)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=DEVICE), second) and not torch.equal(first, second)
    assert state.numel() == 16


def test_operands_on_two_devices_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(2, device=f"{DEVICE}:0") + torch.ones(2, device=f"{DEVICE}:1")
