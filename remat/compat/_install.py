"""Regions for programs that call ``torch.utils.checkpoint.checkpoint`` themselves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .._core import private, private_compile
from .._policy.policy import PolicyLike, as_policy
from ._checkpoint import checkpoint

_ORIGINAL = private.original_checkpoint
_installed: list[Callable] = []  # the last one is in the place of torch's function


class Installation:
    """What :func:`install` has put in place; as a context manager it is taken away at the end.

    Entered once more after that, it is put in place again.
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
    """Make programs that call ``torch.utils.checkpoint.checkpoint`` run regions instead, without a change of them.

    The function is exchanged in ``torch.utils.checkpoint`` and in every module that has imported it already, under
    whatever name. ``use_reentrant=True`` is taken as ``False`` there; :func:`checkpoint` itself goes on refusing it.

    Args:
        policy: what the regions may keep beyond their inputs, where the call has no ``context_fn``, which is a policy
            of its own; see :func:`remat.remat`.

    Returns:
        A context manager that takes it away again, as :func:`uninstall` does.

    Raises:
        PolicyError: ``policy`` is not a policy. Nothing is changed then.

    Note:
        What somebody made of torch's function before isn't reached: a ``functools.partial`` of it, a default of an
        argument, an attribute of a class. Transformers makes such a partial when a model's checkpointing is switched
        on: install before that, or use ``remat.integrations.transformers.enable``.

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
        if private_compile.traced_by_torch(function):
            return _ORIGINAL(function, *args, use_reentrant=use_reentrant, **kwargs)
        own: Any = {} if "context_fn" in kwargs or "policy" in kwargs else {"policy": policy}
        return checkpoint(function, *args, use_reentrant=False, **own, **kwargs)

    return Installation(installed).__enter__()


def uninstall() -> None:
    """Put torch's own function back everywhere; without effect where nothing is installed.

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
    """Exchange it in all modules but those in which Dynamo and this package have to know torch's own."""
    old, new = ([_ORIGINAL, *each][-1] for each in (_installed, functions))
    _installed[:] = functions
    if new is not old:
        private.let_dynamo_trace_checkpoint(new is not _ORIGINAL)
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and not name.startswith(("remat.", "torch._")):
                for key, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, key, new)
