"""Charts of what was measured, drawn by matplotlib, which the extra ``remat[plot]`` installs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .units import size_text

MARKERS = "sovDP^X*"


def plot_peaks(axes: Any, points: Sequence[tuple[str, int, int]], best: Sequence[tuple[int, int]] = ()) -> Any:
    """Draw labelled points of recomputed FLOPs and peak memory, and a dashed line through the ``best``."""
    axes = _axes(axes)
    for i, (label, count, nbytes) in enumerate(points):
        marker = MARKERS[i % len(MARKERS)]
        # Hollow markers, so that equal points are both seen; at zero they are not cut.
        axes.plot(count, nbytes, marker, markersize=8, fillstyle="none", mew=1.8, clip_on=False, label=label)
    if len(best) > 1:
        axes.plot(*zip(*sorted(best)), "--", drawstyle="steps-post", color="grey", linewidth=1, zorder=1)
    _from_zero(axes, "FLOPs recomputed", "peak memory")
    from matplotlib import ticker

    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(ticker.EngFormatter("FLOP"))
    _ticks_of_bytes(axes.yaxis)
    axes.legend()
    return axes


def plot_choices(axes: Any, points: Sequence[tuple[int, float]], unit: str) -> Any:
    """Draw the cost of choices against the bytes that they save."""
    axes = _axes(axes)
    axes.plot(*zip(*points), "o--", drawstyle="steps-post", linewidth=1, clip_on=False)
    _from_zero(axes, "memory saved for the backward", f"cost of the recompute{unit}")
    _ticks_of_bytes(axes.xaxis)
    return axes


def _axes(axes: Any) -> Any:
    """The axes to draw on: those given, or those of a new figure."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("A plot needs matplotlib: pip install remat[plot]") from error
    return pyplot.subplots(layout="constrained")[1] if axes is None else axes


def _from_zero(axes: Any, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y, xlim=(0, max(1, axes.get_xlim()[1])), ylim=(0, max(1, axes.get_ylim()[1])))
    axes.grid(alpha=0.3)


def _ticks_of_bytes(axis: Any) -> None:
    """At most six steps, each a power of two."""
    from matplotlib import ticker

    step = 2 ** max(0, math.ceil(math.log2(axis.get_view_interval()[1] / 6)))
    axis.set_major_locator(ticker.MultipleLocator(step))
    axis.set_major_formatter(lambda value, _: size_text(int(value)))
