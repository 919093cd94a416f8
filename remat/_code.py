"""What code reads: the names of globals and attributes."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

# pytest puts its own calls where a test module asserts something.
_LIBRARIES = sys.stdlib_module_names | {"_pytest", "functorch", "numpy", "optree", "pluggy", "pytest", "remat", "torch"}
CACHE = 4096  # entries per cache: a class or code made on the fly does not stay for ever


def is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def wrapped(value: Any) -> Any:
    """What a static or class method, a property, or the work of `functools.wraps`, stands for; or None."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return getattr(value, "__dict__", {}).get("__wrapped__")


class Reads(NamedTuple):
    """The names that code reads, nested functions included."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]


# Keyed by id, for code is hashed by its contents, which is slow; the entry keeps the id valid.
_codes: dict[int, tuple[CodeType, Reads | None]] = {}


def reads(fn: FunctionType) -> Reads | None:
    """What the code of `fn` reads; None in a library."""
    code = fn.__code__
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    if len(_codes) >= CACHE:
        _codes.clear()
    module = str(fn.__globals__.get("__name__"))
    # Doctests run in a copy of their module's globals, and are no library.
    library = is_library(module) and vars(sys.modules.get(module, sys)) is fn.__globals__
    found = None if library else code_reads(code)
    _codes[id(code)] = code, found
    return found


def code_reads(code: CodeType) -> Reads:
    names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for part in _nested(code):
        for step in dis.get_instructions(part):
            if step.opname == "LOAD_GLOBAL":
                names[step.argval] = None
            elif "ATTR" in step.opname or "METHOD" in step.opname:
                attributes[step.argval] = None
    return Reads(tuple(names), tuple(attributes))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)
