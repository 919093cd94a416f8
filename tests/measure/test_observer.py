"""Peaks and live bytes of the storages that operations make, against counts by hand."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from benchmarks.measure import PeakMemory, count_flops, count_ops, gc_disabled, held_bytes, leaked_bytes, peak_bytes

ROWS, COLUMNS = 8, 32
N = ROWS * COLUMNS * 4  # bytes of one float32 activation
SCALAR = 4


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, COLUMNS)


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


def halved(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed.float()):
        return x.tanh().sum()


VIEWS: list[Callable[[Tensor], Any]] = [
    lambda x: x.view(-1),
    lambda x: x.T[3:],
    lambda x: x.detach(),
    lambda x: x.unbind(),
    lambda x: x.expand(5, *x.shape),
]
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
    "a wrapper subclass": (lambda x: Wrapped(x).exp().exp(), 2 * N, N),
    # The output of tanh and its gradient; the loss and the gradient that the backward starts from.
    "grad": (grad(lambda x: x.tanh().sum()), 2 * N + 2 * SCALAR, N),
    "vmap": (vmap(lambda row: row.tanh().tanh()), 2 * N, N),
    "vmap of a view": (vmap(lambda row: row.view(2, -1)), 0, 0),
    "grad in vmap": (vmap(grad(lambda row: row.tanh().sum())), 2 * N + 2 * ROWS * SCALAR, N),
    "vmap in grad": (grad(lambda x: vmap(torch.tanh)(x).sum()), 2 * N + 2 * SCALAR, N),
    "jvp": (lambda x: jvp(torch.exp, (x,), (x,)), 2 * N, 2 * N),
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
            thread = threading.Thread(target=loss.backward)
            thread.start(), thread.join()
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
        z = x.exp()
        assert memory.live == N and memory.peak == 3 * N
        x.untyped_storage().resize_(10 * N)  # of an input
    assert memory.live == N
    del z


def test_flops_and_operations_are_those_below_all_transforms_and_subclasses() -> None:
    x = torch.ones(2, 3)
    assert count_flops(lambda x: (x @ x.T).tanh(), x) == 2 * 2 * 3 * 2
    assert count_flops(lambda x: vmap(lambda row: x @ row)(x), x) == 2 * 2 * 3 * 2
    assert count_flops(lambda x: Wrapped(x).exp().mm(Wrapped(x.T)), x) == 2 * 2 * 3 * 2
    assert count_ops(lambda x: x.exp().exp(), Wrapped(x)) == {"aten.exp": 2}


def test_the_collector_is_off_in_the_block_and_restored_after_it() -> None:
    with pytest.raises(ZeroDivisionError), gc_disabled():
        with gc_disabled():
            pass
        assert not gc.isenabled()
        1 / 0  # noqa: B018
    assert gc.isenabled()
