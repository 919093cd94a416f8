"""The errors of the package: one family, so that one ``except`` catches them all."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError

__all__ = ["CaptureError", "MutationError", "PolicyError", "RecomputeMismatchError", "RematError"]


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
    """


class MutationError(RematError):
    """An input or captured tensor of a region was changed in place before the region was run again.

    The recompute would see the new value and give wrong gradients, so it does not start. The message names the
    tensor and where the region reads it.
    """


class CaptureError(RematError):
    """A tensor that a region reads without getting it as an argument can't be followed.

    Raised under ``torch.func`` transforms when such a tensor is tracked by one of the transforms and appears only
    when the region is run again. Pass the tensor as an argument instead.
    """


class PolicyError(RematError, ValueError):
    """A ``policy`` that does not exist or contradicts itself."""
