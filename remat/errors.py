"""The errors and warnings of the package, with one base class for each."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

__all__ = ["CaptureError", "MutationError", "PolicyError", "RecomputeMismatchError", "RematError", "RematWarning"]


class RematError(CheckpointError):
    """Base class of the package's errors, and a subclass of ``torch.utils.checkpoint.CheckpointError``.

    Attributes:
        region: where the message names a region, its name and the line that called it; else None.
    """

    region: str | None = None


class RecomputeMismatchError(RematError):
    """The recompute of a region differs from its forward.

    Raised when the recompute saves a different number of tensors, tensors of a different shape, stride, dtype, device
    or operation, different values (with ``determinism_check="values"``), or returns a different structure.

    Attributes:
        logs: with ``debug=True`` the operations of the forward and of the recompute up to the error, each with its
            result and the line that called it. Else ``None``, as for recomputes that check only results.

    Example:
        >>> import torch, remat
        >>> from remat import RecomputeMismatchError, is_recomputing
        >>> f = remat.remat(lambda x: (x.sin() if is_recomputing() else x.cos()).exp(), debug=True)
        >>> try:
        ...     f(torch.ones(3, requires_grad=True)).sum().backward()
        ... except RecomputeMismatchError as error:
        ...     forward, recompute = error.logs
        >>> forward[0].partition(" at ")[0], recompute[0].partition(" at ")[0]
        ('aten.cos.default -> float32[3]', 'aten.sin.default -> float32[3]')
    """

    logs: tuple[list[str], list[str]] | None = None


class MutationError(RematError):
    """An input or captured tensor of a region was changed in place before the region was recomputed.

    The message names the tensor, the region that reads it, and the line that called the region.

    Example:
        >>> import torch, remat
        >>> from remat import MutationError
        >>> w, x = torch.ones(3, requires_grad=True), torch.ones(3)
        >>> y = remat.remat(lambda w, x: (w * x).sin())(w, x).sum()
        >>> _ = x.mul_(2)
        >>> try:
        ...     y.backward()
        ... except MutationError as error:
        ...     print(str(error).partition(" between ")[0])
        argument x was changed in place
    """


class CaptureError(RematError):
    """A tensor enters or leaves a region in a way that a ``torch.func`` transform can't track.

    The tensor is not an argument, no variable of the function leads to it, and it is a new object in each run: pass it
    as an argument. Or a region stores it outside (in an attribute, say): return it.
    """


class PolicyError(RematError, ValueError):
    """The ``policy`` is not a policy, or contradicts itself."""


class RematWarning(UserWarning):
    """The class of every warning of the package. Warnings point to a line of user code."""


def shown(value: Any) -> str:
    """A wrong argument as a message shows it: short, and without the data of tensors."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


# Tracebacks print the public names: ``remat.PolicyError``.
for _each in (RematError, RecomputeMismatchError, MutationError, CaptureError, PolicyError, RematWarning):
    _each.__module__ = "remat"
