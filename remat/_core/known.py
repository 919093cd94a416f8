"""Facts about a function that are remembered from one call to the next."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

_ENTRIES = 4096  # so that code made at run time is not kept alive forever


class Shared:
    """What functions with the same code share. It saves time, and can't change what a call computes."""

    __slots__ = ("choices", "programs", "warnings")

    def __init__(self) -> None:
        # Each is given once.
        self.warnings: set[str] = set()
        # The operations of the last first run under a policy, by the policy's judge. A later run compares each of its
        # own with them before it uses what is known of it.
        self.programs: dict[Any, Any] = {}
        # What a policy with a budget has chosen to save, by policy. A later run compares its operations too, and what
        # is saved changes no value.
        self.choices: dict[Any, list[Any]] = {}


class Known:
    """What is remembered of one rematerialized function."""

    __slots__ = ("compiles", "graded", "shared")

    def __init__(self, shared: Shared | None = None) -> None:
        # Both save time only. Its first run restores ``grad`` levels from the start; otherwise it would start twice.
        self.graded = False
        # It calls `torch.cond` or the like, which compile what they run: Dynamo guards whether a mode has said so.
        self.compiles = False
        self.shared = shared or Shared()

    def is_new_warning(self, warning: str) -> bool:
        """Whether this warning was not given yet; from now on it counts as given."""
        warnings = self.shared.warnings
        news = warning not in warnings
        warnings.add(warning)
        return news


# Keyed by ids, as code is hashed by its contents, which is slow. The entries keep the code alive, so the ids are valid.
Entries: TypeAlias = dict[tuple[int, ...], tuple[Any, Shared]]
_of_codes: Entries = {}
# Equal modules are different modules, and the `__eq__` of their class may do anything.
_of_functions = WeakIdKeyDictionary()
_around_modules = WeakIdKeyDictionary()


def known_of(fn: Any) -> Known:
    """The ``Known`` of a function. A module and its methods have one; an object of another kind has a new one.

    Functions have the same ``Shared`` if they have the same code and wrap functions with the same code, or the same
    module. Small wrappers may be made anew for each call, but one that wraps something else may do something else.
    """
    if torch.compiler.is_compiling():  # then it is not used, and Dynamo can't trace the `id` of code
        return Known()
    module = _module_of(fn)
    if module is None and not isinstance(fn, (FunctionType, MethodType, functools.partial)):
        return Known()
    owner = fn if module is None else module
    known = _of_functions.get(owner)
    if known is None:
        known = _of_functions[owner] = Known(None if module is not None else _of_path(_path(fn, 0)))
    return known


def _module_of(fn: Any) -> torch.nn.Module | None:
    """The module that a function is, or is a method of."""
    owner = fn.__self__ if isinstance(fn, MethodType) else fn
    return owner if isinstance(owner, torch.nn.Module) else None


def _path(fn: Any, depth: int) -> tuple[Any, ...]:
    """The code of a function, then that of the function that it wraps, and so on. A module ends the path."""
    module = _module_of(fn)
    if module is not None:
        return (module,)
    if isinstance(fn, functools.partial):
        values = [item for arg in fn.args for item in (arg if type(arg) is tuple else (arg,))]
        return (*_path(fn.func, depth + 1), *_first(values, depth)) if depth < _DEPTH else ()
    fn = fn.__func__ if isinstance(fn, MethodType) else fn
    if not isinstance(fn, FunctionType):
        return ()
    code = fn.__code__
    cells = []
    for cell in fn.__closure__ or ():
        with suppress(ValueError):  # the cell is empty
            cells.append(cell.cell_contents)
    return code, *_first(cells, depth)


def _first(values: list[Any], depth: int) -> tuple[Any, ...]:
    """The path of the first module or function among these values."""
    for each in values:
        if isinstance(each, (torch.nn.Module, FunctionType, MethodType, functools.partial)):
            return _path(each, depth + 1) if depth < _DEPTH else ()
    return ()


_DEPTH = 4


def _of_path(path: tuple[Any, ...]) -> Shared:
    if not path:
        return Shared()
    module = next((each for each in path if isinstance(each, torch.nn.Module)), None)
    entries = _of_codes if module is None else _around_modules.setdefault(module, {})
    codes = [each for each in path if not isinstance(each, torch.nn.Module)]  # modules must not be kept alive
    key = tuple(map(id, codes))
    entry = entries.get(key)
    if entry is None:
        if len(entries) >= _ENTRIES:
            entries.clear()
        entry = entries[key] = codes, Shared()
    return entry[1]
