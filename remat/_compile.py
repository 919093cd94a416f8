"""The lowering under ``torch.compile``: a region is torch's own checkpoint, which Dynamo knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from . import _torch
from ._region import Options


def call(fn: Callable, options: Options, args: tuple, kwargs: dict) -> Any:
    """Call ``fn`` as a checkpointed part of the graph that is being traced; inlined under torch.func and export."""
    if _torch.transforms_active() or _torch.exporting():
        return fn(*args, **kwargs)
    return torch.utils.checkpoint.checkpoint(
        lambda *inputs: fn(*inputs, **kwargs), *args, use_reentrant=False, preserve_rng_state=options.preserve_rng_state
    )
