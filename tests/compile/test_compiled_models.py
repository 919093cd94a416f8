"""Models with regions: dynamic sizes, `torch.export`, AOTInductor, and policies that offload."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import count, graphs_of, handed_over
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import remat
from remat import policies


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def models(policy: Any = None) -> tuple[nn.Module, nn.Module]:
    plain = nn.Sequential(*(Block() for _ in range(3)))
    return remat.nn.apply(deepcopy(plain), Block, policy=policy), plain


def step(f: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(f(x).square().sum(), list(model.parameters())))


def test_sizes_marked_as_dynamic() -> None:
    ours, plain = models()
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(ours, backend=counter, fullgraph=True)
    for rows in (16, 12, 33):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(step(f, ours, x), step(plain, plain, x))
    assert counter.frame_count == 1


def test_recomputed_products_at_dynamic_sizes() -> None:
    def products(model: nn.Module) -> int:
        x = torch.randn(16, 8)
        torch._dynamo.mark_dynamic(x, 0)
        graphs, _ = graphs_of(model, lambda f: step(f, model, x))
        return count(graphs.backward)

    ours, plain = models()
    assert products(ours) == products(plain) + 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_aot_inductor(tmp_path: Path) -> None:
    """The exported program contains no regions."""
    ours, plain = models()
    with torch.no_grad():
        batch = torch.export.Dim("batch", min=2)
        program = torch.export.export(ours, (torch.randn(4, 8),), dynamic_shapes=({0: batch},))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        x = torch.randn(7, 8)
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), plain(x))


def test_values_to_offload_are_saved() -> None:
    """Nothing in torch.compile reads torch's `MUST_CPU_OFFLOAD`."""
    x = torch.randn(16, 8)
    sizes = []
    for policy in (policies.save_matmuls, policies.offload(policies.save_matmuls), None):
        ours, plain = models(policy)
        graphs, result = graphs_of(ours, lambda f, m=ours: step(f, m, x))
        torch.testing.assert_close(result, step(plain, plain, x))
        assert not any("device" in str(node.target) for node in graphs.backward.graph.nodes)
        sizes.append(handed_over(graphs.backward))
    assert sizes[0] == sizes[1] > sizes[2]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "policy", [None, policies.save_matmuls, policies.save_only_these_names("h"), ~policies.save_matmuls], ids=str
)
def test_training_with_inductor(policy: Any) -> None:
    ours, plain = models(policy)
    f = torch.compile(ours, fullgraph=True)
    for _ in range(2):
        x = torch.randn(16, 8)
        torch.testing.assert_close(step(f, ours, x), step(plain, plain, x), rtol=1e-4, atol=1e-4)


def test_inductor() -> None:
    ours, plain = models()
    x = torch.randn(16, 8)
    torch.testing.assert_close(step(torch.compile(ours), ours, x), step(plain, plain, x), rtol=1e-4, atol=1e-4)
