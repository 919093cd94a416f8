"""Dispatch modes that look at every operation and change none.

What they count is exact and the same on every device: tensor storages and dispatched operations, not an allocator. It
holds under ``torch.func`` transforms too, where the dispatcher sees the plain tensors below all levels.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .._core.facts import tensors
from .._core.parts import is_wrapper_call
from .._core.private import PlainDispatchMode


class Observer(PlainDispatchMode):
    """A mode that sees every operation on plain tensors.

    An operation on a wrapper subclass (one with ``__tensor_flatten__``, such as ``DTensor``) is left to the subclass:
    the mode sees what that runs on the tensors inside.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if is_wrapper_call(types):
            return NotImplemented
        kwargs = kwargs or {}
        self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result

    def before(self, func: Any, args: tuple, kwargs: dict) -> None:
        """The operation is about to run."""

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """The operation has run."""


class PeakMemory(Observer):
    """Counts the bytes of the storages that are made while the mode is on.

    A storage counts from the operation that returns it until it is freed, once, whatever views share it. Storages
    from before the mode was entered count nothing: not when they are viewed, written to or freed.

    Limits: it sees neither what a kernel uses and frees within one operation, nor data that reaches torch without an
    operation (``torch.tensor``, ``torch.from_numpy``), nor tensors that aren't strided.

    Attributes:
        peak: the most bytes that were alive after an operation.

    Example:
        >>> x = torch.ones(256)
        >>> with PeakMemory() as memory:
        ...     y = x.tanh().tanh()
        >>> memory.peak, memory.live
        (2048, 1024)
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # The Python object of a storage lives as long as the storage, so that a weak reference to it tells whether
        # autograd or anybody else in C++ still holds the memory.
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self.total = 0  # of the sizes, so that an operation takes no time for each storage

    @property
    def live(self) -> int:
        """Bytes that are alive now, at the size that the storages have now; also after the mode was left."""
        return sum(storage.nbytes() for storage in self.storages())

    def storages(self) -> list[torch.UntypedStorage]:
        """Those that were made while the mode was on and are alive."""
        return [storage for ref in list(self._refs.values()) if (storage := ref()) is not None]

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        given = {id(storage): storage for storage, _ in strided((args, kwargs))}
        for key, storage in given.items():
            self._resized(key, storage)
        for storage, tensor in strided(result):
            key = id(storage)
            if key not in given and not self._resized(key, storage):
                self._refs[key] = weakref.ref(storage, functools.partial(self._freed, key))
                self._sizes[key] = size = storage.nbytes()
                self.total += size
                self.made(storage, tensor, func)
        if self.total > self.peak:
            for storage in self.storages():  # some may have been resized without an operation
                self._resized(id(storage), storage)
            self.peak = max(self.peak, self.total)

    def _resized(self, key: int, storage: torch.UntypedStorage) -> bool:
        """Note the size that a storage has now, if it was made while the mode was on: whether it was."""
        if key not in self._sizes:
            return False
        size = storage.nbytes()
        self.total += size - self._sizes[key]
        self._sizes[key] = size
        return True

    def _freed(self, key: int, ref: weakref.ref) -> None:
        if self._refs.get(key) is ref:
            del self._refs[key]
            self.total -= self._sizes.pop(key)

    def made(self, storage: torch.UntypedStorage, tensor: torch.Tensor, func: Any) -> None:
        """The operation has made a storage, and a tensor on it."""


def strided(tree: Any) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
    """The strided tensors in a call's argument or result, each with its storage."""
    for tensor in tensors(tree):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage(), tensor


# torch's counter has the formulas for the attention kernels of every device but the CPU.
_CPU_ATTENTION: dict[str, Any] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": sdpa_flop_count,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop_count,
}


def flops(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """The floating-point operations of one call, by torch's formulas: matrix products, convolutions and attention.

    What any other operation costs is not counted.
    """
    packet: Any = getattr(func, "overloadpacket", func)
    if (attention := _CPU_ATTENTION.get(str(packet))) is not None:
        shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
        return int(attention(*shapes[: 3 + packet.__name__.endswith("backward")]))
    formula: Any = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


class FlopCount(Observer):
    """Counts the floating-point operations that run while the mode is on.

    Attributes:
        flops: how many there were.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with FlopCount() as counter:
        ...     y = (x @ x).tanh()
        >>> counter.flops
        16
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        self.flops += flops(func, args, kwargs, result)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect garbage, then keep the collector off: within, only reference counts free memory.

    Where it is off already, nothing is done.
    """
    was_enabled = gc.isenabled()
    if was_enabled:
        gc.collect()
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
