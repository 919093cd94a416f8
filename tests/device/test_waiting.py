"""Regions don't make the host wait for a device."""

from __future__ import annotations

import pytest
import torch
from accelerator import DEVICE, backend
from torch import Tensor

from remat import policies, remat

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.offload(policies.save_matmuls)], ids=str)
def test_a_region_does_not_wait(policy: policies.Policy | None) -> None:
    """Not for small arguments either, which are compared with copies."""

    def fn(x: Tensor, small: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x @ x).sin() * small * captured, 0.5).cos()

    x, small, captured = (torch.ones(8, 8, device=DEVICE) for _ in range(3))
    x.requires_grad_()
    before = backend.host_waits()
    out = remat(fn, policy=policy)(x, small).sum()
    out.backward()
    assert backend.host_waits() == before
