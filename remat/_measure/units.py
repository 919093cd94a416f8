"""Readable numbers and tables."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """The lines of a table. The first ``left`` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(f"{c:{'<' if i < left else '>'}{widths[i]}}" for i, c in enumerate(row)).rstrip() for row in rows]


def size_text(nbytes: int) -> str:
    """Bytes: ``280 B``, ``1.5 KiB``, ``12 MiB``."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    return _scaled(nbytes / 1024, 1024, ["KiB", "MiB", "GiB", "TiB"])


def flops_text(count: int) -> str:
    """Floating-point operations: ``0``, ``1.5 MFLOP``, ``12 GFLOP``."""
    if abs(count) < 1000:
        return f"{count} FLOP" if count else "0"
    return _scaled(count / 1000, 1000, ["kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])


def _scaled(size: float, base: int, units: list[str]) -> str:
    while abs(size) >= base - 0.05 and len(units) > 1:
        size /= base
        del units[0]
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"


def percent_text(part: int, whole: int) -> str:
    """A fraction as ``+33 %``; empty if it is zero."""
    return f"+{100 * part / whole:.0f} %" if part and whole else ""
