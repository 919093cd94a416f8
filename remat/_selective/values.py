"""Values, which are numbers for the contents of a storage from one write to the next; and the layout of tensors.

The operations of a region are recorded with the numbers of the values that they read and made. In the recompute an
operation matches a step of the first run if it is the same function of the same values. Only then is its result
restored from the step's saved values. So an operation never gets the value of another one, in whatever order they run.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .._core.facts import Facts, tensors
from .._core.private import FakeTensor, has_no_memory, without_dispatch
from .._core.tensors import as_bytes, bytes_of, holder, is_dense, parts, span


class Form(NamedTuple):
    """How a tensor lies on its storage, with lazy conjugation and lazy negation."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    conj: bool
    negated: bool

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this form on a storage."""
        with without_dispatch():
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return empty.set_(storage, self.offset, self.size, self.stride)

    @property
    def nbytes(self) -> int:
        """The bytes from the start of the storage to the last element."""
        return (self.offset + span(self.size, self.stride)) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this form."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


New: TypeAlias = tuple[torch.Tensor, Any, Form | None]  # a tensor, and its storage and form (see `place_of`)
_new = tuple.__new__  # takes half the time of a named tuple's constructor


def place_of(tensor: torch.Tensor) -> tuple[Any, Form | None]:
    """Return a tensor's storage and form, or the tensor itself and None if it has no strided storage."""
    try:
        offset, size, stride, dtype = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        lazy = dtype.is_complex and tensor.is_conj(), tensor.is_neg()
        return tensor.untyped_storage(), _new(Form, (offset, size, stride, dtype, tensor.device, *lazy))
    except RuntimeError:  # sparse tensors have no storage, nested tensors have no strides
        return tensor, None


def form_of(tensor: torch.Tensor) -> Form | None:
    """Return a tensor's form, None if it has no strided storage."""
    _, form = place_of(tensor)
    return form


def is_as_it_lies(form: Form | None) -> bool:
    """Whether a tensor of this form reads its storage directly, without lazy conjugation or negation."""
    return form is not None and not form.conj and not form.negated


class Layout(NamedTuple):
    """The description of a tensor in a result: the index ``i`` of its value in the step's ``outs``, and its form."""

    i: int
    form: Form


class Argument(NamedTuple):
    """The description of a result that is the ``i``-th tensor of the arguments, as of in-place operations."""

    i: int


UNDESCRIBED: Any = object()  # a result that can't be described


def template(result: Any, new: Sequence[New], arguments: list[torch.Tensor]) -> Any:
    """Return the description of a result, with layouts in place of tensors, from which it can be rebuilt."""
    if isinstance(result, torch.Tensor):
        for i, (tensor, storage, form) in enumerate(new):
            if tensor is result or storage is holder(result):
                form = form if tensor is result else form_of(result)
                is_described = is_as_it_lies(form) and not (result.is_quantized or has_no_memory(result))
                return _new(Layout, (i, form)) if is_described else UNDESCRIBED
        return next((Argument(i) for i, tensor in enumerate(arguments) if tensor is result), UNDESCRIBED)
    if isinstance(result, (tuple, list)):
        items = [template(item, new, arguments) for item in result]
        return UNDESCRIBED if any(item is UNDESCRIBED for item in items) else type(result)(items)
    return UNDESCRIBED if isinstance(result, torch.ScriptObject) else result


CONSTANT_BYTES = 4096
_NO_HOME: Any = lambda: None, None  # of an unknown storage


class Storages:
    """The numbers of the values that storages contain, by weak references."""

    def __init__(self) -> None:
        self.count = 0  # of values
        # Small values that no seen operation made, by their bytes: a recompute makes equal ones anew.
        self._constants: dict[bytes, int] = {}
        self.tracked: set[int] = set()  # the values that require grad
        self._homes: dict[int, tuple[weakref.ref, int]] = {}  # by the storage's id: the storage, its value's number

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the value in a tensor's storage, or None for an unknown storage."""
        return self.at(holder(tensor))

    def at(self, storage: Any) -> int | None:
        """Return the number of the value in a storage, or None for an unknown storage."""
        ref, number = self._homes.get(id(storage), _NO_HOME)
        return number if ref() is storage else None

    def get(self, tensor: torch.Tensor) -> int:
        """Return the number of the value in a tensor's storage. An unknown storage contains a constant."""
        number = self.find(tensor)
        return self._meet(tensor, holder(tensor)) if number is None else number

    def inside(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return the numbers of the values in a tensor, each with the plain tensor that contains it."""
        found = [(self.find(part), part) for part in parts(tensor)]
        return [(number, part) for number, part in found if number is not None]

    def values(self) -> list[int]:
        """Return the numbers of the values in all storages that are alive."""
        return [number for ref, number in self._homes.values() if ref() is not None]

    def new(self, result: Any) -> list[New]:
        """Return the tensors of a result that have new, unknown storages, one for each storage."""
        found: dict[int, New] = {}
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors(result):
            storage, form = place_of(tensor)
            if self.at(storage) is None:
                found.setdefault(id(storage), (tensor, storage, form))
        return [*found.values()]

    def put(self, storage: Any, number: int | None = None) -> int:
        """Set the number of the value in a storage, that of a new value if it is None, and return it."""
        if number is None:
            number, self.count = self.count, self.count + 1
        self._homes[id(storage)] = weakref.ref(storage), number
        return number

    def copy(self, without: Collection[int] = ()) -> Storages:
        """Return a copy that can change independently, of the living storages that contain other values than these."""
        found = Storages()
        found.count, found._constants, found.tracked = self.count, self._constants.copy(), self.tracked.copy()
        homes = ((key, ref, number) for key, (ref, number) in self._homes.items() if number not in without)
        found._homes = {key: (ref, number) for key, ref, number in homes if ref() is not None}
        return found

    def _meet(self, tensor: torch.Tensor, storage: Any) -> int:
        """Return the number of the value in an unknown storage, which contains a constant."""
        content = _content(tensor)
        number = self.put(storage, None if content is None else self._constants.get(content))
        if content is not None:
            self._constants[content] = number
        if tensor.requires_grad:
            self.tracked.add(number)
        return number

    def key(self, facts: Facts, draw: int | None, args: tuple, kwargs: dict, read: list) -> tuple:
        """Return the operation, its draw, arguments and values: equal for equal calls. Add the tensors it reads."""
        reads: list[int] = []
        patterns = self._patterns(args, reads, read)
        return facts, draw, patterns, self._patterns((kwargs,), reads, read) if kwargs else None, tuple(reads)

    def _patterns(self, arguments: Iterable[Any], reads: list, read: list) -> tuple:
        """Return arguments with forms in place of tensors, which are equal for equal calls."""
        found: list[Any] = []
        for argument in arguments:
            kind = type(argument)
            if isinstance(argument, torch.Tensor):
                storage, form = place_of(argument)
                number = self.at(storage)
                reads.append(self._meet(argument, storage) if number is None else number)
                read.append(argument)
                argument = form
            elif kind is int:
                argument = kind, argument  # 1 and True differ
            elif kind is float:
                argument = argument.hex()  # 0.0 and -0.0 differ, and NaN equals itself
            elif kind is tuple or kind is list:
                argument = self._patterns(argument, reads, read)
            elif kind is dict:
                argument = (*argument, *self._patterns(argument.values(), reads, read))
            elif kind is torch.ScriptObject:  # it can't be compared; those of collectives are new objects in each call
                name = argument._type().qualified_name()
                argument = name if ".c10d." in name else (name, hash(argument))
            found.append(argument)
        return tuple(found)


def _content(tensor: torch.Tensor) -> bytes | None:
    """The bytes of a small constant; None for a parameter, which the function doesn't create, and where they're far."""
    is_parameter = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
    is_near = is_dense(tensor) and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    if is_parameter or not is_near or has_no_memory(tensor):
        return None
    return bytes_of(as_bytes(tensor)) if tensor.untyped_storage().nbytes() <= CONSTANT_BYTES else None
