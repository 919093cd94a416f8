"""What objects and containers hold. A user's class may override any method: those of its built-in base are called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any


def attributes(value: Any) -> Any:
    """The ``__dict__`` of an object, or an empty one."""
    return object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {}


def size(container: Any) -> int:
    """The number of values in a dict, list or tuple."""
    return int(_base(container).__len__(container))


def contents(container: Any) -> Iterable[Any]:
    """The values in a dict, list or tuple."""
    base = _base(container)
    found: Iterable[Any] = dict.values(container) if base is dict else base.__iter__(container)
    return found


def copy_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    """A plain copy of a dict."""
    if type(value) is dict:
        return value.copy()
    return dict(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))


def _base(container: Any) -> Any:
    cls = type(container)
    return dict if issubclass(cls, dict) else list if issubclass(cls, list) else tuple
