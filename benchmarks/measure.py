"""The memory that a program takes and the operations that it runs, counted at the dispatcher.

Tensor storages and dispatched ops are counted, not the memory of an allocator, so the counts are
exact and the same on every device. Under `torch.func` transforms the dispatcher sees the physical
tensors below all levels.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from remat._core.facts import flops
from remat._measure.observer import Observer, PeakMemory, gc_disabled

__all__ = [
    "OpCounter",
    "PeakMemory",
    "Watch",
    "allocated_bytes",
    "assert_freed_without_gc",
    "count_flops",
    "count_ops",
    "gc_disabled",
    "held_bytes",
    "leaked_bytes",
    "peak_bytes",
]


class OpCounter(Observer):
    """Counts dispatched ops by the name of their packet; an op that never ran counts 0.

        >>> x = torch.ones(2, 2)
        >>> with OpCounter() as counter:
        ...     y = (x @ x @ x).tanh()
        >>> counter["aten.mm"], counter["aten.tanh"], counter["aten.exp"]
        (2, 1, 0)

    Attributes:
        counts: the number of runs of each op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __getitem__(self, name: str, /) -> int:
        return self.counts[name]

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        self.counts[str(func.overloadpacket)] += 1


class FlopCount(Observer):
    """Counts the floating-point operations that run while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        self.flops += flops(func, args, kwargs, result)


def peak_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The most bytes alive at once during `fn(*args)`, with its result and without its inputs.

    The garbage collector is off, so tensors that only a reference cycle keeps alive are counted.
    """
    with gc_disabled(), PeakMemory() as memory:
        fn(*args)
    return memory.peak


def allocated_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The most bytes that were allocated at once by the CPU's allocator during `fn(*args)`.

    Unlike `peak_bytes`, it counts memory that kernels use inside, and that compiled code uses without the dispatcher.
    Memory that was allocated before the call and is freed in it is subtracted.

    >>> x = torch.ones(256)
    >>> allocated_bytes(lambda x: x.tanh().tanh(), x)
    2048
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports on stderr when it starts and stops
    with gc_disabled(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn(*args)
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes, initial=0))


def held_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The bytes that are alive while the result of `fn(*args)` is: a forward pass's outputs and residuals.

    The garbage collector is off.
    """
    with gc_disabled(), PeakMemory() as memory:
        out = fn(*args)
        live = memory.live
        del out
    return live


def leaked_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The bytes that are still alive after the result of `fn(*args)` was freed, with the garbage collector off.

    Gradients that `fn` accumulates on its inputs are counted.
    """
    with gc_disabled(), PeakMemory() as memory:
        fn(*args)
        return memory.live


def count_ops(fn: Callable[..., Any], /, *args: Any) -> Counter[str]:
    """How often `fn(*args)` runs each op, by the name of its packet.

    >>> count_ops(lambda x: x @ x, torch.ones(2, 2))["aten.mm"]
    1
    """
    with OpCounter() as counter:
        fn(*args)
    return counter.counts


def count_flops(fn: Callable[..., Any], /, *args: Any) -> int:
    """The floating-point operations of `fn(*args)` in matrix products, convolutions and attention kernels.

    Other ops are not counted, nor are ops whose results are restored from saved values.

    >>> count_flops(lambda x: (x @ x).tanh(), torch.ones(2, 2))
    16
    """
    with FlopCount() as counter:
        fn(*args)
    return counter.flops


class Watch:
    """Weak references to objects that must be freed at the end of `assert_freed_without_gc`."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, weakref.ref[Any]]] = []

    def __call__(self, *objects: Any) -> None:
        """Watch the storage of each tensor, and any other object itself."""
        for thing in objects:
            if isinstance(thing, torch.Tensor):
                name = f"storage of a {thing.dtype} tensor of shape {tuple(thing.shape)}"
                self._watched.append((name, weakref.ref(thing.untyped_storage())))
            else:
                self._watched.append((repr(thing), weakref.ref(thing)))

    def alive(self) -> list[str]:
        """The names of the objects that are still alive."""
        return [name for name, ref in self._watched if ref() is not None]


@contextmanager
def assert_freed_without_gc() -> Iterator[Watch]:
    """Assert that all watched objects are freed when the block ends, without the garbage collector.

        >>> with assert_freed_without_gc() as watch:
        ...     x = torch.ones(3)
        ...     watch(x)
        ...     del x

    Raises:
        AssertionError: a watched object is alive, or nothing was watched.
    """
    watch = Watch()
    with gc_disabled():
        yield watch
        assert watch._watched, "nothing was watched: call the block's `watch` with the objects that must be freed"
        alive = watch.alive()
    assert not alive, f"still alive without the garbage collector: {', '.join(alive)}"
