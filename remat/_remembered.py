"""Walks that need not be made again: of a function that reads functions alone, as long as it reads the same ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinMethodType, CellType, FunctionType
from typing import Any

from ._bulk import call
from ._captured import NOTHING, find
from ._code import reads
from ._memory import Memory
from ._walk import Found, visits

_parts = attrgetter("__code__", "__closure__", "__defaults__", "__kwdefaults__")
_attributes = attrgetter("__dict__")
_contents = attrgetter("cell_contents")
_wrapped = attrgetter("__wrapped__")


class Remembered(Found):
    """A walk through functions and through what wraps functions, and all that decided where it went.

    It has met no tensor, so that it keeps none alive.
    """

    __slots__ = ("_before", "_cells", "_functions", "_globals", "_held", "_wrappers")

    def __init__(self, found: Found, functions: list[FunctionType], wrappers: list[Any]) -> None:
        super().__init__()
        self.cells = found.cells
        self._held = found.holders()
        self._functions, self._wrappers = functions, wrappers
        closures = [fn.__closure__ for fn in functions if fn.__closure__]
        self._cells: list[CellType] = list(chain(*closures))
        names = [(fn.__globals__, names.globals) for fn in functions if (names := reads(fn)) is not None]
        self._globals: list[Callable] = [partial(scope.get, name) for scope, each in names for name in each]
        self._before = self._now()

    def holders(self) -> list[tuple[Any, Any]]:
        return self._held

    def _now(self) -> list[Any]:
        read = map(call, self._globals), map(_contents, self._cells), map(_wrapped, self._wrappers)
        return list(chain(*map(_parts, self._functions), *read))

    def holds(self) -> bool:
        """Whether a walk would go the same way."""
        try:
            now = self._now()
        except (AttributeError, ValueError):  # a cell is empty
            return False
        before = self._before
        return len(now) == len(before) and all(map(is_, now, before)) and not any(map(_attributes, self._functions))

    def put_back(self) -> None:
        """Undo what has been bound to something else since."""
        for place, value in self._held:
            if place.get() is not value:
                place.set(value)
        for cell, value in self.cells:
            cell.cell_contents = value


class unchanged:
    """While a function runs again that finds all as it was: after it, all is so."""

    __slots__ = ("_walk",)

    def __init__(self, walk: Remembered) -> None:
        self._walk = walk

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        if not self._walk.holds():
            self._walk.put_back()


def walk(fn: Any, leaves: list[Any], memory: Memory) -> Found:
    """What ``find(fn, *leaves)`` finds."""
    if leaves or type(fn) is not FunctionType:
        return find(fn, *leaves)
    last = memory.walk
    if last is not None and last[0] is fn and last[1].holds():
        return last[1]
    found = find(fn)
    parts = _only_functions(found)
    memory.walk = None if parts is None else (fn, Remembered(found, *parts))
    return found


def _only_functions(found: Found) -> tuple[list[FunctionType], list[Any]] | None:
    """The functions of a walk, and what wraps functions, if it has met nothing else that leads anywhere."""
    if found is NOTHING or found.places or found.contents:
        return None
    functions, wrappers = [], []
    for visit, value, _ in found.queue:
        if visit is visits[FunctionType]:
            functions.append(value)
        elif visit is visits.wrapper and "__wrapped__" in vars(value):
            wrappers.append(value)
        elif visit is not visits[BuiltinMethodType]:
            return None
    return functions, wrappers
