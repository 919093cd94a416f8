"""Lines of the user's code, for errors, warnings and lists, and which arguments its functions take."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar, cast

from ..errors import RematWarning

F = TypeVar("F", bound=Callable)


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


def accepts(fn: Callable, args: Iterable = (), kwargs: Mapping[str, Any] = {}, more: bool = False) -> bool | None:
    """Whether ``fn`` takes these arguments; None if it has no signature, as some functions written in C.

    ``more``: there may be others beside them.
    """
    try:
        signature = inspect.signature(fn)
        (signature.bind_partial if more else signature.bind)(*args, **kwargs)
    except ValueError:
        return None
    except TypeError:
        return False
    return True


def lists_arguments(fn: F) -> F:
    """Let Python's error about a wrong argument of a public function list those that it takes."""
    parameters = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = ", ".join(f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)

    @wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next is None:  # raised by this call itself
                raise TypeError(f"Call it as `{fn.__name__}({names})`: {error}.") from None
            raise

    return cast(F, called)
