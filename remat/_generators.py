"""Random generators, torch's, Python's and NumPy's: the global ones, and those that somebody holds.

Each comes as an object with `get_state` and `set_state`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from . import _slow_states
from ._slow_states import SlowState, together


@cache
def accelerator() -> tuple[torch.device, ...]:
    """The accelerator that this build of torch is for, if it is for one; does not start it."""
    device = torch.accelerator.current_accelerator()
    return () if device is None else (device,)


def started_devices() -> list[torch.device]:
    """All devices of the accelerator, if the backend has started."""
    return [
        torch.device(device.type, i)
        for device in accelerator()
        if _has_started(torch.get_device_module(device))
        for i in range(torch.accelerator.device_count())
    ]


def is_capturing() -> bool:
    """Whether a CUDA graph is made of what runs now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_device() -> tuple[torch.device, ...]:
    """The accelerator's current device, if the backend has started."""
    for device in accelerator():
        module = torch.get_device_module(device)
        if _has_started(module) and hasattr(module, "current_device"):
            return (torch.device(device.type, module.current_device()),)
    return ()


def set_current_device(value: tuple[torch.device, ...]) -> None:
    """Set it to what ``current_device`` has returned."""
    for device in value:
        torch.accelerator.set_device_index(device.index)


def global_generators(devices: tuple[torch.device, ...]) -> tuple[Any, ...]:
    """Those of the host, of all devices of the accelerator, and of `devices`, where the backend has started."""
    found = _host_generators("numpy" in sys.modules)
    if devices := devices + accelerator():
        found += tuple(_device_generators(devices))
    return found


@cache
def _host_generators(with_numpy: bool) -> tuple[Any, ...]:
    numpy = (_slow_states.numpy(),) if with_numpy else ()
    return SlowState(_slow_states.torch_host), SlowState(together(_slow_states.python, *numpy))


def _device_generators(devices: Iterable[torch.device]) -> Iterable[Any]:
    started = {}  # a fake tensor may be on a device that this machine hasn't got
    for device in devices:
        module = None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)
        if module is not None and _has_started(module):
            # What a region draws from is not told by its tensors, and the states are in host memory.
            every = getattr(module, "default_generators", None)
            for generator in [_device_generator(module, device)] if every is None else every:
                started[id(generator)] = generator
    return started.values()


def _has_started(module: ModuleType) -> bool:
    return getattr(module, "is_initialized", module.is_available)()


def _device_generator(module: ModuleType, device: torch.device) -> Any:
    where = {} if device.type == "mps" else {"device": device}  # there is but one
    get, put = module.get_rng_state, module.set_rng_state
    return SimpleNamespace(get_state=partial(get, **where), set_state=partial(put, **where))


def is_generator(cls: type) -> bool:
    """Whether this is a class of generators, other than torch's."""
    kinds: tuple[Any, ...] = (random.Random,)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds += numpy.Generator, numpy.RandomState
    return issubclass(cls, kinds) and not issubclass(cls, random.SystemRandom)


def with_state(generator: Any) -> Any:
    """The object by which a generator's state is read and set."""
    if isinstance(generator, random.Random):
        return SimpleNamespace(get_state=generator.getstate, set_state=generator.setstate)
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:  # of NumPy's newer kind
        return SimpleNamespace(get_state=lambda: bits.state, set_state=partial(setattr, bits, "state"))
    return generator
