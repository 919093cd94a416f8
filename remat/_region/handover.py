"""Tensors that a region lets the saved-tensor hooks around it keep, as autograd does with what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core import private
from .._core.layout import laid_out
from .._core.parts import is_plain
from .._core.passes import current_scope
from .._core.state import unseen
from ..errors import MutationError, RematError
from .fingerprints import fingerprint

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Handed:
    """One such tensor. It may come back with other values, but it must be of the same kind."""

    __slots__ = ("_kind", "_stride", "_unpack", "packed")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks) -> None:
        pack, self._unpack = hooks
        self._kind = fingerprint(tensor, "metadata")
        self._stride = _stride(tensor)
        version = private.version(tensor)
        with torch.no_grad():  # as autograd does: what a hook computes is not saved in turn
            self.packed = pack(tensor)
        if private.version(tensor) != version:
            raise MutationError(
                f"The pack hook of the saved-tensor hooks around a region changed a tensor, {self._kind}, in place. "
                f"This is an error without remat too: let the hook change a copy, `.clone()`."
            )

    def get(self) -> torch.Tensor:
        """The tensor, for one reader.

        Raises:
            RematError: what the hooks give back can't stand for it.
        """
        running = current_scope() if _unpacks_once(self._unpack) else None
        if running is None:
            return self._unpacked()
        if self not in running.unpacked:  # such hooks give it once in a pass, or in a group of them
            running.unpacked[self] = self._unpacked()
        return running.unpacked[self]

    def _unpacked(self) -> torch.Tensor:
        with torch.no_grad(), unseen():  # the hooks are no part of the region, whose first run may still go on
            tensor = self._unpack(self.packed)
            found = fingerprint(tensor, "metadata") if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            if found != self._kind:
                raise RematError(
                    f"The saved-tensor hooks around a region were given a tensor {self._kind} and gave back {found}. "
                    f"The region is run again from it, so it must have the shape, dtype and device that it had: let "
                    f"the unpack hook convert it back, or the pack hook return it as it is."
                )
            return tensor if self._stride is None else laid_out(tensor, self._stride)


class HandedToRegion:
    """The same where the hooks are those of a region around: they give back what they were given."""

    __slots__ = ("_unpack", "packed")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks) -> None:
        pack, self._unpack = hooks
        self.packed = pack(tensor)

    def get(self) -> torch.Tensor:
        """The tensor."""
        return self._unpack(self.packed)


class AtHand:
    """One that they have given back for a run of the region, and keep on keeping."""

    __slots__ = ("packed",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.packed = tensor

    def get(self) -> torch.Tensor:
        """The tensor."""
        return self.packed


def _unpacks_once(unpack: Any) -> bool:
    """Whether a hook is that of ``torch.utils.checkpoint``, which raises when a tensor is asked for twice."""
    return getattr(unpack, "__module__", None) == "torch.utils.checkpoint"


def _stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None for a tensor that has none."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and is_plain(tensor)
    return tensor.stride() if plain else None
