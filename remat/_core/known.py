"""Facts about a function that are remembered from one call to the next."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Shared:
    """What functions with the same code share. It saves time, and can't change what a call computes."""

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

    def __init__(self, shared: Shared | None = None) -> None:
        # It calls `torch.cond` or the like, which compile what they run: Dynamo guards whether a mode has said so.
        self.compiles = False
        self.shared = shared or Shared()

    def is_new_warning(self, warning: str) -> bool:
        """Whether this warning was not given yet; from now on it counts as given."""
        news = warning not in self.shared.warnings
        self.shared.warnings.add(warning)
        return news


_of_functions = WeakIdKeyDictionary()  # by identity, as equal modules are different modules


@functools.lru_cache(4096)  # not more, so that code made at run time is not kept alive forever
def _of_code(number: int, code: CodeType) -> Shared:
    """``number`` is the id of the code: two functions may have equal code."""
    return Shared()


def known_of(fn: Any) -> Known:
    """The ``Known`` of a function. A module and its methods have one; an object of another kind has a new one.

    Functions with the same code have the same ``Shared``, as small wrappers may be made anew for each call.
    """
    if torch.compiler.is_compiling():  # then it is not used, and Dynamo can't trace the `hash` of code
        return Known()
    fn = fn.__self__ if isinstance(fn, MethodType) and isinstance(fn.__self__, torch.nn.Module) else fn
    if not isinstance(fn, (torch.nn.Module, FunctionType, MethodType, functools.partial)):
        return Known()
    known = _of_functions.get(fn)
    if known is None:
        known = _of_functions[fn] = Known(_shared(fn))
    return known


def _shared(fn: Any) -> Shared:
    if isinstance(fn, functools.partial):
        return known_of(fn.func).shared
    fn = getattr(fn, "__func__", fn)
    return _of_code(id(fn.__code__), fn.__code__) if isinstance(fn, FunctionType) else Shared()
