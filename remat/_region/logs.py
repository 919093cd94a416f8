"""A log record of each region, at the level DEBUG: what it saves between its forward and its backward."""

from __future__ import annotations

import logging
from typing import Any

from .._core.amounts import size_text
from .._core.tensors import type_text
from .error_context import name_of_region, with_parameters

LOGGER = logging.getLogger("remat")


def log_saved(region: Any) -> None:
    """Log what a region saves, whose first run has ended."""
    inputs = region.inputs
    named = [(inputs.name(i), tensor) for i, tensor in enumerate(inputs.operands())]
    named += [(guard.name, guard.tensor) for guard in inputs.captured if guard.tensor is not None]
    given = [f"{name} {type_text(t.dtype, t.shape)}" for name, t in named]
    residuals = [] if region.record is None else region.record.saved_values.residuals()
    made = [f"{each.op} at {each.line}" for each in residuals]
    nbytes = size_text(sum({id(t): t.numel() * t.element_size() for _, t in named}.values()))
    LOGGER.debug(
        "%s called at %s saves inputs, %s: %s; and values, %s: %s",
        *(name_of_region(region), region.line, nbytes, with_parameters(region.fn, ", ".join(given)) or "none"),
        *(size_text(sum(each.nbytes for each in residuals)), ", ".join(made) or "none"),
    )
