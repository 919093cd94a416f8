"""A tensor that was passed to saved-tensor hooks around a region, as autograd does with what it saves."""

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


class Packed:
    """What a pack hook has made of a tensor. The user's hooks may change its values, not its shape, dtype or device.

    ``of_region``: the hooks are those of an outer region, which return the tensor unchanged.
    """

    __slots__ = ("_kind", "_stride", "_unpack", "contents")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks, of_region: bool = False) -> None:
        pack, self._unpack = hooks
        self._kind: Any = None
        if of_region:
            self.contents = pack(tensor)
            return
        self._kind, self._stride = fingerprint(tensor, "metadata"), _stride(tensor)
        version = private.version(tensor)
        with torch.no_grad():  # as in autograd: operations of a hook are not recorded
            self.contents = pack(tensor)
        if private.version(tensor) != version:
            raise MutationError(
                f"The pack hook of the saved-tensor hooks around a region changed a tensor, {self._kind}, in place. "
                f"The same program raises an error without remat: let the hook change a copy, `.clone()`."
            )

    def get(self) -> torch.Tensor:
        """Unpack the tensor for one reader.

        Raises:
            RematError: the unpack hook returns a different shape, dtype or device, or no tensor.
        """
        if self._kind is None:
            return self._unpack(self.contents)
        running = current_scope() if _unpacks_once(self._unpack) else None
        if running is None:
            return self._unpacked()
        if self not in running.unpacked:  # such hooks can be called once in a pass, or in a GraphExecGroup
            running.unpacked[self] = self._unpacked()
        return running.unpacked[self]

    def _unpacked(self) -> torch.Tensor:
        with torch.no_grad(), unseen():  # the first run may still be going on, and hooks are not part of the region
            tensor = self._unpack(self.contents)
            found = fingerprint(tensor, "metadata") if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            if found != self._kind:
                raise RematError(
                    f"The saved-tensor hooks around a region packed a tensor {self._kind} and unpacked {found}. The "
                    f"region is recomputed from it, so its shape, dtype and device must be those of the packed one: "
                    f"let the unpack hook convert it back, or the pack hook return it unchanged."
                )
            return tensor if self._stride is None else laid_out(tensor, self._stride)


def _unpacks_once(unpack: Any) -> bool:
    """Whether a hook is from ``torch.utils.checkpoint``, which raises when a tensor is unpacked twice."""
    return getattr(unpack, "__module__", None) == "torch.utils.checkpoint"


def _stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a plain tensor, else None."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and is_plain(tensor)
    return tensor.stride() if plain else None
