"""Drop-ins for functions that make modules checkpointed, and their installation in place of torch's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

from .._core import private
from .._core.state import state
from .._modules.eligible import check_module
from .._modules.region_class import change_in_place
from .._policy.policy import PolicyLike, as_policy
from .._region.options import checked_options
from ..errors import shown
from ._checkpoint import checkpoint

M = TypeVar("M", bound=torch.nn.Module)


def checkpoint_wrapper(module: M, offload_to_cpu: bool = False, policy: PolicyLike = None, **others: Any) -> M:
    """Make every later call of ``module`` a region, in place. A drop-in for fairscale's ``checkpoint_wrapper``.

    :func:`remat.nn.undo` makes calls plain again.

    Args:
        offload_to_cpu: save the tensors that the module is called with in (pinned) host memory, without parameters.
            Under ``torch.func`` and ``torch.compile``, or if an outer region or saved-tensor hooks save the inputs,
            this has no effect.
        policy: what may be saved beyond the inputs; see :func:`remat.remat`.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: ``module`` is not a module, or its forward can't be recomputed; there are other options.
        PolicyError: ``policy`` is not a policy.

    Example:
        >>> import torch
        >>> from remat.compat import checkpoint_wrapper
        >>> layer = checkpoint_wrapper(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
        >>> layer(torch.randn(3, 5, 16), is_causal=False).sum().backward()

    Based on fairscale's documentation. :doc:`/reference/differences` lists the differences.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"checkpoint_wrapper takes a torch.nn.Module, got {type(module).__name__}. See `remat.remat`.")
    if others or not isinstance(offload_to_cpu, bool):
        raise TypeError(
            f"checkpoint_wrapper takes the module, offload_to_cpu and policy, not "
            f"{', '.join(others) or shown(offload_to_cpu)}. Leave out `checkpoint_impl` and `checkpoint_fn`; "
            f"`remat.nn.apply` takes the options of `remat.remat`."
        )
    options = checked_options(policy)
    check_module(module)
    change_in_place(module, replace(options, offload_inputs=offload_to_cpu))
    return module


def is_checkpointing() -> bool:
    """Whether the calling code is in the first run of a region.

    Example:
        >>> import torch, remat
        >>> runs = []
        >>> def f(x):
        ...     runs.append((remat.compat.is_checkpointing(), remat.compat.is_recomputing()))
        ...     return x.sin().cos()
        >>> remat.remat(f)(torch.ones(3, requires_grad=True)).sum().backward()
        >>> runs
        [(True, False), (False, True)]
    """
    return state.checkpointing or state.traced is not None


def apply_activation_checkpointing(
    model: torch.nn.Module,
    checkpoint_wrapper_fn: Callable[[Any], torch.nn.Module] | None = None,
    check_fn: Callable[[torch.nn.Module], bool] = lambda module: True,
    auto_wrap_policy: Callable[..., Any] | None = None,
    policy: PolicyLike = None,
) -> None:
    """Make every call of the chosen submodules a region, in place. A drop-in for torch's function of this name.

    As in torch, the model itself is not chosen.

    Args:
        checkpoint_wrapper_fn: called with each chosen module; its result replaces the module. By default, and in place
            of torch's function of that name or a partial of it, :func:`checkpoint_wrapper`.
        check_fn: whether a submodule is chosen.
        auto_wrap_policy: an FSDP policy that chooses instead of ``check_fn``, such as ``ModuleWrapPolicy({Block})``.
        policy: what the regions may save beyond their inputs; see :func:`remat.remat`.

    Raises:
        ValueError: no submodule is chosen; ``policy`` is given together with your own ``checkpoint_wrapper_fn``; or a
            partial of torch's function has settings other than ``checkpoint_impl``.
        TypeError: ``model`` is not a module, or a chosen module can't be a region.
        PolicyError: ``policy`` is not a policy.

    If one module raises, the modules before it are already changed; :func:`remat.nn.undo` changes them back.

    Example:
        >>> import torch
        >>> from remat.compat import apply_activation_checkpointing
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Linear))
        >>> model(torch.randn(3, 8)).sum().backward()

    Based on torch's documentation of its function.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"apply_activation_checkpointing takes a torch.nn.Module, got {type(model).__name__}.")
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


def install(policy: PolicyLike = None) -> AbstractContextManager[Any]:
    """Make programs that call ``torch.utils.checkpoint.checkpoint`` execute regions instead, without changing the code.

    The function is replaced in ``torch.utils.checkpoint`` and in every module that has already imported it, under
    any name. The replacement treats ``use_reentrant=True`` as ``False``; :func:`checkpoint` itself still refuses it.

    Args:
        policy: what the regions may save beyond their inputs; see :func:`remat.remat`. A call with a ``context_fn``
            ignores it.

    Returns:
        A context manager at whose end the function is again what it was before this call.

    Raises:
        PolicyError: ``policy`` is not a policy. Nothing is changed then.

    Other references that were made before are not replaced, such as a ``functools.partial`` of torch's function.
    Transformers makes one when a model's checkpointing is enabled: install before that, or use
    ``remat.integrations.transformers.enable``.

    Example:
        >>> import remat, torch.utils.checkpoint
        >>> w = torch.ones(4, 4, requires_grad=True)
        >>> with remat.compat.install(policy=remat.policies.save_matmuls):
        ...     y = torch.utils.checkpoint.checkpoint(lambda x: (x @ w).sin(), torch.ones(2, 4), use_reentrant=False)
        >>> y.sum().backward()
    """
    as_policy(policy)

    @functools.wraps(private.original_checkpoint)
    def installed(function: Any = None, *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and private.traced_by_torch(function):
            return private.original_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
        own: Any = {} if "context_fn" in kwargs or "policy" in kwargs else {"policy": policy}
        return checkpoint(function, *args, use_reentrant=False, **own, **kwargs)

    before = ExitStack()
    before.callback(_replace_by, torch.utils.checkpoint.checkpoint)
    _replace_by(installed)
    return before


def uninstall() -> None:
    """Restore torch's own function everywhere. Has no effect if nothing is installed."""
    _replace_by(private.original_checkpoint)


def _replace_by(new: Callable) -> None:
    """Replace it in all modules except torch's private ones and this package's, which need torch's own function."""
    old = torch.utils.checkpoint.checkpoint
    private.let_dynamo_trace_checkpoint(new is not private.original_checkpoint)
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not name.startswith(("remat.", "torch._")):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
