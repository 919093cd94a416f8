"""The tools that tests and benchmarks measure with, against counts by hand."""

from __future__ import annotations

import doctest
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from benchmarks import measure
from benchmarks.measure import (
    OpCounter,
    allocated_bytes,
    assert_freed_without_gc,
    count_ops,
    held_bytes,
    leaked_bytes,
    peak_bytes,
)

N = 8 * 32 * 4  # bytes of one float32 activation


@pytest.fixture
def x() -> Tensor:
    return torch.randn(8, 32)


class Cycle:
    """An object in a reference cycle, which keeps other objects alive until the garbage collector runs."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.me = self


def test_memory_that_only_a_cycle_holds_is_leaked(x: Tensor) -> None:
    assert leaked_bytes(lambda x: x.tanh().tanh().sum(), x.requires_grad_()) == 0
    assert leaked_bytes(lambda x: Cycle(x.exp()) and None, x) == N
    gc.collect()


def test_allocated_bytes_contain_memory_inside_a_kernel(x: Tensor) -> None:
    step = lambda x: torch.autograd.grad(x.tanh().tanh().sum(), x)[0]
    x.requires_grad_()
    assert allocated_bytes(step, x) == peak_bytes(step, x) == 3 * N + 2 * 4
    assert allocated_bytes(lambda x: x.view(-1), x) == 0
    inverse = lambda x: torch.linalg.inv(x @ x.T + torch.eye(8))
    assert allocated_bytes(inverse, x.detach()) > peak_bytes(inverse, x.detach())


def test_ops_are_counted_by_packet(x: Tensor) -> None:
    with OpCounter() as counter:
        x.tanh().tanh() * x.exp() + 1 + x
    assert counter["aten.tanh"] == 2 and counter["aten.mm"] == 0
    assert counter.counts == {"aten.tanh": 2, "aten.exp": 1, "aten.mul": 1, "aten.add": 2}
    ops = count_ops(vmap(grad(lambda row: row.tanh().sum())), x)
    assert ops["aten.tanh"] == ops["aten.tanh_backward"] == 1  # once per batch
    step = lambda x: torch.autograd.grad(checkpoint(torch.tanh, x, use_reentrant=False).sum(), x)
    assert count_ops(step, x.requires_grad_())["aten.tanh"] == 2  # a recompute counts again


def test_objects_in_a_view_a_graph_or_a_cycle_are_alive(x: Tensor) -> None:
    tensor = r"storage of a torch.float32 tensor of shape \(8, 32\)$"
    for make, keep, name in (
        (lambda: x.exp(), lambda y: y[0], tensor),
        (lambda: x.requires_grad_().tanh(), lambda y: y.sum(), tensor),
        (Cycle, lambda y: None, "Cycle"),
    ):
        with pytest.raises(AssertionError, match=f"still alive .*{name}"), assert_freed_without_gc() as watch:
            made = make()
            watch(made)
            kept = keep(made)
            del made
        del kept
    gc.collect()


def test_watching_nothing_is_an_error_but_an_exception_in_the_block_takes_precedence(x: Tensor) -> None:
    with pytest.raises(AssertionError, match="nothing was watched"), assert_freed_without_gc():
        pass
    with pytest.raises(KeyError), assert_freed_without_gc() as watch:
        watch(x)
        raise KeyError


def test_the_examples_in_the_docstrings() -> None:
    assert held_bytes(torch.exp, torch.ones(2)) == 8
    result = doctest.testmod(measure)
    assert result.attempted > 0 and result.failed == 0
