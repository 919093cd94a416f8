"""Dispatch modes that observe every operation and change none.

They count tensor storages and dispatched operations, not the memory of an allocator, so their counts are exact and the
same on every device. Under ``torch.func`` transforms the dispatcher sees the plain tensors below all levels.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._core.facts import facts_of, tensors
from .._core.private import PlainDispatchMode, has_no_memory
from .._core.tensors import is_wrapper_call


class Observer(PlainDispatchMode):
    """A mode that sees every operation on plain tensors, and of wrapper subclasses those on their inner tensors."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if is_wrapper_call(types):
            return NotImplemented
        kwargs = kwargs or {}
        self.before(func, args, kwargs)
        result = facts_of(func).run(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result

    def before(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Called before the operation runs."""

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Called after the operation has run."""


class PeakMemory(Observer):
    """Counts the bytes of the storages that are made while the mode is active.

    A storage counts once, however many views share it, from the operation that returns it until it is freed. Not
    counted are storages that existed before, memory that a kernel uses and frees, data that reaches torch without an
    operation (``torch.tensor``, ``torch.from_numpy``) and tensors that aren't strided.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0  # the most bytes that were alive after an operation
        # The Python object of a storage lives as long as the storage, so a weak reference to it dies only when no
        # Python or C++ code (such as autograd) refers to the memory.
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._buffers: dict[int, weakref.ref] = {}  # those that FSDP may resize without an operation
        self._sizes: dict[int, int] = {}
        self.total = 0  # the sum of the sizes, so that no operation has to add them up

    @property
    def live(self) -> int:
        """The current bytes of the live storages, also after the mode was exited."""
        return sum(storage.nbytes() for storage in self.storages())

    def storages(self) -> list[torch.UntypedStorage]:
        """The live storages that were made while the mode was active."""
        return [storage for ref in list(self._refs.values()) if (storage := ref()) is not None]

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        given = {id(storage) for storage, _ in strided((args, kwargs))}
        for storage, tensor in strided(result):
            is_new = id(storage) not in self._refs
            if is_new and (id(storage) in given or _has_only_a_shape(tensor, func)):
                continue
            self._count(storage)
            if is_new:
                self.made(storage, tensor, func)
                if facts_of(func).makes_nothing:
                    self._buffers[id(storage)] = self._refs[id(storage)]
        if self.total > self.peak:
            for ref in list(self._buffers.values()):
                if (buffer := ref()) is not None:
                    self._count(buffer)
            self.peak = max(self.peak, self.total)

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage at its current size."""
        key, size = id(storage), storage.nbytes()
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, functools.partial(self._freed, key))
        elif self._sizes[key] != size:
            self._buffers[key] = self._refs[key]
        self.total += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _freed(self, key: int, ref: weakref.ref) -> None:
        del self._refs[key]  # the callback runs before another storage can have this id
        self._buffers.pop(key, None)
        self.total -= self._sizes.pop(key)

    def made(self, storage: torch.UntypedStorage, tensor: torch.Tensor, func: Any) -> None:
        """Called when an operation has made a storage, with a tensor on it."""


def _has_only_a_shape(tensor: torch.Tensor, func: Any) -> bool:
    """Whether a tensor is a zero of forward mode, which has no memory, or on the meta device for the shape of one."""
    return has_no_memory(tensor) or (tensor.is_meta and str(func).startswith(("prims.", "aten.to.")))


def strided(tree: Any) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
    """The strided tensors in a call's argument or result, each with its storage."""
    return ((tensor.untyped_storage(), tensor) for tensor in tensors(tree) if tensor.layout is torch.strided)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect garbage, then disable the collector in the context, so that only reference counts free memory."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
