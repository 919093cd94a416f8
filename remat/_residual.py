"""What is kept of a value because the policy lets it be: on its device, in host memory, or by the hooks around."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import _offload, _torch
from ._errors import MutationError
from ._offload import Group, Offloaded
from ._passes import current_pass
from ._state import alias

if TYPE_CHECKING:
    from ._values import Layout, Step


class Residual:
    """What a storage held when it was kept: the value that a step made, of which ``tensor`` is any alias."""

    __slots__ = ("__weakref__", "_guard", "_kept", "_near", "_unpack", "_written", "line", "op")

    def __init__(
        self, tensor: torch.Tensor, step: Step, layout: Layout | None, offload: bool, outer: tuple | None, group: Group
    ) -> None:
        self.op, self.line = str(step.func), step.line
        content = memory(tensor) if layout is None or not layout.fills(tensor) else layout.of(tensor)
        self._guard: torch.Tensor | None = None
        self._written = 0
        self._unpack: Callable[[Any], torch.Tensor] | None = None
        self._kept: Any = content
        self._near: torch.Tensor | None = content  # as long as the region runs for the first time
        if outer is not None:
            pack, self._unpack = outer
            self._kept = pack(content)
        elif offload and not _offload.in_host_memory(tensor):
            self._kept, self._unpack = Offloaded(content, group), Offloaded.get
        else:
            self._guard, self._written = alias(tensor), _torch.version(tensor)

    @property
    def is_elsewhere(self) -> bool:
        """Whether to get it may run the region around again, which can't be done within an operation."""
        return self._unpack is not None

    def get(self) -> torch.Tensor:
        """A tensor whose storage holds the value.

        Raises:
            MutationError: it was changed in place.
        """
        if self._unpack is not None:
            if self._near is not None:
                return self._near
            content = self._unpacked(self._unpack)
            whole = content.storage_offset() == 0 and content.is_contiguous()
            return content if whole else content.clone(memory_format=torch.contiguous_format)
        assert self._guard is not None
        if _torch.version(self._guard) != self._written:
            raise MutationError(
                f"The output of {self.op} at {self.line}, which the region's policy keeps for the backward, was "
                f"changed in place later. Use the out-of-place operation, or change a copy: `.clone()`."
            )
        return self._guard

    def _unpacked(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        running = current_pass() if _torch.unpacks_once(unpack) else None
        if running is None:
            return unpack(self._kept)
        if self not in running.unpacked:
            running.unpacked[self] = unpack(self._kept)
        return running.unpacked[self]

    def settle(self) -> None:
        """The first run has ended."""
        self._near = None


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All that the storage of a tensor holds, in bytes: without its dtype, and without conjugation that is put off."""
    storage = tensor.untyped_storage()
    with _torch.without_dispatch():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
