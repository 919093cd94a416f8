"""Lines of the user's code, for errors, warnings and lists."""

from __future__ import annotations

import functools
import sys
import warnings
from types import CodeType, FrameType
from typing import NamedTuple

from ..errors import RematWarning


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


def warn(message: str, line: Line | None = None) -> None:
    """Warn at a line of the user's, by default the one that runs now."""
    line = line or user_line()
    file = "<unknown>" if line.code is None else line.code.co_filename
    warnings.warn_explicit(message, RematWarning, file, line.number, registry=_registries.setdefault(file, {}))


# So that Python shows a warning once for each line, as by default, where it comes from several functions.
_registries: dict[str, dict] = {}


@functools.cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in ("remat", "torch")
