"""Amounts of memory as users write them, and readable numbers and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import shown

_UNITS = {
    "B": 1,
    **{f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)},
    **{f"{p}B": 10 ** (3 * i) for i, p in enumerate("KMGT", 1)},
    "kB": 1000,
}


def parse_amount(amount: Any, whole: int, name: str, integers: str = "bytes") -> int:
    """The bytes of an amount, which errors call ``name``: a number of ``integers``, or a part of ``whole``."""
    if isinstance(amount, bool) or not isinstance(amount, (int, str, float)):
        raise TypeError(
            f"{name} must be a number of {integers}, a string such as '64MiB', or a float; got {shown(amount)}."
        )
    if isinstance(amount, float):
        if not 0 < amount <= 1:
            raise ValueError(
                f"{name} as a float must be a fraction in (0, 1]; got {amount!r}. Pass a number of {integers} as an "
                f"int."
            )
        return int(amount * whole)
    if isinstance(amount, int):
        if amount < 0:
            raise ValueError(f"{name} must not be negative, got {amount!r}.")
        return amount
    if (percent := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", amount)) and 0 < float(percent[1]) <= 100:
        return int(float(percent[1]) / 100 * whole)
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(\w+)\s*", amount)
    if found is None or found[2] not in _UNITS:
        raise ValueError(
            f"{name} as a string must be a number and a unit ({', '.join(_UNITS)}), as in '64MiB', or a percentage up "
            f"to '100%'; got {amount!r}."
        )
    return int(float(found[1]) * _UNITS[found[2]])


def aligned(rows: Sequence[Sequence[str]], align: str = "") -> list[str]:
    """The lines of a table, without its empty columns. ``align`` has ``<`` or ``>`` for the first; others are ``>``."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    columns = list(zip(align.ljust(len(widths), ">"), widths))
    cells = ((f"{c:{side}{width}}" for c, (side, width) in zip(row, columns) if width) for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def size_text(nbytes: int) -> str:
    """Bytes: ``280 B``, ``1.5 KiB``, ``12 MiB``."""
    return _scaled(nbytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])


def count_text(number: int, what: str) -> str:
    """A number of things: ``1 operation``, ``2 operations``."""
    return f"{number} {what}{'s' * (number != 1)}"


def number_text(number: float) -> str:
    """A cost: ``1,200``, ``12.3``."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def flops_text(count: int) -> str:
    """Floating-point operations: ``0``, ``1.5 MFLOP``, ``12 GFLOP``."""
    return _scaled(count, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]) if count else "0"


def _scaled(size: float, base: int, units: list[str]) -> str:
    while abs(size) >= base - 0.05 and len(units) > 1:
        size /= base
        del units[0]
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"


def percent_text(part: int, whole: int) -> str:
    """A fraction as ``+33 %``; empty if it is zero."""
    return f"+{100 * part / whole:.0f} %" if part and whole else ""
