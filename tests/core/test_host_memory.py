"""Tensors in host memory: how often and when they are copied, and that they and their copies are freed.

Without a CUDA device, tensors of the CPU are treated as tensors of a device without streams (``far``). The simulated
device (tests/device) finds races. The order of work on streams is in `test_accelerators.py`.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from accelerator import DEVICE, LONG, backend, each_device
from cases import assert_same, gradient, in_threads, rand, repeated
from host_copies import Copies
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from remat._core import host_memory
from remat._core.host_memory import Group, Offloaded, stays

MIB = 2**20
pytestmark = pytest.mark.usefixtures("collector_off")
cuda = pytest.mark.cuda
plainly = lambda x, count: gradient(repeated(lambda t: t.sin().exp(), count), x)


def regions(x: Tensor, count: int, steps: int = 1, unpack: Callable = Offloaded.get) -> tuple[Tensor, list[Group]]:
    """``count`` regions one after another, each a group of ``2 * steps`` saved tensors."""
    groups = []
    for _ in range(count):
        group = Group()
        with saved_tensors_hooks(lambda t, group=group: Offloaded(t.detach(), group), unpack):
            for _ in range(steps):
                x = x.sin().exp()
        groups.append(group)
    return x.sum(), groups


def test_a_tensor_is_copied_out_and_back_once(far: Copies) -> None:
    x = torch.nn.Parameter(torch.ones(2, 3))
    kept, expected = Offloaded(x), x.detach().clone()
    x.detach().zero_()  # does not reach the copy
    assert (kept._host.nbytes, kept.shape, kept.dtype, kept.device) == (24, x.shape, x.dtype, x.device)
    assert len(far.out) == 1 and not far.back
    got = kept.get()
    kept.prefetch()
    assert got is kept.get() and got is not x and type(got) is Tensor and not got.requires_grad
    assert_same(got, expected)
    assert far.taken() == [0]
    got.mul_(torch.ones(3, requires_grad=True))  # it is neither a leaf that requires grad, nor a view made without grad
    got.detach().zero_()
    kept.release()
    assert_same(kept.get(), expected)
    assert far.taken() == [0] and len(far.out) == 1


BASE = torch.arange(120.0).view(2, 3, 4, 5)
Layouts = dict[str, Callable[[Tensor], Tensor]]
KEPT: Layouts = {
    "scalar": lambda x: x[1, 2, 3, 4],
    "empty": lambda x: x[:0],
    "transposed": lambda x: x.permute(2, 0, 3, 1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "expanded": lambda x: x[0, 0, 0].expand(7, 2, 5),
    "windows": lambda x: x.view(-1)[4:40].unfold(0, 8, 2),
}
OTHERS: Layouts = {
    "transposed steps": lambda x: x[:, :, :, 1:3].permute(3, 0, 2, 1),
    "expanded steps": lambda x: x[0, 0, 0, ::4].expand(2, 2),
    "conjugate": lambda x: torch.view_as_complex(x.view(60, 2)).conj(),
    "negative": lambda x: torch._neg_view(x),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}
LAYOUTS = {**KEPT, **OTHERS}
OVERLAPPING = {"expanded", "windows"}


@each_device
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_copy_has_the_layout_without_gaps(name: str, device: str, far: Copies) -> None:
    tensor = LAYOUTS[name](BASE.to(device))
    kept = Offloaded(tensor)
    assert kept._host.device.type == "cpu" and (kept._host.is_pinned() or device == "cpu" or not tensor.numel())
    for _ in range(2):
        got = kept.get()
        assert torch.equal(got.cpu(), tensor.cpu())
        assert (got.dtype, got.shape, got.device) == (tensor.dtype, tensor.shape, tensor.device)
        assert got.storage_offset() == 0 and not got._is_view()
        assert name in OTHERS or got.stride() == tensor.stride()
        assert kept._host.nbytes == got.untyped_storage().nbytes() <= tensor.nbytes
        assert name not in OVERLAPPING or kept._host.nbytes < tensor.nbytes
        kept.release()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_tensor_that_is_more_than_memory_is_not_copied(far: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    subclass = torch.ones(3).as_subclass(type("Special", (Tensor,), {}))
    for tensor in (torch.eye(3).to_sparse(), quantized, subclass):
        assert stays(tensor) and not stays(torch.ones(3))
    monkeypatch.undo()
    assert stays(torch.ones(3))  # it is in host memory


def test_levels_and_tangents_are_not_copied(far: Copies) -> None:
    plain, taken = torch.arange(3.0), list[Tensor]()

    def fn(x: Tensor) -> Tensor:
        assert stays(x)
        taken.append(Offloaded(plain).get())
        return x.sin()

    torch.func.grad(fn)(torch.tensor(1.0))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(taken[0])
    with fwAD.dual_level():
        taken.append(Offloaded(fwAD.make_dual(plain, plain)).get())
        assert fwAD.unpack_dual(taken[1]).tangent is None
    assert_same(taken, [plain, plain])


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_read_copies_back_its_group_and_the_one_before(retain_graph: bool, far: Copies) -> None:
    reads: list[tuple[list[int], int]] = []
    x = rand(8)
    loss, _ = regions(x, 4, unpack=lambda kept: (kept.get(), reads.append((far.taken(), far.on_device())))[0])
    assert len(far.out) == 8 and not far.back
    for _ in range(1 + retain_graph):
        reads.clear()
        assert_same(torch.autograd.grad(loss, x, retain_graph=retain_graph)[0], plainly(x, 4))
        taken, live = zip(*reads)
        assert taken == ([7, 6, 4, 5], [], [2, 3], [], [0, 1], [], [], [])  # of each region, `exp` is read first
        assert max(live) == 4 and far.on_device() == 0
    assert far.on_host() == (8 if retain_graph else 0)


def test_a_tensor_that_is_released_in_a_pass_is_not_copied_back_again(far: Copies) -> None:
    x = rand(8)
    loss, _ = regions(x, 1, 2, unpack=lambda kept: (kept.get(), kept.release())[0])
    torch.autograd.grad(loss, x, retain_graph=True)
    assert sorted(far.taken()) == [0, 1, 2, 3]
    with saved_tensors_hooks(lambda t: Offloaded(t.detach()), Offloaded.get):  # each is a group of its own
        loss = x.sin().exp().sum()
    loss.backward()
    assert far.taken() == [5, 4]


def test_a_group_that_was_only_prefetched_is_released_when_the_pass_ends(far: Copies) -> None:
    middle, _ = regions(rand(8), 1)
    loss, _ = regions(middle.detach().requires_grad_(), 1)
    loss.backward()
    assert set(far.taken()) == {0, 1, 2, 3}
    assert far.on_device() == 0 and far.on_host() == 2
    middle.backward()
    assert set(far.taken()) == {0, 1}


def test_a_prefetch_may_run_out_of_memory(far: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rand(8)
    loss, _ = regions(x, 2)
    to_device, fails = Offloaded._to_device, iter([False, True, True])

    def short(*args: Any) -> Any:
        if next(fails, False):
            raise torch.OutOfMemoryError("no memory")
        return to_device(*args)

    monkeypatch.setattr(Offloaded, "_to_device", short)
    assert_same(torch.autograd.grad(loss, x)[0], plainly(x, 2))
    assert sorted(far.back) == [0, 1, 2, 3] and next(fails, None) is None


def test_nothing_is_kept_alive(far: Copies) -> None:
    x = rand(8)
    loss, groups = regions(x, 3)
    refs, thread_groups = [weakref.ref(group) for group in groups], groups[0]._siblings
    torch.autograd.grad(loss, x, retain_graph=True)
    assert far.on_host() == 6 and far.on_device() == 0 and all(ref() is not None for ref in refs)
    del loss, groups
    assert far.on_host() == 0 and all(ref() is None for ref in refs) and not len(thread_groups)
    x = torch.randn(8, 8)[:, :4]
    source, kept = weakref.ref(x.untyped_storage()), Offloaded(x)
    del x
    assert source() is None and kept.shape == (8, 4)


def test_each_thread_has_its_own_order_of_groups(far: Copies) -> None:
    x = rand(8)
    first, _ = regions(x, 1)
    ((other, _),) = in_threads(lambda: regions(x, 1))
    empty = Group()  # it has no tensor to copy back
    second, _ = regions(x, 1)
    second.backward()
    assert set(far.taken()) == {4, 5, 0, 1}
    other.backward()
    assert set(far.taken()) == {2, 3} and first.requires_grad and not empty.members


@cuda
def test_copies_run_beside_the_computation_and_after_a_late_producer() -> None:
    x = torch.randn(MIB, device=DEVICE)
    kept = Offloaded(x)
    for event in (lambda: kept._copied, lambda: kept._arrival[1]):
        backend._sleep(LONG)
        busy = backend.current_stream().record_event()
        event().synchronize()
        assert not busy.query()
        backend.synchronize()
        kept.prefetch()
    assert_same(kept.get(), x)
    backend._sleep(LONG)
    x.fill_(3)
    late = Offloaded(x)
    del x
    other = torch.zeros(MIB, device=DEVICE)  # not in the memory that is still to be copied
    assert_same(late.get(), torch.full_like(other, 3))


@cuda
@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("limit", [8 * MIB, 512 * MIB])
def test_gradients_and_peak_on_a_device(limit: int, retain_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "IN_FLIGHT_BYTES", limit)
    x = torch.randn(MIB, device=DEVICE, requires_grad=True)  # 4 MiB
    expected = plainly(x, 16)
    for _ in range(2):
        backend.synchronize()
        backend.reset_peak_memory_stats()
        before = backend.memory_allocated()
        backend._sleep(LONG // 10)  # the caller is far ahead of the device
        loss, _ = regions(x, 8, steps=2)
        assert backend.memory_allocated() - before < 4 * MIB  # none of the 32 tensors
        for _ in range(2 if retain_graph else 1):
            found = torch.autograd.grad(loss, x, retain_graph=retain_graph)[0]
            peak = backend.max_memory_allocated() - before
            assert_same(found, expected)
            assert peak < 20 * 4 * MIB  # two groups of four, and the operands of the computation
