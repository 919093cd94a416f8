"""How errors and log records describe a region."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from .._core.amounts import size_text
from .._core.ranges import name_of
from .._core.tensors import type_text
from ..errors import RematError


def with_region(error: Exception, region: Any, recomputing: bool = True) -> Exception:
    """Add the region's name and the line that called it to an error, and remove the package's frames.

    ``recomputing``: the user's function was being recomputed, so an error that it raised gets a note.
    """
    root = region.root
    where = f"{name_of_region(root)} called at {root.line}"
    if isinstance(error, RematError) and error.region is None:
        error.region = where
        error.args = (f"{error}\nThe region is {where}.",)
    elif recomputing:
        add_note(error, f"while recomputing {where}")
    elif str(error).startswith("Expanded Weights"):
        add_note(error, "Regions don't take expanded weights: for per-sample gradients write `vmap(grad(loss))`.")
    return error.with_traceback(error.__traceback__ if root.options.debug else without_internals(error.__traceback__))


def without_internals(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package."""
    entries = []
    while traceback is not None:
        if not str(traceback.tb_frame.f_globals.get("__name__")).startswith("remat."):
            entries.append(traceback)
        traceback = traceback.tb_next
    result = None
    for each in reversed(entries):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def name_of_region(root: Any) -> str:
    """The name of the function, or the class of the module and, after ``nn.apply``, its path in the model."""
    return f"{name_of(root.fn)} {root.options.name!r}" if root.options.name else name_of(root.fn)


def add_note(error: Exception, note: str) -> None:
    """Add a note to an error that hasn't got it."""
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        error.__notes__ = [*notes, note]  # Python 3.10 has no `add_note`


LOGGER = logging.getLogger("remat")


def log_saved(region: Any) -> None:
    """Log what a region saves, whose first run has ended."""
    inputs = region.inputs
    named = [(inputs.name(i), tensor) for i, tensor in enumerate(inputs.operands)]
    named += [(guard.name, guard.tensor) for guard in inputs.captured if guard.tensor is not None]
    given = [f"{name} {type_text(t.dtype, t.shape)}" for name, t in named]
    residuals = [] if region.record is None else region.record.saved_values.residuals()
    made = [f"{each.op} at {each.line}" for each in residuals]
    nbytes = size_text(sum({id(t): t.numel() * t.element_size() for _, t in named}.values()))
    LOGGER.debug(
        "%s called at %s saves inputs, %s: %s; and values, %s: %s",
        *(name_of_region(region), region.line, nbytes, ", ".join(given) or "none"),
        *(size_text(sum(each.nbytes for each in residuals)), ", ".join(made) or "none"),
    )
