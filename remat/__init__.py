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

from . import compat, integrations, nn, policies
from ._core.state import disable_remat, is_disabled, is_recomputing
from ._policy.names import checkpoint_name
from ._policy.policy import Policy, PolicyLike
from ._region.options import override
from ._scan.loop import scan
from ._sequential import sequential
from .budgeting import pareto
from .errors import CaptureError, MutationError, PolicyError, RecomputeMismatchError, RematError, RematWarning
from .measuring import CheckResult, Costs, Report, Share, check, report
from .residuals import SavedResidual, print_saved_residuals, saved_residuals
from .transform import remat

# The names in JAX.
checkpoint = remat
checkpoint_policies = policies

__all__ = [
    "CaptureError", "CheckResult", "Costs", "MutationError", "Policy", "PolicyError", "PolicyLike",
    "RecomputeMismatchError", "RematError", "RematWarning", "Report", "SavedResidual", "Share", "check",
    "checkpoint", "checkpoint_name", "checkpoint_policies", "compat", "disable_remat", "integrations",
    "is_disabled", "is_recomputing", "nn", "override", "pareto", "policies", "print_saved_residuals", "remat",
    "report", "saved_residuals", "scan", "sequential",
]  # fmt: skip
__version__ = "0.1.0"
