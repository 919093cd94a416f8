"""FSDP2 and DDP with regions in one process, compared with plain models and torch's checkpoint.

A unit's hooks gather its parameters before its forward, and in the backward before a recompute or within it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import OpCounter, PeakMemory
from remat import compat, policies, remat
from remat import nn as remat_nn

if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.usefixtures("process_group", "collector_off")
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
SAVED = policies.save_ops(*PRODUCTS)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Layer(nn.Module):
    """Some of its parameters may be frozen, one part isn't used by the result, and one may be called twice."""

    def __init__(self, frozen: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.unused = nn.Linear(8, 8)
        self.twice = twice
        self.norm.requires_grad_(not frozen), self.up.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        h = F.gelu(self.up(self.norm(x)))
        x = x + self.down(h).sin()
        return x + self.down(h.cos()).tanh() if self.twice else x


class Model(nn.Module):
    def __init__(self, call: Callable, **kind: Any) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList(Layer(**kind) for _ in range(2)), call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x.float()


by_call = lambda layer, x: layer(x)
by_checkpoint = lambda module, **options: functools.partial(module.checkpoint, use_reentrant=False, **options)
in_function = lambda **options: lambda layer, x: remat(lambda x: layer(x), **options)(x)
SELECTIVE = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, PRODUCTS)
CALLS: dict[str, tuple[Callable, str]] = {  # with the call whose memory and work are the limit
    "plain": (by_call, "plain"),
    "torch": (by_checkpoint(torch.utils.checkpoint), "torch"),
    "torch, selective": (by_checkpoint(torch.utils.checkpoint, context_fn=SELECTIVE), "torch, selective"),
    "checkpoint": (by_checkpoint(compat), "torch"),
    "checkpoint, selective": (by_checkpoint(compat, context_fn=SELECTIVE), "torch, selective"),
    "function": (in_function(debug=True, determinism_check="values"), "torch"),
    "function, products": (in_function(policy=SAVED, debug=True), "torch, selective"),
    "apply": (by_call, "torch"),
    "apply, products": (by_call, "torch, selective"),
}
UNITS: dict[str, Callable[[Layer], list[nn.Module]]] = {
    "layers": lambda layer: [layer],
    "parts": lambda layer: [*layer.children()],
    "layers and parts": lambda layer: [*layer.children(), layer],
}
OPTIONS: dict[str, dict] = {
    "trained": {}, "frozen": {"frozen": True}, "twice": {"twice": True}, "bfloat16": {"dtype": torch.bfloat16},
    "gathered once": {"reshard": False},
}  # fmt: skip


def measured(call: str, units: str, options: str) -> tuple[list[Tensor], dict[str, int]]:
    """The gradients of three steps, and the saved bytes and operations of the last one."""
    kind = dict(OPTIONS[options])
    dtype, reshard = kind.pop("dtype", None), kind.pop("reshard", True)
    torch.manual_seed(0)
    model, mesh = Model(CALLS[call][0], **kind), init_device_mesh("cpu", (1,))
    if call.startswith("apply"):
        remat_nn.apply(model, Layer, policy=SAVED if "products" in call else None)
    precision = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype)
    for unit in (*(unit for layer in model.layers for unit in UNITS[units](layer)), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
    x, grads = torch.randn(4, 5, 8, requires_grad=True), []
    for step in range(3):
        model.zero_grad()
        with PeakMemory() as memory, OpCounter() as forward:
            loss = (model(x * step).sin() + 1).prod(-1).sum()
        kept = memory.live
        with OpCounter() as backward:
            loss.backward()
        del loss
        grads += [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]
    products, reduced = backward["aten.mm"] + backward["aten.addmm"], backward["c10d._reduce_scatter_base_"]
    gathered = forward["c10d._allgather_base_"] + backward["c10d._allgather_base_"]
    counts = {"kept": kept, "left": memory.live, "products": products, "reduced": reduced, "gathered": gathered}
    return [*grads, x.grad], counts


reference = functools.cache(measured)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("units, options", [*((units, "trained") for units in UNITS), *(("parts", o) for o in OPTIONS)])
@pytest.mark.parametrize("call", [call for call, (_, bound) in CALLS.items() if call != bound])
def test_sharded_models_take_no_more_than_with_torchs_checkpoint(call: str, units: str, options: str) -> None:
    grads, taken = measured(call, units, options)
    assert_same(grads, reference("plain", units, options)[0])
    # Torch's selective checkpoint doesn't support all kinds of units, but it saves the same for all.
    bound, selected = reference("torch", units, options)[1], reference(CALLS[call][1], "layers", options)[1]
    bound = {**bound, "kept": selected["kept"], "products": selected["products"]}
    assert {name: (taken[name], limit) for name, limit in bound.items() if taken[name] > limit} == {}
