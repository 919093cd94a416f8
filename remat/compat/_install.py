"""Make programs that call ``torch.utils.checkpoint.checkpoint`` themselves execute regions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .._core import private, private_compile
from .._policy.policy import PolicyLike, as_policy
from ._checkpoint import checkpoint

_ORIGINAL = private.original_checkpoint
_installed: list[Callable] = []  # the last one replaces torch's function


class Installation:
    """The replacement that :func:`install` made. As a context manager it removes the replacement at the end.

    Entering it once more installs the replacement again.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function

    def __enter__(self) -> Installation:
        if self._function not in _installed:
            _set([*_installed, self._function])
        return self

    def __exit__(self, *exception: Any) -> None:
        _set([function for function in _installed if function is not self._function])


def install(policy: PolicyLike = None) -> Installation:
    """Make programs that call ``torch.utils.checkpoint.checkpoint`` execute regions instead, without changing the code.

    The function is replaced in ``torch.utils.checkpoint`` and in every module that has already imported it, under
    any name. The replacement treats ``use_reentrant=True`` as ``False``; :func:`checkpoint` itself still refuses it.

    Args:
        policy: what the regions may save beyond their inputs; see :func:`remat.remat`. A call with a ``context_fn``
            ignores it, as ``context_fn`` contains a policy.

    Returns:
        A context manager that removes the replacement at its end, as :func:`uninstall` does.

    Raises:
        PolicyError: ``policy`` is not a policy. Nothing is changed then.

    Note:
        Other references to torch's function that were made before are not replaced: a ``functools.partial`` of it, the
        default of an argument, an attribute of a class. Transformers makes such a partial when a model's checkpointing
        is enabled: install before that, or use ``remat.integrations.transformers.enable``.

    Example:
        >>> import torch
        >>> import torch.utils.checkpoint
        >>> import remat
        >>> w = torch.ones(4, 4, requires_grad=True)
        >>> with remat.compat.install(policy=remat.policies.save_matmuls):
        ...     y = torch.utils.checkpoint.checkpoint(lambda x: (x @ w).sin(), torch.ones(2, 4), use_reentrant=False)
        >>> y.sum().backward()
    """
    if policy is not None:
        as_policy(policy)

    @functools.wraps(_ORIGINAL)
    def installed(function: Any = None, *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and private_compile.traced_by_torch(function):
            return _ORIGINAL(function, *args, use_reentrant=use_reentrant, **kwargs)
        own: Any = {} if "context_fn" in kwargs or "policy" in kwargs else {"policy": policy}
        return checkpoint(function, *args, use_reentrant=False, **own, **kwargs)

    return Installation(installed).__enter__()


def uninstall() -> None:
    """Restore torch's own function everywhere. Has no effect if nothing is installed.

    Example:
        >>> import torch.utils.checkpoint
        >>> import remat
        >>> before = torch.utils.checkpoint.checkpoint
        >>> _ = remat.compat.install()
        >>> remat.compat.uninstall()
        >>> torch.utils.checkpoint.checkpoint is before
        True
    """
    _set([])


def _set(functions: list[Callable]) -> None:
    """Replace it in all modules except torch's private ones and this package's, which need torch's own function."""
    old, new = ([_ORIGINAL, *each][-1] for each in (_installed, functions))
    _installed[:] = functions
    if new is not old:
        private.let_dynamo_trace_checkpoint(new is not _ORIGINAL)
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and not name.startswith(("remat.", "torch._")):
                for key, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, key, new)
