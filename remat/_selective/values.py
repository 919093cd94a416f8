"""Values, which are numbers for the contents of a storage from one write to the next; and the layout of tensors.

The operations of a region are recorded with the numbers of the values that they read and made. In the recompute an
operation matches a step of the first run if it is the same function of the same values. Only then is its result
restored from the step's saved values. So an operation never gets the value of another one, in whatever order they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._core.facts import Facts
from .._core.layout import holder, span
from .._core.private import has_no_memory, without_dispatch

New: TypeAlias = tuple[torch.Tensor, Any, "tuple | None"]  # a tensor, its storage (see `place_of`), its form


def form_of(tensor: torch.Tensor) -> tuple:
    """Return a tensor's form: offset, sizes, strides, dtype, device, lazy conjugation, lazy negation."""
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return tensor.storage_offset(), shape, stride, dtype, device, tensor.is_conj(), tensor.is_neg()


def place_of(tensor: torch.Tensor) -> tuple[Any, tuple | None]:
    """Return a tensor's storage and form, or the tensor itself and None if it has no strided storage."""
    try:
        return tensor.untyped_storage(), form_of(tensor)
    except RuntimeError:  # sparse tensors have no storage, nested tensors have no strides
        return tensor, None


def is_as_it_lies(form: tuple | None) -> bool:
    """Whether a tensor of this form reads its storage directly, without lazy conjugation or negation."""
    return form is not None and not form[5] and not form[6]


class Layout(NamedTuple):
    """The description of a tensor in a result: its form, and the index ``i`` of its value in the step's ``outs``."""

    i: int
    form: tuple

    @property
    def size(self) -> torch.Size:
        """The sizes."""
        return self.form[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.form[3]

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.form[4]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this layout on another tensor's storage."""
        return self.on(tensor.untyped_storage())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this layout on a storage."""
        offset, size, stride, dtype, device, *_ = self.form
        with without_dispatch():
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)

    def fills(self, tensor: torch.Tensor) -> bool:
        """Whether a contiguous tensor of this layout covers the whole storage of another tensor."""
        offset, sizes, strides, dtype, *_ = self.form
        expected, count = 1, dtype.itemsize
        for size, stride in zip(reversed(sizes), reversed(strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return offset == 0 and expected * count == tensor.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """The bytes from the start of the storage to the last element."""
        offset, size, stride, dtype, *_ = self.form
        return (offset + span(size, stride)) * dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this layout."""
        _, size, stride, dtype, device, *_ = self.form
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


class Argument(NamedTuple):
    """The description of a result that is the ``i``-th tensor of the arguments, as of in-place operations."""

    i: int


def layouts(template: Any) -> Iterator[Layout]:
    """Iterate over the layouts in the description of a result."""
    if isinstance(template, Layout):
        yield template
    elif type(template) in (tuple, list):
        for item in template:
            yield from layouts(item)


_new = tuple.__new__  # takes half the time of the named tuple's constructor
UNDESCRIBED: Any = object()  # a result that can't be described


def template(result: Any, new: Sequence[New], arguments: list[torch.Tensor]) -> Any:
    """Return the description of a result, with layouts in place of tensors, from which it can be rebuilt."""
    if isinstance(result, torch.Tensor):
        for i, (tensor, storage, form) in enumerate(new):
            if tensor is result:
                return _layout(result, form, i)
            if storage is holder(result):
                return _layout(result, place_of(result)[1], i)
        return next((Argument(i) for i, tensor in enumerate(arguments) if tensor is result), UNDESCRIBED)
    if isinstance(result, (tuple, list)):
        items = [template(item, new, arguments) for item in result]
        return UNDESCRIBED if any(item is UNDESCRIBED for item in items) else type(result)(items)
    return UNDESCRIBED if isinstance(result, torch.ScriptObject) else result


def _layout(tensor: torch.Tensor, form: tuple | None, i: int) -> Any:
    if form is None or not is_as_it_lies(form) or tensor.is_quantized or has_no_memory(tensor):
        return UNDESCRIBED
    return _new(Layout, (i, form))


def is_judged(result: Any, facts: Facts) -> bool:
    """Whether the policy decides about a result: not if it can't be described, or is uninitialized memory."""
    return result is not UNDESCRIBED and not facts.makes_nothing
