"""The processes of a distributed job."""

from __future__ import annotations

from typing import Any

import torch


def agreed(value: Any) -> Any:
    """Return the value of a distributed job's first process, as processes with different plans would deadlock."""
    found, distributed = [value], torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(found, src=0)
    return found[0]
