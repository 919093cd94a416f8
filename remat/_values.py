"""Values: what a storage holds from one write to the next, and the operations that made them.

The operations of a region are noted with the values that they read and made. When the region runs again, an operation
is the same as one of the first run if it is the same function of the same values: then it may be given what that one
made. It can't be given what another one made, in whatever order it comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ._determinism import Line
from ._facts import Facts
from ._policy import Verdict
from ._torch import has_no_memory, without_dispatch

if TYPE_CHECKING:
    from ._residual import Residual

New: TypeAlias = tuple[torch.Tensor, Any, "tuple | None"]  # with what stands for its memory, and in which form it is


class Value:
    """What a storage holds from one write to the next.

    ``step`` is the number of the step that made it, None if none of the region did. (A number: steps own values.)
    """

    names: Mapping[str, Line] = MappingProxyType({})  # given to it, each with the line
    overwritten: int | None = None  # the step that wrote to the storage next
    seen = False  # Python code may have read it in ways that can't be seen
    constant: torch.Tensor | None = None  # a copy, of a small one that the function makes out of sight
    held: torch.Tensor | None = None  # in the first run: it may have to be kept
    loan: weakref.ref[Residual] | None = None  # what is kept of it,
    residual: Residual | None = None  # if more needs it than the slots that own that

    def __init__(self, step: int | None = None, verdict: Verdict = Verdict.RECOMPUTE, tracked: bool = False) -> None:
        self.step = step
        self.verdict = verdict
        self.tracked = tracked  # it is differentiated

    @property
    def can_wait(self) -> bool:
        """Whether it may be made later: if not differentiated, user code may read it in ways that can't be seen."""
        return self.tracked and not self.seen

    @property
    def saveable(self) -> bool:
        """Whether the policy lets it be kept."""
        return self.verdict is not Verdict.RECOMPUTE

    def kept(self) -> Residual | None:
        """What is kept of it, if it still is."""
        return None if self.loan is None else self.loan()


class Step:
    """An operation of a first run that made or changed a value; views aren't noted."""

    __slots__ = ("draws", "facts", "func", "key", "line", "number", "outs", "question", "reads", "result")

    def __init__(self, func: Any, facts: Facts, number: int, key: tuple, reads: list[Value]) -> None:
        self.func = func
        self.facts = facts
        self.number = number
        self.key = key
        self.draws = key[1] is not None
        self.reads = reads
        self.outs: list[Value] = []  # the values of new storages, then of those that it wrote to
        self.result: Any = UNTOLD
        self.line: Any = ""  # of the user's code
        self.question: tuple[Any, Any, tuple, dict] | None = None  # for the policy, once more if a value gets a name


class Layout:
    """A tensor of a result without its data: the ``i``-th value that the step made."""

    __slots__ = ("device", "form", "i")

    def __init__(self, tensor: torch.Tensor, i: int, form: tuple | None = None) -> None:
        self.i = i
        self.form = form or form_of(tensor)
        self.device = tensor.device

    @property
    def size(self) -> torch.Size:
        """Its sizes."""
        return self.form[1]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.form[3]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout on the storage of another one."""
        return self.on(tensor.untyped_storage())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same on a storage."""
        offset, size, stride, dtype, *_ = self.form
        with without_dispatch():
            return torch.empty(0, dtype=dtype, device=self.device).set_(storage, offset, size, stride)

    def fills(self, tensor: torch.Tensor) -> bool:
        """Whether such a tensor is all that the storage of another one holds, in order."""
        offset, sizes, strides, dtype, *_ = self.form
        expected, count = 1, dtype.itemsize
        for size, stride in zip(reversed(sizes), reversed(strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return offset == 0 and expected * count == tensor.untyped_storage().nbytes()

    def empty(self) -> torch.Tensor:
        """A tensor of this layout that holds nothing yet."""
        _, size, stride, dtype, *_ = self.form
        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)


class Argument:
    """A tensor of a result that is the ``i``-th tensor of the arguments, as in-place operations return it."""

    __slots__ = ("i",)

    def __init__(self, i: int) -> None:
        self.i = i


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is a plain one: sizes and strides on a storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def holder(tensor: torch.Tensor) -> Any:
    """What stands for a tensor's memory: its storage, or a sparse tensor itself, which has none."""
    return tensor.untyped_storage() if is_dense(tensor) else tensor


def place_of(tensor: torch.Tensor) -> tuple[Any, tuple | None]:
    """What stands for a tensor's memory, and in which form the tensor lies there."""
    try:
        return tensor.untyped_storage(), form_of(tensor)
    except RuntimeError:  # sparse ones have no storage, nested ones no strides
        return tensor, None


def form_of(tensor: torch.Tensor) -> tuple:
    """How a tensor lies on its storage."""
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    return tensor.storage_offset(), shape, stride, dtype, tensor.is_conj(), tensor.is_neg()


def layouts(template: Any) -> Iterator[Layout]:
    """Of all tensors in the description of a result."""
    if isinstance(template, Layout):
        yield template
    elif type(template) in (tuple, list):
        for item in template:
            yield from layouts(item)


UNTOLD: Any = object()  # a result that can't be described


def template(result: Any, new: list[New], arguments: list[torch.Tensor]) -> Any:
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
        return UNTOLD if UNTOLD in items else type(result)(items)
    return result


def _layout(tensor: torch.Tensor, form: tuple | None, i: int) -> Any:
    if form is None or form[4] or form[5] or tensor.is_quantized or has_no_memory(tensor):
        return UNTOLD
    return Layout(tensor, i, form)
