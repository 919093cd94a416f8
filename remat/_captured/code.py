"""The state that code and classes read: names in code, slots, and methods that are not a library's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import ismemberdescriptor
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch import nn

from .._core.contents import attributes

_ENTRIES = 4096  # code that is made at run time must not stay alive for ever

# pytest is in the list because it rewrites the assertions of test modules into calls of its own.
_LIBRARIES = sys.stdlib_module_names | {"_pytest", "functorch", "numpy", "optree", "pluggy", "pytest", "remat", "torch"}
# Keyed by id, because code is hashed by its contents, which is slow. The entry keeps the code alive, and the id valid.
_codes: dict[int, tuple[CodeType, tuple[str, ...] | None]] = {}


T = TypeVar("T")


class ByClass(dict[Any, T]):
    """What a function returns for a class.

    It is remembered for classes that can be imported. Others may hold tensors, as that of a parametrized module does.
    """

    def __init__(self, find: Callable[[Any], T]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, cls: Any) -> T:
        found = self._find(cls)
        if getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls:
            self[cls] = found
        return found


def is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def names_of(fn: FunctionType) -> tuple[str, ...] | None:
    """The names in the code of a function, nested functions included; None for a library's function."""
    code = fn.__code__
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    if len(_codes) >= _ENTRIES:
        _codes.clear()
    module = str(fn.__globals__.get("__name__"))
    # Doctests run in a copy of their module's globals, and are not a library's code.
    library = is_library(module) and vars(sys.modules.get(module, sys)) is fn.__globals__
    names = None if library else tuple(dict.fromkeys(_names(code)))
    _codes[id(code)] = code, names
    return names


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


@ByClass
def is_sharded(cls: Any) -> bool:
    """Whether FSDP manages the modules below in each run: it frees and replaces their parameters."""
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in cls.__mro__)


@ByClass
def may_add(cls: Any) -> bool:
    """Whether code may add parameters, buffers or modules to a module that has none: not to torch's own modules."""
    return not is_library(cls.__module__) or issubclass(cls, _CONTAINERS)


def called(cls: Any, name: str) -> Any:
    """The Python method of a class, or the function that it wraps."""
    method = getattr(cls, name, None)
    return method if isinstance(method, FunctionType) else wrapped(method)


def wrapped(value: Any) -> Any:
    """The function in a static method, a class method or a wrapper made with `functools.wraps`; or None."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return attributes(value).get("__wrapped__")


@ByClass
def slots(cls: Any) -> list[Any]:
    """The slots of the instances of a class, without those of library classes, which may be read-only."""
    return [
        slot
        for base in cls.__mro__
        if "__slots__" in vars(base) and not is_library(base.__module__)
        for slot in vars(base).values()
        if ismemberdescriptor(slot)
    ]


_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList, nn.Sequential)
