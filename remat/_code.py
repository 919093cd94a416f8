"""What code reads: the globals of a function, and the methods and slots of a class that a call of it reaches."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from inspect import ismemberdescriptor
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_LIBRARIES = sys.stdlib_module_names | {"functorch", "numpy", "optree", "remat", "torch"}
CACHE = 4096  # entries per cache: a class or code made on the fly does not stay for ever


def is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def wrapped(value: Any) -> Any:
    """What a static or class method, or the work of `functools.wraps`, stands for; or None."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__dict__", {}).get("__wrapped__")


# Keyed by id, for code is hashed by its contents, which is slow; the entry keeps the id valid.
_codes: dict[int, tuple[CodeType, tuple[str, ...] | None]] = {}


def global_names(fn: FunctionType) -> tuple[str, ...] | None:
    """The globals that the code of `fn` reads, nested functions included; None in a library."""
    code = fn.__code__
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    if len(_codes) >= CACHE:
        _codes.clear()
    module = str(fn.__globals__.get("__name__"))
    # Doctests run in a copy of their module's globals, and are no library.
    library = is_library(module) and vars(sys.modules.get(module, sys)) is fn.__globals__
    steps = (step for part in nested_code(code) for step in dis.get_instructions(part))
    read = dict.fromkeys(step.argval for step in steps if step.opname == "LOAD_GLOBAL")
    names = None if library else tuple(read)
    _codes[id(code)] = code, names
    return names


def nested_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested_code(const)


@functools.lru_cache(CACHE)
def class_facts(cls: Any) -> tuple[list[Any], tuple[FunctionType, ...]]:
    """The slots of the instances, and the functions that run when one is called."""
    slots = [
        slot
        for base in cls.__mro__
        if not is_library(base.__module__)
        for slot in vars(base).values()
        if ismemberdescriptor(slot)
    ]
    return slots, methods(cls, ("forward" if issubclass(cls, nn.Module) else "__call__",))


@functools.lru_cache(CACHE)
def methods(cls: Any, names: tuple[str, ...]) -> tuple[FunctionType, ...]:
    """The functions of `cls` named by `names`, by the code of these, and so on."""
    bases = [vars(base) for base in cls.__mro__ if not is_library(base.__module__)]
    found: dict[FunctionType, None] = {}
    todo = list(names)
    for name in todo:
        for base in bases:
            fn = base.get(name)
            while fn is not None:
                if isinstance(fn, FunctionType):
                    if fn in found:
                        break
                    found[fn] = None
                    todo += (name for code in nested_code(fn.__code__) for name in code.co_names)
                fn = wrapped(fn)
    return tuple(found)
