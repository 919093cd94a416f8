"""Ambient state: what a second run of a region must see again, and must leave as it was.

The random generators (of every device in use, those that the caller names, Python's and NumPy's
global ones), the settings (autocast, grad mode, default dtype and device, attention kernels), and
the weights that `torch.nn.utils.parametrize.cached()` holds.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.backends import cuda as sdpa

from . import _torch


class Ambient:
    """The ambient state at one moment.

    Generators are read and set past the dispatcher: no torch.func level or mode matters to them.
    """

    __slots__ = ("_devices", "_every", "_generators", "_settings", "_states", "_weights")
    _settings: list[Any]
    _devices: tuple[torch.device, ...]
    _generators: tuple[torch.Generator, ...]
    _every: tuple[Any, ...] | None  # generators that matter, with these among them
    _states: tuple[Any, ...]  # theirs
    _weights: tuple[int, dict]

    @classmethod
    def capture(
        cls,
        devices: Iterable[torch.device],
        generators: Iterable[torch.Generator],
        preserve_rng_state: bool,
    ) -> Ambient:
        """The state of now; the generators of `devices` only where the backend has started."""
        self = cls.__new__(cls)
        self._settings = _read_settings()
        self._weights = _torch.parametrization_cache()
        self._devices, self._generators, self._every, self._states = (), (), None, ()
        if preserve_rng_state:
            self._devices, self._generators = tuple(devices), tuple(generators)
            self._every = _global_generators(self._devices) + self._generators
            self._states = tuple([each.get_state() for each in self._every])
        return self

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """The generators with their states."""
        return zip(self._every or (), self._states)

    @property
    def casts(self) -> bool:
        """Whether autocast is on for any device."""
        return any(self._settings[i] for i in _autocast_switches())

    def restored(self) -> _Restored:
        """Within, the captured state; after, that of before. Any number of times, in any thread."""
        return _Restored(self)

    def moved(self) -> bool:
        """Whether a torch generator has drawn numbers since."""
        return any(
            isinstance(state, torch.Tensor) and _bytes_of(each.get_state()) != _bytes_of(state)
            for each, state in self._pairs()
        )

    def cached_since(self) -> list[torch.Tensor]:
        """The weights of parametrized modules that were computed since, and are held for others to read."""
        return [weight for key, weight in _torch.parametrization_cache()[1].items() if key not in self._weights[1]]

    def rewind(self) -> None:
        """Sets what a run moves on, the generators and the cached weights, back to the captured state."""
        _torch.set_parametrization_cache(self._weights)
        pairs = self._pairs()
        try:
            for each, state in pairs:
                each.set_state(state)
        except BaseException:
            _call_all((each.set_state, state) for each, state in pairs)
            raise

    def _put(self, now: list[Any]) -> None:
        try:
            if now != self._settings:
                settings = zip(_settings(), now, self._settings, strict=True)
                _call_all((put, new) for (_, put), old, new in settings if old != new)
        finally:
            self.rewind()


class _Restored:
    """An ambient state while it is put back; made for one use."""

    __slots__ = ("before", "state")

    def __init__(self, state: Ambient) -> None:
        self.state = state

    def __enter__(self) -> None:
        state = self.state
        # Read anew, and not only what was captured: a backend or NumPy may have come since.
        self.before = state.capture(state._devices, state._generators, state._every is not None)
        torch.autocast_increment_nesting()  # as torch.autocast: casts are not kept beyond the run
        try:
            state._put(self.before._settings)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: Any) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.before._put(_read_settings())


def _bytes_of(state: torch.Tensor) -> bytes:
    """The memory of a generator's state, read past modes and levels."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _call_all(calls: Iterator[tuple[Callable[[Any], Any], Any]]) -> None:
    """A call that fails does not keep the others from being made."""
    try:
        for call, value in calls:
            call(value)
    except BaseException:
        _call_all(calls)
        raise


@cache
def _accelerator() -> tuple[torch.device, ...]:
    """The accelerator that this build of torch is for, if it is for one; does not start it."""
    device = torch.accelerator.current_accelerator()
    return () if device is None else (device,)


_SDPA_SETTERS = (
    sdpa.enable_flash_sdp,
    sdpa.enable_mem_efficient_sdp,
    sdpa.enable_math_sdp,
    sdpa.enable_cudnn_sdp,
    sdpa.allow_fp16_bf16_reduction_math_sdp,
)


@cache
def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    settings: list[tuple[Any, Any]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (_torch.device_mode, _torch.set_device_mode),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (_torch.sdpa_priority, _torch.set_sdpa_priority),
        *zip(_torch.sdpa_enabled, _SDPA_SETTERS, strict=True),
    ]
    autocast = (
        (torch.is_autocast_enabled, torch.set_autocast_enabled),
        (torch.get_autocast_dtype, torch.set_autocast_dtype),
    )
    for kind in ("cpu", *(device.type for device in _accelerator())):
        if torch.amp.is_autocast_available(kind):
            settings += [(partial(get, kind), partial(put, kind)) for get, put in autocast]
    return settings


@cache
def _autocast_switches() -> list[int]:
    gets = [getattr(get, "func", get) for get, _ in _settings()]
    return [i for i, get in enumerate(gets) if get is torch.is_autocast_enabled]


_last_settings: list[Any] = []


def _read_settings() -> list[Any]:
    global _last_settings
    settings, last = [get() for get, _ in _settings()], _last_settings
    if settings == last:  # they seldom change, so that most regions have the same list
        return last
    _last_settings = settings
    return settings


def _global_generators(devices: tuple[torch.device, ...]) -> tuple[Any, ...]:
    found = _host_generators("numpy" in sys.modules)
    if devices := devices + _accelerator():
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
