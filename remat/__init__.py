"""Rematerialization for PyTorch: the same values and derivatives from less memory."""

from . import compat, integrations, nn, policies
from ._errors import CaptureError, MutationError, PolicyError, RecomputeMismatchError, RematError
from ._listing import SavedResidual, print_saved_residuals, saved_residuals
from ._names import checkpoint_name
from ._options import override
from ._policy import Policy
from ._remat import remat
from ._sequential import sequential
from ._state import disable_remat, is_disabled, is_recomputing

__all__ = [
    "CaptureError",
    "MutationError",
    "Policy",
    "PolicyError",
    "RecomputeMismatchError",
    "RematError",
    "SavedResidual",
    "checkpoint_name",
    "compat",
    "disable_remat",
    "integrations",
    "is_disabled",
    "is_recomputing",
    "nn",
    "override",
    "policies",
    "print_saved_residuals",
    "remat",
    "saved_residuals",
    "sequential",
]
__version__ = "0.1.0"
