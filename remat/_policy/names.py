"""Names of values, and the policies that select values by name."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .._core import private, trees
from .._core.lines import user_line
from .._core.state import state
from ..errors import PolicyError, shown
from .policy import RECOMPUTE, SAVE, Ask, Policy, Verdict

T = TypeVar("T")


def checkpoint_name(x: T, name: str) -> T:
    """Give a value a name, so that a policy can select it.

    It returns ``x`` itself. In a region with a policy such as ``policies.save_only_these_names("hidden")`` the
    operation that computed the value is not recomputed, whichever operation reads the value, through whichever alias.
    Elsewhere the name has no effect.

    Args:
        x: a tensor, or any pytree: each tensor in it gets the name.
        name: any string. A value may have several names, and several values may have the same name.

    Returns:
        ``x``, the same object.

    Raises:
        TypeError: ``name`` is not a string.

    Note:
        A view shares memory with its base, so naming a view of a part of a value saves the whole value. To save only
        the part, name a copy of it.

    Example:
        >>> import torch, remat
        >>> from remat import checkpoint_name, policies
        >>> @remat.remat(policy=policies.save_only_these_names("hidden"))
        ... def mlp(x, w1, w2):
        ...     hidden = checkpoint_name(torch.tanh(x @ w1), "hidden")
        ...     return hidden @ w2
        >>> x, w1, w2 = (torch.ones(2, 2, requires_grad=True) for _ in range(3))
        >>> mlp(x, w1, w2).sum().backward()  # recomputes nothing

    Modeled on ``jax.ad_checkpoint.checkpoint_name``.
    """
    if not isinstance(name, str):
        swapped = " The arguments are swapped." if isinstance(x, str) else ""
        raise TypeError(f"checkpoint_name(x, name): the name must be a string; got {shown(name)}.{swapped}")
    if torch.compiler.is_compiling():
        if state.traced is None or not state.traced.judges_names:
            return x
        with torch.fx.traceback.annotate({NAME: name}):  # `_compile/graphs.py` finds the values of these aliases
            return private.tree_map(lambda t: torch.ops.aten.alias.default(t) if isinstance(t, torch.Tensor) else t, x)
    if state.recordings:
        line = user_line()
        with private.without_torch_function():
            for leaf in (x,) if isinstance(x, torch.Tensor) else trees.flatten(x)[0]:
                if isinstance(leaf, torch.Tensor):
                    for recording in state.recordings:
                        recording.name(leaf, name, line)
    return x


NAME = "remat.name"  # the key under which a trace annotates an alias with its name


@functools.lru_cache(4096)
def is_named(name: str, pattern: str) -> bool:
    """Whether a name matches a policy's pattern, in which ``*`` matches any characters."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


@dataclass(frozen=True)
class Names(Policy):
    """A policy that selects values by name. Its kind determines the verdicts on matching, other and unnamed values."""

    kind: str
    patterns: tuple[str, ...] = field(compare=False)
    key: frozenset[str] = field(init=False)  # the order of the patterns doesn't affect equality

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if not isinstance(pattern, str) or not pattern:
                apart = " Pass the names separately." if isinstance(pattern, (list, tuple, set)) else ""
                raise PolicyError(
                    f"policies.{self.kind} takes names as nonempty strings, as in "
                    f"`policies.{self.kind}('q', 'k*')`; got {shown(pattern)}.{apart}"
                )
        object.__setattr__(self, "key", frozenset(self.patterns))

    def __repr__(self) -> str:
        return f"policies.{self.kind}({', '.join(map(repr, self.patterns))})"

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict:
        unnamed, matched, unmatched = _KINDS[self.kind]
        if not names:
            return unnamed
        return matched if any(is_named(name, pattern) for pattern in self.patterns for name in names) else unmatched

    judges_names = True
    mentioned_names = property(lambda self: self.patterns)


_KINDS = {  # the verdicts on unnamed values, values with a matching name, and other named values
    "save_only_these_names": (RECOMPUTE, SAVE, RECOMPUTE),
    "save_any_names_but_these": (RECOMPUTE, RECOMPUTE, SAVE),
    "save_anything_except_these_names": (SAVE, RECOMPUTE, SAVE),
}
