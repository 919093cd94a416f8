"""Lines of the user's code, for errors, warnings and lists."""

from __future__ import annotations

import functools
import sys
from types import CodeType, FrameType
from typing import NamedTuple


class Line(NamedTuple):
    """A line of code, as text only where somebody reads it."""

    code: CodeType | None
    number: int

    def __str__(self) -> str:
        if self.code is None:
            return "an unknown line"
        return f"{self.code.co_filename}:{self.number} ({self.code.co_name})"


def user_line() -> Line:
    """Where in the user's code the current run is: ``file:line (function)``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame):
            return Line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return Line(None, 0)


def is_library(frame: FrameType) -> bool:
    """Whether a frame is of torch, of this package or of the import system, and not of the user's code."""
    return _is_library(frame.f_globals.get("__name__", "")) or frame.f_code.co_filename[:7] == "<frozen"


@functools.cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("remat", "torch")
