"""What a function can keep, and what its recompute costs then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._measure.drawing import Axis, scatter, standalone
from .._measure.drawing import Point as Mark
from .._measure.units import aligned, flops_text, size_text
from .._policy.budget import Budget, Chosen
from .._policy.operators import full_name
from .._selective.choices import Tradeoff


@dataclass(frozen=True)
class Point:
    """One choice.

    Attributes:
        nbytes: what is kept beyond inputs, captured tensors and results.
        cost: what the operations cost that are recomputed, in the units of the curve.
        flops: their floating-point operations.
        kept: the operations whose results are kept, each with the user's line that calls it.
        steps: their numbers.
    """

    nbytes: int
    cost: float
    flops: int
    kept: tuple[str, ...] = field(repr=False)
    steps: frozenset[int] = field(repr=False)


@dataclass(frozen=True)
class Curve:
    """The choices for one program that no other beats in both bytes and cost, the one that keeps the least first.

    Attributes:
        points: the choices.
        whole: the bytes that are kept without rematerialization.
        cost: in what the cost is told: ``"roofline"`` and ``"time"`` are microseconds, ``"flops"`` are FLOPs.
        is_exact: whether these are all there are. Of very long programs they are the corners of the convex hull.
        operators: the operations of the program.
    """

    points: tuple[Point, ...]
    whole: int
    cost: str | Callable
    is_exact: bool
    operators: tuple[str, ...] = field(repr=False)

    def at(self, amount: int | str | float) -> Budget:
        """The policy that keeps the best choice within an amount of memory.

        Args:
            amount: bytes, a text such as ``"64MiB"``, or a float in (0, 1], which is that part of ``whole``.

        Returns:
            A policy, which can be pickled. For a program with other operations it warns once, and chooses anew.

        Raises:
            PolicyError: ``amount`` is none.
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
                f"{point.cost:,.0f}",
                flops_text(point.flops),
                f"{len(point.kept)} of {len(self.operators)}",
            )
            for point in self.points
        ]
        head = ("kept", "of all", f"cost{_UNITS.get(str(self.cost), '')}", "recomputed", "operations kept")
        lines = aligned([head, *rows])
        return "\n".join(lines if self.is_exact else [*lines, "(the corners of the convex hull)"])

    def to_svg(self) -> str:
        """The curve as a picture: bytes kept, and cost."""
        marks = [Mark("", point.nbytes, point.cost, 1, _hint(point)) for point in self.points]
        x = Axis("bytes kept", size_text, 1024)
        y = Axis(f"cost of the recompute{_UNITS.get(str(self.cost), '')}", lambda cost: f"{cost:,.0f}")
        return standalone(scatter(marks, x, y))

    def _repr_svg_(self) -> str:
        return self.to_svg()


_UNITS = {"roofline": ", us", "time": ", us", "flops": ", FLOP"}


def _hint(point: Point) -> str:
    return f"{size_text(point.nbytes)}, cost {point.cost:,.0f}: {'; '.join(point.kept) or 'nothing'}"


def curve_of(tradeoff: Tradeoff, cost: Any) -> Curve:
    """The curve of a program, from what can be chosen for it."""
    operators = tuple(full_name(key[0]) for key in tradeoff.keys)

    def kept(steps: frozenset[int]) -> tuple[str, ...]:
        return tuple(f"{operators[number]} at {tradeoff.lines[number]}" for number in sorted(steps))

    points = tuple(Point(each.nbytes, each.cost, each.flops, kept(each.steps), each.steps) for each in tradeoff.options)
    return Curve(points, tradeoff.whole, cost, tradeoff.is_exact, operators)
