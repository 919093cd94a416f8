"""Copies of small tensors that a region may change, and comparisons of the tensors with their copies.

In host memory the comparison is immediate. On a device it is queued in the forward, and its result is read when the
region is recomputed. By then the device has usually finished it, so that nothing waits; reading the result at once
would wait for the device in every forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._core import host_memory, private
from .._core.devices import is_capturing
from .._core.layout import is_dense, span
from .._core.parts import parts
from .._core.state import unseen
from .fingerprints import bits

# Tensors up to these sizes are copied before the first run, as the region may change them: counters, and running
# statistics, which have one dimension. Batch norm updates its statistics without increasing the version counter.
COPY_BYTES = 16 * 1024
COPY_VECTOR_BYTES = 1024 * 1024

Pairs = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is copied in case the region changes it."""
    limit = COPY_VECTOR_BYTES if tensor.dim() <= 1 else COPY_BYTES
    size = tensor.numel()
    if not private.is_wrapped(tensor) and not tensor.is_nested:
        size = max(size, span(tensor.shape, tensor.stride()))
    return size * tensor.element_size() <= limit


def may_differ(a: Any, b: torch.Tensor) -> bool:
    """Whether two tensors with the same metadata may have different values; fake and nested tensors always may."""
    if a.is_meta and type(a) is torch.Tensor:
        return False
    with unseen():
        return isinstance(a, private.FakeTensor) or a.is_nested or not torch.equal(a, b)


def can_be_asked(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be compared on its device. During CUDA graph capture no result can be read."""
    plain = is_dense(tensor) and not tensor.is_quantized and not isinstance(tensor, private.FakeTensor)
    return plain and not is_capturing()


class DeviceComparison:
    """Queued comparisons of tensors with their copies, by number."""

    __slots__ = ("_results",)

    def __init__(self, pairs: Pairs) -> None:
        self._results: list[tuple[list[int], torch.Tensor, torch.Event | None]] = []
        numbers: dict[torch.device, list[int]] = {}
        for i, (tensor, _) in pairs.items():
            numbers.setdefault(tensor.device, []).append(i)
        with torch.no_grad(), unseen(), private.without_levels():
            for on_device in numbers.values():
                flags = torch.stack([_differ(*pairs[i]) for i in on_device])
                self._results.append((on_device, *_copy_to_host(flags)))

    def same(self) -> set[int]:
        """Return the numbers of the tensors that equal their copies."""
        found: set[int] = set()
        with unseen():
            for numbers, host, copied in self._results:
                if copied is not None:
                    copied.synchronize()
                found.update(i for i, differs in zip(numbers, host.tolist()) if not differs)
        return found


def _copy_to_host(flags: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """Start a copy to host memory; it is complete after the event."""
    if not host_memory.has_streams(flags.device):
        return flags.cpu(), None
    host = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
    host.copy_(flags, non_blocking=True)
    return host, torch.accelerator.current_stream(flags.device).record_event()


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    of_parts = [(bits(x.detach()) != bits(y.detach())).any() for x, y in zip(parts(a), parts(b))]
    return of_parts[0] if len(of_parts) == 1 else torch.stack(of_parts).any()
