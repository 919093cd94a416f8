"""The memory that the allocators hand out while a program runs, with what kernels take for themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._core import private
from .._core.devices import accelerators_of, wait_for_backward_threads

_MARK = "remat: the next phase"


def with_statistics(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The modules of the accelerators that these tensors are on, that have statistics of memory."""
    return [module for module in accelerators_of(tensors).values() if hasattr(module, "reset_peak_memory_stats")]


def free_memory(tensors: Iterable[torch.Tensor]) -> int | None:
    """The bytes that are free on the accelerators of these tensors; None on a CPU.

    That is what the driver and the allocator have, less the most that fragmentation has taken.
    """
    devices = [module for module in with_statistics(tensors) if hasattr(module, "mem_get_info")]
    if not devices:
        return None
    own = sum(each.memory_reserved() - each.memory_allocated() for each in devices)
    fragments = sum(each.max_memory_reserved() - each.max_memory_allocated() for each in devices)
    return sum(each.mem_get_info()[0] for each in devices) + own - fragments


class Allocated:
    """A context that measures the peaks of the phases of a run, which ``next_phase`` separates.

    On an accelerator these are the bytes of its allocator; else those of the CPU's, in the calling thread.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._devices = with_statistics(self._tensors)
        self._start = 0
        self.peaks: list[int] = []  # the most bytes in each phase, beyond those at the start

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at any time."""
        return max(self.peaks)

    def next_phase(self) -> None:
        """End a phase, and start the next one."""
        if self._devices:
            self.peaks.append(self._of_devices("max_memory_allocated"))
            self._reset()
        else:
            with torch.profiler.record_function(_MARK):
                pass

    def __enter__(self) -> Allocated:
        if not self._devices:
            private.start_recording_allocations()
            return self
        wait_for_backward_threads(self._tensors)  # they may still hold what an earlier pass has used
        self._start = self._of_devices("memory_allocated")
        self._reset()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._devices:
            self.next_phase()
            return
        now = peak = 0
        for nbytes in (*private.recorded_allocations(_MARK), None):
            if nbytes is None:
                self.peaks.append(peak)
                peak = now
            else:
                now += nbytes
                peak = max(peak, now)

    def _reset(self) -> None:
        for module in self._devices:
            module.reset_peak_memory_stats()

    def _of_devices(self, name: str) -> int:
        for module in self._devices:
            module.synchronize()
        return sum(getattr(module, name)() for module in self._devices) - self._start
