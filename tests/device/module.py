"""The functions of a device's module, `torch.cuda` or `torch.sim`."""

import contextlib
import types
from typing import Any

import torch

from .build import build, why_not

DEVICES = 2
_cpp: Any = None


def races() -> list[str]:
    """The races between streams since the last call."""
    return _cpp.races()


def install(name: str) -> types.ModuleType:
    """Register the devices under this name, and return their module. Call it once in a process, before CUDA is used."""
    global _cpp
    if (reason := why_not(name)) is not None:
        raise RuntimeError(reason)
    if name == "cuda":
        _cpp = build(name)
        module = torch.cuda
        vars(module).update(_functions(name))
        module.random.default_generators = module.default_generators  # type: ignore[attr-defined]
    else:
        torch.utils.rename_privateuse1_backend(name)
        _cpp = build(name)
        module = types.ModuleType(f"torch.{name}")
        vars(module).update(_functions(name))
        torch._register_device_module(name, module)
        torch.utils.generate_methods_for_privateuse1_backend()
    return module


class _Device:
    """A context that sets the current device."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _cpp.current_device()
        _cpp.set_device(self.index)

    def __exit__(self, *exception: object) -> None:
        _cpp.set_device(self.before)


class _Within:
    """A context that sets the current stream and its device."""

    def __init__(self, stream: torch.Stream, get: Any, put: Any) -> None:
        self.stream, self.get, self.put = stream, get, put

    def __enter__(self) -> torch.Stream:
        self.index, self.before = _cpp.current_device(), self.get(self.stream.device)
        self.put(self.stream)
        _cpp.set_device(self.stream.device.index)
        return self.stream

    def __exit__(self, *exception: object) -> None:
        self.put(self.before)
        _cpp.set_device(self.index)


def _index(device: Any = None) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index
    return _cpp.current_device() if device is None else device


def _functions(kind: str) -> dict[str, Any]:
    generators = tuple(_cpp.default_generator(i) for i in range(DEVICES))
    types_of = torch._C._autograd.DeviceType
    device_type = int(types_of.CUDA if kind == "cuda" else types_of.PrivateUse1)

    def where(device: Any = None) -> torch.device:
        return torch.device(kind, _index(device))

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **which: int) -> "Stream":
            return super().__new__(cls, **which) if which else super().__new__(cls, where(device), priority=priority)

        cuda_stream = property(lambda self: self.stream_id)

    class Event(torch.Event):  # a class, as torch calls `isinstance(x, torch.cuda.Event)`
        def __new__(cls, enable_timing: bool = False, **_: Any) -> "Event":
            return super().__new__(cls, kind, enable_timing=enable_timing)

    def the_stream(device: Any, number: int) -> Stream:
        return Stream(stream_id=number, device_index=_index(device), device_type=device_type)

    def current_stream(device: Any = None) -> Stream:
        return the_stream(device, torch.accelerator.current_stream(where(device)).stream_id)

    def set_stream(stream: torch.Stream) -> None:
        index = _cpp.current_device()
        torch.accelerator.set_stream(stream)  # it also sets the stream's device
        _cpp.set_device(index)

    def within(stream: torch.Stream | None) -> Any:
        return contextlib.nullcontext() if stream is None else _Within(stream, current_stream, set_stream)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def set_rng_state_all(states: Any) -> None:
        for generator, state in zip(generators, states):
            generator.set_state(state)

    properties = types.SimpleNamespace(name="simulated", total_memory=2**40, major=9, minor=0, multi_processor_count=1)
    return {
        "default_generators": generators,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": _cpp.current_device,
        "set_device": lambda device: _cpp.set_device(_index(device)),
        "device": _Device,
        "device_of": lambda tensor: _Device(tensor.device),
        "get_rng_state": lambda device=kind: generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device=kind: generators[_index(device)].set_state(state),
        "get_rng_state_all": lambda: [each.get_state() for each in generators],
        "set_rng_state_all": set_rng_state_all,
        "initial_seed": lambda: generators[_index()].initial_seed(),
        "manual_seed": lambda seed: generators[_index()].manual_seed(seed) and None,
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda *a, **k: True,
        "Stream": Stream,
        "Event": Event,
        "is_current_stream_capturing": lambda: False,
        "current_stream": current_stream,
        "default_stream": lambda device=None: the_stream(device, 0),
        "set_stream": set_stream,
        "stream": within,
        "synchronize": lambda device=None: torch.accelerator.synchronize(where(device)),
        "memory_allocated": lambda device=None: _cpp.bytes_now(_index(device)),
        "max_memory_allocated": lambda device=None: _cpp.bytes_peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: _cpp.reset_peak(_index(device)),
        "memory_reserved": lambda device=None: _cpp.bytes_now(_index(device)),
        "max_memory_reserved": lambda device=None: _cpp.bytes_peak(_index(device)),
        "mem_get_info": lambda device=None: (2**30 - _cpp.bytes_now(_index(device)), 2**30),
        "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: properties,
        "_sleep": lambda cycles: _cpp.busy(),
        "host_waits": _cpp.host_waits,
    }
