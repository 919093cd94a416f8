"""Profiler ranges: those of regions, and those of FSDP's hooks, which dispatch modes see as operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from . import private

# Prefixes of the names in FSDP2 and in FSDP1. FSDP2 casts inputs and outputs outside of these ranges.
_FSDP = (
    *("FSDP::pre_forward", "FSDP::root_pre_forward", "FSDP::post_forward"),
    *(f"FullyShardedDataParallel.{hook}" for hook in ("_pre_forward", "_root_pre_forward", "_post_forward")),
)


class Ranges(set[int]):
    """The open ranges of FSDP's hooks in one run of a region; true while operations are the hooks' own.

    The hooks gather the parameters of a module. A recompute may find these gathered already, so the hooks' operations
    are not part of what the region computes.
    """

    def mark(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation that starts or ends a range."""
        result = func(*args, **kwargs)
        if isinstance(result, torch.ScriptObject) and args[0].startswith(_FSDP):
            self.add(hash(result))
        elif isinstance(args[0], torch.ScriptObject):
            self.discard(hash(args[0]))
        return result


@contextmanager
def in_range(fn: Any, run: str) -> Iterator[None]:
    """Within, a run of a region's function is in a profiler range, which no mode sees."""
    open_range = record_function(f"remat {name_of(fn)} {run}")
    with private.without_torch_function(), private.without_dispatch():
        open_range.__enter__()
    try:
        yield
    finally:
        with private.without_torch_function(), private.without_dispatch():
            open_range.__exit__(None, None, None)


def name_of(fn: Any) -> str:
    """The class name of the module that a function is or belongs to; for any other function its own name."""
    while True:
        owner = getattr(fn, "__self__", fn)
        if isinstance(owner, torch.nn.Module):
            return getattr(type(owner), "_remat_own", type(owner)).__name__
        inner = fn.func if isinstance(fn, partial) else getattr(fn, "__wrapped__", None)
        if inner is None:
            return getattr(fn, "__name__", type(fn).__name__)
        fn = inner
