"""Activation checkpointing for PyTorch as a function transform, like ``jax.checkpoint``.

``remat.remat(fn)`` has the same values and derivatives as ``fn``, saves only its inputs for the backward pass, and
recomputes the rest. ``remat.policies`` choose what else is saved, ``remat.nn.apply`` makes a model's layers regions,
``remat.report`` measures memory, and ``remat.check`` compares values and gradients.

Example:
    >>> import torch, remat
    >>> layer = remat.remat(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w), policy=remat.policies.save_matmuls)
    >>> torch.func.grad(lambda w: layer(torch.ones(2, 3), w).sum())(torch.ones(3, 3)).shape
    torch.Size([3, 3])
"""

import torch

from ._core.versions import check_version

check_version(torch.__version__)  # before the modules that use private parts of torch

from . import checkpoint_policies, compat, integrations, nn, policies
from ._core.state import disable_remat, is_disabled, is_recomputing  # noqa: F401
from ._measure.origins import SavedResidual
from ._pareto import Curve, Point, pareto
from ._policy.names import checkpoint_name
from ._policy.policy import Policy, PolicyLike
from ._region.options import override
from ._residuals import print_saved_residuals, saved_residuals
from ._scan import scan
from ._sequential import sequential
from ._transform import remat
from .errors import CaptureError, MutationError, PolicyError, RecomputeMismatchError, RematError, RematWarning
from .measuring import CheckResult, Costs, Report, Share, check, report

checkpoint = remat  # its name in JAX

__all__ = [
    "CaptureError", "CheckResult", "Costs", "Curve", "MutationError", "Point", "Policy", "PolicyError", "PolicyLike",
    "RecomputeMismatchError", "RematError", "RematWarning", "Report", "SavedResidual", "Share", "check",
    "checkpoint", "checkpoint_name", "checkpoint_policies", "compat", "disable_remat", "integrations",
    "is_recomputing", "nn", "override", "pareto", "policies", "print_saved_residuals", "remat", "report",
    "saved_residuals", "scan", "sequential",
]  # fmt: skip
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
