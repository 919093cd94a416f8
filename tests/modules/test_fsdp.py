"""FSDP2 in regions that call its units, compared with plain models and torch's checkpoint; in one and two processes.

A unit's hooks gather its parameters before its forward, and in the backward before a recompute or within it.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import run_program
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import OpCounter, PeakMemory, gc_disabled
from remat import compat, policies, remat
from remat import nn as remat_nn

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")
aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]


class Block(nn.Module):
    """A transformer's block, some of whose parameters may be frozen, and may have a layer that it calls twice."""

    def __init__(self, frozen: bool = False, twice: bool = False, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.unused = nn.Linear(width, width)
        self.twice = twice
        for module in (self.norm, self.up) if frozen else ():
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(F.scaled_dot_product_attention(*self.qkv(self.norm(x)).chunk(3, -1)))
        self.unused(x)
        x = x + self.down(F.gelu(self.up(x)))
        return x + self.out(x).tanh() if self.twice else x


class Model(nn.Module):
    def __init__(self, call: Callable, **kind: Any) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(Block(**kind) for _ in range(2)), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.float()


def by_torch(module: Any = torch.utils.checkpoint, **options: Any) -> Callable:
    return lambda block, x: module.checkpoint(block, x, use_reentrant=False, **options)


def selective() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts(PRODUCTS)


def by_call(block: Block, x: Tensor) -> Tensor:
    return block(x)


def in_function(**options: Any) -> Callable:
    return lambda block, x: remat(lambda x: block(x), **options)(x)


CALLS: dict[str, tuple[Callable, str]] = {  # with the call whose memory and work are the limit
    "plain": (by_call, "plain"),
    "torch": (by_torch(), "torch"),
    "torch, selective": (by_torch(context_fn=selective), "torch, selective"),
    "checkpoint": (by_torch(compat), "torch"),
    "checkpoint, selective": (by_torch(compat, context_fn=selective), "torch, selective"),
    "function": (in_function(), "torch"),
    "function, products": (in_function(policy=policies.save_ops(*PRODUCTS)), "torch, selective"),
    "function, names": (in_function(policy=policies.save_only_these_names("none of these")), "torch"),
    "function, values": (in_function(determinism_check="values"), "torch"),
    "function, debug": (in_function(debug=True, determinism_check="values"), "torch"),
    "function, products, debug": (in_function(policy=policies.save_ops(*PRODUCTS), debug=True), "torch, selective"),
    "apply": (by_call, "torch"),
    "apply, products": (by_call, "torch, selective"),
}
POLICIES = {"apply": None, "apply, products": policies.save_ops(*PRODUCTS)}
UNITS: dict[str, Callable[[Block], list[nn.Module]]] = {
    "blocks": lambda block: [block],
    "layers": lambda block: [*block.children()],
    "blocks and layers": lambda block: [*block.children(), block],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"frozen": True},
    "twice": {"twice": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "gathered once": {"reshard": False},
}


def measured(call: str, units: str, options: str) -> tuple[list[Tensor], dict[str, int]]:
    """The gradients of three steps, and the saved bytes and operations of the last one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def shard(module: nn.Module) -> None:
        precision = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)

    kind = dict(OPTIONS[options])
    dtype, reshard = kind.pop("dtype", None), kind.pop("reshard", True)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = Model(CALLS[call][0], **kind)
    if call in POLICIES:
        remat_nn.apply(model, Block, policy=POLICIES[call])
    for block in model.blocks:
        for unit in UNITS[units](block):
            shard(unit)
    shard(model)
    x, grads = torch.randn(4, 5, 8, requires_grad=True), []
    for step in range(3):
        model.zero_grad()
        with PeakMemory() as memory, OpCounter() as forward:
            loss = (model(x * step).sin() + 1).prod(-1).sum()
        kept = settled(memory)
        with OpCounter() as backward:
            loss.backward()
        del loss
        grads += [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]
    grads.append(x.grad)
    return grads, {
        "kept": kept,
        "left": settled(memory),
        "products": sum(backward[f"aten.{name}"] for name in ("mm", "addmm", "bmm")),
        "gathered": sum(count["c10d._allgather_base_"] for count in (forward, backward)),
        "reduced": backward["c10d._reduce_scatter_base_"],
    }


reference = functools.cache(measured)


def settled(memory: PeakMemory) -> int:
    """The live bytes; a thread of gloo may hold the last result of a collective briefly, so take the minimum."""
    found = [memory.live]
    for _ in range(20 if torch.distributed.get_world_size() > 1 else 0):
        time.sleep(0.002)
        found.append(memory.live)
    return min(found)


def check(call: str, units: str, options: str) -> None:
    """The gradients are those of the plain model, and memory and work are within those of torch's checkpoint."""
    grads, taken = measured(call, units, options)
    expected, _ = reference("plain", units, options)
    # Torch's selective checkpoint doesn't support all kinds of units, but it saves the same for all.
    _, bound = reference("torch", units, options)
    _, selected = reference(CALLS[call][1], "blocks", options)
    bound = {**bound, "kept": selected["kept"], "products": selected["products"]}
    assert len(grads) == len(expected)
    assert all(map(torch.equal, grads, expected))
    assert {name: (taken[name], limit) for name, limit in bound.items() if taken[name] > limit} == {}


OURS = [call for call, (_, bound) in CALLS.items() if call != bound]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("process_group", "collector_off")
@pytest.mark.parametrize(
    "units, options", [*((units, "trained") for units in UNITS), *(("layers", options) for options in [*OPTIONS][1:])]
)
@pytest.mark.parametrize("call", OURS)
def test_one_process(call: str, units: str, options: str) -> None:
    check(call, units, options)


# --- two processes ----------------------------------------------------------------------------------------------------


CALLED = ["checkpoint", "checkpoint, selective", "function, products, debug", "apply", "apply, products"]


def check_all(rank: int, folder: str, options: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with gc_disabled():
        for call, units in itertools.product(CALLED, ["layers", "blocks and layers"]):
            try:
                check(call, units, options)
            except Exception as error:
                raise AssertionError(f"{call}, {units} in process {rank}") from error
    if rank == 0:
        print("all the same")
    torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS)
def test_two_processes(options: str, tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = {[str(path) for path in Path(__file__).parents[:2]]!r}
import torch.multiprocessing
from test_fsdp import check_all
torch.multiprocessing.start_processes(check_all, ({str(tmp_path)!r}, {options!r}), nprocs=2, start_method="fork")
"""
    assert "all the same" in run_program(program)
