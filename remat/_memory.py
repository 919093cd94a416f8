"""What is remembered of a function from one of its calls to the next."""

from __future__ import annotations

import functools
import weakref
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
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
        return Memory(Known() if code is None else _known_of(code))
    memory = _of_modules.get(owner)
    if memory is None:
        memory = _of_modules[owner] = Memory(Known())
    return memory


def _known_of(code: Any) -> Known:
    entry = _of_codes.get(id(code))
    if entry is None:
        if len(_of_codes) >= CACHE:
            _of_codes.clear()
        entry = _of_codes[id(code)] = code, Known()
    return entry[1]
