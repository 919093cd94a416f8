"""Which value each storage holds, and what calls of operations have in common that make the same."""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import torch

from ._facts import tensors
from ._residual import memory
from ._state import unseen
from ._values import New, Value, holder, is_dense, place_of

# Constants up to this size are compared, so that one can stand for another in a run again.
CONSTANT_BYTES = 4096

Reads: TypeAlias = list[tuple[Value, torch.Tensor]]


class Storages:
    """Which value each storage holds now. Keeps none of them alive."""

    def __init__(self, entries: dict[int, tuple[weakref.ref, Value]] | None = None) -> None:
        self._entries = entries or {}
        self.strangers = 0  # storages that were met and not known

    def find(self, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor's storage, None for a storage that is not known."""
        storage = holder(tensor)
        entry = self._entries.get(id(storage))
        return entry[1] if entry is not None and entry[0]() is storage else None

    def look(self, tensor: torch.Tensor) -> tuple[Value | None, tuple | None]:
        """The same, and in which form the tensor is; that is None for what has no strides on a storage."""
        storage, form = place_of(tensor)
        entry = self._entries.get(id(storage))
        return (entry[1] if entry is not None and entry[0]() is storage else None), form

    def new(self, result: Any) -> list[New]:
        """The tensors of a result that have storages of their own, which aren't known."""
        found: dict[int, New] = {}
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors(result):
            storage, form = place_of(tensor)
            entry = self._entries.get(id(storage))
            if entry is None or entry[0]() is not storage:
                found.setdefault(id(storage), (tensor, storage, form))
        return [*found.values()]

    def put(self, storage: Any, value: Value) -> None:
        """Note what a storage holds from now on."""
        self._entries[id(storage)] = weakref.ref(storage), value

    def bind(self, tensor: torch.Tensor, value: Value) -> None:
        """The same with a tensor on the storage."""
        self.put(holder(tensor), value)

    def get(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor's storage; one that is not known comes from outside."""
        value = self.find(tensor)
        if value is None:
            value = Value(None, tracked=tensor.requires_grad)
            value.constant = self._constant(tensor)
            self.bind(tensor, value)
            self.strangers += 1
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
        entries = self._entries.items()
        return Storages({key: entry for key, entry in entries if entry[1].step is None and entry[0]() is not None})

    def values(self) -> list[Value]:
        """What all storages hold that are still there."""
        return [value for ref, value in self._entries.values() if ref() is not None]

    def where(self, value: Value) -> Any:
        """The storage that holds a value, None if none does any more."""
        return next((ref() for ref, held in self._entries.values() if held is value), None)

    def copy(self) -> Storages:
        """The same, to go on with."""
        return Storages(dict(self._entries))

    def key(self, func: Any, args: tuple, kwargs: dict, draw: int | None, reads: Reads) -> tuple:
        """What calls have in common that make the same; adds what is read to ``reads``."""
        key = [func, draw]
        for argument in args:
            if isinstance(argument, torch.Tensor):
                self._read(argument, key, reads)
            else:
                key.append(self._pattern(argument, reads))
        if kwargs:
            key.append(self._pattern(kwargs, reads))
        return tuple(key)

    def _read(self, tensor: torch.Tensor, pattern: list, reads: Reads) -> None:
        """Add a tensor to a pattern: its value, and in which form that is read."""
        value, form = self.look(tensor)
        if value is None:
            value = self.get(tensor)
        reads.append((value, tensor))
        pattern += (value, form)

    def _pattern(self, argument: Any, reads: Reads) -> Any:
        """A call's argument with values for tensors, equal for calls that are the same."""
        kind = type(argument)
        if kind is int or kind is bool:
            return kind, argument
        if kind is float:
            return argument.hex()  # tells zeros apart, and a NaN is itself
        if isinstance(argument, torch.Tensor):
            pattern: list[Any] = []
            self._read(argument, pattern, reads)
            return tuple(pattern)
        if kind is tuple or kind is list:
            return tuple([self._pattern(item, reads) for item in argument])
        if kind is dict:
            return tuple([(key, self._pattern(item, reads)) for key, item in argument.items()])
        return argument
