"""What errors of a recompute tell: of which region they are, and where that was called."""

from __future__ import annotations

import inspect
import re
from types import FrameType, TracebackType
from typing import Any, TypeVar

from .._core.lines import Line
from .._core.ranges import name_of
from ..errors import MutationError, RecomputeMismatchError

E = TypeVar("E", bound=Exception)


def told(error: E, region: Any, recomputing: bool = True) -> E:
    """The error with the region's name, the line that called it, and without frames of the package.

    ``recomputing`` says that the user's function was running: an error of its own gets a note.
    """
    root = region.root
    where = f"{_name(root)} called at {Line(root.code, root.number)}"
    if isinstance(error, (MutationError, RecomputeMismatchError)) and error.region is None:
        error.region = where
        text = _ARGUMENT.sub(lambda found: _argument(root.fn, found), str(error))
        error.args = (f"{text}\nThe region is {where}.",)
    elif recomputing:
        _add_note(error, f"while recomputing {where}")
    return error.with_traceback(error.__traceback__ if root.options.debug else without_internals(error.__traceback__))


def without_internals(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package."""
    kept = []
    while traceback is not None:
        if not _is_internal(traceback.tb_frame):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for each in reversed(kept):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def _is_internal(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("remat.")


def _name(root: Any) -> str:
    """The function, or the class of the module with its path if the model is known."""
    return f"{name_of(root.fn)} {root.options.name!r}" if root.options.name else name_of(root.fn)


def _add_note(error: Exception, note: str) -> None:
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        error.__notes__ = [*notes, note]  # Python 3.10 has no `add_note`


_ARGUMENT = re.compile(r"argument (args|kwargs)\[('[^']*'|\d+)\]")


def _argument(fn: Any, found: re.Match[str]) -> str:
    """What the user's function calls an argument, instead of its position."""
    kind, key = found[1], found[2]
    if kind == "kwargs":
        return f"argument {key.strip(chr(39))}"
    try:
        parameters = list(inspect.signature(fn).parameters.values())[: int(key) + 1]
    except (TypeError, ValueError):  # a built-in function
        return found[0]
    if len(parameters) <= int(key) or any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return found[0]
    return f"argument {parameters[-1].name}"
