"""Tests of the measuring tools, against counts by hand."""

from __future__ import annotations

import doctest
import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from benchmarks import measure
from benchmarks.measure import (
    OpCounter,
    PeakMemory,
    allocated_bytes,
    assert_freed_without_gc,
    count_ops,
    gc_disabled,
    held_bytes,
    leaked_bytes,
    peak_bytes,
)

ROWS, COLUMNS = 8, 32
N = ROWS * COLUMNS * 4  # bytes of one float32 activation
SCALAR = 4


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, COLUMNS)


class Cycle:
    """An object in a reference cycle, which keeps other objects alive until the garbage collector runs."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.me = self


# peak and live


def test_all_live_tensors_count(x: Tensor) -> None:
    with PeakMemory() as memory:
        a = x + 1
        b = a * 2
        c = a @ b.T
    assert memory.live == memory.peak == 2 * N + ROWS * ROWS * 4
    del a
    assert memory.live == N + ROWS * ROWS * 4
    del b, c
    assert memory.live == 0
    assert memory.peak == 2 * N + ROWS * ROWS * 4


def test_freed_memory_is_subtracted_at_once(x: Tensor) -> None:
    with PeakMemory() as memory:
        y = x
        for _ in range(10):
            y = y.tanh()
    assert memory.live == N
    assert memory.peak == 2 * N


def test_a_chain_needs_two_tensors_at_once_and_a_list_all(x: Tensor) -> None:
    def listed(x: Tensor) -> list[Tensor]:
        return [x.exp() for _ in range(5)]

    assert peak_bytes(lambda x: x.exp().exp().exp(), x) == 2 * N
    assert peak_bytes(listed, x) == 5 * N


def test_dtypes_count_by_their_size(x: Tensor) -> None:
    assert peak_bytes(lambda x: x.double(), x) == 2 * N
    assert peak_bytes(lambda x: x > 0, x) == N // 4


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(-1),
        lambda x: x.T[3:],
        lambda x: x.detach(),
        lambda x: x.unbind(),
        lambda x: x.expand(5, *x.shape),
    ],
)
def test_views_count_once_and_views_of_inputs_not_at_all(view: Any, x: Tensor) -> None:
    assert peak_bytes(view, x) == 0
    assert peak_bytes(lambda x: view(x.exp()), x) == N


def test_a_view_keeps_its_whole_storage_alive(x: Tensor) -> None:
    assert held_bytes(lambda x: x.exp()[0, 0], x) == N


def test_inputs_do_not_count(x: Tensor) -> None:
    other = torch.ones(())

    def in_place(x: Tensor) -> Tensor:
        return x.add_(other).mul_(x).view(-1)

    assert peak_bytes(in_place, x) == 0
    assert peak_bytes(lambda x: torch.add(x, 1, out=x), x) == 0


def test_an_input_that_is_freed_counts_nothing() -> None:
    with PeakMemory() as memory:
        pass
    x = [torch.ones(100)]
    with memory:
        y = x.pop().exp()
        assert memory.live == 400
    del y
    assert memory.live == 0


def test_several_outputs_and_list_arguments_are_found(x: Tensor) -> None:
    assert peak_bytes(lambda x: torch.sort(x), x) == N + 2 * N  # int64 indices
    assert peak_bytes(lambda x: torch.stack([x, x]), x) == 2 * N
    assert peak_bytes(lambda x: torch._foreach_add([x, x], 1), x) == 2 * N


def test_resized_storages_count_at_their_current_size(x: Tensor) -> None:
    with PeakMemory() as memory:
        y = x.exp()
        y.resize_(3 * ROWS, COLUMNS)
        assert memory.live == memory.peak == 3 * N
        y.untyped_storage().resize_(0)
        assert memory.live == 0
        z = x.exp()
    assert memory.live == N
    assert memory.peak == 3 * N
    del z


def test_a_storage_counts_while_only_autograd_saves_it(x: Tensor) -> None:
    x.requires_grad_()
    with gc_disabled(), PeakMemory() as memory:
        loss = x.tanh().sum()
        assert memory.live == N + SCALAR
        del loss
        assert memory.live == 0


def test_the_backward_is_counted_and_frees_its_residuals(x: Tensor) -> None:
    x.requires_grad_()
    with PeakMemory() as memory:
        loss = x.tanh().tanh().sum()
        assert memory.live == 2 * N + SCALAR
        loss.backward()
        del loss
    # Both residuals and a gradient; the loss and the gradient that its backward starts from.
    assert memory.peak == 3 * N + 2 * SCALAR
    assert memory.live == N
    assert x.grad is not None


def test_a_backward_in_another_thread_frees_what_the_mode_counted(x: Tensor) -> None:
    x.requires_grad_()
    with PeakMemory() as memory:
        loss = x.tanh().tanh().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert memory.live == SCALAR


def test_saved_tensor_hooks_are_counted(x: Tensor) -> None:
    def pack(saved: Tensor) -> Tensor:
        return saved.half()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.float()):
        assert held_bytes(lambda x: x.tanh().sum(), x.requires_grad_()) == N // 2 + SCALAR
        ops = count_ops(lambda x: torch.autograd.grad(x.tanh().sum(), x), x)
    assert ops["aten._to_copy"] == 2


def test_modes_nest(x: Tensor) -> None:
    with PeakMemory() as outer:
        y = x.exp()
        with PeakMemory() as inner:
            z = y.exp()
    assert inner.peak == inner.live == N
    assert outer.peak == outer.live == 2 * N
    del z


def test_sparse_tensors_are_not_counted(x: Tensor) -> None:
    with PeakMemory() as memory:
        sparse = x.to_sparse()
        assert memory.live == 0
        dense = sparse.to_dense()
    assert memory.live == N
    del dense


class Wrapped(Tensor):
    """A wrapper subclass around one tensor, as DTensor is around its local one."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Wrapped:
        self = Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)
        self.elem = elem
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elem"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(a.elem if isinstance(a, cls) else a for a in args), **(kwargs or {})))


def test_wrapper_subclasses_count_by_their_inner_tensors(x: Tensor) -> None:
    w = Wrapped(x)
    assert peak_bytes(lambda w: w.exp().exp(), w) == 2 * N
    assert count_ops(lambda w: w.exp().exp(), w) == {"aten.exp": 2}


# under torch.func


def test_grad_is_counted_on_physical_tensors(x: Tensor) -> None:
    # The output of tanh and its gradient; the loss and the gradient that the backward starts from.
    with PeakMemory() as memory:
        g = grad(lambda x: x.tanh().sum())(x)
    assert memory.peak == 2 * N + 2 * SCALAR
    assert memory.live == N
    del g
    assert memory.live == 0


def test_vmap_is_counted_on_the_whole_batch(x: Tensor) -> None:
    assert peak_bytes(vmap(lambda row: row.exp().exp().exp()), x) == 2 * N
    assert peak_bytes(vmap(lambda row: row.view(2, -1).T), x) == 0


def test_grad_and_vmap_nest(x: Tensor) -> None:
    per_row = vmap(grad(lambda row: row.tanh().sum()))
    assert peak_bytes(per_row, x) == 2 * N + 2 * ROWS * SCALAR
    assert peak_bytes(grad(lambda x: vmap(torch.tanh)(x).sum()), x) == 2 * N + 2 * SCALAR


def test_plain_grad_needs_more_memory_for_a_deeper_function(x: Tensor) -> None:
    def peak(depth: int) -> int:
        def loss(x: Tensor) -> Tensor:
            for _ in range(depth):
                x = x.tanh()
            return x.sum()

        return peak_bytes(grad(loss), x)

    # A backward by `torch.func.grad` is recorded itself: an output and a gradient per op.
    assert peak(9) - peak(8) == 2 * N


def test_a_jvp_has_a_tangent_for_each_value(x: Tensor) -> None:
    with PeakMemory() as memory:
        out = jvp(torch.exp, (x,), (x,))
        assert memory.live == 2 * N
    del out
    assert memory.live == 0


@pytest.mark.parametrize("order", [1, 2, 3])
def test_nothing_is_alive_after_any_order_of_grad(order: int, x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.tanh().sum()

    f = fn
    for _ in range(order):
        f = (lambda g: lambda x: g(x).sum())(grad(f))
    assert peak_bytes(f, x) >= 2 * N
    assert leaked_bytes(f, x) == 0


# the allocator


def test_allocated_bytes_agree_with_the_dispatcher(x: Tensor) -> None:
    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.tanh().tanh().sum(), x)[0]

    x.requires_grad_()
    assert allocated_bytes(step, x) == peak_bytes(step, x) == 3 * N + 2 * SCALAR
    assert allocated_bytes(lambda x: x.view(-1), x) == 0


def test_allocated_bytes_contain_memory_inside_a_kernel(x: Tensor) -> None:
    def within(x: Tensor) -> Tensor:
        return torch.linalg.inv(x @ x.T + torch.eye(ROWS))

    assert allocated_bytes(within, x) > peak_bytes(within, x)


# ops


def test_ops_are_counted_by_packet(x: Tensor) -> None:
    with OpCounter() as counter:
        x.tanh().tanh() * x.exp()
    assert counter["aten.tanh"] == 2
    assert counter["aten.mm"] == 0
    assert counter.counts == {"aten.tanh": 2, "aten.exp": 1, "aten.mul": 1}


def test_overloads_count_as_one_op(x: Tensor) -> None:
    assert count_ops(lambda x: (x + 1, x + x), x) == {"aten.add": 2}


def test_recomputed_ops_count_again(x: Tensor) -> None:
    def step(wrap: bool) -> None:
        leaf = x.detach().requires_grad_()
        out = checkpoint(torch.tanh, leaf, use_reentrant=False) if wrap else leaf.tanh()
        out.sum().backward()

    assert count_ops(step, False)["aten.tanh"] == 1
    assert count_ops(step, True)["aten.tanh"] == 2


def test_ops_under_transforms_count_once_per_batch(x: Tensor) -> None:
    ops = count_ops(vmap(grad(lambda row: row.tanh().sum())), x)
    assert ops["aten.tanh"] == ops["aten.tanh_backward"] == 1


# freed without the garbage collector


def test_the_collector_is_off_in_the_block_and_restored_after_it() -> None:
    assert gc.isenabled()
    with gc_disabled():
        assert not gc.isenabled()
        with gc_disabled():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_disabled():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_held_and_leaked(x: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        return x.tanh().tanh().sum()

    def cyclic(x: Tensor) -> None:
        Cycle(x.exp())

    assert held_bytes(forward, x) == SCALAR
    assert held_bytes(forward, x.requires_grad_()) == 2 * N + SCALAR
    assert leaked_bytes(forward, x) == 0
    assert leaked_bytes(cyclic, x) == N
    gc.collect()


def test_freed_objects_pass(x: Tensor) -> None:
    with assert_freed_without_gc() as watch:
        y = x.exp()
        thing = threading.Event()
        watch(y, thing)
        del y, thing


def test_tensors_in_a_view_or_a_graph_are_alive(x: Tensor) -> None:
    message = r"still alive .*: storage of a torch.float32 tensor of shape \(8, 32\)$"
    with pytest.raises(AssertionError, match=message), assert_freed_without_gc() as watch:
        y = x.exp()
        watch(y)
        y = y[0]
    with pytest.raises(AssertionError, match=message), assert_freed_without_gc() as watch:
        y = x.requires_grad_().tanh()
        watch(y)
        loss = y.sum()
        del y
    del loss


def test_an_object_in_a_cycle_is_alive() -> None:
    message = r"still alive .*Cycle"
    with pytest.raises(AssertionError, match=message), assert_freed_without_gc() as watch:
        cycle = Cycle()
        watch(cycle)
        del cycle
    gc.collect()


def test_watching_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="nothing was watched"), assert_freed_without_gc():
        pass


def test_an_exception_in_the_block_takes_precedence(x: Tensor) -> None:
    with pytest.raises(KeyError), assert_freed_without_gc() as watch:
        watch(x)
        raise KeyError


# examples


def test_the_examples_in_the_docstrings() -> None:
    result = doctest.testmod(measure)
    assert result.attempted > 0
    assert result.failed == 0
