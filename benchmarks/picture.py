"""Draws the rows of `benchmarks.gpu`: a point for each row, its memory against its recomputed FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from remat._measure.costs import plot_peaks

__all__ = ["draw", "new_axes", "save"]


class Measured(Protocol):
    """The part of a row that is drawn."""

    family: str
    policy: str
    peak_bytes: int
    recomputed_flops: int | None


def draw(rows: Sequence[Measured], path: Path, title: str) -> None:
    """Write the picture as SVG. Compiled rows are skipped, as their FLOPs aren't counted."""
    axes = new_axes()
    points = [(f"{row.family}: {row.policy}", row.recomputed_flops, row.peak_bytes) for row in rows]
    plot_peaks(axes, [point for point in points if point[1] is not None]).set_title(title, fontsize="medium")
    save(axes, path)


def new_axes() -> Any:
    """The axes of a new picture."""
    from matplotlib.figure import Figure

    return Figure(layout="constrained").subplots()


def save(axes: Any, path: Path) -> None:
    """Write a picture as SVG, the same each time, with text as text."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "remat"}):
        axes.figure.savefig(path, format="svg", metadata={"Date": None})
