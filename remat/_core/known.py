"""Facts about a function that are remembered from one call to the next."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .lines import Line, warn


class Known:
    """What is remembered of one module, or of functions with the same code. It can't change what a call computes."""

    def __init__(self) -> None:
        # It calls `torch.cond` or the like, which compile what they run: Dynamo guards whether a mode has said so.
        self.compiles = False
        # The operations of the last first run under a policy, by the policy. A later run compares each of its
        # own with them before it uses what is known of it.
        self.programs: dict[Any, Any] = {}
        # What a policy with a budget has chosen to save, by policy. A later run compares its operations too.
        self.choices: dict[Any, list[Any]] = {}
        self.warnings: set[str] = set()  # the keys of those that were given

    def warn_once(self, key: str, message: str, line: Line | None = None) -> None:
        """Warn at a line, by default the current one, unless a warning with this key was given before."""
        if key not in self.warnings:
            self.warnings.add(key)
            warn(message, line)


_of_modules = WeakIdKeyDictionary()  # by identity, as equal modules are different modules


@functools.lru_cache(4096)  # not more, so that code made at run time is not kept alive forever
def _of_code(number: int, code: CodeType) -> Known:
    """``number`` is the id of the code: two functions may have equal code."""
    return Known()


def known_of(fn: Any) -> Known:
    """The ``Known`` of a module or its methods, or of a function's code, as small wrappers may be made for each call.

    An object of another kind has a new one.
    """
    if torch.compiler.is_compiling():  # then it is not used, and Dynamo can't trace the `hash` of code
        return Known()
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, MethodType):
        fn = fn.__self__ if isinstance(fn.__self__, torch.nn.Module) else fn.__func__
    if isinstance(fn, torch.nn.Module):
        return _of_modules.setdefault(fn, Known())
    return _of_code(id(fn.__code__), fn.__code__) if isinstance(fn, FunctionType) else Known()
