"""Random generators, torch's, Python's and NumPy's: the global ones, and those that somebody holds.

Each comes as an object with `get_state` and `set_state`.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


@cache
def accelerator() -> tuple[torch.device, ...]:
    """The accelerator that this build of torch is for, if it is for one; does not start it."""
    device = torch.accelerator.current_accelerator()
    return () if device is None else (device,)


def global_generators(devices: tuple[torch.device, ...]) -> tuple[Any, ...]:
    """Those of the host, of the accelerator and of `devices`, where the backend has started."""
    found = _host_generators("numpy" in sys.modules)
    if devices := devices + accelerator():
        found += tuple(_device_generators(devices))
    return found


@cache
def _host_generators(with_numpy: bool) -> tuple[Any, ...]:
    return (torch.default_generator, _python, _numpy()) if with_numpy else (torch.default_generator, _python)


def _device_generators(devices: Iterable[torch.device]) -> Iterable[Any]:
    started = {}  # a fake tensor may be on a device that this machine hasn't got
    for device in devices:
        module = None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)
        if module is not None and getattr(module, "is_initialized", module.is_available)():
            generator = _device_generator(module, device)
            started[id(generator)] = generator
    return started.values()


def _device_generator(module: ModuleType, device: torch.device) -> Any:
    if hasattr(module, "default_generators"):
        index = module.current_device() if device.index is None else device.index
        return module.default_generators[index]
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


class _Slow:
    """A generator whose state is slow to read (Python's 8 us, NumPy's 30), and the last reading.

    Nearly always it has not moved since, as the memory of its object tells in 1 us. A state is
    `(memory, state)`; `memory` gives None where that isn't known to hold all of the state.
    """

    def __init__(self, read: Callable, write: Callable, memory: Callable[[], Any]) -> None:
        self._read, self._write, self._memory = read, write, memory
        self._last: tuple[Any, Any] = (None, None)

    def get_state(self) -> tuple[Any, Any]:
        now, last = self._memory(), self._last
        if now is not None and now == last[0]:
            return last
        while True:
            state = (now, self._read())
            now = self._memory()
            if now == state[0]:  # else another thread has drawn meanwhile
                self._last = state
                return state

    def set_state(self, state: tuple[Any, Any]) -> None:
        if state[0] is None or state[0] != self._memory():
            self._write(state[1])
            self._last = state


_Read = Callable[[], bytes]


def _reader(obj: Any, part: slice = slice(None)) -> _Read:
    """Reads what an object holds in its own memory, beyond the header; or a part of that."""
    header = object.__basicsize__
    start, stop, _ = part.indices(type(obj).__basicsize__ - header)
    return memoryview((ctypes.c_char * (stop - start)).from_address(id(obj) + header + start)).tobytes


def _telling_part(new: Any, draw: Callable[[], Any]) -> slice:
    """The few bytes of a Mersenne twister by which each draw is seen.

    A draw moves the position, and after the last one all of the state is made anew: that is the position, and a part
    of the state beside it. `new` is one to try it out.
    """
    for _ in range(4):
        draw()  # past the first position
    before = _reader(new)()
    draw()
    moved = [i for i, (old, now) in enumerate(zip(before, _reader(new)())) if old != now]
    return slice(max(0, moved[0] - 32), moved[-1] + 32) if moved else slice(None)


_python_part = _telling_part(new := random.Random(0), new.random)
_python_last: tuple[Any, _Read] = (new, _reader(new, _python_part))


def _python_memory() -> tuple[bytes, float | None]:
    global _python_last
    generator, read = _python_last
    if generator is not random.getstate.__self__:  # type: ignore[attr-defined]
        generator = random.getstate.__self__  # type: ignore[attr-defined]
        read = _reader(generator, _python_part)
        _python_last = generator, read
    return read(), generator.gauss_next


_python = _Slow(random.getstate, random.setstate, _python_memory)


@cache
def _numpy() -> _Slow:
    import numpy.random as np_random

    state: Any = vars(np_random)["get_state"].__self__  # beside the bits, half a pair of normals

    new = np_random.MT19937(0)
    part = _telling_part(new, new.random_raw)
    last, read_bits, read_rest = new, _reader(new, part), _reader(state)

    def memory() -> tuple[bytes, bytes] | None:
        nonlocal last, read_bits
        bits = state._bit_generator
        if bits is not last:
            if type(bits) is not np_random.MT19937:  # another may keep its state elsewhere
                return None
            read_bits, last = _reader(bits, part), bits
        return read_bits(), read_rest()

    return _Slow(partial(np_random.get_state, legacy=False), np_random.set_state, memory)
