"""What a program costs under each policy: saved bytes, peak bytes, recomputed FLOPs; as text, values and a plot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from torch import nn

from .._core.amounts import aligned, flops_text, number_text, percent_text, size_text
from .._core.facts import facts_of, flops
from .._policy.policy import UNITS
from .._selective.search import cost_of
from .allocated import Allocated, with_statistics
from .observer import gc_disabled
from .origins import Origins, SavedResidual, grouped
from .program import Program, Way

WITHOUT, AS_WRITTEN = "without remat", "as written"  # the labels of rows that are not for a policy


def plot_peaks(axes: Any, points: Sequence[tuple], best: Sequence[tuple] = (), timed: bool = False) -> Any:
    """Draw labelled points of recomputed FLOPs (or times) and peak memory, and a dashed line through the ``best``."""
    axes = given_or_new(axes)
    for (label, count, nbytes), marker in zip(points, itertools.cycle("sovDP^X*")):
        # Hollow markers, so that equal points are both seen; at zero they are not cut.
        axes.plot(count, nbytes, marker, markersize=8, fillstyle="none", mew=1.8, clip_on=False, label=label)
    if len(best) > 1:
        axes.plot(*zip(*sorted(best)), "--", drawstyle="steps-post", color="grey", linewidth=1, zorder=1)
    finish(axes, "time of a step, 1 is that without remat" if timed else "FLOPs recomputed", "peak memory", axes.yaxis)
    if not timed:
        axes.xaxis.set_major_formatter(lambda count, _: flops_text(int(count)))
    axes.legend()
    return axes


def given_or_new(axes: Any) -> Any:
    """The axes to draw on: those given, or those of a new figure."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("A plot needs matplotlib: pip install remat[plot]") from error
    return pyplot.subplots(layout="constrained")[1] if axes is None else axes


def finish(axes: Any, x: str, y: str, of_bytes: Any) -> None:
    """Label both axes, which start at zero. The axis ``of_bytes`` has few ticks, at multiples of a power of two."""
    axes.set(xlabel=x, ylabel=y, xlim=(0, max(1, axes.get_xlim()[1])), ylim=(0, max(1, axes.get_ylim()[1])))
    axes.grid(alpha=0.3)
    most = of_bytes.get_view_interval()[1]
    step = 2 ** max(0, math.ceil(math.log2(most / 6)))
    of_bytes.set_ticks([*range(0, int(most) + 1, step)])
    of_bytes.set_major_formatter(lambda nbytes, _: size_text(int(nbytes)))


@dataclass(frozen=True)
class Share:
    """The saved bytes of one operation in one module, together with the same module in other layers."""

    module: str | None
    op: str
    name: str | None
    count: int
    nbytes: int


@dataclass(frozen=True)
class Costs:
    """The costs of one run of a program. Arguments and captured tensors are not counted.

    Attributes:
        label: the policy as text.
        policy: the policy; None for no policy and for runs that were not made for a policy.
        saved_bytes: bytes alive at the end of the forward, which are saved for the backward.
        peak_bytes: the most bytes alive at any time.
        flops: floating-point operations of matrix products, convolutions and attention.
        recomputed_flops: the number of these beyond a run without rematerialization.
        timeline: the bytes alive after each operation.
        forward_operations: how many of the operations belong to the forward.
        residuals: the saved tensors, the largest first.
        device_peak_bytes: the peak of the device's allocator, beyond what was allocated before. None on a CPU.
        cost: the cost of all operations by the report's ``objective``, if it has one.
        time: the time of a step, in parts of that without rematerialization; None if it was not measured.
    """

    label: str
    policy: Any
    saved_bytes: int
    peak_bytes: int
    flops: int
    recomputed_flops: int
    timeline: tuple[int, ...] = field(repr=False)
    forward_operations: int
    residuals: tuple[SavedResidual, ...] = field(repr=False)
    device_peak_bytes: int | None = None
    cost: float = 0.0
    time: float | None = None

    @property
    def shares(self) -> list[Share]:
        """The saved bytes by module and operation."""
        groups = grouped(self.residuals, lambda row: (row.module, row.op or row.source, row.name))
        return [Share(m, op, name, len(rows), sum(r.nbytes for r in rows)) for (m, op, name), rows in groups]

    @property
    def price(self) -> float:
        """What the saved memory costs: the time if it was measured, else the recomputed FLOPs."""
        return self.recomputed_flops if self.time is None else self.time

    def beats(self, other: Costs) -> bool:
        """Whether it has a lower peak or a lower price than another one, and is not worse in either."""
        mine, theirs = _peak_and_price(self), _peak_and_price(other)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs))


_peak_and_price: Any = attrgetter("peak_bytes", "price")


class _Meter(Origins):
    """Counts bytes, FLOPs and residuals in one run."""

    def __init__(self, named: Mapping[str, nn.Module], objective: Any) -> None:
        super().__init__(named)
        self._objective = objective
        self.flops = self.saved = self.forward = 0
        self.cost = 0.0
        self.timeline: list[int] = []
        self.residuals: list[SavedResidual] = []

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        super().after(func, args, kwargs, result)
        self.flops += flops(func, args, kwargs, result)
        if self._objective is not None:
            self.cost += cost_of(self._objective, facts_of(func), args, kwargs, result)
        self.timeline.append(self.total)

    def at_end_of_forward(self) -> None:
        """Record the memory alive now. A transform may call the function more than once: the largest forward counts."""
        if (saved := self.live) > self.saved or not self.forward:
            self.saved, self.forward = saved, len(self.timeline)
            self.residuals = self.alive()


def measured(
    program: Program, label: str, way: Way, plain: Costs | None = None, policy: Any = None, objective: Any = None
) -> Costs:
    """Run the program one way. ``plain`` are its costs without rematerialization; ``objective`` is that of a budget."""
    meter, tensors = _Meter(program.named_modules, objective), program.inputs()
    allocated = Allocated(tensors) if with_statistics(tensors) else None
    with program.preserved(), way.context(), gc_disabled(), allocated or nullcontext(), meter.records_names(), meter:
        program.run(way.fn, meter.at_end_of_forward)
    return Costs(
        label=label,
        policy=policy,
        saved_bytes=meter.saved,
        peak_bytes=meter.peak,
        flops=meter.flops,
        recomputed_flops=0 if plain is None else meter.flops - plain.flops,
        timeline=tuple(meter.timeline),
        forward_operations=meter.forward,
        residuals=tuple(sorted(meter.residuals, key=lambda row: (-row.nbytes, row.source))),
        device_peak_bytes=None if allocated is None else allocated.peak,
        cost=meter.cost,
    )


def distinct(rows: Sequence[Costs]) -> list[Costs]:
    """The rows without repeated costs."""
    seen: dict[tuple, Costs] = {}
    for row in rows:
        seen.setdefault((row.saved_bytes, row.peak_bytes, row.flops), row)
    return list(seen.values())


@dataclass(frozen=True, repr=False)
class Report:
    """The costs of a program under each policy, and without rematerialization.

    Attributes:
        name: what was run.
        environment: the versions and the device that it ran on.
        rows: the costs of each run: without rematerialization, then the program as written if it has regions of its
            own, then one row per policy.
        note: what to keep in mind about the rows.
        objective: what the budgets among the policies minimize, if that is not the FLOPs: their ``cost``.
    """

    name: str
    environment: Mapping[str, str]
    rows: tuple[Costs, ...]
    note: str = ""
    objective: Any = None

    @property
    def plain(self) -> Costs:
        """The costs without rematerialization."""
        return self.rows[0]

    @property
    def as_written(self) -> Costs:
        """The costs of the program as written, with its own regions; those of ``plain`` if it has none."""
        return next((row for row in self.rows if row.label == AS_WRITTEN), self.plain)

    @property
    def policies(self) -> tuple[Costs, ...]:
        """The costs under each policy."""
        return tuple(row for row in self.rows if row.label not in (WITHOUT, AS_WRITTEN))

    @property
    def pareto(self) -> list[Costs]:
        """The rows that no other one beats in peak and time, by increasing peak, without the plain one.

        Where the time was not measured, recomputed FLOPs take its place.
        """
        plain = _peak_and_price(self.plain)
        best = [r for r in self.rows[1:] if not any(other.beats(r) for other in self.rows)]
        found = [r for r in best if _peak_and_price(r) != plain and not self._saves_more(r)]
        return sorted(found, key=_peak_and_price)

    def _saves_more(self, row: Costs) -> bool:
        """Whether a row saves more than the plain program, as where a policy saves what autograd needs otherwise."""
        return row.saved_bytes > self.plain.saved_bytes

    @property
    def timeline(self) -> dict[str, tuple[int, ...]]:
        """The bytes alive after each operation, by the label of the row."""
        return {row.label: row.timeline for row in self.rows}

    @property
    def residuals(self) -> dict[str, list[Share]]:
        """The saved bytes by module and operation, by the label of the row."""
        return {row.label: row.shares for row in self.rows}

    def __str__(self) -> str:
        best = self.pareto if self.policies else []  # else there is no choice
        rows, plain, by = self.rows, self.plain, f"recompute{UNITS.get(str(self.objective), ', by the cost')}"
        columns = [
            ("", [row.label for row in rows]),
            ("saved", [size_text(row.saved_bytes) for row in rows]),
            ("peak", [size_text(row.peak_bytes) for row in rows]),
            ("peak of the allocator", ["" if (n := row.device_peak_bytes) is None else size_text(n) for row in rows]),
            ("FLOPs recomputed", [flops_text(row.recomputed_flops) for row in rows]),
            ("", [percent_text(row.recomputed_flops, plain.flops) for row in rows]),
            (by, ["" if self.objective is None else number_text(row.cost - plain.cost) for row in rows]),
            ("time", ["" if row.time is None else f"x {row.time:.2f}" for row in rows]),
            ("", ["saves more than without remat" if self._saves_more(r) else "*" * (r in best) for r in rows]),
        ]
        table = list(zip(*([head, *cells] for head, cells in columns if any(cells))))
        lines = [f"{self.name}: {', '.join(self.environment.values())}", *aligned(table, "<")]
        if best:
            longer = "recomputing more" if plain.time is None else "taking longer"
            lines.append(f"* no other row has a lower peak without {longer}")
        elif self.policies:
            lines.append("No other row is better than the plain program.")
        if not plain.flops:
            lines.append("FLOPs are those of matrix products, convolutions and attention; this program has none.")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        best = self.pareto
        rows = [
            {
                **vars(row),
                "policy": None if row.policy is None else repr(row.policy),
                "residuals": [asdict(share) for share in row.shares],
                "pareto": row in best,
            }
            for row in self.rows
        ]
        objective = self.objective if isinstance(self.objective, str) else None
        return {"name": self.name, "environment": dict(self.environment), "rows": rows, "objective": objective}

    def plot(self, axes: Any = None) -> Any:
        """Draw the peak of each row against its time, or its recomputed FLOPs, with a line through those of ``pareto``.

        ``axes`` are matplotlib ``Axes``, by default new ones. Returns them. Raises ``ImportError`` without matplotlib.
        """
        points = [(row.label, row.price, row.peak_bytes) for row in self.rows]
        best = [(row.price, row.peak_bytes) for row in self.pareto]
        return plot_peaks(axes, points, best, timed=self.plain.time is not None)
