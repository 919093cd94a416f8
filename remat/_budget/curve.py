"""The curve of a function's choices: what it can save, and the cost of recomputing the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._core.amounts import aligned, flops_text, number_text, size_text
from .._measure.costs import plot_choices
from .._policy.policy import Budget, Chosen
from .._selective.search import UNITS


@dataclass(frozen=True)
class Point:
    """One choice of what to save.

    Attributes:
        nbytes: the saved bytes, without inputs, captured tensors and results.
        cost: the cost of the operations that are recomputed, in the units of the curve.
        flops: the floating-point operations that are recomputed.
        kept: the operations whose results are saved, each with the user's line that calls it.
        steps: the numbers of these operations.
    """

    nbytes: int
    cost: float
    flops: int
    kept: tuple[str, ...] = field(repr=False)
    steps: frozenset[int] = field(repr=False)


@dataclass(frozen=True, repr=False)
class Curve:
    """The Pareto-optimal choices for one program: no other choice has both fewer bytes and a lower cost.

    Attributes:
        points: the choices, by increasing bytes.
        whole: the bytes that are saved without rematerialization.
        cost: what the cost was computed by. ``"roofline"`` and ``"time"`` are microseconds, ``"flops"`` are FLOPs.
        is_exact: whether ``points`` is complete. For very long programs it has only the corners of the convex hull.
        operators: the operations of the program.
    """

    points: tuple[Point, ...]
    whole: int
    cost: str | Callable
    is_exact: bool
    operators: tuple[str, ...] = field(repr=False)

    def at(self, amount: int | str | float) -> Budget:
        """Return the policy of the best choice within an amount of memory.

        Args:
            amount: bytes, a string such as ``"64MiB"``, or a float in (0, 1], a fraction of ``whole``.

        Returns:
            A policy, which can be pickled. For a program with other operations it warns once, and chooses again.

        Raises:
            PolicyError: ``amount`` is none of these.
        """
        budget = Budget(amount, self.cost)
        most = budget.nbytes(self.whole)
        best = min((p for p in self.points if p.nbytes <= most), key=lambda point: (point.cost, point.nbytes))
        return Budget(most, self.cost, Chosen(self.operators, best.steps))

    def __str__(self) -> str:
        rows = [
            (
                size_text(point.nbytes),
                f"{point.nbytes / max(1, self.whole):.0%}",
                number_text(point.cost),
                flops_text(point.flops),
                f"{len(point.kept)} of {len(self.operators)}",
            )
            for point in self.points
        ]
        head = ("saved", "of all", f"cost{UNITS.get(str(self.cost), '')}", "recomputed", "operations saved")
        lines = aligned([head, *rows])
        return "\n".join(lines if self.is_exact else [*lines, "(the corners of the convex hull)"])

    __repr__ = __str__

    def plot(self, axes: Any = None) -> Any:
        """Draw the cost of the choices against their saved bytes, on matplotlib ``Axes``, by default new ones.

        Returns the ``Axes``. Raises ``ImportError`` if matplotlib is not installed.
        """
        points = [(point.nbytes, point.cost) for point in self.points]
        return plot_choices(axes, points, UNITS.get(str(self.cost), ""))
