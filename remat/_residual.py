"""What is kept of a value because the policy lets it be: on its device, in host memory, or by the hooks around."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from ._errors import MutationError
from ._offload import Group, Offloaded, in_host_memory
from ._policy import Verdict

if TYPE_CHECKING:
    from ._values import Step, Value


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All that the storage of a tensor holds."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (count,), (1,), 0)


class Residual:
    """A tensor that is kept from a region's forward for its backward: a value that a step made."""

    __slots__ = ("__weakref__", "_kept", "_unpack", "_written", "line", "op")

    def __init__(self, value: Value, step: Step, outer: tuple | None, group: Group) -> None:
        assert value.held is not None
        tensor = _whole(value.held.detach())
        self.op, self.line = str(step.func), step.line
        self._kept: Any = tensor
        self._written = _torch.version(tensor)
        self._unpack: Callable[[Any], torch.Tensor] | None = None
        if outer is not None:
            pack, self._unpack = outer
            self._kept = pack(tensor)
        elif value.verdict is Verdict.OFFLOAD and not in_host_memory(tensor):
            self._kept, self._unpack = Offloaded(tensor, group), Offloaded.get

    def get(self) -> torch.Tensor:
        """The tensor.

        Raises:
            MutationError: it was changed in place.
        """
        if self._unpack is not None:
            return self._unpack(self._kept)
        if _torch.version(self._kept) != self._written:
            raise MutationError(
                f"The output of {self.op} at {self.line}, which the region's policy keeps for the backward, was "
                f"changed in place after the region's forward. Use the out-of-place operation, or change a copy: "
                f"`.clone()`."
            )
        return self._kept


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all that the storage holds, in an order that copies keep."""
    whole = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole and tensor.is_contiguous() else flat(tensor)
