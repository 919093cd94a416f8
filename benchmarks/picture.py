"""Draws the rows of `benchmarks.gpu`: a point for each row, its memory against its recomputed FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from remat._measure.drawing import Axis, Point, scatter, standalone
from remat._measure.units import flops_text, size_text

__all__ = ["draw"]


class Measured(Protocol):
    """The part of a row that is drawn."""

    family: str
    policy: str
    peak_bytes: int
    recomputed_flops: int | None


def draw(rows: Sequence[Measured], path: Path, title: str) -> None:
    """Write the picture as SVG. Compiled rows are skipped, as their FLOPs aren't counted."""
    rows = [row for row in rows if row.recomputed_flops is not None]
    families = list(dict.fromkeys(row.family for row in rows))
    points = [Point(row.policy, row.recomputed_flops or 0, row.peak_bytes, families.index(row.family)) for row in rows]
    x, y = Axis("FLOPs recomputed in a step", flops_text), Axis("peak memory of a step", size_text, 1024)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(standalone(scatter(points, x, y, legend=families, title=title)))
