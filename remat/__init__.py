"""Rematerialization for PyTorch: the same values and derivatives from less memory."""

from ._errors import CaptureError, MutationError, PolicyError, RecomputeMismatchError, RematError
from ._names import checkpoint_name
from ._remat import remat
from ._state import disable_remat, is_recomputing

__all__ = [
    "CaptureError",
    "MutationError",
    "PolicyError",
    "RecomputeMismatchError",
    "RematError",
    "checkpoint_name",
    "disable_remat",
    "is_recomputing",
    "remat",
]
__version__ = "0.1.0"
