"""Values: what a storage holds from one write to the next, and the operations that made them.

The operations of a region are noted with the values that they read and made. When the region runs again, an operation
is the same as one of the first run if it is the same function of the same values: then it may be given what that one
made. It can't be given what another one made, in whatever order it comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ._facts import Facts, tensors
from ._policy import Verdict
from ._residual import Residual, memory
from ._state import unseen
from ._torch import has_no_memory, without_dispatch

# Constants up to this size are compared, so that one can stand for another in a run again.
CONSTANT_BYTES = 4096


class Value:
    """What a storage holds from one write to the next.

    ``step`` is the number of the step that made it, None if none of the region did. (A number: steps own values.)
    """

    __slots__ = (
        "constant", "held", "loan", "names", "overwritten", "residual", "seen", "step", "tracked", "verdict",
    )  # fmt: skip

    held: torch.Tensor | None  # in the first run: it may have to be kept
    loan: weakref.ref[Residual] | None  # what is kept of it,
    residual: Residual | None  # if more needs it than the slots that own that

    def __init__(self, step: int | None = None, verdict: Verdict = Verdict.RECOMPUTE) -> None:
        self.step = step
        self.verdict = verdict
        self.names: dict[str, str] = {}  # given to it, each with the line
        self.overwritten: int | None = None  # the step that wrote to the storage next
        self.tracked = False  # it is differentiated
        self.seen = False  # Python code may have read it in ways that can't be seen
        self.constant: torch.Tensor | None = None  # a copy, of a small one that the function makes out of sight
        self.held = self.loan = self.residual = None

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
        self.draws = key[-1] is not None
        self.reads = reads
        self.outs: list[Value] = []  # the values of new storages, then of those that it wrote to
        self.result: Any = UNTOLD
        self.line = ""  # of the user's code
        self.question: tuple[Any, Any, tuple, dict] | None = None  # for the policy, once more if a value gets a name


class Layout:
    """A tensor of a result without its data: the ``i``-th value that the step made."""

    __slots__ = ("device", "dtype", "i", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, i: int) -> None:
        self.i = i
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.dtype, self.device = tensor.dtype, tensor.device

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout on the storage of another one."""
        return self.on(tensor.untyped_storage())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same on a storage."""
        with without_dispatch():
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return empty.set_(storage, self.offset, self.size, self.stride)

    def fills(self, tensor: torch.Tensor) -> bool:
        """Whether such a tensor is all that the storage of another one holds, in order."""
        expected, count = 1, self.dtype.itemsize
        for size, stride in zip(reversed(self.size), reversed(self.stride)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * count == tensor.untyped_storage().nbytes()

    def empty(self) -> torch.Tensor:
        """A tensor of this layout that holds nothing yet."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class Argument:
    """A tensor of a result that is the ``i``-th tensor of the arguments, as in-place operations return it."""

    __slots__ = ("i",)

    def __init__(self, i: int) -> None:
        self.i = i


class Storages:
    """Which value each storage holds now. Keeps none of them alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, Value]] = {}

    def find(self, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor's storage, None for a storage that is not known."""
        storage = holder(tensor)
        entry = self._entries.get(id(storage))
        return entry[1] if entry is not None and entry[0]() is storage else None

    def bind(self, tensor: torch.Tensor, value: Value) -> None:
        """Note what the storage of a tensor holds from now on."""
        storage = holder(tensor)
        self._entries[id(storage)] = weakref.ref(storage), value

    def get(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor's storage; one that is not known comes from outside."""
        value = self.find(tensor)
        if value is None:
            value = Value()
            value.tracked = tensor.requires_grad
            value.constant = self._constant(tensor)
            self.bind(tensor, value)
        return value

    @staticmethod
    def _constant(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.requires_grad or not is_dense(tensor) or tensor.device.type != "cpu":
            return None
        if tensor.untyped_storage().nbytes() > CONSTANT_BYTES:
            return None
        with unseen():
            return memory(tensor).clone()

    def outside(self) -> Storages:
        """Those alone that are still there and hold what no step made."""
        found = Storages()
        found._entries = {
            key: (ref, value) for key, (ref, value) in self._entries.items() if value.step is None and ref() is not None
        }
        return found

    def values(self) -> list[Value]:
        """What all storages hold that are still there."""
        return [value for ref, value in self._entries.values() if ref() is not None]

    def where(self, value: Value) -> Any:
        """The storage that holds a value, None if none does any more."""
        return next((ref() for ref, held in self._entries.values() if held is value), None)

    def copy(self) -> Storages:
        """The same, to go on with."""
        found = Storages()
        found._entries = dict(self._entries)
        return found

    def key(self, func: Any, args: tuple, kwargs: dict, draw: int | None, reads: list) -> tuple:
        """What calls have in common that make the same; adds the values that are read, with their tensors."""
        return func, self.pattern(args, reads), self.pattern(kwargs, reads) if kwargs else (), draw

    def pattern(self, argument: Any, reads: list[tuple[Value, torch.Tensor]]) -> Any:
        """A call's arguments with values for tensors, equal for calls that are the same; adds to ``reads``."""
        if isinstance(argument, torch.Tensor):
            value = self.get(argument)
            reads.append((value, argument))
            if not is_dense(argument):
                return value
            flags = argument.is_conj(), argument.is_neg()
            return value, argument.storage_offset(), argument.size(), argument.stride(), argument.dtype, flags
        kind = type(argument)
        if kind is tuple or kind is list:
            return tuple([self.pattern(item, reads) for item in argument])
        if kind is float:
            return argument.hex()  # tells zeros apart, and a NaN is itself
        if kind is int or kind is bool:
            return kind, argument
        if kind is dict:
            return tuple([(key, self.pattern(item, reads)) for key, item in argument.items()])
        return argument


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is a plain one: sizes and strides on a storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def holder(tensor: torch.Tensor) -> Any:
    """What stands for a tensor's memory: its storage, or a sparse tensor itself, which has none."""
    return tensor.untyped_storage() if is_dense(tensor) else tensor


def new_tensors(result: Any, storages: Storages, arguments: Any = ()) -> list[torch.Tensor]:
    """The tensors of a result that have storages of their own, which neither are known nor those of ``arguments``."""
    found: list[torch.Tensor] = []
    for tensor in tensors(result):
        if storages.find(tensor) is None and not any(holder(t) is holder(tensor) for t in found):
            found.append(tensor)
    if found and (given := {id(holder(t)) for t in tensors(arguments)}):
        found = [tensor for tensor in found if id(holder(tensor)) not in given]
    return found


def layouts(template: Any) -> Iterator[Layout]:
    """Of all tensors in the description of a result."""
    if isinstance(template, Layout):
        yield template
    elif type(template) in (tuple, list):
        for item in template:
            yield from layouts(item)


UNTOLD: Any = object()  # a result that can't be described


def template(result: Any, new: list[torch.Tensor], arguments: list[torch.Tensor]) -> Any:
    """A result with descriptions for tensors, from which it can be made up again."""
    if isinstance(result, torch.Tensor):
        for i, tensor in enumerate(new):
            if holder(tensor) is holder(result):
                odd = result.is_quantized or result.is_conj() or result.is_neg() or has_no_memory(result)
                return UNTOLD if odd or not is_dense(result) else Layout(result, i)
        return next((Argument(i) for i, tensor in enumerate(arguments) if tensor is result), UNTOLD)
    if isinstance(result, (tuple, list)):
        items = [template(item, new, arguments) for item in result]
        return UNTOLD if UNTOLD in items else type(result)(items)
    return result
