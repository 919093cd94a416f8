"""The tools that tests and benchmarks measure with, against counts by hand."""

import doctest
import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases import in_threads
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from benchmarks import measure
from benchmarks.measure import OpCounter, PeakMemory, count_flops, count_ops, held_bytes, leaked_bytes, peak_bytes
from remat._measure import allocated

ROWS, COLUMNS = 8, 32
N = ROWS * COLUMNS * 4  # bytes of one float32 activation
SCALAR = 4


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, COLUMNS)


def halved(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed.float()):
        return x.tanh().sum()


VIEWS: list[Callable] = [torch.ravel, lambda x: x.T[3:], torch.detach, torch.unbind, lambda x: x.expand(5, *x.shape)]
# The peak of a function, and what its result holds.
COUNTS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    "a chain": (lambda x: x.exp().exp().exp(), 2 * N, N),
    "a larger dtype": (lambda x: x.double(), 2 * N, 2 * N),
    "a mask": (lambda x: x > 0, N // 4, N // 4),
    "a part of a tensor": (lambda x: x.exp()[0, 0], N, N),
    "an input in place": (lambda x: x.add_(1).mul_(x).view(-1), 0, 0),
    "two results": (lambda x: torch.sort(x), 3 * N, 3 * N),  # with int64 indices
    "a list of results": (lambda x: torch._foreach_add([x, x], 1), 2 * N, 2 * N),
    "a sparse tensor": (lambda x: x.to_sparse(), 0, 0),
    "a dense tensor": (lambda x: x.to_sparse().to_dense(), N, N),
    "what autograd saves": (lambda x: x.requires_grad_().tanh().sum(), N + SCALAR, N + SCALAR),
    "what hooks save": (lambda x: halved(x.requires_grad_()), N + N // 2 + SCALAR, N // 2 + SCALAR),
    "a wrapper subclass": (lambda x: TwoTensor(x, x).exp().exp(), 4 * N, 2 * N),
    # The output of tanh and its gradient; the loss and the gradient that the backward starts from.
    "grad": (grad(lambda x: x.tanh().sum()), 2 * N + 2 * SCALAR, N),
    "vmap": (vmap(lambda row: row.tanh().tanh()), 2 * N, N),
    "vmap of a view": (vmap(lambda row: row.view(2, -1)), 0, 0),
    "grad in vmap": (vmap(grad(lambda row: row.tanh().sum())), 2 * N + 2 * ROWS * SCALAR, N),
    "vmap in grad": (grad(lambda x: vmap(torch.tanh)(x).sum()), 2 * N + 2 * SCALAR, N),
    "jvp": (lambda x: jvp(torch.exp, (x,), (x,)), 2 * N, 2 * N),
    "jvp, with a zero tangent": (lambda x: jvp(lambda y: y + x, (x,), (x,)), 2 * N, 2 * N),
    **{f"view {i}": (view, 0, 0) for i, view in enumerate(VIEWS)},
    **{f"view {i} of a result": (lambda x, view=view: view(x.exp()), N, N) for i, view in enumerate(VIEWS)},
}


@pytest.mark.parametrize("what", COUNTS)
def test_a_storage_counts_once_while_it_is_alive(what: str, x: Tensor) -> None:
    fn, peak, held = COUNTS[what]
    assert (held_bytes(fn, x), peak_bytes(fn, x)) == (held, peak)
    assert leaked_bytes(fn, x) == 0


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_backward_frees_its_residuals(in_a_thread: bool, x: Tensor) -> None:
    x.requires_grad_()
    with PeakMemory() as memory:
        loss = x.tanh().tanh().sum()
        assert memory.live == 2 * N + SCALAR
        if in_a_thread:  # the mode doesn't see the operations there
            in_threads(loss.backward)
        else:
            loss.backward()
        del loss
    assert x.grad is not None and memory.live == (0 if in_a_thread else N)
    # Both residuals and a gradient; the loss and the gradient that its backward starts from.
    assert in_a_thread or memory.peak == 3 * N + 2 * SCALAR


def test_resized_storages_count_at_their_current_size(x: Tensor) -> None:
    with PeakMemory() as memory:
        y = x.exp()
        y.resize_(3 * ROWS, COLUMNS)
        assert memory.live == memory.peak == 3 * N
        y.untyped_storage().resize_(0)
        assert memory.live == 0
        z, buffer = x.exp(), torch.empty(2 * ROWS, COLUMNS)
        buffer.untyped_storage().resize_(0)  # as FSDP does
        z = z.exp()
        assert memory.live == N and memory.peak == 3 * N
        x.untyped_storage().resize_(10 * N)  # of an input
    assert memory.live == N
    del z


def test_flops_and_operations_are_those_below_all_transforms_and_subclasses() -> None:
    x = torch.ones(2, 3)
    assert count_flops(lambda x: (x @ x.T).tanh(), x) == 2 * 2 * 3 * 2
    assert count_flops(lambda x: vmap(lambda row: x @ row)(x), x) == 2 * 2 * 3 * 2
    assert count_flops(lambda x: TwoTensor(x, x).exp().mm(TwoTensor(x.T, x.T)), x) == 2 * 2 * 2 * 3 * 2
    assert count_ops(lambda x: x.exp().exp(), TwoTensor(x, x)) == {"aten.exp": 4}


def test_the_collector_is_off_in_the_block_and_restored_after_it() -> None:
    with pytest.raises(ZeroDivisionError), measure.gc_disabled():
        with measure.gc_disabled():
            pass
        assert not gc.isenabled()
        1 / 0  # noqa: B018
    assert gc.isenabled()


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
    assert measure.allocated_bytes(step, x) == peak_bytes(step, x) == 3 * N + 2 * 4
    assert measure.allocated_bytes(lambda x: x.view(-1), x) == 0
    inverse = lambda x: torch.linalg.inv(x @ x.T + torch.eye(8))
    assert measure.allocated_bytes(inverse, x.detach()) > peak_bytes(inverse, x.detach())


def test_the_peaks_of_phases_on_a_device_are_those_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"memory_allocated": [100, 140], "max_memory_allocated": [150, 140, 170]}
    figures |= {"mem_get_info": [(1000, 2000)], "memory_reserved": [400], "max_memory_reserved": [600]}
    device = Mock(**{f"{name}.side_effect": each for name, each in figures.items()})
    monkeypatch.setattr(allocated, "accelerators_of", lambda of: {"device": device, "another": object()} if of else {})
    with allocated.Allocated([torch.ones(1)]) as memory:
        memory.next_phase()
    assert (memory.peaks, memory.peak) == ([50, 40], 50)
    peak = ["synchronize", "max_memory_allocated", "reset_peak_memory_stats"]
    assert [name for name, *_ in device.mock_calls] == ["synchronize", "memory_allocated", peak[-1], *peak, *peak]
    assert [*map(allocated.free_memory, ([], [torch.ones(1)]))] == [None, 1000 + (400 - 140) - (600 - 170)]


def test_ops_are_counted_by_packet(x: Tensor) -> None:
    with OpCounter() as counter:
        x.tanh().tanh() * x.exp() + 1 + x
    assert counter["aten.mm"] == 0
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
        with pytest.raises(AssertionError, match=f"still alive .*{name}"), measure.assert_freed_without_gc() as watch:
            made = make()
            watch(made)
            kept = keep(made)
            del made
        del kept
    gc.collect()


def test_watching_nothing_is_an_error_but_an_exception_in_the_block_takes_precedence(x: Tensor) -> None:
    with pytest.raises(AssertionError, match="nothing was watched"), measure.assert_freed_without_gc():
        pass
    with pytest.raises(KeyError), measure.assert_freed_without_gc() as watch:
        watch(x)
        raise KeyError


def test_the_examples_in_the_docstrings() -> None:
    assert held_bytes(torch.exp, torch.ones(2)) == 8
    result = doctest.testmod(measure)
    assert result.attempted > 0 and result.failed == 0
