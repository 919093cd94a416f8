"""Names for values, by which policies choose what is kept."""

from __future__ import annotations

import functools
import re
from typing import TypeVar

import torch

from . import _torch, _tree
from ._lines import user_line
from ._state import state

T = TypeVar("T")

__all__ = ["checkpoint_name"]


def checkpoint_name(x: T, name: str) -> T:
    """Give a value a name, by which a policy may keep it.

    It returns ``x`` itself, everywhere. In a region with a policy such as ``policies.save_only_these_names("hidden")``
    the operation that made the value is not run again, whoever reads the value, and under whichever alias. Elsewhere
    the name means nothing.

    Args:
        x: a tensor, or any pytree: each tensor in it gets the name.
        name: any text. A value may have several names, and a name several values.

    Returns:
        ``x``, the same object.

    Raises:
        TypeError: ``name`` is not a string.

    Note:
        A view shares the memory of what it is a view of, so a name on a part of a value keeps the whole of it; name a
        copy of the part to keep that alone.

    Example:
        >>> import torch
        >>> from remat import checkpoint_name, policies, remat
        >>> @remat(policy=policies.save_only_these_names("hidden"))
        ... def mlp(x, w1, w2):
        ...     hidden = checkpoint_name(torch.tanh(x @ w1), "hidden")
        ...     return hidden @ w2
        >>> x, w1, w2 = (torch.ones(2, 2, requires_grad=True) for _ in range(3))
        >>> mlp(x, w1, w2).sum().backward()  # runs nothing again

    After ``jax.ad_checkpoint.checkpoint_name``.
    """
    if not isinstance(name, str):
        raise TypeError(f"checkpoint_name takes a value and its name, a string; got the name {name!r}.")
    if not torch.compiler.is_compiling() and state.recordings:
        line = user_line()
        with _torch.without_torch_function():
            for leaf in (x,) if isinstance(x, torch.Tensor) else _tree.flatten(x)[0]:
                if isinstance(leaf, torch.Tensor):
                    for recording in state.recordings:
                        recording.name(leaf, name, line)
    return x


def is_named(name: str, pattern: str) -> bool:
    """Whether a name is the one that a policy mentions, in which ``*`` stands for any text."""
    return _regex(pattern).fullmatch(name) is not None


@functools.cache
def _regex(pattern: str) -> re.Pattern:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
