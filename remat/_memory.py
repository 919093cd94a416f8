"""What is remembered of a function from one of its calls to the next."""

from __future__ import annotations

import functools
import weakref
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch

from ._code import CACHE


class Known:
    """What is known of a module or of code, also where a function is made of it anew for each call."""

    __slots__ = ("by_level", "changing", "draws", "programs", "uses_func", "warnings")

    def __init__(self) -> None:
        self.by_level: set[tuple] = set()  # kinds of transforms under which each level must take its own derivative
        self.changing: set[str] = set()  # names of tensors that it was seen to change in place
        self.draws = False  # it draws random numbers
        self.uses_func = False  # it calls torch.func transforms, so it can't run under saved-tensor hooks
        self.warnings: set[str] = set()  # of what users were warned: once is enough
        self.programs: dict[Any, Any] = {}  # what first runs under policies did, by what judges for these


class Memory:
    """What a rematerialized function has learnt from its calls."""

    __slots__ = ("__weakref__", "known", "searched", "walk")

    def __init__(self, known: Known) -> None:
        self.known = known
        self.walk: Any = None  # the last search for what a function captures, if another may be spared by it
        self.searched: set[tuple] = set()  # kinds of transforms under which suspects were looked into

    def is_news(self, warning: str) -> bool:
        """Whether the user was not warned of it yet."""
        news = warning not in self.known.warnings
        self.known.warnings.add(warning)
        return news


# Keyed by id, for code is hashed by its contents, which is slow; the entry keeps the id valid.
_of_codes: dict[int, tuple[Any, Known]] = {}
_of_modules: weakref.WeakKeyDictionary[torch.nn.Module, Memory] = weakref.WeakKeyDictionary()


def memory_of(fn: Any) -> Memory:
    """The memory of a module, and of its methods; a new one for any other function."""
    if torch.compiler.is_compiling():  # then none is used, and Dynamo has no `id` for code
        return Memory(Known())
    module = _module_of(fn)
    if module is None:
        return Memory(_known_of(_subject(fn, 0)))
    memory = _of_modules.get(module)
    if memory is None:
        memory = _of_modules[module] = Memory(Known())
    return memory


def _module_of(fn: Any) -> torch.nn.Module | None:
    """The module that a function is, or is a method of."""
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def _subject(fn: Any, depth: int) -> Any:
    """The module or code that a function is about: what small wrappers call, which may be made anew for each call."""
    module = _module_of(fn)
    if module is not None:
        return module
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
    if depth == _DEPTH:
        return code
    if isinstance(fn, functools.partial):
        held = [item for arg in fn.args for item in (arg if isinstance(arg, tuple) else (arg,))]
        return _first(held, depth) or _subject(fn.func, depth + 1)
    if code is None:
        return None
    cells = []
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            cells.append(cell.cell_contents)
    return _first(cells, depth) or code


def _first(held: list[Any], depth: int) -> Any:
    """What the first module or function among these is about."""
    for each in held:
        if isinstance(each, (torch.nn.Module, FunctionType, MethodType, functools.partial)):
            return _subject(each, depth + 1)
    return None


_DEPTH = 4


def _known_of(subject: Any) -> Known:
    if subject is None:
        return Known()
    if isinstance(subject, torch.nn.Module):
        return memory_of(subject).known
    entry = _of_codes.get(id(subject))
    if entry is None:
        if len(_of_codes) >= CACHE:
            _of_codes.clear()
        entry = _of_codes[id(subject)] = subject, Known()
    return entry[1]
