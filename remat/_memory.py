"""What is remembered of a function from one of its calls to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")

# Modules and code that drew random numbers: known of a function that is made anew for each call, too.
_drawing: weakref.WeakSet[Any] = weakref.WeakSet()
# What first runs of code did, by the policy that they were under.
_programs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
# Of what users were warned: once is enough.
_warnings: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class Memory:
    """What a rematerialized function has learnt from its calls."""

    source: Any = None  # the module or the code that it runs
    changing: set[str] = field(default_factory=set)  # names of tensors that it was seen to change in place
    searched: set[tuple] = field(default_factory=set)  # kinds of transforms under which suspects were looked into
    by_policy: dict[Any, Any] | None = None  # what first runs of its source did
    uses_func: bool = False  # it calls torch.func transforms, so it can't run under saved-tensor hooks

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, as far as is known."""
        return self.source in _drawing

    def found_to_draw(self) -> None:
        """Remember that it draws random numbers."""
        _drawing.add(self._known_source())

    def programs(self, judge: K, kind: Callable[[], T]) -> T:
        """What its last first runs under a policy did, an object of a certain kind."""
        if self.by_policy is None:
            self.by_policy = _programs.setdefault(self._known_source(), {})
        return self.by_policy.get(judge) or self.by_policy.setdefault(judge, kind())

    def is_news(self, warning: str) -> bool:
        """Whether the user was not warned of it yet."""
        told = _warnings.setdefault(self._known_source(), set())
        news = warning not in told
        told.add(warning)
        return news

    def _known_source(self) -> Any:
        if self.source is None:
            self.source = _Source()
        return self.source


class _Source:
    """Stands for a function whose code can't be told."""


def memory_of(fn: Any) -> Memory:
    """A new memory for a function, method, callable object or module."""
    owner = getattr(fn, "__self__", None)
    if isinstance(fn, torch.nn.Module):
        return Memory(fn)
    if isinstance(owner, torch.nn.Module):
        return Memory(owner)
    return Memory(getattr(fn, "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None))
