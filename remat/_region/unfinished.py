"""Functions whose body would run after the region has ended: generators and async functions."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch


def check_returns(fn: Any) -> None:
    """Check that a function has computed its result when it returns.

    Raises:
        TypeError: it is a generator function or an async function.
    """
    fn = getattr(fn, "__func__", fn) if isinstance(fn, (classmethod, staticmethod)) else fn
    called = fn.forward if isinstance(fn, torch.nn.Module) and hasattr(fn, "forward") else fn
    method = vars(type(called)).get("__call__")  # for callable objects
    for is_kind, kind in _KINDS:
        if is_kind(called) or is_kind(method):
            raise TypeError(
                f"remat takes functions that have computed their result when they return, but "
                f"{getattr(fn, '__name__', type(fn).__name__)} is {kind}. Apply remat to a function that it calls."
            )


_KINDS: list[tuple[Callable[[Any], bool], str]] = [
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isasyncgenfunction, "an async generator function"),
]
UNFINISHED = types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType


def refuse_unfinished(fn: Any, result: Any) -> NoReturn:
    """Raise an error for a result that is computed only after the region has ended."""
    name = getattr(fn, "__name__", type(fn).__name__)
    raise TypeError(
        f"{name} returned a {type(result).__name__}, whose body would run outside the region. Return its values, as in "
        f"`list(...)`."
    )
