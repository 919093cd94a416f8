"""Tensors, generators and memory of the device."""

from typing import Any

import torch
from accelerator import DEVICE, backend
from torch import Tensor

from remat import policies

MATMULS = policies.save_matmuls
POLICIES = [None, MATMULS, policies.offload(MATMULS)]


def leaf(*shape: int, device: Any = DEVICE) -> Tensor:
    """Random numbers that require grad, the same on each device."""
    return torch.randn(*shape).to(device).requires_grad_()


def states(*generators: torch.Generator) -> list[Tensor]:
    """The states of the generators of the host and of all devices, and of these."""
    return [torch.get_rng_state(), *backend.get_rng_state_all(), *(each.get_state() for each in generators)]


def allocated() -> list[int]:
    """The bytes of each device, when its thread has released the graphs of earlier backward passes."""
    for i in range(backend.device_count()):
        leaf(1, device=f"{DEVICE}:{i}").backward()
        backend.synchronize(i)
    return [backend.memory_allocated(i) for i in range(backend.device_count())]
