"""What code reads of a class: the methods that a call reaches, the attributes that these read, and the slots."""

from __future__ import annotations

import functools
from inspect import ismemberdescriptor
from types import FunctionType
from typing import Any

from torch import nn

from ._code import CACHE, code_reads, is_library, wrapped


class ClassReads:
    """What is run and read when code reads these names from a class or an instance of it."""

    __slots__ = ("_libraries", "_seen", "_size", "attributes", "bases", "functions", "names", "read")

    def __init__(self, cls: type, names: tuple[str, ...]) -> None:
        self.bases = {base: vars(base) for base in cls.__mro__ if not is_library(base.__module__)}
        self._libraries = [vars(base) for base in cls.__mro__ if base not in self.bases]
        self.names = names
        self.read = names  # these, and all that the functions read
        self.functions: dict[FunctionType, tuple[type, str, Any]] = {}  # each with where it was found
        self.attributes: list[tuple[type, str]] = []  # of all bases, for `super()` and `Base.w` read them too
        self._size = -1
        self._seen: list[tuple[Any, str, Any]] = []

    def update(self) -> None:
        """Look again if the classes have been written to: entries added, or methods replaced."""
        size = 0
        for scope in self.bases.values():
            size += len(scope)
        if size == self._size:
            for scope, name, held in self._seen:
                if scope.get(name) is not held:
                    break
            else:
                return
        self._size = size
        functions: dict[FunctionType, tuple[type, str, Any]] = {}
        attributes: list[tuple[type, str]] = []
        done: dict[str, None] = {}
        queue = list(self.names)
        for name in queue:
            if name in done:
                continue
            done[name] = None
            for base, scope in self.bases.items():
                held = fn = scope.get(name, self)
                if held is self:
                    continue
                if not isinstance(held, _CALLED):
                    attributes.append((base, name))
                while fn is not None:
                    if isinstance(fn, FunctionType):
                        if fn in functions:
                            break
                        functions[fn] = base, name, held
                        queue += code_reads(fn.__code__).attributes
                    fn = wrapped(fn)
            for scope in self._libraries:  # they may call what a user's class overrides
                if isinstance(fn := scope.get(name), FunctionType):
                    queue += code_reads(fn.__code__).attributes
        self.functions, self.attributes, self.read = functions, attributes, tuple(done)
        self._seen = [(self.bases[base], name, held) for base, name, held in functions.values()]


_CALLED = (FunctionType, staticmethod, classmethod, property)


@functools.lru_cache(CACHE)
def class_reads(cls: Any, names: tuple[str, ...]) -> ClassReads | None:
    """What is read of a class, or an instance, by these names; None of a library's class."""
    found = ClassReads(cls, names)
    return found if found.bases else None


@functools.lru_cache(CACHE)
def call_reads(cls: Any) -> ClassReads | None:
    """What a call of an instance reads of its class."""
    return class_reads(cls, ("forward" if issubclass(cls, nn.Module) else "__call__",))


@functools.lru_cache(CACHE)
def slots(cls: Any) -> list[Any]:
    """The slots of the instances of a class. What classes that are written in C have may be read-only."""
    return [
        slot
        for base in cls.__mro__
        if "__slots__" in vars(base) and not is_library(base.__module__)
        for slot in vars(base).values()
        if ismemberdescriptor(slot)
    ]
