"""What a function can keep for how much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._budget.curve import Curve, Point, curve_of
from ._core.known import Known
from ._function import call
from ._measure.subject import Subject
from ._policy.budget import Budget
from ._region.options import Options
from .errors import RematError

__all__ = ["Curve", "Point", "pareto"]


def pareto(fn: Callable, /, *args: Any, cost: str | Callable = "roofline", **kwargs: Any) -> Curve:
    """What ``fn(*args, **kwargs)`` can keep as a region, and what its recompute costs then.

    It runs ``fn`` once, and no backward; buffers, generators and the state of modules are put back. ``fn`` is
    differentiated by what requires grad; if nothing does, by all floating-point arguments.

    Args:
        fn: the function or module, without :func:`remat.remat` around it.
        *args: its arguments, any pytrees.
        cost: what an operation costs when it is recomputed. ``"roofline"``: microseconds by its FLOPs and the bytes
            that it moves, the same on every run. ``"flops"``: FLOPs of matrix products, convolutions and attention.
            ``"time"``: microseconds as measured. Or a function ``(op, args, kwargs, result)`` that returns a number.
        **kwargs: its keyword arguments.

    Returns:
        The curve. Print it, look at its ``points``, or take a policy from it: ``curve.at("64MiB")``.

    Raises:
        RematError: nothing in ``fn`` is differentiated, or it calls ``torch.func`` transforms itself.
        PolicyError: ``cost`` is none of these.

    Example:
        >>> import torch
        >>> import remat
        >>> def f(x, w):
        ...     return torch.tanh(torch.tanh(x @ w) @ w).sum()
        >>> x, w = torch.ones(64, 32), torch.ones(32, 32)
        >>> curve = remat.pareto(f, x, w, cost="flops")
        >>> print(curve)
          kept  of all  cost, FLOP   recomputed  operations kept
           0 B      0%     262,144  262.1 kFLOP           0 of 5
         8 KiB     50%     131,072  131.1 kFLOP           1 of 5
        16 KiB    100%           0            0           2 of 5
        >>> [(point.nbytes, point.flops) for point in curve.points]
        [(0, 262144), (8192, 131072), (16384, 0)]
        >>> g = remat.remat(f, policy=curve.at("8KiB"))
    """
    policy, known = Budget(0, cost), Known()
    subject = Subject(fn, args, kwargs)
    with subject.preserved(), torch.enable_grad():
        operands = subject.operands()
        follows = any(tensor.requires_grad for tensor in (*operands, *(t for _, t in subject.captured)))
        subject.call(lambda *a, **k: call(fn, Options(policy=policy), known, a, k), operands)
    if not follows or not known.choices.get(policy):
        raise RematError(
            "There is nothing to choose: the function differentiates nothing by its arguments or captured tensors, or "
            "calls torch.func transforms itself."
        )
    return curve_of(known.choices[policy][-1][0], cost)
