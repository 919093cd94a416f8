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

    __slots__ = ("changing", "draws", "programs", "uses_func", "warnings")

    def __init__(self) -> None:
        self.changing: set[str] = set()  # names of tensors that it was seen to change in place
        self.draws = False  # it draws random numbers
        self.uses_func = False  # it calls torch.func transforms, so it can't run under saved-tensor hooks
        self.warnings: set[str] = set()  # of what users were warned: once is enough
        self.programs: dict[Any, Any] = {}  # what first runs under policies did, by what judges for these


class Memory:
    """What a rematerialized function has learnt from its calls."""

    __slots__ = ("__weakref__", "known", "searched")

    def __init__(self, known: Known) -> None:
        self.known = known
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
    if not isinstance(fn, torch.nn.Module) and not isinstance(getattr(fn, "__self__", None), torch.nn.Module):
        subject = _subject(fn, 0)
        return Memory(Known() if subject is None else _known_of(subject))
    owner = fn if isinstance(fn, torch.nn.Module) else fn.__self__
    memory = _of_modules.get(owner)
    if memory is None:
        memory = _of_modules[owner] = Memory(Known())
    return memory


def _subject(fn: Any, depth: int) -> Any:
    """The module or code that a function is about: what small wrappers call, which may be made anew for each call."""
    if isinstance(fn, torch.nn.Module) or depth == _DEPTH:
        return fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__code__", None)
    if isinstance(fn, functools.partial):
        held = [item for arg in fn.args for item in (arg if isinstance(arg, tuple) else (arg,))]
        return _first(held, depth) or _subject(fn.func, depth + 1)
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
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


def _known_of(code: Any) -> Known:
    if isinstance(code, torch.nn.Module):
        return memory_of(code).known
    entry = _of_codes.get(id(code))
    if entry is None:
        if len(_of_codes) >= CACHE:
            _of_codes.clear()
        entry = _of_codes[id(code)] = code, Known()
    return entry[1]
