"""Accelerators and the order of work on their streams, with streams that only note what they are asked for."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from remat._core import devices, host_memory
from remat._core.host_memory import Offloaded

CPU, META = torch.device("cpu"), torch.device("meta")
NOWHERE, NOTES = torch.ones(3, device=META), list[str]()
accelerator = devices.accelerator.__wrapped__


class Stream:
    def __init__(self, name: str, device: torch.device = CPU) -> None:
        self.name, self.device = name, device
        self.synchronize = lambda: NOTES.append(f"the caller waits for {name}")
        self.record_event = lambda: self  # an event is the stream that it is of
        self.wait_event = lambda event: NOTES.append(f"{name} waits for a copy of {event.name}")
        self.wait_stream = lambda other: NOTES.append(f"{name} waits for {other.name}")

    def __enter__(self) -> None:
        CURRENT.append(self)

    def __exit__(self, *exception: Any) -> None:
        CURRENT.pop()


MAIN, SIDE, ELSEWHERE = Stream("main"), Stream("side"), Stream("elsewhere", META)
CURRENT = [MAIN]


def taken() -> list[str]:
    """What was noted since the last call of this function."""
    return [NOTES.pop(0) for _ in range(len(NOTES))]


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let the CPU be an accelerator with two devices; return its module."""
    copy, empty, names = Tensor.copy_, torch.empty, iter(["out", "back"])
    module = SimpleNamespace(is_available=lambda: True, current_device=lambda: 1, Stream=Stream)
    for owner, name, value in [
        (devices, "accelerator", lambda: (CPU,)),
        (host_memory, "accelerator", lambda: (CPU,)),
        (host_memory, "_side", functools.cache(host_memory._Side)),
        (torch, "get_device_module", lambda device: module),
        (torch, "Stream", lambda device: Stream(next(names), device)),
        (torch, "empty", lambda *shape, pin_memory=False, device=CPU, **options: empty(*shape, **options)),
        (torch.accelerator, "current_stream", lambda device: ELSEWHERE if device == META else CURRENT[-1]),
        (torch.accelerator, "device_count", lambda: 2),
        (torch.accelerator, "set_device_index", lambda index: NOTES.append(f"device {index}")),
        (torch.autograd, "grad", lambda *args: NOTES.append("a pass")),
        (Tensor, "record_stream", lambda tensor, stream: NOTES.append(f"memory is kept for {stream.name}")),
        (Tensor, "copy_", lambda to, x, **options: NOTES.append(f"{CURRENT[-1].name} copies") or copy(to, x)),
    ]:
        monkeypatch.setattr(owner, name, value)
    return module


def test_copies_wait_for_the_computation_and_are_waited_for(module: SimpleNamespace) -> None:
    x = torch.arange(4.0)
    kept = Offloaded(x)
    assert taken() == ["out waits for main", "out copies", "memory is kept for out"]
    kept.settle()
    assert taken() == ["main waits for a copy of out"]
    kept.prefetch()
    assert taken() == ["back waits for main", "back waits for a copy of out", "back copies"]
    assert torch.equal(kept.get(), x) and taken() == ["main waits for a copy of back"]
    with SIDE:
        kept.get()
        assert taken() == ["side waits for a copy of back", "memory is kept for side"]
        kept.release()  # its memory is that of the main stream
        assert taken() == ["main waits for a copy of back"]
    del module.Stream  # then copies are synchronous
    kept = Offloaded(x)
    kept.settle()
    assert torch.equal(kept.get(), x) and taken() == ["main copies", "main copies"]
    assert not host_memory.has_streams(META)


@pytest.mark.parametrize("limit, late", [(100, 0), (40, 3), (0, 4)])
def test_the_caller_waits_when_too_much_is_in_flight(limit: int, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the latest copy."""
    monkeypatch.setattr(host_memory, "IN_FLIGHT_BYTES", limit)
    assert len([Offloaded(torch.ones(4)) for _ in range(5)]) == 5  # of 16 bytes each
    assert taken().count("the caller waits for out") == late == 5 - len(host_memory._side(CPU).pending)


def test_which_stream_waits_for_which() -> None:
    x = torch.ones(3)
    assert devices.current_streams() == [MAIN, MAIN] and devices.streams_for([x, NOWHERE, x]) == [MAIN]
    with devices.resumed([MAIN, SIDE]):
        assert taken() == ["side waits for main"] and CURRENT[-1] is SIDE
    assert taken() == ["main waits for side"] and CURRENT[-1] is MAIN
    devices.make_readable(x, [ELSEWHERE, MAIN, SIDE])
    kept = "memory is kept for main"
    assert taken() == [kept, "main waits for side", kept]
    found = [devices.is_on_another(CPU, streams) for streams in ([SIDE, MAIN], [SIDE], [ELSEWHERE], [])]
    assert found == [False, True, False, False]


def test_a_backend_is_asked_only_if_it_has_started(module: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.set_current_device(devices.current_device())
    assert taken() == ["device 1"] and devices.current_device() == (torch.device("cpu", 1),)
    module.is_initialized = lambda: False
    assert devices.current_device() == () and devices.current_streams() == []
    module.is_initialized = lambda: True
    del module.current_device
    assert devices.current_device() == ()
    for device, started, captured in [(None, False, True), (CPU, True, False), (CPU, True, True)]:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda device=device: device)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda started=started: started)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        assert accelerator() == (() if device is None else (CPU,))
        assert devices.is_capturing() is (started and captured)


def test_only_the_threads_of_accelerators_are_waited_for(module: SimpleNamespace) -> None:
    tensors: Any = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda", "meta", "cuda")]
    devices.wait_for_backward_threads(tensors)
    assert taken() == ["a pass"] and devices.accelerators_of(tensors) == {"cuda": module}
