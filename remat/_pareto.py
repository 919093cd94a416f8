"""The trade-off between the memory that a function saves and the cost of its recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ._core.amounts import aligned, flops_text, number_text, size_text
from ._core.known import Known
from ._function import call
from ._measure.costs import finish, given_or_new
from ._measure.program import CALLS_BACKWARD, Program, check_surroundings
from ._policy.policy import UNITS, Budget, Chosen
from ._region.options import Options
from .errors import RematError


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
        is_exact: whether ``points`` is complete. For long programs it has only the corners of the convex hull.
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
        *_, best = (point for point in self.points if point.nbytes <= most)
        return Budget(most, self.cost, Chosen(self.operators, best.steps))

    def __str__(self) -> str:
        table = [("saved", "of all", f"cost{UNITS.get(str(self.cost), '')}", "recomputed", "operations saved")]
        for point in self.points:
            part, kept = f"{point.nbytes / max(1, self.whole):.0%}", f"{len(point.kept)} of {len(self.operators)}"
            table.append((size_text(point.nbytes), part, number_text(point.cost), flops_text(point.flops), kept))
        lines = aligned(table)
        return "\n".join(lines if self.is_exact else [*lines, "(the corners of the convex hull)"])

    __repr__ = __str__

    def plot(self, axes: Any = None) -> Any:
        """Draw the cost of the choices against their saved bytes, on matplotlib ``Axes``, by default new ones.

        Returns the ``Axes``. Raises ``ImportError`` if matplotlib is not installed.
        """
        axes, unit = given_or_new(axes), UNITS.get(str(self.cost), "")
        points = [(point.nbytes, point.cost) for point in self.points]
        axes.plot(*zip(*points), "o--", drawstyle="steps-post", linewidth=1, clip_on=False)
        finish(axes, "memory saved for the backward", f"cost of the recompute{unit}", axes.xaxis)
        return axes


def pareto(fn: Callable, /, *args: Any, cost: str | Callable = "roofline", **kwargs: Any) -> Curve:
    """Return what ``fn(*args, **kwargs)`` can save as a region, and the cost of recomputing the rest.

    ``fn`` runs once, without a backward pass. Buffers, generators and the state of modules are restored. ``fn`` is
    differentiated with respect to tensors that require grad; if none does, with respect to all floating-point
    arguments.

    Args:
        fn, args, kwargs: the function or module, and its arguments, any pytrees. Regions in it have no effect.
        cost: what an operation costs when it is recomputed, as in :func:`remat.policies.budget`; ``"roofline"`` and
            ``"time"`` are microseconds.

    Returns:
        The curve. It can be printed and drawn (``plot()``). ``points`` has the choices, and ``at("64MiB")`` returns a
        policy.

    Raises:
        RematError: nothing in ``fn`` is differentiated, or it calls ``backward`` itself, or :func:`remat.override` or
            ``disable_remat`` is active.
        RuntimeError: called under a ``torch.func`` transform or ``torch.inference_mode``.
        PolicyError: ``cost`` is none of these.

    Example:
        >>> import torch, remat
        >>> def f(x, w):
        ...     return torch.tanh(torch.tanh(x @ w) @ w).sum()
        >>> x, w = torch.ones(64, 32), torch.ones(32, 32)
        >>> curve = remat.pareto(f, x, w, cost="flops")
        >>> print(curve)
         saved  of all  cost, FLOP   recomputed  operations saved
           0 B      0%     262,144  262.1 kFLOP            0 of 5
         8 KiB     50%     131,072  131.1 kFLOP            1 of 5
        16 KiB    100%           0            0            2 of 5
        >>> [(point.nbytes, point.flops) for point in curve.points]
        [(0, 262144), (8192, 131072), (16384, 0)]
        >>> g = remat.remat(f, policy=curve.at("8KiB"))
    """
    check_surroundings("remat.pareto", "Call it before, for the function without the transform.")
    policy, program = Budget(0, cost), Program(fn, args, kwargs)
    options = Options(policy=policy)

    def as_region() -> tuple[Known, Any]:
        known = Known()
        return known, program.call_and_note(lambda *a, **k: call(fn, options, known, a, k), program.operands())

    with program.preserved(), torch.enable_grad():
        known, _ = program.differentiated(as_region)
    if not program.is_differentiated() or not known.choices.get(policy):
        raise RematError(
            "There is nothing to choose: nothing is differentiated with respect to the function's arguments or "
            "captured tensors, or they have no data (FakeTensorMode)."
        )
    found, _ = known.choices[policy][-1]
    if program.calls_backward and not found.whole:
        raise RematError(CALLS_BACKWARD)
    names = [f"{name} at {found.lines.get(i)}" for i, name in enumerate(found.operators)]
    points = [
        Point(each.nbytes, each.cost, each.flops, tuple(names[i] for i in sorted(each.steps)), each.steps)
        for each in found.options
    ]
    return Curve(tuple(points), found.whole, cost, found.is_exact, found.operators)
