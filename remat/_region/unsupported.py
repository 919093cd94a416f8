"""Errors for options and calls that ``remat`` doesn't have, but JAX or torch's checkpoint has."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from .._policy.policy import Policy

POLICY_IS_A_KEYWORD = "The policy is a keyword argument: `remat({}, policy=...)`."
_OPTIONS = {
    "static_argnums": "is not needed, because arguments that aren't tensors are passed as they are: leave it out",
    "static_argnames": "is not needed, because arguments that aren't tensors are passed as they are: leave it out",
    "offload_to_cpu": "is an option of `remat.compat.checkpoint_wrapper`; here it is `policy=policies.offload(...)`",
    "prevent_cse": "is not needed, because nothing merges a recompute with the forward: leave it out",
    "concrete": "is not needed, because Python control flow sees the values of tensors: leave it out",
    "use_reentrant": (
        "is not needed, because there is no reentrant variant: leave it out, or call "
        "`remat.compat.checkpoint(fn, x, use_reentrant=False)`"
    ),
    "context_fn": "is an option of `remat.compat.checkpoint(fn, x, context_fn=...)`; here it is `policy=`",
}


def refuse(fn: Any, others: Sequence[Any], options: Mapping[str, Any], known: Sequence[str]) -> NoReturn:
    """Raise an error that names what to write instead of ``remat(fn, *others, **options)``; ``known`` are its options.

    Raises:
        TypeError: always.
    """
    name = getattr(fn, "__name__", "fn")
    if others and len(others) == 1 and not options and _is_policy(others[0]):
        raise TypeError(POLICY_IS_A_KEYWORD.format(name))
    if others:
        instead = f"`remat({name})(x)`"
        instead += ", or `remat.compat.checkpoint(fn, x, use_reentrant=False)` as in torch"
        raise TypeError(f"remat takes only the function, and returns one that takes the arguments: {instead}.")
    for option in options:
        if option in _OPTIONS:
            raise TypeError(f"`{option}` {_OPTIONS[option]}.")
    option = next(iter(options))
    near = difflib.get_close_matches(option, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Its options are {', '.join(known)}."
    raise TypeError(f"remat has no option {option!r}. {hint}")


def _is_policy(value: Any) -> bool:
    return isinstance(value, Policy) or (callable(value) and not isinstance(value, (torch.nn.Module, torch.Tensor)))


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
