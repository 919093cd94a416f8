"""Whether a callable takes some arguments, without calling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def accepts(fn: Callable, *args: Any) -> bool | None:
    """Whether ``fn`` takes these arguments; None if it has no signature, as some functions written in C."""
    try:
        inspect.signature(fn).bind(*args)
    except ValueError:
        return None
    except TypeError:
        return False
    return True
