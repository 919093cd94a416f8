"""Recomputes take turns: autograd runs a thread for each device, but a recompute changes state of the whole process.

That state is the CPU generators of torch, Python and NumPy, and variables in globals, containers and modules.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from .._core.passes import nearest_engine_call

_lock = threading.RLock()
_holder: tuple[int, FrameType] | None = None  # the thread whose turn it is, and the frame where it began


class turn:
    """Within, only this thread recomputes.

    A thread doesn't wait for a recompute whose function runs a backward pass, which may need the waiting thread.
    """

    __slots__ = ("has_lock", "holder")

    def __enter__(self) -> None:
        global _holder
        self.has_lock = _lock.acquire(blocking=False) or _wait()
        if self.has_lock:
            self.holder = _holder
            _holder = _holder or (threading.get_ident(), sys._getframe(1))

    def __exit__(self, *exception: Any) -> None:
        global _holder
        if self.has_lock:
            _holder = self.holder
            _lock.release()


def _wait() -> bool:
    """Wait for the lock, unless its holder runs a backward pass. Return whether this thread has it."""
    while True:
        if (holder := _holder) is not None:
            thread, start = holder
            if nearest_engine_call(sys._current_frames().get(thread), within=start) is not None:
                return False
        if _lock.acquire(timeout=0.01):
            return True
