"""Amounts of memory as users write them: bytes, a string such as "64MiB", or a fraction of the amount without remat."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"B": 1, **{f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}B": 10 ** (3 * i) for i, p in enumerate(("K", "M", "G", "T"), 1)} | {"kB": 1000}


def parse_amount(amount: Any, whole: int, name: str) -> int:
    """The number of bytes of an amount. A float is a fraction of ``whole``. Errors call the amount ``name``.

    Raises:
        TypeError: it is not an int, str or float.
        ValueError: it is negative, a string without a known unit, or a float that isn't in (0, 1].
    """
    if isinstance(amount, bool) or not isinstance(amount, (int, str, float)):
        raise TypeError(f"{name} must be a number of bytes, a string such as '64MiB', or a float; got {amount!r}.")
    if isinstance(amount, float):
        if not 0 < amount <= 1:
            raise ValueError(f"{name} as a float must be a fraction in (0, 1]; got {amount!r}. Pass bytes as an int.")
        return int(amount * whole)
    if isinstance(amount, int):
        if amount < 0:
            raise ValueError(f"{name} must not be negative, got {amount!r}.")
        return amount
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(\w+)\s*", amount)
    if found is None or found[2] not in _UNITS:
        raise ValueError(
            f"{name} as a string must be a number and a unit ({', '.join(_UNITS)}), as in '64MiB'; got {amount!r}."
        )
    return int(float(found[1]) * _UNITS[found[2]])
