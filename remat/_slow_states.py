"""The states of the host's random generators, torch's, Python's and NumPy's, which are slow to read.

Each region asks for them three times, and nearly always they have not moved since, as a few bytes of their memory tell
in 1 us. Reading takes torch's 5 us, Python's 8 and NumPy's 30.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from . import _torch
from ._bulk import call

Reader = Callable[[], Any]


class Source(NamedTuple):
    """A generator.

    `find` says what reads the memory by which it is known whether it has moved; among it must be which object it is, if
    another one may take its place. It finds nothing if the memory isn't known to hold all of the state.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    find: Callable[[], tuple[Reader, ...]]


def together(*sources: Source) -> Source:
    """Several generators as one, for those that seldom move: one look tells it of all."""

    def write(states: Sequence[Any]) -> None:
        for source, state in zip(sources, states):
            source.write(state)

    def find() -> tuple[Reader, ...]:
        found = [source.find() for source in sources]
        return tuple(chain(*found)) if all(found) else ()

    return Source(lambda: [source.read() for source in sources], write, find)


class State(NamedTuple):
    """The state of a generator, and what was read of its memory then, None if that doesn't tell it."""

    look: tuple | None
    value: Any


class SlowState:
    """A generator and its last state."""

    __slots__ = ("_last", "_readers", "_source")

    def __init__(self, source: Source) -> None:
        self._source = source
        self._readers: tuple[Reader, ...] = ()
        self._last = State(None, None)

    def get_state(self) -> State:
        last = self._last
        return last if tuple(map(call, self._readers)) == last[0] else self._moved()

    def _moved(self) -> State:
        look = self._look()
        while True:
            state = State(look, self._source.read())
            look = self._look()
            if look == state[0]:  # else another thread has drawn meanwhile
                self._last = state
                return state

    def _look(self) -> tuple | None:
        self._readers = readers = self._source.find()
        return tuple(map(call, readers)) or None

    def set_state(self, state: State) -> None:
        look = state[0]
        if look is None or look != tuple(map(call, self._readers)):
            self._source.write(state[1])
            self._last = state


def _reader(obj: Any, part: slice = slice(None)) -> Reader:
    """Reads what a Python object holds in its own memory, beyond the header; or a part of that."""
    header = object.__basicsize__
    start, stop, _ = part.indices(type(obj).__basicsize__ - header)
    return _memory_at(id(obj) + header, slice(start, stop), obj)


def _memory_at(address: int, part: slice, owner: Any) -> Reader:
    memory: Any = (ctypes.c_char * (part.stop - part.start)).from_address(address + part.start)
    memory.owner = owner  # which must live as long
    return memoryview(memory).tobytes


def _changes(read: Reader, act: Callable[[], Any]) -> list[int]:
    """Which bytes change."""
    before = read()
    act()
    return [i for i, (old, new) in enumerate(zip(before, read())) if old != new]


def _telling_part(read: Reader, draw: Callable[[], Any]) -> slice | None:
    """The few bytes of a Mersenne twister by which each draw is seen.

    A draw moves the position, and after the last one all of the state is made anew: that is the position, and a part
    of the state beside it. `read` is of one to try it out.
    """
    for _ in range(4):
        draw()  # past the first position
    moved = _changes(read, draw)
    return slice(max(0, moved[0] - 32), moved[-1] + 32) if moved else None


# --- Python's -------------------------------------------------------------------------------------------------------

_python_part = _telling_part(_reader(new := random.Random(0)), new.random) or slice(None)


def _of_python() -> tuple[Reader, ...]:
    generator = random.getstate.__self__  # type: ignore[attr-defined]
    which, normal = partial(getattr, random, "getstate"), partial(getattr, generator, "gauss_next")
    return which, normal, _reader(generator, _python_part)


python = Source(random.getstate, random.setstate, _of_python)


# --- NumPy's --------------------------------------------------------------------------------------------------------


@cache
def numpy() -> Source:
    import numpy.random as np_random

    state: Any = vars(np_random)["get_state"].__self__  # beside the bits, half a pair of normals

    new = np_random.MT19937(0)
    part = _telling_part(_reader(new), new.random_raw) or slice(None)

    def find() -> tuple[Reader, ...]:
        bits = state._bit_generator
        if type(bits) is not np_random.MT19937:  # another may keep its state elsewhere
            return ()
        return partial(getattr, state, "_bit_generator"), _reader(state), _reader(bits, part)

    return Source(partial(np_random.get_state, legacy=False), np_random.set_state, find)


# --- torch's, of the host -------------------------------------------------------------------------------------------

# A Mersenne twister as torch writes it down, in words of 8 bytes; and in memory, in words of 4. There its position
# stands before its 624 words, and the second halves of pairs of normals after.
_STATE_BYTES = 5056
_OBJECT_BYTES = 2624


def _parts_of_torch() -> list[slice]:
    """Where the position is and where the halves are, as tried out; nothing if it isn't as expected.

    No mode and no level may have a part in that, as this package may be imported under any.
    """
    new = torch.Generator()
    if new.get_state().nbytes != _STATE_BYTES or torch.jit.is_tracing():  # it would record the draws
        return []
    with _torch.without_levels(), _torch.without_dispatch(), _torch.without_torch_function():
        return _try_out(new)


def _try_out(new: torch.Generator) -> list[slice]:
    read = _memory_at(_torch.address_of_generator(new), slice(0, _OBJECT_BYTES), new)
    kinds = [torch.empty(1, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.float64)]
    position = _telling_part(read, partial(kinds[0].uniform_, generator=new))
    halves: set[int] = set()
    for kind in (*kinds, *kinds):
        kind.normal_(generator=new)  # draws a pair, and keeps the second half
        moved = _changes(read, partial(kind.normal_, generator=new))  # takes it
        if not moved:
            return []
        halves.update(moved)
    return [] if position is None else [position, slice(min(halves) - 16, max(halves) + 1)]


_torch_parts = _parts_of_torch()


@cache
def _of_torch() -> tuple[Reader, ...]:
    generator = torch.default_generator
    address = _torch.address_of_generator(generator)
    return tuple([_memory_at(address, part, generator) for part in _torch_parts])


torch_host = Source(torch.default_generator.get_state, torch.default_generator.set_state, _of_torch)
