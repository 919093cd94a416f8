"""Torch's ``apply_activation_checkpointing``, implemented with regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._core import private
from .._policy.policy import PolicyLike, as_policy
from ._wrapper import checkpoint_wrapper


def apply_activation_checkpointing(
    model: torch.nn.Module,
    checkpoint_wrapper_fn: Callable[[Any], torch.nn.Module] | None = None,
    check_fn: Callable[[torch.nn.Module], bool] = lambda module: True,
    auto_wrap_policy: Callable[..., Any] | None = None,
    policy: PolicyLike = None,
) -> None:
    """Make every call of the chosen submodules a region, in place. A drop-in for torch's function of this name.

    Torch has this function for FSDP, next to its ``checkpoint_wrapper``. Here the modules, their names and the
    ``state_dict`` keys do not change. As in torch, the model itself is not chosen.

    Args:
        model: the model.
        checkpoint_wrapper_fn: called with each chosen module; its result replaces the module. The default is
            :func:`checkpoint_wrapper`, which is also used in place of torch's function of that name or a partial of it.
        check_fn: whether a submodule is chosen.
        auto_wrap_policy: an FSDP policy that chooses instead of ``check_fn``, such as ``ModuleWrapPolicy({Block})``.
        policy: what the regions may save beyond their inputs; see :func:`remat.remat`.

    Raises:
        ValueError: no submodule is chosen; ``policy`` is given together with your own ``checkpoint_wrapper_fn``; or a
            partial of torch's function has settings other than ``checkpoint_impl``.
        TypeError: ``model`` is not a module, or a chosen module can't be a region.
        PolicyError: ``policy`` is not a policy.

    Note:
        If one module raises, the modules before it are already changed; :func:`remat.nn.undo` changes them back.

    Example:
        >>> import torch
        >>> from remat.compat import apply_activation_checkpointing
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4)]
        >>> model = torch.nn.Sequential(*layers)
        >>> apply_activation_checkpointing(
        ...     model, check_fn=lambda module: isinstance(module, torch.nn.TransformerEncoderLayer)
        ... )
        >>> model(torch.randn(3, 5, 16)).sum().backward()

    Based on torch's documentation of its function.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"apply_activation_checkpointing takes a torch.nn.Module, got {type(model).__name__}.")
    if policy is not None:
        as_policy(policy)
    choose, torchs = private.activation_checkpointing()
    wrap: Callable[..., torch.nn.Module] = functools.partial(checkpoint_wrapper, policy=policy)
    settings = dict(getattr(checkpoint_wrapper_fn, "keywords", {}))
    if getattr(checkpoint_wrapper_fn, "func", checkpoint_wrapper_fn) is torchs:
        settings.pop("checkpoint_impl", None)
        if settings:
            raise ValueError(
                f"remat.compat.checkpoint_wrapper has no setting {', '.join(settings)}. Remove it, or use "
                f"`remat.nn.apply`, which takes the options of `remat.remat`."
            )
    elif checkpoint_wrapper_fn is not None:
        if policy is not None:
            raise ValueError("policy is only for the default checkpoint_wrapper_fn. Pass it to your own function.")
        wrap = checkpoint_wrapper_fn
    chosen = []

    def wrapped(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        chosen.append(module)
        return wrap(module, **kwargs)

    choose(model, wrapped, check_fn, auto_wrap_policy)
    if not chosen:
        raise ValueError("check_fn, or auto_wrap_policy, chooses none of the model's submodules.")
