"""The counts of the overhead benchmark, against counts by hand, and the gradients of its sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.layers import arguments, layers
from benchmarks.overhead import CASES, DEPTH, WIDTH, Case, Overhead, Row, overhead, table
from benchmarks.wrappers import torch_remat_checkpoint


class Held:
    """An object of a known size."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)


def with_graph_of(make: Callable[[], object]) -> Overhead:
    """The overhead of the layers with one more object in their graph."""

    def fn(*args: torch.Tensor) -> torch.Tensor:
        out = layers(*args)
        out.grad_fn.metadata["held"] = make()
        return out

    return overhead(fn)


def test_objects_in_the_graph_count_and_data_of_tensors_does_not() -> None:
    nothing, small, large = overhead(layers), with_graph_of(lambda: Held(1000)), with_graph_of(lambda: Held(5000))
    assert abs(nothing.python_bytes) < 100 and abs(nothing.objects) < 0.1
    assert large.python_bytes - small.python_bytes == pytest.approx(4000, abs=100)
    assert small.python_bytes > 1000
    assert small.objects == pytest.approx(large.objects, abs=0.1) and small.objects > 0.9
    tensors = [with_graph_of(lambda: torch.zeros(size)).python_bytes for size in (1, 10**5)]
    assert tensors[0] == pytest.approx(tensors[1], abs=100)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.policy)
def test_all_sides_have_the_same_gradients(case: Case) -> None:
    pytest.importorskip("torch_remat")
    leaves = [t.requires_grad_() for t in arguments(WIDTH, DEPTH)]
    expected = torch.autograd.grad(layers(*leaves).sum(), leaves)
    for fn in (case.remat, case.torch, torch_remat_checkpoint(case.torch_remat())):
        assert all(map(torch.equal, torch.autograd.grad(fn(*leaves).sum(), leaves), expected))


def test_the_table_shows_the_overhead_and_a_dash_for_a_missing_library() -> None:
    row = CASES[0].measure()
    assert row.remat.python_bytes > 0 and row.remat.objects > 0
    assert f"{row.remat.python_bytes:.0f}" in table([row])
    some = Overhead(python_bytes=1234.4, objects=56.0)
    lines = table([Row("none", some, some, None)]).splitlines()
    assert lines[-1].split() == ["none", "1234", "1234", "-", "56", "56", "-"]
