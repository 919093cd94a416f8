"""Placeholders for values that a recompute skips because nothing needs them. Reading one restarts the recompute."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from .._core.facts import tensors
from .._core.private import as_subclass, without_overrides
from .._core.tensors import holder

_LARGE = 64 * 1024  # bytes


class Restart(BaseException):
    """A recompute reads a value that it has skipped. Not an Exception, so that user code doesn't catch it."""


class Placeholders:
    """The placeholders of one recompute, by their storages. References to them are weak."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref] = {}
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._thread = threading.get_ident()
        self.is_read = False  # a placeholder was read

    def __bool__(self) -> bool:
        return bool(self._storages)

    def placeholder(self, form: Any) -> torch.Tensor:
        """Return a new placeholder of a `Form`. Large ones on a device share one memory, as nothing writes to them.

        They contain NaN, so that an undetected read shows in the result.
        """
        memory = self._memory_for(form) if form.nbytes >= _LARGE else None
        if type(memory) is torch.Tensor:
            tensor = form.on(torch.from_dlpack(memory[: form.nbytes]).untyped_storage())
        else:  # the memory of a FakeTensor can't be shared
            tensor = form.empty().fill_(torch.nan)
        self.add(tensor)
        return tensor

    def _memory_for(self, form: Any) -> torch.Tensor | None:
        memory = self._memory.get(form.device)
        if form.device.type != "meta" and (memory is None or len(memory) < form.nbytes):
            memory = torch.full((form.nbytes,), 0xFF, dtype=torch.uint8, device=form.device)
            self._memory[form.device] = memory
        return memory

    def add(self, tensor: torch.Tensor) -> None:
        """Make a tensor a placeholder."""
        storage = holder(tensor)
        self._storages[id(storage)] = weakref.ref(storage)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a placeholder."""
        storage = holder(tensor)
        ref = self._storages.get(id(storage))
        return ref is not None and ref() is storage

    def mark_filled(self, tensor: torch.Tensor) -> None:
        """Note that a placeholder has been filled with its value."""
        self._storages.pop(id(holder(tensor)), None)

    def read(self, read: Iterable[torch.Tensor]) -> None:
        """Note that these tensors are read. Raises Restart if one of them is a placeholder."""
        if self._storages and any(map(self.has, read)):
            self.restart()

    def restart(self) -> None:
        """Restart the recompute. `is_read` says so as well, since another exception may replace this one.

        Another thread can't be stopped by an exception: it continues with placeholders until the recompute ends.
        """
        self.is_read = True
        if self.is_own_thread:
            raise Restart

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread of the recompute, whose operations the dispatcher sees."""
        return threading.get_ident() == self._thread

    def escaped(self, but: Iterable[Any] = ()) -> bool:
        """Whether a placeholder is still alive after the run, except for the storages in ``but``."""
        unread = {*map(id, but)}
        return any(ref() is not None and key not in unread for key, ref in self._storages.items())

    def mark(self, result: Any) -> Any:
        """Make the placeholders in a result `Placeholder`s, which notice when torch exposes their memory."""
        if type(result) in (tuple, list):
            return type(result)(map(self.mark, result))
        if type(result) is torch.Tensor and self._storages and self.has(result):  # a FakeTensor has no data to expose
            result = as_subclass(Placeholder, result)
            result.placeholders = weakref.ref(self)
        return result


class Placeholder(torch.Tensor):
    """A placeholder. The dispatcher sees operations on it, but not reads of its memory by these methods."""

    __module__ = "torch"  # by which opt_einsum chooses its functions for a tensor
    placeholders: weakref.ref[Placeholders]
    _READERS = frozenset([
        "numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__repr__", "__format__", "__reduce_ex__",
        "storage", "new_tensor", "item", "__bool__", "__complex__", "__float__", "__index__", "__int__",
    ])  # fmt: skip

    def check(self) -> None:
        """Note a read of its memory that the dispatcher doesn't see."""
        placeholders = self.placeholders()
        if placeholders is not None:
            with without_overrides():
                placeholders.read([self])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", None)
        # Of its own tensor, ``new_tensor`` reads only dtype and device.
        read = [t for t in tensors((args[name == "new_tensor" :], kwargs)) if isinstance(t, Placeholder)]
        for tensor in read:
            placeholders = tensor.placeholders()
            if name in cls._READERS or (placeholders is not None and not placeholders.is_own_thread):
                tensor.check()
        with without_overrides():
            return func(*args, **kwargs)
