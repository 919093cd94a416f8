"""What code and classes tell of the state that they read: names in code, slots, methods of the user's own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from inspect import ismemberdescriptor
from types import CodeType, FunctionType
from typing import Any

from torch import nn

CACHE = 4096  # entries per cache: a class or code made on the fly does not stay for ever

# pytest puts its own calls where a test module asserts something.
_LIBRARIES = sys.stdlib_module_names | {"_pytest", "functorch", "numpy", "optree", "pluggy", "pytest", "remat", "torch"}
# Keyed by id, for code is hashed by its contents, which is slow; the entry keeps the id valid.
_codes: dict[int, tuple[CodeType, tuple[str, ...] | None]] = {}


def is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def names_of(fn: FunctionType) -> tuple[str, ...] | None:
    """The names in the code of a function, nested functions included; None in a library."""
    code = fn.__code__
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    if len(_codes) >= CACHE:
        _codes.clear()
    module = str(fn.__globals__.get("__name__"))
    # Doctests run in a copy of their module's globals, and are no library.
    library = is_library(module) and vars(sys.modules.get(module, sys)) is fn.__globals__
    names = None if library else tuple(dict.fromkeys(_names(code)))
    _codes[id(code)] = code, names
    return names


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


@functools.lru_cache(CACHE)
def is_sharded(cls: Any) -> bool:
    """Whether FSDP says, in each run, what the modules below hold: it frees and exchanges their parameters."""
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in cls.__mro__)


@functools.lru_cache(CACHE)
def may_add(cls: Any) -> bool:
    """Whether code may add parameters, buffers or modules to a module without any: not to those of torch."""
    return not is_library(cls.__module__) or issubclass(cls, _CONTAINERS)


def called(cls: Any, name: str) -> Any:
    """The method of a class, unless it is a library's."""
    method = getattr(cls, name, None)
    return method if isinstance(method, FunctionType) else wrapped(method)


def wrapped(value: Any) -> Any:
    """What a static or class method, or the work of `functools.wraps`, stands for; or None."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return getattr(value, "__dict__", {}).get("__wrapped__")


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


_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList, nn.Sequential)
