"""FSDP2 whose units are parts of a region, in one process.

A unit's hooks gather its parameters before its forward, and in the backward within the recompute. More kinds of units
and of parallelism are in tests/integration/test_distributed.py.
"""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from blocks import in_place
from cases import assert_same
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import OpCounter, PeakMemory
from remat import RematError, check, compat, policies, remat, report

if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.usefixtures("process_group", "collector_off")


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Layer(nn.Module):
    """Some of its parameters may be frozen, one part isn't used by the result, and one is called twice."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.unused = nn.Linear(8, 8)
        self.norm.requires_grad_(not frozen), self.up.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(h).sin() + self.down(h.cos()).tanh()


def step(wrap: Callable, frozen: bool) -> tuple[list[Tensor], int, int]:
    """The gradients of a step, the bytes that it saves, and the products in its backward."""
    torch.manual_seed(0)
    layers = [Layer(frozen) for _ in range(2)]
    for unit in (unit for layer in layers for unit in layer.children()):
        fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
    x = torch.randn(4, 5, 8, requires_grad=True)
    with PeakMemory() as memory:
        y = x
        for layer in layers:
            y = wrap(layer)(y)
    kept = memory.live
    with OpCounter() as counter:
        y.exp().sum().backward()
    grads = [p.grad.full_tensor() for layer in layers for p in layer.parameters() if p.grad is not None]
    return [x.grad, *grads], kept, counter["aten.mm"] + counter["aten.addmm"]


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
CONTEXTS = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, PRODUCTS)
in_function = lambda **options: lambda layer: remat(lambda x: layer(x), **options)
WAYS: dict[str, tuple[Callable, int]] = {  # with the products that a layer recomputes
    "apply": (in_place, 4),
    "function": (in_function(debug=True, determinism_check="values"), 4),
    "function, products": (in_function(debug=True, policy=policies.save_ops(*PRODUCTS)), 0),
    "checkpoint, products": (lambda layer: functools.partial(compat.checkpoint, layer, context_fn=CONTEXTS), 0),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_layers_with_sharded_parts_are_recomputed_and_save_less(way: str, frozen: bool) -> None:
    wrap, recomputed = WAYS[way]
    (grads, kept, products), (expected, most, fewest) = step(wrap, frozen), step(lambda layer: layer, frozen)
    assert_same(grads, expected)
    assert kept < most and products == fewest + 2 * recomputed
    with pytest.raises(RematError, match="Call it before FSDP wraps the model"):
        check(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,))), torch.ones(4))


def test_a_report_has_the_rows_and_notes_of_a_model_without_fsdp() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    found = report(fully_shard(layers, mesh=init_device_mesh("cpu", (1,))), torch.ones(4, 8))
    assert "as written" not in str(found) and "requires grad" not in found.note
