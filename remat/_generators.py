"""Random generators, torch's, Python's and NumPy's: the global ones, and those that somebody holds.

Each comes as an object with `get_state` and `set_state`.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ._bulk import call


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
    slow = _Slow(_python, _numpy()) if with_numpy else _Slow(_python)
    return torch.default_generator, slow


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


_Reader = Callable[[], Any]


class _Source(NamedTuple):
    """A generator whose state is slow to read (Python's 8 us, NumPy's 30).

    `find` says what reads the memory by which it is known whether it has moved; among it must be which object it is, as
    another one may take its place. It finds nothing if the memory isn't known to hold all of the state.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    find: Callable[[], tuple[_Reader, ...]]


class _Slow:
    """Such generators, and the last reading: nearly always they have not moved since, as their memory tells in 1 us.

    A state is `(memory, states)`.
    """

    def __init__(self, *sources: _Source) -> None:
        self._sources = sources
        self._readers: tuple[_Reader, ...] = ()
        self._last: tuple[tuple | None, list[Any]] = (None, [])

    def get_state(self) -> tuple[tuple | None, list[Any]]:
        last = self._last
        return last if tuple(map(call, self._readers)) == last[0] else self._moved()

    def _moved(self) -> tuple[tuple | None, list[Any]]:
        now = self._memory()
        while True:
            state = now, [source.read() for source in self._sources]
            now = self._memory()
            if now == state[0]:  # else another thread has drawn meanwhile
                self._last = state
                return state

    def _memory(self) -> tuple | None:
        found = [source.find() for source in self._sources]
        self._readers = tuple(chain(*found)) if all(found) else ()
        return tuple(map(call, self._readers)) or None

    def set_state(self, state: tuple[tuple | None, list[Any]]) -> None:
        if state[0] is None or state[0] != tuple(map(call, self._readers)):
            for source, value in zip(self._sources, state[1]):
                source.write(value)
            self._last = state


def _reader(obj: Any, part: slice = slice(None)) -> _Reader:
    """Reads what an object holds in its own memory, beyond the header; or a part of that."""
    header = object.__basicsize__
    start, stop, _ = part.indices(type(obj).__basicsize__ - header)
    memory: Any = (ctypes.c_char * (stop - start)).from_address(id(obj) + header + start)
    memory.owner = obj  # which must live as long
    return memoryview(memory).tobytes


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


def _of_python() -> tuple[_Reader, ...]:
    generator = random.getstate.__self__  # type: ignore[attr-defined]
    which, normal = partial(getattr, random, "getstate"), partial(getattr, generator, "gauss_next")
    return which, normal, _reader(generator, _python_part)


_python = _Source(random.getstate, random.setstate, _of_python)


@cache
def _numpy() -> _Source:
    import numpy.random as np_random

    state: Any = vars(np_random)["get_state"].__self__  # beside the bits, half a pair of normals

    new = np_random.MT19937(0)
    part = _telling_part(new, new.random_raw)

    def find() -> tuple[_Reader, ...]:
        bits = state._bit_generator
        if type(bits) is not np_random.MT19937:  # another may keep its state elsewhere
            return ()
        return partial(getattr, state, "_bit_generator"), _reader(state), _reader(bits, part)

    return _Source(partial(np_random.get_state, legacy=False), np_random.set_state, find)
