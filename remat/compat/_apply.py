"""Torch's ``apply_activation_checkpointing``, by regions."""

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
    auto_wrap_policy: PolicyLike = None,
    policy: PolicyLike = None,
) -> None:
    """Make calls of chosen submodules regions, in place. A drop-in for torch's function of this name.

    Torch has it beside its ``checkpoint_wrapper`` for FSDP. Here the modules, their names and ``state_dict`` keys stay
    what they are. The model itself is not chosen, as in torch.

    Args:
        model: the model.
        checkpoint_wrapper_fn: called with each chosen module; its result takes the module's place. By default
            :func:`checkpoint_wrapper`, which torch's function of that name, and a partial of it, stand for too.
        check_fn: whether a submodule is chosen.
        auto_wrap_policy: an FSDP policy that chooses instead, such as ``ModuleWrapPolicy({Block})``.
        policy: what the regions may keep beyond their inputs; see :func:`remat.remat`.

    Raises:
        ValueError: no submodule is chosen; ``policy`` is given with a ``checkpoint_wrapper_fn`` of your own, or a
            partial of torch's has settings other than ``checkpoint_impl``.
        TypeError: ``model`` is not a module, or a chosen module can't be a region.
        PolicyError: ``policy`` is not a policy.

    Note:
        Modules that came before one that raises are changed; :func:`remat.nn.undo` changes them back.

    Example:
        >>> import torch
        >>> from remat.compat import apply_activation_checkpointing
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4)]
        >>> model = torch.nn.Sequential(*layers)
        >>> apply_activation_checkpointing(
        ...     model, check_fn=lambda module: isinstance(module, torch.nn.TransformerEncoderLayer)
        ... )
        >>> model(torch.randn(3, 5, 16)).sum().backward()

    After torch's documentation of its function.
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
                f"A region has no setting {', '.join(settings)} of torch's checkpoint_wrapper. Leave it out, or use "
                f"`remat.nn.apply`, which takes the options of `remat.remat`."
            )
    elif checkpoint_wrapper_fn is not None:
        if policy is not None:
            raise ValueError("policy is for the default checkpoint_wrapper_fn: give it to your own one instead.")
        wrap = checkpoint_wrapper_fn
    chosen = []

    def wrapped(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        chosen.append(module)
        return wrap(module, **kwargs)

    choose(model, wrapped, check_fn, auto_wrap_policy)
    if not chosen:
        raise ValueError("check_fn, or auto_wrap_policy, chooses none of the model's submodules.")
