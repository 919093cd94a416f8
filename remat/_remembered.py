"""Walks that need not be made again: of a function that reads functions alone, as long as it reads the same ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

from ._bulk import call
from ._captured import NOTHING, find
from ._code import reads
from ._memory import Memory
from ._places import MISSING
from ._rebound import rebound
from ._walk import Found, visits

_parts = attrgetter("__code__", "__closure__", "__defaults__", "__kwdefaults__")
_attributes = attrgetter("__dict__")
_contents = attrgetter("cell_contents")
_wrapped = attrgetter("__wrapped__")

_SMALL = frozenset([
    type(None), bool, int, float, complex, str, bytes, type, CodeType, FunctionType, BuiltinFunctionType, ModuleType,
])  # fmt: skip


class Remembered(Found):
    """A walk through functions and through what wraps functions, and all that decided where it went.

    Raises:
        ValueError: a closure cell is empty.
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
        self._globals: list[Callable] = [partial(scope.get, name, MISSING) for scope, each in names for name in each]
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

    def keeps(self, memory: Memory) -> bool:
        """Whether it would keep anything alive that may be large, or ``memory`` itself."""
        own = any(getattr(each, "_memory", None) is memory for each in self._wrappers)
        return own or not all(map(self._is_small, self._before))

    def _is_small(self, value: Any) -> bool:
        if type(value) is tuple:
            return all(type(item) is CellType or self._is_small(item) for item in value)
        return type(value) in _SMALL or any(value is each for each in self._wrappers)

    def put_back(self) -> None:
        """Undo what has been bound to something else since."""
        rebound(self._held, cells=self.cells).__enter__()  # for good


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
    last, memory.walk = memory.walk, None
    if last is None or last[0] is not fn or not last[1].holds():
        found = find(fn)
        last = _to_remember(found, fn, memory)
        if last is None:
            return found
    memory.walk = last
    return last[1]


def _to_remember(found: Found, fn: FunctionType, memory: Memory) -> tuple[FunctionType, Remembered] | None:
    parts = _only_functions(found)
    if parts is None:
        return None
    try:
        walk = Remembered(found, *parts)
    except ValueError:
        return None
    return None if walk.keeps(memory) else (fn, walk)


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
        elif visit is not visits[BuiltinFunctionType]:
            return None
    return functions, wrappers
