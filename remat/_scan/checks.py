"""What the trees of a loop must be: tensors alone, and the same from one step to the next."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import torch

from .._core import trees


class Kind(NamedTuple):
    """What a leaf is."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{where}"


class Trees:
    """Trees with these leaves. ``what`` is the tree's name in errors."""

    __slots__ = ("kinds", "nbytes", "spec", "what")

    def __init__(self, tree: Any, what: str) -> None:
        leaves, self.spec = trees.flatten(tree)
        self.what = what
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"{self._name(i)} must be a tensor, got {leaf!r}: `torch.as_tensor` makes one of a number. What "
                    f"steps don't change belongs into the function."
                )
        self.kinds = [_kind(leaf) for leaf in leaves]
        self.nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    def checked(self, tree: Any, number: int) -> list[torch.Tensor]:
        """The leaves of the tree that the step of this number has returned.

        Raises:
            ValueError: it is another one.
        """
        leaves, spec = trees.flatten(tree)
        if spec != self.spec:
            raise ValueError(
                f"Step {number} changes the tree of {self.what}: "
                f"{trees.describe_difference(self.spec, spec, self.what)} All steps must return the same."
            )
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds)):
            now = _kind(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
            if now != kind:
                raise ValueError(f"Step {number} changes {self._name(i)} from {kind} to {now}. All must be the same.")
        return leaves

    def _name(self, i: int) -> str:
        return trees.paths(self.spec, self.what)[i]


def _kind(leaf: torch.Tensor) -> Kind:
    return Kind(leaf.shape, leaf.dtype, leaf.device)


def checked_pair(pair: Any, number: int) -> tuple[Any, Any]:
    """What a step has returned, a carry and a y."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        got = f"a tuple of {len(pair)}" if isinstance(pair, tuple) else f"a {type(pair).__name__}"
        raise TypeError(
            f"step must return a pair, the next carry and y (None if there is none); step {number} returned {got}."
        )
    return pair


def checked_length(xs: Any, length: Any) -> int:
    """The number of steps.

    Raises:
        TypeError: ``length`` is no int, or a leaf of ``xs`` no tensor.
        ValueError: it isn't known, is not that of all of ``xs``, or is 0.
    """
    if length is not None:
        length = _integer(length)
    leaves, spec = ([], None) if xs is None else trees.flatten(xs)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            got = "a tensor without dimensions" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise TypeError(f"{_name(spec, i)} must be a tensor of shape [length, ...], got {got}.")
    lengths = [len(leaf) for leaf in leaves]
    if length is None:
        if not lengths:
            raise ValueError("The number of steps isn't known: give `length`, or `xs` with a tensor.")
        length = lengths[0]
    for i, each in enumerate(lengths):
        if each != length:
            raise ValueError(
                f"{_name(spec, i)} has {each} entries, and there are {length} steps: they must be as many."
            )
    if length < 1:
        raise ValueError(f"A loop has at least one step, got {length}: with none it isn't known what `y` is.")
    return length


def _integer(length: Any) -> int:
    """It may be NumPy's, too."""
    if not isinstance(length, (bool, torch.Tensor)) and hasattr(length, "__index__"):
        return index(length)
    raise TypeError(f"length must be an integer, got {length!r}.")


def _name(spec: Any, i: int) -> str:
    return trees.paths(spec, "xs")[i]
