"""The trade-off between the memory that a function saves and the cost of its recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.known import Known
from .._function import call
from .._measure.program import Program
from .._policy.policy import Budget
from .._region.options import Options
from ..errors import RematError
from .curve import Curve, Point

__all__ = ["Curve", "Point", "pareto"]


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
        RematError: nothing in ``fn`` is differentiated, or :func:`remat.disable_remat` is active.
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
    policy, known = Budget(0, cost), Known()
    program = Program(fn, args, kwargs)
    with program.preserved(), torch.enable_grad():
        program.call(lambda *a, **k: call(fn, Options(policy=policy), known, a, k), program.operands())
    if not program.is_differentiated() or not known.choices.get(policy):
        raise RematError(
            "There is nothing to choose: nothing is differentiated with respect to the function's arguments or "
            "captured tensors, or remat is disabled here."
        )
    found = known.choices[policy][-1][0]
    names = [f"{name} at {found.lines.get(i)}" for i, name in enumerate(found.operators)]
    points = [
        Point(each.nbytes, each.cost, each.flops, tuple(names[i] for i in sorted(each.steps)), each.steps)
        for each in found.options
    ]
    return Curve(tuple(points), found.whole, cost, found.is_exact, found.operators)
