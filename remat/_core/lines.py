"""Lines of the user's code, for errors, warnings and lists."""

from __future__ import annotations

import sys
import warnings
from types import CodeType, FrameType
from typing import NamedTuple

from ..errors import RematWarning


class Line(NamedTuple):
    """A line of code, which becomes text only when it is printed."""

    code: CodeType | None
    number: int

    def __str__(self) -> str:
        if self.code is None:
            return "an unknown line"
        return f"{self.code.co_filename}:{self.number} ({self.code.co_name})"


def user_line(above: int = 1) -> Line:
    """The current line of the user's code, as ``file:line (function)``. The search starts ``above`` frames up."""
    frame: FrameType | None = sys._getframe(above)
    while frame is not None:
        if not is_library(frame):
            return Line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return Line(None, 0)


def is_library(frame: FrameType) -> bool:
    """Whether a frame is of torch, of this package or of the import system, and not of the user's code."""
    library = frame.f_globals.get("__name__", "").partition(".")[0] in ("remat", "torch")
    return library or frame.f_code.co_filename[:7] == "<frozen"


def warn(message: str, line: Line | None = None) -> None:
    """Warn at a line of the user's code, by default the current one."""
    line = line or user_line()
    file = "<unknown>" if line.code is None else line.code.co_filename
    warnings.warn_explicit(message, RematWarning, file, line.number, registry=_registries.setdefault(file, {}))


# One for each file, so that by default Python shows a warning once for each line, whichever function gives it.
_registries: dict[str, dict] = {}
