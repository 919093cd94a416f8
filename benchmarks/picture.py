"""Draws what `benchmarks.gpu` measured: a point for each row, memory against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.report import MIB

__all__ = ["draw"]


class Point(Protocol):
    """What is drawn of a row."""

    family: str
    policy: str
    peak_bytes: int
    ratio: float


# Each family has a colour, a marker and a side for its labels, as points of two families often lie on each other.
STYLES = [
    ("black", "s", (8, -3), "left"),
    ("tab:red", "o", (8, -3), "left"),
    ("tab:blue", "x", (0, 8), "center"),
    ("tab:green", "^", (0, -14), "center"),
    ("tab:purple", "v", (-8, -3), "right"),
]


def draw(rows: Sequence[Point], path: Path, title: str) -> None:
    """Writes the picture as SVG, with text as text; the same rows make the same file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    settings = {"svg.fonttype": "none", "svg.hashsalt": "remat", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        for family, (color, marker, offset, side) in zip(dict.fromkeys(row.family for row in rows), STYLES):
            points = [row for row in rows if row.family == family]
            times, peaks = [row.ratio for row in points], [row.peak_bytes / MIB for row in points]
            axes.plot(times, peaks, marker, color=color, label=family, markerfacecolor="none")
            for row, x, y in zip(points, times, peaks):
                axes.annotate(
                    row.policy, (x, y), offset, textcoords="offset points", ha=side, color=color, fontsize="small"
                )
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("time of a step, relative to the plain one")
        axes.set_ylabel("peak memory of a step, MiB")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.15)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)
