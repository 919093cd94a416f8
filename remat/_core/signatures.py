"""Which arguments a function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def accepts(fn: Callable, args: Iterable = (), kwargs: Mapping[str, Any] = {}, more: bool = False) -> bool | None:
    """Whether ``fn`` takes these arguments; None if it has no signature, as some functions written in C.

    ``more``: there may be others beside them.
    """
    try:
        signature = inspect.signature(fn)
        (signature.bind_partial if more else signature.bind)(*args, **kwargs)
    except ValueError:
        return None
    except TypeError:
        return False
    return True
