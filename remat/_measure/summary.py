"""What :func:`remat.report` returns: the costs of a program under each policy, as text, values and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from . import plot
from .costs import Costs, Share, pareto
from .units import aligned, flops_text, percent_text, size_text

AS_WRITTEN = "as written"


@dataclass(frozen=True, repr=False)
class Report:
    """The costs of a program under each policy, and without rematerialization.

    Attributes:
        name: what was run.
        environment: the versions and the device that it ran on.
        rows: the costs of each run: without rematerialization, then the program as written if it has regions of its
            own, then one row per policy.
        note: what to keep in mind about the rows.
    """

    name: str
    environment: Mapping[str, str]
    rows: tuple[Costs, ...]
    note: str = ""

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
        return tuple(row for row in self.rows if row.under_policy)

    @property
    def pareto(self) -> list[Costs]:
        """The policies that no other row beats in peak and recomputed FLOPs, by increasing peak."""
        return [row for row in pareto(self.rows) if row.under_policy and not self._is_as_plain(row)]

    def _is_as_plain(self, row: Costs) -> bool:
        return (row.peak_bytes, row.recomputed_flops) == (self.plain.peak_bytes, 0)

    @property
    def timeline(self) -> dict[str, tuple[int, ...]]:
        """The bytes alive after each operation, by the label of the row."""
        return {row.label: row.timeline for row in self.rows}

    @property
    def residuals(self) -> dict[str, list[Share]]:
        """The saved bytes by module and operation, by the label of the row."""
        return {row.label: row.shares for row in self.rows}

    def __str__(self) -> str:
        best = self.pareto
        device = any(row.device_peak_bytes is not None for row in self.rows)
        table = [["", "saved", "peak", *(["peak of the allocator"] * device), "FLOPs recomputed", "", ""]]
        for row in self.rows:
            cells = [row.label, size_text(row.saved_bytes), size_text(row.peak_bytes)]
            if device:
                cells.append("" if row.device_peak_bytes is None else size_text(row.device_peak_bytes))
            share = percent_text(row.recomputed_flops, self.plain.flops)
            cells += [flops_text(row.recomputed_flops), share, "*" * (row in best)]
            table.append(cells)
        lines = [f"{self.name}: {', '.join(self.environment.values())}", *aligned(table, left=1)]
        if best:
            lines.append("* no other row has a lower peak without recomputing more")
        elif self.policies:
            lines.append("No policy is better than the other rows.")
        if not self.plain.flops:
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
                "label": row.label,
                "policy": None if row.policy is None else repr(row.policy),
                "saved_bytes": row.saved_bytes,
                "peak_bytes": row.peak_bytes,
                "flops": row.flops,
                "recomputed_flops": row.recomputed_flops,
                "device_peak_bytes": row.device_peak_bytes,
                "pareto": row in best,
                "forward_operations": row.forward_operations,
                "timeline": list(row.timeline),
                "residuals": [asdict(share) for share in row.shares],
            }
            for row in self.rows
        ]
        return {"name": self.name, "environment": dict(self.environment), "rows": rows}

    def plot(self, axes: Any = None) -> Any:
        """Draw the peak of each row against its recomputed FLOPs, with a line through those of ``pareto``.

        Args:
            axes: the matplotlib ``Axes`` to draw on. By default those of a new figure.

        Returns:
            The ``Axes``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        points = [(row.label, row.recomputed_flops, row.peak_bytes) for row in self.rows]
        return plot.plot_peaks(axes, points, [(row.recomputed_flops, row.peak_bytes) for row in self.pareto])
