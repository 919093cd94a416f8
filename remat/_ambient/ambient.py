"""Ambient state: random generators and settings. A recompute sees them as the first run did, and then restores them.

The generators are those of every device in use, those that the caller names, and Python's and NumPy's global ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from operator import methodcaller
from typing import Any

import torch

from .._core.devices import current_device, is_capturing
from .._core.tensors import bytes_of
from ..errors import RematError
from .generators import global_generators, with_state
from .settings import read_settings, set_cached_weights, setters, weights


class Ambient:
    """The ambient state at one moment.

    Generators are read and set without the dispatcher, so torch.func levels and modes have no effect on it.
    """

    __slots__ = ("_devices", "_every", "_generators", "_settings", "_states")
    _settings: list[Any]
    _devices: tuple[torch.device, ...]
    _generators: tuple[Any, ...]
    _every: tuple[Any, ...] | None  # all generators whose states are recorded, including `_generators`
    _states: tuple[Any, ...]  # the states of `_every`

    @classmethod
    def capture(
        cls,
        devices: Iterable[torch.device],
        generators: Iterable[Any],
        preserve_rng_state: bool,
    ) -> Ambient:
        """Return the current state. Of `devices` only generators of backends that have been initialized are included.

        Raises:
            RematError: a CUDA graph is being captured, so a generator's state can't be set.
        """
        self = cls.__new__(cls)
        self._settings = read_settings()
        self._devices, self._generators, self._every, self._states = (), (), None, ()
        if preserve_rng_state:
            if is_capturing():
                raise RematError(_IN_A_GRAPH)
            self._devices = (*devices, *current_device())  # another device may be current in the backward
            self._generators = tuple(map(with_state, generators))
            self._every = global_generators(self._devices) + self._generators
            self._states = tuple(map(_get_state, self._every))
        return self

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """The generators with their states."""
        return zip(self._every or (), self._states)

    def restored(self) -> _Restored:
        """Return a context in which the captured state is set. Can be used any number of times, in any thread."""
        return _Restored(self)

    def moved(self) -> bool:
        """Whether a torch generator has drawn numbers since."""
        pairs = [(each.get_state(), state) for each, state in self._pairs()]
        return any(now is not state and _torch_part(now) != _torch_part(state) for now, state in pairs)

    def rewind(self) -> None:
        """Restore what a run changes: the generators and the cached weights."""
        set_cached_weights(weights(self._settings))
        self._set_generators(_UNKNOWN)

    def _put(self, settings: list[Any], states: Iterable[Any]) -> None:
        """Set the captured state. The arguments are the current settings and generator states."""
        try:
            if settings is not self._settings and settings != self._settings:
                changes = zip(setters(), settings, self._settings, strict=True)
                _call_all((put, new) for put, old, new in changes if old != new)
        finally:
            self._set_generators(states)

    def _set_generators(self, now: Iterable[Any]) -> None:
        triples = zip(self._every or (), self._states, now)
        try:
            for each, state, moved in triples:
                if state is not moved:
                    each.set_state(state)
        except BaseException:
            _call_all((each.set_state, state) for each, state, _ in triples)
            raise


class _Restored:
    """The context in which an ambient state is set, for one use."""

    __slots__ = ("before", "state")

    def __init__(self, state: Ambient) -> None:
        self.state = state

    def __enter__(self) -> None:
        state = self.state
        # Not only the captured generators are read: a backend or NumPy may have been initialized since.
        self.before = state.capture(state._devices, state._generators, state._every is not None)
        torch.autocast_increment_nesting()  # as in torch.autocast, so that cached casts are dropped after the run
        known = self.before._every is state._every
        try:
            state._put(self.before._settings, self.before._states if known else _UNKNOWN)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: Any) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self.before._put(read_settings(), _UNKNOWN)


def _torch_part(state: Any) -> bytes | None:
    return bytes_of(state) if isinstance(state, torch.Tensor) else None


def _call_all(calls: Iterator[tuple[Callable[[Any], Any], Any]]) -> None:
    """Make all calls, even if one fails."""
    try:
        for call, value in calls:
            call(value)
    except BaseException:
        _call_all(calls)
        raise


_IN_A_GRAPH = (
    "A region is called while a CUDA graph is captured, where its recompute could not restore the random generators. "
    "Pass `preserve_rng_state=False` to it if it draws no random numbers; otherwise call it outside of the graph."
)
_get_state = methodcaller("get_state")
_UNKNOWN = repeat(object())  # equal to no state, so that all are set
