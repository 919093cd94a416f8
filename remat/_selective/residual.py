"""Residuals: values that a policy saves, on their device, in host memory, or by the hooks around the region."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._core import host_memory, private
from .._core.facts import tensors
from .._core.host_memory import Group, Offloaded
from .._core.layout import holder
from .._core.state import alias, unseen
from .._region.packed import Hooks, Packed
from .._region.placeholders import Placeholder
from ..errors import MutationError
from .values import form_of

if TYPE_CHECKING:
    from .._core.lines import Line
    from .values import Layout


class Residual:
    """A saved value: the contents of a storage, as an operation made them. Methods take any alias as ``tensor``."""

    __slots__ = ("__weakref__", "_bring", "_form", "_guard", "_near", "_offloaded", "_versions", "line", "op")

    def __init__(self, op: Any, line: Line | None) -> None:
        self.op, self.line = op, line  # the operator that made it, and the line that called the operator
        self._bring: Callable[[], torch.Tensor] | None = None
        self._near: torch.Tensor | None = None
        self._offloaded: Offloaded | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []  # of tensors on its storage, unless it is a copy

    def save_here(self, tensor: torch.Tensor, form: tuple | None) -> None:
        """Save the value where it is."""
        self._guard, self._form = alias(tensor), form or form_of(tensor)
        self._versions = [(self._guard, private.version(tensor))]

    def watch(self, result: torch.Tensor) -> None:
        """Watch a result of the region, whose version counter may be its own: ``_unsafe_view`` doesn't share it."""
        if self._versions:
            self._versions.append((alias(result), private.version(result)))

    @property
    def has_changed(self) -> bool:
        """Whether the value was changed in place."""
        return any(private.version(tensor) != version for tensor, version in self._versions)

    def save_elsewhere(
        self, tensor: torch.Tensor, form: tuple | None, layout: Layout | None, outer: Hooks | None, group: Group | None
    ) -> None:
        """Hand the value to the hooks around the region, or copy it to host memory."""
        if outer is None and host_memory.in_host_memory(tensor):
            self.save_here(tensor, form)
            return
        if outer is None and isinstance(tensor, Placeholder):  # skipped by the recompute of an enclosing region
            tensor.check()
        with unseen():
            self._near = alias(tensor)  # until the first run ends
            numbers = _numbers(tensor, layout)
            if outer is None:
                self._offloaded = Offloaded(numbers, group)
                self._bring = self._offloaded.get
            else:
                handed = Packed(numbers, outer)
                self._bring = handed.get
                if any(holder(kept) is holder(tensor) for kept in tensors(handed.contents)):
                    self._versions = [(alias(tensor), private.version(tensor))]

    @property
    def nbytes(self) -> int:
        """The bytes that it occupies on the device."""
        return 0 if self.is_elsewhere else self._guard.untyped_storage().nbytes()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the value must be fetched. That may recompute an enclosing region, so not within an operation."""
        return self._bring is not None

    def on(self, layout: Layout) -> torch.Tensor:
        """Return a new tensor of a layout, whose storage contains the value.

        Raises:
            MutationError: the value was changed in place.
        """
        tensor = self.get()
        if self._bring is None and self._form == layout.form:
            return alias(tensor)
        if not private.transforms_active():
            return layout.of(tensor)
        with private.without_levels():
            return layout.of(tensor)

    def get(self) -> torch.Tensor:
        """Return a tensor whose storage contains the value.

        Raises:
            MutationError: the value was changed in place.
        """
        if self.has_changed:
            op, line = self.op or "an operation", self.line or "an unknown line"
            raise MutationError(
                f"The output of {op} at {line}, which the region's policy saves for the backward, was "
                f"changed in place later. Use the out-of-place operation, or change a copy: `.clone()`."
            )
        if self._bring is not None:
            if self._near is not None:
                return self._near
            with private.without_levels(), unseen():
                content = self._bring()
                whole = content.storage_offset() == 0 and content.is_contiguous()
                return content if whole else content.clone(memory_format=torch.contiguous_format)
        return self._guard

    def before_writing(self) -> None:
        """Have the stream wait for the copy to host memory, as the storage is about to be overwritten."""
        if self._offloaded is not None:
            self._offloaded.settle()

    def settle(self) -> None:
        """Release the value on the device. A shared storage, as of a result, may be overwritten next."""
        if self._near is not None and private.is_shared(self._near):
            self.before_writing()
        self._near = None


def tensor_of(content: Residual | torch.Tensor) -> torch.Tensor:
    """Return a residual's tensor, or a tensor itself."""
    return content.get() if isinstance(content, Residual) else content


def _numbers(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """Return the whole storage of a tensor in the value's dtype: in its shape if that covers the storage, else flat."""
    storage, dtype = tensor.untyped_storage(), tensor.dtype if layout is None else layout.dtype
    size: tuple[int, ...] = (storage.nbytes() // dtype.itemsize,)
    stride: tuple[int, ...] = (1,)
    if layout is not None and layout.fills(tensor):
        _, size, stride, *_ = layout.form
    with private.without_dispatch():
        if dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg()):
            return alias(tensor).as_strided(size, stride, 0)  # shares the version counter, which hooks may read
        return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, size, stride)
