"""The errors of the package: one family, so that one ``except`` catches them all."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError

__all__ = ["CaptureError", "MutationError", "PolicyError", "RecomputeMismatchError", "RematError", "RematWarning"]


class RematError(CheckpointError):
    """Base of every error that the package raises.

    It is a ``torch.utils.checkpoint.CheckpointError``, so what handles the errors of torch's function handles these.

    Example:
        >>> from remat import MutationError, RematError
        >>> issubclass(MutationError, RematError)
        True
    """


class RecomputeMismatchError(RematError):
    """A region that was run again did not do what it did first.

    Raised when the recompute saves another number of tensors, tensors of another shape, dtype or device, other
    values (with ``determinism_check="values"``), or returns another tree. The usual reasons are Python state that
    changed between the runs and a branch on a value that isn't reproducible.

    Attributes:
        region: its name, and the line that called it, as in the message.
        logs: with ``debug=True`` two lists, of the forward and of the recompute as far as it came: each operation, what
            it made, and the line that called it. ``None`` without, and where a recompute isn't run for autograd.

    Example:
        >>> import torch
        >>> from remat import RecomputeMismatchError, is_recomputing, remat
        >>> f = remat(lambda x: (x.sin() if is_recomputing() else x.cos()).exp(), debug=True)
        >>> try:
        ...     f(torch.ones(3, requires_grad=True)).sum().backward()
        ... except RecomputeMismatchError as error:
        ...     forward, recompute = error.logs
        >>> forward[0].partition(" at ")[0], recompute[0].partition(" at ")[0]
        ('aten.cos.default -> float32[3]', 'aten.sin.default -> float32[3]')
    """

    region: str | None = None
    logs: tuple[list[str], list[str]] | None = None


class MutationError(RematError):
    """An input or captured tensor of a region was changed in place before the region was run again.

    The recompute would see the new value and give wrong gradients, so it does not start. The message names the
    tensor, the region that reads it, and where that was called.

    Attributes:
        region: its name, and the line that called it, as in the message.

    Example:
        >>> import torch
        >>> from remat import MutationError, remat
        >>> w, x = torch.ones(3, requires_grad=True), torch.ones(3)
        >>> y = remat(lambda w, x: (w * x).sin())(w, x).sum()
        >>> _ = x.mul_(2)
        >>> try:
        ...     y.backward()
        ... except MutationError as error:
        ...     print(str(error).partition(" between ")[0])
        argument x was changed in place
    """

    region: str | None = None


class CaptureError(RematError):
    """A tensor that a region reads without getting it as an argument can't be followed.

    Raised under ``torch.func`` transforms when such a tensor is tracked by one of the transforms and appears only
    when the region is run again. Pass the tensor as an argument instead.
    """


class PolicyError(RematError, ValueError):
    """A ``policy`` that does not exist or contradicts itself."""


class RematWarning(UserWarning):
    """Base of every warning that the package gives, at the line of the user's code that it is about.

    Example:
        >>> import warnings
        >>> from remat import RematWarning
        >>> warnings.filterwarnings("error", category=RematWarning)
        >>> warnings.filterwarnings("default", category=RematWarning)
    """


# Tracebacks call them what users call them: ``remat.PolicyError``.
for _each in (RematError, RecomputeMismatchError, MutationError, CaptureError, PolicyError, RematWarning):
    _each.__module__ = "remat"
