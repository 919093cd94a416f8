"""Recomputes take turns: autograd runs a thread for each device, and what a recompute puts back is the whole process's.

That is Python's and torch's CPU generator, and captured tensors in globals, containers and modules.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from ._proof import nearest_engine_call


class _Thread(threading.local):
    within = False


_thread = _Thread()
_lock = threading.Lock()
_holder: tuple[int, FrameType] | None = None  # the thread whose turn it is, and where that began


class turn:
    """Within, this thread alone recomputes.

    But for recomputes whose function runs a backward pass: that may need the thread which waits here, so it goes on.
    """

    __slots__ = ("has_lock", "nested")

    def __enter__(self) -> None:
        global _holder
        self.nested, _thread.within = _thread.within, True
        self.has_lock = not self.nested and (_lock.acquire(blocking=False) or _wait())
        if self.has_lock:
            _holder = threading.get_ident(), sys._getframe(1)

    def __exit__(self, *exception: Any) -> None:
        global _holder
        _thread.within = self.nested
        if self.has_lock:
            _holder = None
            _lock.release()


def _wait() -> bool:
    while not _lock.acquire(timeout=0.01):
        if _holder_runs_a_backward():
            return False
    return True


def _holder_runs_a_backward() -> bool:
    holder = _holder
    if holder is None:
        return False
    thread, start = holder
    return nearest_engine_call(sys._current_frames().get(thread), within=start) is not None
