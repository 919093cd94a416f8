"""What is kept of a value because the policy lets it be: on its device, in host memory, or by the hooks around."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from ._errors import MutationError
from ._offload import Offloaded
from ._policy import Verdict

if TYPE_CHECKING:
    from ._values import Step, Value


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All that the storage of a tensor holds."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor, (count,), (1,), 0)


class Residual:
    """A tensor that is kept from a region's forward for its backward: a value that a step made."""

    __slots__ = (
        "__weakref__",
        "_change",
        "_offloaded",
        "_packed",
        "_tensor",
        "_unpack",
        "device",
        "dtype",
        "line",
        "names",
        "nbytes",
        "op",
        "shape",
    )  # fmt: skip

    def __init__(self, value: Value, step: Step, outer: tuple | None) -> None:
        assert value.held is not None
        tensor = _whole(value.held.detach())
        self.op, self.line, self.names = str(step.func), step.line, value.names
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.nbytes = tensor.untyped_storage().nbytes()
        self._tensor: torch.Tensor | None = None
        self._change = 0
        self._packed: Any = None
        self._unpack: Callable[[Any], torch.Tensor] | None = None
        self._offloaded: Offloaded | None = None
        if outer is not None:
            pack, self._unpack = outer
            self._packed = pack(tensor)
        elif value.verdict is Verdict.OFFLOAD:
            self._offloaded = Offloaded(tensor)
        else:
            self._tensor, self._change = tensor, _torch.version(tensor)

    def get(self) -> torch.Tensor:
        """The tensor.

        Raises:
            MutationError: it was changed in place.
        """
        if self._unpack is not None:
            return self._unpack(self._packed)
        if self._offloaded is not None:
            return self._offloaded.get()
        assert self._tensor is not None
        if _torch.version(self._tensor) != self._change:
            raise MutationError(
                f"The output of {self.op} at {self.line}, which the region's policy keeps for the backward, was "
                f"changed in place after the region's forward. Use the out-of-place operation, or change a copy: "
                f"`.clone()`."
            )
        return self._tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all that the storage holds, in an order that copies keep."""
    whole = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole and tensor.is_contiguous() else flat(tensor)
