"""Functions for `map`, which runs them for many objects without a frame of Python for each."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

# What a callable returns that takes nothing.
call: Callable[[Callable[[], Any]], Any] = getattr(operator, "call", operator.methodcaller("__call__"))  # Python 3.11

requires_grad = operator.attrgetter("requires_grad")  # of a tensor


def gone() -> None:
    """What a weak reference to a tensor says that is no longer there."""
