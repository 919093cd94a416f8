"""What a program keeps alive and what it runs, counted at the dispatcher.

The counts are exact and the same on every device: they are taken of tensor storages and of
dispatched ops, not of an allocator. They hold under `torch.func` transforms too, where the
dispatcher sees the physical tensors below all levels.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

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


class _Observer(TorchDispatchMode):
    """A dispatch mode that looks at every physical op and changes none.

    An op on a wrapper subclass (one with `__tensor_flatten__`, such as `DTensor`) is left to the
    subclass: what that runs on the tensors inside comes by again, and is what counts.
    """

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.observe(func, (args, kwargs), out)
        return out

    def observe(self, func: torch._ops.OpOverload, inputs: Any, out: Any) -> None:
        """Sees that `func` made `out` of `inputs`, a tree of its arguments. Each observer says what it does with it."""


class PeakMemory(_Observer):
    """Counts the bytes of the storages made while the mode is on.

        >>> x = torch.ones(256)
        >>> with PeakMemory() as memory:
        ...     y = x.tanh().tanh()
        >>> memory.peak, memory.live
        (2048, 1024)

    A storage counts from the op that returns it until it dies, once, whatever views share it.
    Storages from before the mode was entered count nothing: not when they are viewed, not when
    they are written to, not when they are freed.

    Limits: what a kernel uses and frees within one op is not seen, nor is data that reaches torch
    without an op (`torch.tensor`, `torch.from_numpy`), nor are tensors that are not strided.

    Attributes:
        peak: the most bytes that were alive after an op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # A storage's Python object lives as long as the storage itself, so that a weak reference
        # to it tells whether autograd or anybody else in C++ still holds the memory.
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    @property
    def live(self) -> int:
        """Bytes alive now, at the size that the storages have now; also after the mode was left."""
        storages = (ref() for ref in self._storages.valuerefs())
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def observe(self, func: torch._ops.OpOverload, inputs: Any, out: Any) -> None:
        given = {id(storage) for storage in _storages(inputs)}
        new = {id(storage): storage for storage in _storages(out) if id(storage) not in given}
        self._storages.update(new)
        self.peak = max(self.peak, self.live)


class OpCounter(_Observer):
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

    def observe(self, func: torch._ops.OpOverload, inputs: Any, out: Any) -> None:
        self.counts[str(func.overloadpacket)] += 1


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of a tree's strided tensors."""
    for leaf in optree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Collects garbage, then keeps the collector off: in the block only refcounts free memory.

    Where it is off already, the block is entered as it is.
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


def peak_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The most bytes alive at once during `fn(*args)`, its result included and its inputs not.

    The garbage collector is off, so that what only a reference cycle keeps alive counts.
    """
    with gc_disabled(), PeakMemory() as memory:
        fn(*args)
    return memory.peak


def allocated_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The most bytes that the CPU's allocator had given out at once during `fn(*args)`.

    Beyond what `peak_bytes` sees this has what kernels use inside, and what compiled code uses without the dispatcher.
    Memory from before that is freed in the call counts less than nothing.

    >>> x = torch.ones(256)
    >>> allocated_bytes(lambda x: x.tanh().tanh(), x)
    2048
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it tells on stderr that it starts and stops
    with gc_disabled(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn(*args)
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes, initial=0))


def held_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The bytes that are alive as long as the result of `fn(*args)` is.

    Of a forward these are its outputs and its residuals. The garbage collector is off.
    """
    with gc_disabled(), PeakMemory() as memory:
        out = fn(*args)
        live = memory.live
        del out
    return live


def leaked_bytes(fn: Callable[..., Any], /, *args: Any) -> int:
    """The bytes still alive once the result of `fn(*args)` is gone, without the garbage collector.

    Gradients that `fn` accumulates on its inputs are among them.
    """
    with gc_disabled(), PeakMemory() as memory:
        fn(*args)
        return memory.live


def count_ops(fn: Callable[..., Any], /, *args: Any) -> Counter[str]:
    """How often `fn(*args)` ran each op, by the name of its packet.

    >>> count_ops(lambda x: x @ x, torch.ones(2, 2))["aten.mm"]
    1
    """
    with OpCounter() as counter:
        fn(*args)
    return counter.counts


# torch's counter has the formulas for the attention kernels of every device but this one.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *args, **kwargs: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *args, **kwargs: sdpa_backward_flop_count(grad, query, key, value)
    ),
}


def count_flops(fn: Callable[..., Any], /, *args: Any) -> int:
    """The floating-point operations of `fn(*args)` in matrix products, convolutions and attention kernels.

    What an op between them costs is not counted, and an op that is given its result counts nothing.

    >>> count_flops(lambda x: (x @ x).tanh(), torch.ones(2, 2))
    16
    """
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        fn(*args)
    return counter.get_total_flops()


class Watch:
    """Weak references to what `assert_freed_without_gc` expects to be gone."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, weakref.ref[Any]]] = []

    def __call__(self, *objects: Any) -> None:
        """Watches the storage of a tensor, whoever shares it; of anything else the object."""
        for thing in objects:
            if isinstance(thing, torch.Tensor):
                name = f"storage of a {thing.dtype} tensor of shape {tuple(thing.shape)}"
                self._watched.append((name, weakref.ref(thing.untyped_storage())))
            else:
                self._watched.append((repr(thing), weakref.ref(thing)))

    def alive(self) -> list[str]:
        """Names what is not gone yet."""
        return [name for name, ref in self._watched if ref() is not None]


@contextmanager
def assert_freed_without_gc() -> Iterator[Watch]:
    """Asserts that all that was watched is gone when the block ends, without the garbage collector.

        >>> with assert_freed_without_gc() as watch:
        ...     x = torch.ones(3)
        ...     watch(x)
        ...     del x

    Raises:
        AssertionError: something watched is alive, or nothing was watched.
    """
    watch = Watch()
    with gc_disabled():
        yield watch
        assert watch._watched, "nothing was watched: call the block's `watch` on what is to be gone"
        alive = watch.alive()
    assert not alive, f"still alive without the garbage collector: {', '.join(alive)}"
