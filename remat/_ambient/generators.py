"""Random generators of torch, Python and NumPy, each as an object with `get_state` and `set_state`."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from .._core.devices import NEAR, accelerator, has_started
from .._core.tensors import bytes_of


def global_generators(devices: tuple[torch.device, ...]) -> tuple[Any, ...]:
    """The generators of the host, the accelerator's devices, and `devices`, if their backend is initialized."""
    numpy = (_NUMPY,) if "numpy" in sys.modules else ()
    return *_HOST, *numpy, *_device_generators(devices + accelerator())


class HostGenerator:
    """A global generator of the host. Regions share its state, of up to 30 KB, until numbers are drawn."""

    def __init__(self, name: str, read: Callable, write: Callable, identify: Callable) -> None:
        self.name, self._read, self.set_state = name, read, write
        self._identify = identify  # returns a key that identifies a state
        self._key: Any = None  # of the last state
        self._state: Any = None

    def get_state(self) -> Any:
        state = self._read()
        key = self._identify(state)
        if key != self._key:
            self._key, self._state = key, state
        return self._state


class _NumPy:
    """NumPy takes 30 us to return its state, so the generator's memory is compared first, at an address from NumPy.

    NumPy also stores one of each pair of normal variates. If it had one at these bits, they don't identify the state.
    """

    name = "NumPy's random"

    def __init__(self) -> None:
        self._bits: bytes | None = None  # of the last state
        self._state: Any = None
        self._had_half = False

    def get_state(self) -> Any:
        numpy = sys.modules["numpy"].random
        generator, bits = numpy.get_bit_generator(), None
        if type(generator) is numpy.MT19937:  # the memory of the Mersenne twister: 624 words and the position
            bits = ctypes.string_at(generator.ctypes.state_address, 2500)
        known = bits is not None and bits == self._bits
        if known and not self._had_half:
            return self._state
        state = numpy.get_state(legacy=False)
        self._bits, self._had_half = bits, known or state["has_gauss"] == 1
        if not known or any(state[name] != self._state[name] for name in ("has_gauss", "gauss")):
            self._state = state
        return self._state

    def set_state(self, state: Any) -> None:
        if self.get_state() is not state:
            sys.modules["numpy"].random.set_state(state)


_HOST = (
    HostGenerator(
        "torch's generator of the CPU", torch.default_generator.get_state, torch.default_generator.set_state, bytes_of
    ),
    # Python's state: 4 of its 624 words and the position; a stored normal variate.
    HostGenerator("Python's random", random.getstate, random.setstate, lambda state: (state[1][-5:], state[2])),
)
_NUMPY = _NumPy()


def generator_name(generator: Any) -> str:
    """The name of a global generator for users."""
    return getattr(generator, "name", f"torch's generator of {getattr(generator, 'device', 'the device')}")


def _device_generators(devices: Iterable[torch.device]) -> Iterable[Any]:
    started: dict[int, Any] = {}  # without devices that this machine doesn't have, which fake tensors may be on
    for device in devices:
        module = None if device.type in NEAR else getattr(torch, device.type, None)
        if module is not None and has_started(module):
            # A region may draw from any device of the backend. Reading is cheap: the states are in host memory.
            every = getattr(module, "default_generators", None)
            if every is None:
                where = {} if device.type == "mps" else {"device": device}  # it has only one device
                get, put = partial(module.get_rng_state, **where), partial(module.set_rng_state, **where)
                every = [SimpleNamespace(get_state=get, set_state=put)]
            started.update((id(generator), generator) for generator in every)
    return started.values()


def is_generator(cls: type) -> bool:
    """Whether this is a class of Python's or NumPy's generators."""
    kinds: tuple[Any, ...] = (random.Random,)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds += numpy.Generator, numpy.RandomState
    return issubclass(cls, kinds) and not issubclass(cls, random.SystemRandom)


def with_state(generator: Any) -> Any:
    """Return an object that reads and sets a generator's state."""
    if isinstance(generator, random.Random):
        return SimpleNamespace(get_state=generator.getstate, set_state=generator.setstate)
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:  # a `numpy.random.Generator`
        return SimpleNamespace(get_state=lambda: bits.state, set_state=partial(setattr, bits, "state"))
    return generator
