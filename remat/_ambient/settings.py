"""The settings that a recompute restores: how each is read, and how it is set.

They are autocast, grad mode, default dtype, attention kernels, deterministic algorithms, and the precision
of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.backends import cuda as sdpa

from .._core import private
from .._core.devices import accelerator, current_device, set_current_device

_CPU = torch.device("cpu")
_PRECISIONS = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}


def _set_float32_precision(value: str) -> None:
    """Restore the precision. Settings of single backends are left alone: inherited ones can't be restored."""
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        return
    torch.set_float32_matmul_precision(_PRECISIONS[value])


def default_device() -> torch.device:
    """The default device of this thread."""
    for i in reversed(range(private.function_modes())):
        if isinstance(mode := private.function_mode_at(i), private.DeviceMode):
            return mode.device
    return _CPU


@cache
def settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """The functions that read and set each setting."""
    kernels = sdpa.enable_flash_sdp, sdpa.enable_mem_efficient_sdp, sdpa.enable_math_sdp, sdpa.enable_cudnn_sdp
    found: list[tuple[Any, Any]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (private.sdpa_priority, private.set_sdpa_priority),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (private.float32_precision, _set_float32_precision),
        *zip(private.sdpa_enabled, (*kernels, sdpa.allow_fp16_bf16_reduction_math_sdp), strict=True),
        (current_device, set_current_device),
    ]
    for kind in ("cpu", *(device.type for device in accelerator())):
        if torch.amp.is_autocast_available(kind):
            found += [
                (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
                (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
            ]
    return found


def read_settings() -> list[Any]:
    """Return the values of all settings, in a fixed order."""
    return [get() for get, _ in settings()]
