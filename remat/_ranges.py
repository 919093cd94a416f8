"""Ranges marked for the profiler, which come by as operations, and what FSDP does in its own ones."""

from __future__ import annotations

from typing import Any

import torch

# What FSDP2 calls them, with the name of the module behind, and FSDP1. Casts of inputs and outputs are none of FSDP2's.
_FSDP = (
    *("FSDP::pre_forward", "FSDP::root_pre_forward", "FSDP::post_forward"),
    *(f"FullyShardedDataParallel.{hook}" for hook in ("_pre_forward", "_root_pre_forward", "_post_forward")),
)


class Ranges:
    """The open ranges of FSDP's hooks in one run of a region; true while operations are the hooks' own.

    They gather the parameters of a module. A recompute may find these gathered already, so what it takes to gather them
    is no part of what the region computes.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: set[int] = set()

    def mark(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation that starts a range, or ends one."""
        result = func(*args, **kwargs)
        if isinstance(result, torch.ScriptObject):
            if args[0].startswith(_FSDP):
                self._open.add(hash(result))
        elif args and isinstance(args[0], torch.ScriptObject):
            self._open.discard(hash(args[0]))
        return result

    def __bool__(self) -> bool:
        return bool(self._open)
