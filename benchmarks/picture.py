"""Draws the rows of `benchmarks.gpu`: a point for each row, its memory against its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.report import MIB

__all__ = ["draw", "new_axes", "save"]


class Measured(Protocol):
    """The part of a row that is drawn."""

    family: str
    policy: str
    peak_bytes: int
    ratio: float


def draw(rows: Sequence[Measured], path: Path, title: str) -> None:
    """Write the picture as SVG."""
    axes = new_axes()
    families = list(dict.fromkeys(row.family for row in rows))
    for i, row in enumerate(rows):
        color = f"C{families.index(row.family)}"
        label = f"{row.family}: {row.policy}"
        axes.plot(row.ratio, row.peak_bytes / MIB, "sovDP^X*"[i % 8], color=color, fillstyle="none", label=label)
    axes.set(xlabel="time of a step / that of the plain blocks", ylabel="peak memory, MiB", ylim=(0, None))
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
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
