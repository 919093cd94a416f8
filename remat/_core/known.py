"""What is remembered of a function from one of its calls to the next."""

from __future__ import annotations

import functools
import weakref
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch

_ENTRIES = 4096  # code that is made on the fly does not stay for ever


class Known:
    """What a rematerialized function has learnt from its calls, also where it is made anew for each call."""

    __slots__ = ("by_level", "changing", "choices", "compiles", "graded", "programs", "uses_func", "warnings")

    def __init__(self) -> None:
        self.by_level: set[tuple] = set()  # kinds of transforms under which each level must take its own derivative
        self.changing: set[str] = set()  # names of tensors that it was seen to change in place
        self.compiles = False  # it calls `torch.cond` or the like, which compile what they run
        self.graded = False  # it can tell whether the ``grad`` levels are there
        self.uses_func = False  # it calls torch.func transforms, so it can't run under saved-tensor hooks
        self.warnings: set[str] = set()  # of what users were warned: once is enough
        self.programs: dict[Any, Any] = {}  # what the last first run did under a policy, by what judges for that
        self.choices: dict[Any, list[Any]] = {}  # what a policy with a budget has chosen to keep, by the policy

    def is_news(self, warning: str) -> bool:
        """Whether the user was not warned of it yet."""
        news = warning not in self.warnings
        self.warnings.add(warning)
        return news


# Keyed by ids, for code is hashed by its contents, which is slow; the entries keep the ids valid.
Entries: TypeAlias = dict[tuple[int, ...], tuple[Any, Known]]
_of_codes: Entries = {}
_of_modules: weakref.WeakKeyDictionary[torch.nn.Module, Known] = weakref.WeakKeyDictionary()
_around_modules: weakref.WeakKeyDictionary[torch.nn.Module, Entries] = weakref.WeakKeyDictionary()


def known_of(fn: Any) -> Known:
    """What is known of a function; of a module and its methods it is the same.

    What is known is that of the function's code together with the code or the module of what it wraps: small wrappers
    may be made anew for each call, but another function that is wrapped, or that wraps it, may do something else.
    """
    if torch.compiler.is_compiling():  # then none is used, and Dynamo has no `id` for code
        return Known()
    module = _module_of(fn)
    if module is None:
        return _of_path(_path(fn, 0))
    known = _of_modules.get(module)
    if known is None:
        known = _of_modules[module] = Known()
    return known


def _module_of(fn: Any) -> torch.nn.Module | None:
    """The module that a function is, or is a method of."""
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def _path(fn: Any, depth: int) -> tuple[Any, ...]:
    """The code of a function and, where it holds another one, of that and so on; a module is the end of it."""
    module = _module_of(fn)
    if module is not None:
        return (module,)
    if isinstance(fn, functools.partial):
        held = [item for arg in fn.args for item in (arg if isinstance(arg, tuple) else (arg,))]
        return (*_path(fn.func, depth + 1), *_first(held, depth)) if depth < _DEPTH else ()
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
    if code is None:
        return ()
    cells = []
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            cells.append(cell.cell_contents)
    return code, *_first(cells, depth)


def _first(held: list[Any], depth: int) -> tuple[Any, ...]:
    """The path of the first module or function among these."""
    for each in held:
        if isinstance(each, (torch.nn.Module, FunctionType, MethodType, functools.partial)):
            return _path(each, depth + 1) if depth < _DEPTH else ()
    return ()


_DEPTH = 4


def _of_path(path: tuple[Any, ...]) -> Known:
    if not path:
        return Known()
    module = next((each for each in path if isinstance(each, torch.nn.Module)), None)
    entries = _of_codes if module is None else _around_modules.setdefault(module, {})
    codes = [each for each in path if not isinstance(each, torch.nn.Module)]  # of which none may be kept alive
    key = tuple(map(id, codes))
    entry = entries.get(key)
    if entry is None:
        if len(entries) >= _ENTRIES:
            entries.clear()
        entry = entries[key] = codes, Known()
    return entry[1]
