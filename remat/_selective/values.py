"""Values: what a storage holds from one write to the next, by numbers; and how tensors lie on storages.

The operations of a region are noted with the numbers of the values that they read and made. When the region is
recomputed, an operation is the same as one of the first run if it is the same function of the same values: then it may
be given what that one made. It can't be given what another one made, in whatever order it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._core.facts import Facts
from .._core.layout import holder, span
from .._core.private import has_no_memory, without_dispatch

New: TypeAlias = tuple[torch.Tensor, Any, "tuple | None"]  # with what stands for its memory, and its form


def form_of(tensor: torch.Tensor) -> tuple:
    """How a tensor lies on its storage: offset, sizes, strides, dtype, device, whether it is conjugated or negated."""
    shape, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return tensor.storage_offset(), shape, stride, dtype, device, tensor.is_conj(), tensor.is_neg()


def place_of(tensor: torch.Tensor) -> tuple[Any, tuple | None]:
    """What stands for a tensor's memory, and the tensor's form: None for what has no strides on a storage."""
    try:
        return tensor.untyped_storage(), form_of(tensor)
    except RuntimeError:  # sparse ones have no storage, nested ones no strides
        return tensor, None


def is_as_it_lies(form: tuple | None) -> bool:
    """Whether a tensor of this form has the values that are in its storage."""
    return form is not None and not form[5] and not form[6]


class Layout(NamedTuple):
    """A tensor of a result without its data: the ``i``-th value that the step made."""

    i: int
    form: tuple

    @property
    def size(self) -> torch.Size:
        """Its sizes."""
        return self.form[1]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.form[3]

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self.form[4]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout on the storage of another one."""
        return self.on(tensor.untyped_storage())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same on a storage."""
        offset, size, stride, dtype, device, *_ = self.form
        with without_dispatch():
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)

    def fills(self, tensor: torch.Tensor) -> bool:
        """Whether such a tensor is all that the storage of another one holds, in order."""
        offset, sizes, strides, dtype, *_ = self.form
        expected, count = 1, dtype.itemsize
        for size, stride in zip(reversed(sizes), reversed(strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return offset == 0 and expected * count == tensor.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """The bytes of a storage from its start to the last element."""
        offset, size, stride, dtype, *_ = self.form
        return (offset + span(size, stride)) * dtype.itemsize

    def empty(self) -> torch.Tensor:
        """A tensor of this layout that holds nothing yet."""
        _, size, stride, dtype, device, *_ = self.form
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


class Argument(NamedTuple):
    """A tensor of a result that is the ``i``-th tensor of the arguments, as in-place operations return it."""

    i: int


def layouts(template: Any) -> Iterator[Layout]:
    """Of all tensors in the description of a result."""
    if isinstance(template, Layout):
        yield template
    elif type(template) in (tuple, list):
        for item in template:
            yield from layouts(item)


_new = tuple.__new__  # half of what a named tuple takes
UNTOLD: Any = object()  # a result that can't be described


def template(result: Any, new: Sequence[New], arguments: list[torch.Tensor]) -> Any:
    """A result with descriptions for tensors, from which it can be made up again."""
    if isinstance(result, torch.Tensor):
        for i, (tensor, storage, form) in enumerate(new):
            if tensor is result:
                return _layout(result, form, i)
            if storage is holder(result):
                return _layout(result, place_of(result)[1], i)
        return next((Argument(i) for i, tensor in enumerate(arguments) if tensor is result), UNTOLD)
    if isinstance(result, (tuple, list)):
        items = [template(item, new, arguments) for item in result]
        return UNTOLD if any(item is UNTOLD for item in items) else type(result)(items)
    return UNTOLD if isinstance(result, torch.ScriptObject) else result


def _layout(tensor: torch.Tensor, form: tuple | None, i: int) -> Any:
    if form is None or not is_as_it_lies(form) or tensor.is_quantized or has_no_memory(tensor):
        return UNTOLD
    return _new(Layout, (i, form))


def is_judged(result: Any, facts: Facts) -> bool:
    """Whether the policy has a say: not where the result can't be described, or is nothing yet."""
    return result is not UNTOLD and not facts.makes_nothing
