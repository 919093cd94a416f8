"""Which arguments a function takes, and errors about wrong ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable)


def accepts(fn: Callable, args: Iterable = (), kwargs: Mapping[str, Any] = {}, more: bool = False) -> bool | None:
    """Whether ``fn`` takes these arguments, or these and ``more``; None without a signature, as some written in C."""
    try:
        signature = inspect.signature(fn)
        (signature.bind_partial if more else signature.bind)(*args, **kwargs)
    except ValueError:
        return None
    except TypeError:
        return False
    return True


def lists_arguments(fn: F) -> F:
    """Let Python's error about a wrong argument of a public function list those that it takes."""
    parameters = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = ", ".join(f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)

    @wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next is None:  # raised by this call itself
                raise TypeError(f"Call it as `{fn.__name__}({names})`: {error}.") from None
            raise

    return cast(F, called)
