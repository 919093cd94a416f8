"""Checks of the pytrees in a loop: all leaves are tensors, and each step returns the same structure and metadata."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from .._core import trees
from .._region.fingerprints import fingerprint
from ..errors import shown


class Trees:
    """The structure of a pytree and the kinds of its leaves, tensors or None, from the first one that is checked."""

    __slots__ = ("kinds", "nbytes", "spec", "what")
    spec: Any

    def __init__(self, what: str) -> None:
        self.what, self.spec = what, None  # its name in errors

    def checked(self, tree: Any, number: int = 0) -> list[Any]:
        """Return the leaves of what step ``number`` returned. ValueError if its structure, or a kind, has changed."""
        leaves, spec = trees.flatten(tree)
        if self.spec is None:
            self.spec, self.kinds = spec, list(map(_kind, leaves))
            for i, leaf in enumerate(leaves):
                if leaf is not None and not isinstance(leaf, torch.Tensor):
                    raise TypeError(
                        f"{self._name(i)} must be a tensor, got {shown(leaf)}. Convert numbers with "
                        f"`torch.as_tensor`, and let the step function capture values that steps don't change."
                    )
            self.nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf is not None)
        if spec != self.spec:
            raise ValueError(
                f"Step {number} changes the structure of {self.what}: "
                f"{trees.describe_difference(self.spec, spec, self.what)} It must not change."
            )
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds)):
            if (now := _kind(leaf)) != kind:
                raise ValueError(f"Step {number} changes {self._name(i)} from {kind} to {now}. It must not change.")
        return leaves

    def _name(self, i: int) -> str:
        return trees.paths(self.spec, self.what)[i]

    def empty(self) -> Any:
        """The pytree with the leaves of no steps, of shape ``[0, ...]``."""
        leaves = [kind and torch.empty((0, *kind[1]), dtype=kind[0], device=kind[2]) for kind in self.kinds]
        return self.spec.unflatten(leaves)


def _kind(leaf: Any) -> Any:
    return fingerprint(leaf, "metadata") if isinstance(leaf, torch.Tensor) else leaf


def checked_length(leaves: list, spec: Any, length: Any) -> int:
    """Return the number of steps, for these leaves of ``xs``, or raise the errors that `scan` documents."""
    if length is not None:
        if isinstance(length, (bool, torch.Tensor)) or not hasattr(length, "__index__"):
            raise TypeError(f"length must be an integer, got {shown(length)}.")
        length = index(length)  # NumPy's integers are accepted too
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            got = "a tensor without dimensions" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise TypeError(f"{trees.paths(spec, 'xs')[i]} must be a tensor of shape [length, ...], got {got}.")
        if length is None:
            length = len(leaf)
        elif len(leaf) != length:
            raise ValueError(
                f"{trees.paths(spec, 'xs')[i]} has {len(leaf)} entries, but there are {length} steps: the numbers must "
                f"be equal."
            )
    if length is None:
        raise ValueError("The number of steps is unknown: pass `length`, or `xs` with at least one tensor.")
    if length < 0:
        raise ValueError(f"The number of steps must not be negative, got {length}.")
    return length
