"""What is kept of a value because the policy lets it be: on its device, in host memory, or by the hooks around."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._core import host_memory, private
from .._core.host_memory import Group, Offloaded
from .._core.state import alias, unseen
from .._region.handover import Handed, Hooks
from .._region.left_out import LeftOutTensor
from ..errors import MutationError
from .values import form_of

if TYPE_CHECKING:
    from .._core.lines import Line
    from .values import Layout


class Residual:
    """What a storage held when it was kept: the value that an operation made, of which ``tensor`` is any alias."""

    __slots__ = ("__weakref__", "_bring", "_form", "_guard", "_near", "_offloaded", "_written", "line", "op")

    def __init__(self, op: Any, line: Line | None) -> None:
        self.op, self.line = op, line  # what made it, and where that was called
        self._bring: Callable[[], torch.Tensor] | None = None
        self._near: torch.Tensor | None = None
        self._offloaded: Offloaded | None = None

    def stay(self, tensor: torch.Tensor, form: tuple | None) -> None:
        """It is kept where it is."""
        self._guard, self._written, self._form = alias(tensor), private.version(tensor), form or form_of(tensor)

    def go(
        self, tensor: torch.Tensor, form: tuple | None, layout: Layout | None, outer: Hooks | None, group: Group | None
    ) -> None:
        """It is kept by the hooks around, or in host memory."""
        if outer is None and host_memory.in_host_memory(tensor):
            self.stay(tensor, form)
            return
        if outer is None and isinstance(tensor, LeftOutTensor):  # by a recompute around
            tensor.check()
        with unseen():
            self._near = alias(tensor)  # as long as the region runs for the first time
            numbers = _numbers(tensor, layout)
            if outer is None:
                self._offloaded = Offloaded(numbers, group)
                self._bring = self._offloaded.get
            else:
                self._bring = Handed(numbers, outer).get

    @property
    def nbytes(self) -> int:
        """What it takes here."""
        return 0 if self.is_elsewhere else self._guard.untyped_storage().nbytes()

    @property
    def is_elsewhere(self) -> bool:
        """Whether to get it may run the region around again, which can't be done within an operation."""
        return self._bring is not None

    def on(self, layout: Layout) -> torch.Tensor:
        """A new tensor of a layout, whose storage holds the value.

        Raises:
            MutationError: it was changed in place.
        """
        tensor = self.get()
        if self._bring is None and self._form == layout.form:
            return alias(tensor)
        if not private.transforms_active():
            return layout.of(tensor)
        with private.without_levels():
            return layout.of(tensor)

    def get(self) -> torch.Tensor:
        """A tensor whose storage holds the value.

        Raises:
            MutationError: it was changed in place.
        """
        if self._bring is not None:
            if self._near is not None:
                return self._near
            with private.without_levels(), unseen():
                content = self._bring()
                whole = content.storage_offset() == 0 and content.is_contiguous()
                return content if whole else content.clone(memory_format=torch.contiguous_format)
        if private.version(self._guard) != self._written:
            op, line = self.op or "an operation", self.line or "a line that isn't known"
            raise MutationError(
                f"The output of {op} at {line}, which the region's policy keeps for the backward, was "
                f"changed in place later. Use the out-of-place operation, or change a copy: `.clone()`."
            )
        return self._guard

    def come(self) -> None:
        """Be here until ``leave``."""
        self._near = self.get()

    def leave(self) -> None:
        """Be elsewhere again."""
        self._near = None

    def before_writing(self) -> None:
        """Its storage is about to get another value, which a copy to host memory that is under way must not read."""
        if self._offloaded is not None:
            self._offloaded.settle()

    def settle(self) -> None:
        """The first run has ended. Whoever has its storage then, as of a result, may change it."""
        if self._near is not None and private.is_shared(self._near):
            self.before_writing()
        self.leave()


def tensor_of(content: Residual | torch.Tensor) -> torch.Tensor:
    """What was kept of a value, or the value itself, as a tensor."""
    return content.get() if isinstance(content, Residual) else content


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All that the storage of a tensor holds, in bytes: without its dtype, and without conjugation that is put off."""
    storage = tensor.untyped_storage()
    with private.without_dispatch():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _numbers(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """The same as numbers, for others to keep: in the value's own shape, or in a row where that leaves any out."""
    storage, dtype = tensor.untyped_storage(), tensor.dtype if layout is None else layout.dtype
    size: tuple[int, ...] = (storage.nbytes() // dtype.itemsize,)
    stride: tuple[int, ...] = (1,)
    if layout is not None and layout.fills(tensor):
        _, size, stride, *_ = layout.form
    with private.without_dispatch():
        if dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg()):
            return alias(tensor).as_strided(size, stride, 0)  # shares the version counter, which hooks may look at
        return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, size, stride)
