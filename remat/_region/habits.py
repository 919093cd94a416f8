"""What people write who come from JAX or from torch's checkpoint, and what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .._policy.policy import Policy

_OPTIONS = {
    "static_argnums": "is not needed, because arguments that aren't tensors just pass: leave it out",
    "prevent_cse": "is not needed, because nothing merges a recompute with the forward: leave it out",
    "concrete": "is not needed, because Python control flow sees the values of tensors: leave it out",
    "use_reentrant": (
        "is not needed, because there is no reentrant variant: leave it out, or call "
        "`remat.compat.checkpoint(fn, x, use_reentrant=False)`"
    ),
    "context_fn": "is an option of `remat.compat.checkpoint(fn, x, context_fn=...)`; here it is `policy=`",
}


def refuse(fn: Any, others: Sequence[Any], options: Mapping[str, Any]) -> NoReturn:
    """Say what to write instead of ``remat(fn, *others, **options)``.

    Raises:
        TypeError: in any case.
    """
    name = getattr(fn, "__name__", "fn")
    if others and len(others) == 1 and not options and _is_policy(others[0]):
        raise TypeError(f"A policy is a keyword, so pass it as `policy=`: `remat({name}, policy=...)`.")
    if others:
        instead = f"`remat({name})(x)`"
        if options:
            instead += ", or `remat.compat.checkpoint(fn, x, use_reentrant=False)` as in torch"
        raise TypeError(f"remat takes the function alone, and returns one that takes the arguments: {instead}.")
    for option in options:
        if option in _OPTIONS:
            raise TypeError(f"`{option}` {_OPTIONS[option]}.")
    raise TypeError(f"remat has no option {next(iter(options))!r}.")


def _is_policy(value: Any) -> bool:
    return isinstance(value, Policy) or (callable(value) and not isinstance(value, (torch.nn.Module, torch.Tensor)))


def check_returns(fn: Any) -> None:
    """Whether a function has done its work when it returns.

    Raises:
        TypeError: it is a generator function, or an async one.
    """
    fn = getattr(fn, "__func__", fn) if isinstance(fn, (classmethod, staticmethod)) else fn
    called = fn.forward if isinstance(fn, torch.nn.Module) and hasattr(fn, "forward") else fn
    method = vars(type(called)).get("__call__")  # of an object that is called
    for is_one, kind in _KINDS:
        if is_one(called) or is_one(method):
            raise TypeError(
                f"remat takes functions that have done their work when they return, but "
                f"{getattr(fn, '__name__', type(fn).__name__)} is {kind}. Make a region of what it calls."
            )


_KINDS: list[tuple[Callable[[Any], bool], str]] = [
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isasyncgenfunction, "an async generator function"),
]
