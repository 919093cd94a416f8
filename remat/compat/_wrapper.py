"""fairscale's ``checkpoint_wrapper``, implemented with regions."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from .._core.state import disable_remat, guarded, is_recomputing
from .._modules.eligible import check_module
from .._modules.region_class import change_in_place
from .._policy.policy import PolicyLike
from .._region.options import checked_options

__all__ = ["checkpoint_wrapper", "disable_checkpointing", "is_checkpointing", "is_recomputing"]

M = TypeVar("M", bound=torch.nn.Module)


def checkpoint_wrapper(module: M, offload_to_cpu: bool = False, policy: PolicyLike = None) -> M:
    """Make every later call of ``module`` a region, in place. A drop-in for fairscale's ``checkpoint_wrapper``.

    Keyword arguments, containers and non-tensor results work. The module's ``state_dict`` keys, names, hooks, copies
    and pickles do not change. :func:`remat.nn.undo` makes calls plain again.

    Args:
        module: the module.
        offload_to_cpu: save the tensors that the module is called with in (pinned) host memory. Parameters, and tensors
            that are already in host memory, are not copied. Under ``torch.func`` and ``torch.compile`` nothing is
            copied. Where an outer region or saved-tensor hooks save the inputs, they decide where.
        policy: what may be saved beyond the inputs; see :func:`remat.remat`.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: ``module`` is not a module, or its forward can't be recomputed.
        PolicyError: ``policy`` is not a policy.

    Example:
        >>> import torch
        >>> from remat.compat import checkpoint_wrapper
        >>> layer = checkpoint_wrapper(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
        >>> layer(torch.randn(3, 5, 16), is_causal=False).sum().backward()

    Based on fairscale's documentation. :doc:`/how-to/migrating` lists the differences.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"checkpoint_wrapper takes a torch.nn.Module, got {type(module).__name__}. See `remat.remat`.")
    options = checked_options(policy)
    check_module(module)
    change_in_place(module, replace(options, offload_inputs=bool(offload_to_cpu)))
    return module


def is_checkpointing() -> bool:
    """Whether the calling code is in the first run of a region.

    Example:
        >>> import torch
        >>> import remat
        >>> from remat.compat import is_checkpointing, is_recomputing
        >>> runs = []
        >>> @remat.remat
        ... def f(x):
        ...     runs.append((is_checkpointing(), is_recomputing()))
        ...     return x.sin().cos()
        >>> f(torch.ones(3, requires_grad=True)).sum().backward()
        >>> runs
        [(True, False), (False, True)]
    """
    return guarded.checkpointing or guarded.traced is not None


disable_checkpointing = disable_remat
