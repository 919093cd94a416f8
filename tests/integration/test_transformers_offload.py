"""Transformers' activation checkpointing with `offload=True` on a device, compared with the library's own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from accelerator import DEVICE, backend
from cases import assert_same
from torch import Tensor, nn

from benchmarks.libraries import TOKENS, transformer
from remat import policies
from remat.integrations.transformers import enable

pytest.importorskip("transformers")

pytestmark = [pytest.mark.cuda, pytest.mark.integration, pytest.mark.usefixtures("collector_off")]


def model_on_device() -> Any:
    return transformer("Llama").to(DEVICE)


def loss(model: nn.Module) -> Tensor:
    ids = TOKENS.to(DEVICE)
    found: Tensor = model(input_ids=ids, labels=ids).loss
    return found


def step(model: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    found = loss(model)
    found.backward()
    return found.detach(), [p.grad for p in model.parameters()]


def held(model: nn.Module) -> int:
    """The bytes on the device between forward and backward."""
    step(model)
    gc.collect()
    before = backend.memory_allocated()
    found = loss(model)
    torch.accelerator.synchronize()
    after: int = backend.memory_allocated()
    found.backward()
    return after - before


def test_offload() -> None:
    plain = model_on_device()
    expected, kept_by_plain = step(plain), held(plain)
    its = {}
    for offload in (False, True):
        model = model_on_device()
        model.activation_checkpointing_enable(offload=offload)
        its[offload] = held(model)
    layers, size = len(plain.model.layers), plain.config.hidden_size
    hidden_states = layers * TOKENS.numel() * size * 4
    # On a device a region has copies of small inputs that need no gradient, until it is known not to change them.
    length = TOKENS.shape[1]
    sizes = 8 * length, *(2 * [4 * length * plain.config.head_dim])  # positions, cosines and sines
    copies = layers * sum(-(-size // 512) * 512 for size in sizes)  # CUDA's allocator rounds them up
    for policy in (None, policies.save_matmuls):
        kept = {}
        for offload in its:
            model = enable(model_on_device(), policy)
            model.activation_checkpointing_enable(offload=offload)
            assert_same(step(model), expected)
            kept[offload] = held(model)
            if policy is None:
                assert kept[offload] <= its[offload] + copies < kept_by_plain
        assert kept[True] <= kept[False] - hidden_states
