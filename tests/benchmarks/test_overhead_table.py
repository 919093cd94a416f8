"""The counts of the overhead benchmark, against counts by hand, and the gradients of its sides."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from benchmarks.layers import arguments, layers
from benchmarks.overhead import CASES, DEPTH, WIDTH, Case, Overhead, Row, overhead, table
from benchmarks.wrappers import torch_remat_checkpoint


class Held:
    """An object of a known size, referenced by the graph."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)


def holding(size: int) -> Callable:
    """The layers, with `size` more bytes in their graph."""

    def fn(*args: torch.Tensor) -> torch.Tensor:
        out = layers(*args)
        out.grad_fn.metadata["held"] = Held(size)
        return out

    return fn


def test_objects_in_the_graph_count() -> None:
    nothing, small, large = overhead(layers), overhead(holding(1000)), overhead(holding(5000))
    assert abs(nothing.python_bytes) < 100 and abs(nothing.objects) < 0.1
    assert large.python_bytes - small.python_bytes == pytest.approx(4000, abs=100)
    assert small.python_bytes > sys.getsizeof(bytearray(1000))
    assert small.objects == pytest.approx(large.objects, abs=0.1) and small.objects > 0.9


def test_tensor_data_does_not_count() -> None:
    def fn(*args: torch.Tensor) -> torch.Tensor:
        out = layers(*args)
        out.grad_fn.metadata["held"] = torch.zeros(size)
        return out

    size = 1
    small = overhead(fn)
    size = 10**5
    assert overhead(fn).python_bytes == pytest.approx(small.python_bytes, abs=100)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.policy)
def test_all_sides_have_the_same_gradients(case: Case) -> None:
    pytest.importorskip("torch_remat")
    leaves = [t.requires_grad_() for t in arguments(WIDTH, DEPTH)]
    expected = torch.autograd.grad(layers(*leaves).sum(), leaves)
    for fn in (case.remat, case.torch, torch_remat_checkpoint(case.torch_remat())):
        assert all(map(torch.equal, torch.autograd.grad(fn(*leaves).sum(), leaves), expected))


def test_the_table_shows_the_overhead() -> None:
    row = CASES[0].measure()
    assert row.remat.python_bytes > 0 and row.remat.objects > 0
    assert f"{row.remat.python_bytes:.0f}" in table([row])


def test_the_table_has_a_dash_for_a_missing_library() -> None:
    some = Overhead(python_bytes=1234.4, objects=56.0)
    lines = table([Row("none", some, some, None)]).splitlines()
    assert lines[-1].split() == ["none", "1234", "1234", "-", "56", "56", "-"]
