"""Tensors in host memory: how often and when they are copied, and that they and their copies are freed.

Without a CUDA device, tensors of the CPU are treated as tensors of a device (``far``), and streams are queues of copies
that run as late as their events allow, or as early (``streams``).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from accelerator import DEVICE, backend
from host_copies import Copies
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from remat import checkpoint_name, policies, remat
from remat._core import host_memory
from remat._core.host_memory import Group, Offloaded

MIB = 2**20


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def regions(x: Tensor, count: int, steps: int = 1) -> tuple[Tensor, list[Group]]:
    """``count`` regions one after another, each a group of ``2 * steps`` saved tensors."""
    groups = []
    for _ in range(count):
        group = Group()
        with saved_tensors_hooks(lambda t, group=group: Offloaded(t.detach(), group), Offloaded.get):
            for _ in range(steps):
                x = x.sin().exp()
        groups.append(group)
    return x.sum(), groups


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# --- one tensor -----------------------------------------------------------------------------------------------------


def test_a_tensor_in_host_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    x = leaf(3)
    kept = Offloaded(x)
    kept.prefetch()
    assert kept.get() is x
    kept.release()
    kept.settle()
    assert kept.get() is x
    assert (kept.nbytes, kept.shape, kept.dtype, kept.device) == (12, x.shape, x.dtype, x.device)
    assert not copies.out and not copies.back


def test_meta_tensor_is_not_copied() -> None:
    x = torch.ones(3, device="meta")
    assert Offloaded(x).get() is x


def test_copied_out_and_back_once(far: Copies) -> None:
    x = leaf(2, 3)
    kept = Offloaded(x)
    assert (kept.nbytes, kept.shape, kept.dtype, kept.device) == (24, x.shape, x.dtype, x.device)
    assert len(far.out) == 1 and not far.back
    got = kept.get()
    assert got is kept.get() and got is not x and not got.requires_grad
    kept.prefetch()
    same(got, x.detach())
    assert far.taken() == [0]
    kept.release()
    assert kept.get() is not got
    assert far.taken() == [0] and len(far.out) == 1


def test_changes_do_not_reach_the_copy(far: Copies) -> None:
    x = torch.arange(4.0)
    kept = Offloaded(x)
    x.zero_()
    got = kept.get()
    same(got, torch.arange(4.0))
    got.mul_(torch.ones(4, requires_grad=True))  # it is neither a leaf that requires grad, nor a view made without grad
    got.detach().zero_()
    kept.release()
    same(kept.get(), torch.arange(4.0))


BASE = torch.arange(120.0).view(2, 3, 4, 5)
Layouts = dict[str, Callable[[Tensor], Tensor]]
DENSE: Layouts = {
    "contiguous": lambda x: x,
    "scalar": lambda x: x[1, 2, 3, 4],
    "empty": lambda x: x[:0],
    "transposed": lambda x: x.permute(2, 0, 3, 1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "slice": lambda x: x[1],
}
OVERLAPPING: Layouts = {
    "expanded": lambda x: x[0, 0, 0].expand(7, 2, 5),
    "expanded scalar": lambda x: x[0, 0, 0, 3].expand(6),
    "windows": lambda x: x.view(-1)[4:40].unfold(0, 8, 2),
}
OTHERS: Layouts = {
    "steps": lambda x: x[:, ::2, :, 1::3],
    "transposed steps": lambda x: x[:, :, :, 1:3].permute(3, 0, 2, 1),
    "expanded steps": lambda x: x[0, 0, 0, ::4].expand(2, 2),
    "conjugate": lambda x: torch.view_as_complex(x.view(60, 2)).conj(),
    "negative": lambda x: torch._neg_view(x),
    "bool": lambda x: x > 7,
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}
LAYOUTS = {**DENSE, **OVERLAPPING, **OTHERS}


def assert_kept(name: str, kept: Offloaded, tensor: Tensor) -> None:
    got = kept.get()
    assert torch.equal(got.cpu(), tensor.cpu())
    assert (got.dtype, got.shape, got.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert got.storage_offset() == 0 and not got._is_view()
    if name in DENSE or name in OVERLAPPING:
        assert got.stride() == tensor.stride()
    assert kept.nbytes == got.untyped_storage().nbytes() <= tensor.nbytes
    assert name not in OVERLAPPING or kept.nbytes < tensor.nbytes


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_layouts(name: str, deterministic: bool, far: Copies) -> None:
    tensor = LAYOUTS[name](BASE)
    torch.use_deterministic_algorithms(deterministic)  # new memory is filled in this mode
    try:
        assert_kept(name, Offloaded(tensor), tensor)
    finally:
        torch.use_deterministic_algorithms(False)
    assert far.taken() == [0]


class Special(Tensor):
    pass


@pytest.mark.parametrize("kind", ["sparse", "quantized", "subclass"])
def test_tensors_that_are_more_than_memory_are_not_copied(kind: str, far: Copies) -> None:
    tensor = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "subclass": lambda: torch.ones(3).as_subclass(Special),
    }[kind]()
    assert Offloaded(tensor).get() is tensor
    assert not far.out


def test_wrappers_of_torch_func_are_not_copied_and_plain_tensors_pass_its_levels(far: Copies) -> None:
    plain, taken = torch.arange(3.0), []

    def fn(x: Tensor) -> Tensor:
        assert Offloaded(x).get() is x and not far.out
        taken.append(Offloaded(plain).get())
        return x.sin()

    torch.func.grad(fn)(torch.tensor(1.0))
    assert len(taken) == 1
    same(taken[0], plain)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(taken[0])


def test_no_tangent_is_saved(far: Copies) -> None:
    with fwAD.dual_level():
        got = Offloaded(fwAD.make_dual(torch.ones(3), torch.ones(3))).get()
        assert fwAD.unpack_dual(got).tangent is None
    same(got, torch.ones(3))


def test_parameter(far: Copies) -> None:
    got = Offloaded(torch.nn.Parameter(torch.ones(3))).get()
    assert type(got) is Tensor and not got.requires_grad and len(far.out) == 1


# --- groups, in the order of a backward pass ------------------------------------------------------------------------


def test_gradients_and_number_of_copies(far: Copies) -> None:
    x = leaf(8)
    expected = torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)
    loss, _ = regions(x, 2)
    assert len(far.out) == 4 and not far.back
    for _ in range(3):
        same(torch.autograd.grad(loss, x, retain_graph=True), expected)
        assert sorted(far.taken()) == [0, 1, 2, 3]
        assert far.on_device() == 0
    same(torch.autograd.grad(loss, x), expected)
    assert far.on_host() == 0


def test_a_read_copies_back_its_group_and_the_one_before(far: Copies) -> None:
    x, read = leaf(8), []

    def noted(kept: Offloaded) -> Tensor:
        got = kept.get()
        read.append(far.taken())
        return got

    y, groups = x, []
    for _ in range(4):
        groups.append(Group())
        with saved_tensors_hooks(lambda t, group=groups[-1]: Offloaded(t.detach(), group), noted):
            y = y.sin().exp()
    y.sum().backward()
    # Of each region, `exp` is read first.
    assert read == [[7, 6, 4, 5], [], [2, 3], [], [0, 1], [], [], []]


@pytest.mark.parametrize("retain_graph", [False, True])
def test_at_most_two_groups_are_on_the_device(retain_graph: bool, far: Copies, no_gc: None) -> None:
    x, most = leaf(8), []

    def noted(kept: Offloaded) -> Tensor:
        got = kept.get()
        most.append(far.on_device())
        return got

    y = x
    for _ in range(6):
        group = Group()
        with saved_tensors_hooks(lambda t, group=group: Offloaded(t.detach(), group), noted):
            y = y.sin().exp()
    loss = y.sum()
    del y
    for _ in range(2 if retain_graph else 1):
        most.clear()
        torch.autograd.grad(loss, x, retain_graph=retain_graph)
        assert len(most) == 12 and max(most) == 4
        assert sorted(far.taken()) == list(range(12))
        assert far.on_device() == 0
    assert far.on_host() == (12 if retain_graph else 0)


def test_tensors_released_in_a_pass_are_not_copied_back_again(far: Copies) -> None:
    def once(kept: Offloaded) -> Tensor:
        got = kept.get()
        kept.release()
        return got

    x, group = leaf(8), Group()
    with saved_tensors_hooks(lambda t: Offloaded(t.detach(), group), once):
        loss = x.sin().exp().cos().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert sorted(far.taken()) == [0, 1, 2]


def test_single_tensors_are_groups_too(far: Copies) -> None:
    x = leaf(8)
    with saved_tensors_hooks(lambda t: Offloaded(t.detach()), Offloaded.get):
        loss = x.sin().exp().sum()
    loss.backward()
    assert far.taken() == [1, 0]


def test_freed_groups_are_skipped(far: Copies) -> None:
    x = leaf(8)
    first, groups = regions(x, 1)
    second, more = regions(x, 1)
    third, _ = regions(x, 1)
    del second  # one of these two groups still has a reference, but no tensors
    more = more[:1]
    third.backward()
    assert far.taken() == [5, 4, 0, 1]
    assert more and groups and first.requires_grad


def test_a_group_that_was_only_prefetched_is_released_when_the_pass_ends(far: Copies) -> None:
    x = leaf(8)
    middle, _ = regions(x, 1)
    loss, _ = regions(middle.detach().requires_grad_(), 1)
    loss.backward()
    assert set(far.taken()) == {0, 1, 2, 3}
    assert far.on_device() == 0 and far.on_host() == 2
    middle.backward()
    assert set(far.taken()) == {0, 1}


def test_a_pass_that_retains_its_graph_does_not_affect_others(far: Copies) -> None:
    x = leaf(8)
    loss, _ = regions(x, 2)
    other = Offloaded(x)
    other.prefetch()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert far.on_device() == 1
    other.get()
    assert far.taken().count(4) == 1


def test_outside_of_a_pass_nothing_else_is_copied_back(far: Copies) -> None:
    x = leaf(8)
    regions(x, 1)
    first, second = Group(), Group()
    before, kept, other = (Offloaded(x.detach(), group) for group in (first, second, second))
    far.taken()
    kept.get()
    assert len(far.taken()) == 1
    second.prefetch()
    assert len(far.taken()) == 1
    other.get()
    assert far.taken() == [] and far.on_device() == 2
    second.clear()
    assert far.on_device() == 0 and before.shape == x.shape


def test_a_prefetch_may_run_out_of_memory(far: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(8)
    expected = torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)
    loss, _ = regions(x, 2)
    to_device, calls = host_memory._to_device, []

    def short(*args: Any) -> Any:
        calls.append(args)
        if len(calls) in (2, 3):
            raise torch.OutOfMemoryError("no memory")
        return to_device(*args)

    monkeypatch.setattr(host_memory, "_to_device", short)
    same(torch.autograd.grad(loss, x), expected)
    assert sorted(far.back) == [0, 1, 2, 3]
    assert len(calls) == 6


def test_a_failed_pass_releases_its_copies(far: Copies) -> None:
    x = leaf(8)
    fails = [True]

    def hook(grad: Tensor) -> None:
        if fails:
            raise ValueError("in the backward")

    middle, _ = regions(x, 1)
    middle.register_hook(hook)
    loss, _ = regions(middle, 1)
    with pytest.raises(ValueError, match="in the backward"):
        torch.autograd.grad(loss, x, retain_graph=True)
    assert far.taken() and far.on_device() == 0
    fails.clear()
    torch.autograd.grad(loss, x)
    assert sorted(far.taken()) == [0, 1, 2, 3]


def test_nothing_is_kept_alive(far: Copies, no_gc: None) -> None:
    x = leaf(8)
    loss, groups = regions(x, 3)
    refs = [weakref.ref(group) for group in groups]
    thread_groups = groups[0]._siblings
    assert far.on_host() == 6 and all(ref() is not None for ref in refs)
    torch.autograd.grad(loss, x, retain_graph=True)
    assert far.on_device() == 0
    del loss, groups
    assert far.on_host() == 0
    assert all(ref() is None for ref in refs) and not len(thread_groups)


def test_the_source_is_released(far: Copies, no_gc: None) -> None:
    storages = []
    for shape in ((8, 8), (8, 4)):
        x = torch.randn(8, 8)[:, : shape[1]]
        storages.append(weakref.ref(x.untyped_storage()))
        kept = Offloaded(x)
        assert storages[-1]() is not None
        del x
        assert storages[-1]() is None and kept.shape == shape


# --- threads --------------------------------------------------------------------------------------------------------


def in_threads(*jobs: Callable[[], Any]) -> None:
    errors = []

    def run(job: Callable[[], Any]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_threads_get_one_copy(far: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    to_device = host_memory._to_device

    def slow(*args: Any) -> Any:
        threading.Event().wait(0.001)
        return to_device(*args)

    monkeypatch.setattr(host_memory, "_to_device", slow)
    kept = [Offloaded(torch.randn(8)) for _ in range(50)]
    start, got = threading.Barrier(4), []

    def read() -> None:
        start.wait()
        got.append([each.get() for each in kept])

    in_threads(*[read] * 4)
    assert sorted(far.taken()) == list(range(50))
    assert all(a is b for row in got for a, b in zip(row, got[0]))


def test_backwards_in_other_threads_during_new_forwards(far: Copies) -> None:
    x = torch.randn(8, requires_grad=True, dtype=torch.float64)
    expected = torch.autograd.grad(regions(x, 5, steps=1)[0], x)[0]
    results: list[Tensor] = []

    def work() -> None:
        for _ in range(10):
            loss = regions(x, 5)[0]
            more = regions(x, 1)[0]
            in_threads(lambda loss=loss: results.extend(torch.autograd.grad(loss, x)))
            assert more.requires_grad

    in_threads(*[work] * 3)
    assert len(results) == 30
    same(results, [expected] * 30)
    assert far.on_device() == far.on_host() == 0


def test_each_thread_has_its_own_order_of_groups(far: Copies) -> None:
    x = leaf(8)
    first, _ = regions(x, 1)
    other: list[Tensor] = []
    in_threads(lambda: other.append(regions(x, 1)[0]))
    second, _ = regions(x, 1)
    second.backward()
    assert set(far.taken()) == {4, 5, 0, 1}
    other[0].backward()
    assert set(far.taken()) == {2, 3}
    assert first.requires_grad


# --- streams, without a device --------------------------------------------------------------------------------------


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.position = stream, len(stream.queue)

    def synchronize(self) -> None:
        self.stream.world.waited.append(self)
        self.stream.run(self.position)

    def has_happened(self) -> bool:
        return self.stream.ran >= self.position


class Stream:
    """A queue of work. The work of a side stream runs at once, or only when something waits for it."""

    def __init__(self, world: Streams, eager: bool) -> None:
        self.world, self.eager = world, eager
        self.queue: list[Callable[[], Any]] = []
        self.ran = 0

    def add(self, work: Callable[[], Any]) -> None:
        self.queue.append(work)
        if self.eager:
            self.run()

    def run(self, until: int | None = None) -> None:
        until = len(self.queue) if until is None else until
        while self.ran < until:
            self.ran += 1
            self.queue[self.ran - 1]()

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.add(lambda: event.stream.run(event.position))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> None:
        self.before, self.world.current = self.world.current, self

    def __exit__(self, *exception: Any) -> None:
        self.world.current = self.before


class Streams(TorchDispatchMode):
    """Non-blocking copies are put into the queue of the current stream."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.main = self.current = Stream(self, False)
        self.others: list[Stream] = []
        self.recorded: list[tuple[int, Stream]] = []
        self.waited: list[Event] = []
        self.copied = 0
        self.pinned = 0

    def new(self, device: Any = None) -> Stream:
        self.others.append(Stream(self, self.eager))
        return self.others[-1]

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        self.pinned += pin_memory
        return torch.full(*args, -1, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or args[2:] != (True,):
            return func(*args, **(kwargs or {}))

        def copy() -> None:
            self.copied += 1
            func(*args[:2])

        self.current.add(copy)
        return args[0]


@pytest.fixture(params=[False, True], ids=["late", "early"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    world = Streams(request.param)
    monkeypatch.setattr(host_memory, "in_host_memory", lambda tensor: False)
    monkeypatch.setattr(host_memory, "has_streams", lambda device: True)
    monkeypatch.setattr(host_memory, "_sides", {})
    monkeypatch.setattr(torch, "Stream", world.new)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: world.current)
    monkeypatch.setattr(torch, "empty", world.empty)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: world.recorded.append((t.data_ptr(), s)))
    with world:
        yield world


def produced(world: Streams, value: float, *shape: int) -> Tensor:
    """A tensor that gets its value when the main stream has run this far."""
    x = torch.zeros(*shape)
    world.main.add(lambda: x.fill_(value))
    return x


def read(world: Streams, tensor: Tensor) -> Tensor:
    """The value that the current stream reads."""
    found = []
    world.current.add(lambda: found.append(tensor.clone()))
    world.current.run()
    return found[0]


def test_copies_wait_for_earlier_work(streams: Streams) -> None:
    x = produced(streams, 3, 4)
    kept = Offloaded(x)
    assert (streams.copied, streams.pinned) == (int(streams.eager), 1)
    out, back = streams.others
    assert streams.recorded == [(x.data_ptr(), out)]
    kept.prefetch()
    assert streams.copied == 2 * streams.eager
    same(read(streams, kept.get()), torch.full((4,), 3.0))
    assert streams.copied == 2 and len(streams.recorded) == 1
    assert len(streams.others) == 2 and back.queue


def test_copy_back_starts_after_earlier_uses_of_its_memory(streams: Streams) -> None:
    kept = Offloaded(produced(streams, 3, 4))
    order: list[int] = []
    streams.main.add(lambda: order.append(streams.copied))
    kept.prefetch()
    streams.main.add(lambda: order.append(streams.copied))
    same(read(streams, kept.get()), torch.full((4,), 3.0))
    assert order[0] == int(streams.eager)
    assert order[1] == (2 if streams.eager else 0)  # the main stream itself doesn't wait before it reads


def test_memory_of_an_unread_copy_waits_for_the_copy(streams: Streams) -> None:
    kept = Offloaded(produced(streams, 3, 4))
    kept.prefetch()
    kept.release()
    streams.main.run()
    assert streams.copied == 2
    kept.prefetch()
    del kept
    streams.main.run()
    assert streams.copied == 3


def test_read_on_another_stream(streams: Streams) -> None:
    kept = Offloaded(produced(streams, 3, 4))
    kept.prefetch()
    consumer = Stream(streams, False)
    with consumer:
        got = kept.get()
        same(read(streams, got), torch.full((4,), 3.0))
    assert streams.recorded[1:] == [(got.data_ptr(), consumer)]


def test_settle_before_a_change_in_place(streams: Streams) -> None:
    x = produced(streams, 3, 4)
    kept = Offloaded(x)
    kept.settle()
    streams.main.add(lambda: x.fill_(5))
    same(read(streams, kept.get()), torch.full((4,), 3.0))


@pytest.mark.parametrize("limit, waits", [(100, 0), (40, 3), (0, 4)])
def test_caller_waits_when_too_much_is_in_flight(
    limit: int, waits: int, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "IN_FLIGHT_BYTES", limit)
    kept = [Offloaded(produced(streams, i, 4)) for i in range(5)]  # 16 bytes each
    assert len(streams.waited) == waits  # never for the latest copy
    assert all(event.has_happened() for event in streams.waited)
    for i, each in enumerate(kept):
        same(read(streams, each.get()), torch.full((4,), float(i)))


def test_temporary_of_a_tensor_with_gaps_outlives_its_copy(streams: Streams) -> None:
    x = torch.arange(8.0)[::2]
    kept = Offloaded(x)
    assert len(streams.recorded) == 1 and streams.recorded[0][0] != x.data_ptr()
    same(read(streams, kept.get()), x)


# --- CUDA -----------------------------------------------------------------------------------------------------------

cuda = pytest.mark.cuda
LONG = 10**9  # cycles: the device is busy for about half a second


@cuda
@pytest.mark.parametrize("name", LAYOUTS)
def test_cuda_layouts(name: str) -> None:
    tensor = LAYOUTS[name](BASE.to(DEVICE))
    kept = Offloaded(tensor)
    assert kept._host.device.type == "cpu" and (kept._host.is_pinned() or not kept.nbytes)
    for _ in range(2):
        assert_kept(name, kept, tensor)
        kept.release()


@cuda
def test_cuda_copies_run_concurrently_with_the_computation() -> None:
    x = torch.randn(MIB, device=DEVICE)
    main = backend.current_stream()
    kept = Offloaded(x)
    backend._sleep(LONG)
    busy = main.record_event()
    kept._copied.synchronize()
    assert not busy.query()
    backend.synchronize()
    kept.prefetch()
    backend._sleep(LONG)
    busy = main.record_event()
    kept._arrival.done.synchronize()
    assert not busy.query()
    same(kept.get(), x)


@cuda
def test_cuda_copy_waits_for_a_late_producer() -> None:
    x = torch.zeros(MIB, device=DEVICE)
    Offloaded(x).get()
    backend.synchronize()
    backend._sleep(LONG)
    x.fill_(3)
    kept = Offloaded(x)
    del x
    other = torch.zeros(MIB, device=DEVICE)  # not in the memory that is still to be copied
    same(kept.get(), torch.full_like(other, 3))


@cuda
def test_cuda_memory_is_free_between_forward_and_backward() -> None:
    x = torch.randn(16 * MIB, device=DEVICE)
    expected = x.sum()
    kept = Offloaded(x)
    with_it = backend.memory_allocated()
    del x
    without = backend.memory_allocated()
    assert without <= with_it - 64 * MIB
    got = kept.get()
    same(got.sum(), expected)
    assert backend.memory_allocated() >= without + 64 * MIB
    kept.release()
    del got
    assert backend.memory_allocated() <= without + MIB


def plainly(x: Tensor, count: int) -> Tensor:
    y = x
    for _ in range(count):
        y = y.sin().exp()
    return torch.autograd.grad(y.sum(), x)[0]


@cuda
@pytest.mark.parametrize("retain_graph", [False, True])
def test_cuda_gradients_and_peak(retain_graph: bool) -> None:
    x = torch.randn(MIB, device=DEVICE, requires_grad=True)  # 4 MiB
    expected = plainly(x, 16)
    for _ in range(2):
        backend.synchronize()
        backend.reset_peak_memory_stats()
        before = backend.memory_allocated()
        loss, _ = regions(x, 8, steps=2)
        for _ in range(2 if retain_graph else 1):
            found = torch.autograd.grad(loss, x, retain_graph=retain_graph)[0]
            peak = backend.max_memory_allocated() - before
            same(found, expected)
            assert peak < 20 * 4 * MIB  # of the 32 tensors, two groups of four and the operands of the computation


@cuda
def test_cuda_caller_far_ahead_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "IN_FLIGHT_BYTES", 8 * MIB)
    x = torch.randn(MIB, device=DEVICE, requires_grad=True)
    expected = plainly(x, 32)
    for _ in range(3):
        backend._sleep(LONG // 10)
        same(torch.autograd.grad(regions(x, 16, steps=2)[0], x)[0], expected)


@cuda
def test_cuda_other_streams() -> None:
    x = torch.randn(MIB, device=DEVICE, requires_grad=True)
    expected = plainly(x, 8)
    side = backend.Stream()
    for _ in range(10):
        side.wait_stream(backend.current_stream())
        with backend.stream(side):
            loss, _ = regions(x, 4, steps=2)
        backend.current_stream().wait_stream(side)
        same(torch.autograd.grad(loss, x)[0], expected)
    kept = Offloaded(x.detach())
    kept.prefetch()
    with backend.stream(side):
        found = kept.get().clone()
        del kept
    side.synchronize()
    same(found, x.detach())


# --- with a policy ----------------------------------------------------------------------------------------------------


def chain(x: Tensor, w: Tensor) -> Tensor:
    for i in range(3):
        x = checkpoint_name(torch.sin(x @ w), f"h{i}")
    return x.sin()


OFFLOADING = {
    policies.offload(policies.save_matmuls): 3,
    policies.offload(policies.save_only_these_names("h*")): 3,
    policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["h0"], names_which_can_be_offloaded=["h1", "h2"]
    ): 2,
    policies.save_matmuls | policies.offload(policies.save_only_these_names("h1")): 1,
}


@pytest.mark.parametrize("policy", OFFLOADING, ids=repr)
def test_each_value_is_copied_out_once_and_back_once_per_pass(policy: Any, far: Copies) -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(chain(x, w).sum(), (x, w))
    out = remat(chain, policy=policy)(x, w).sum()
    count = OFFLOADING[policy]
    assert (len(far.out), far.on_host(), far.taken()) == (count, count, [])
    for _ in range(2):
        same(torch.autograd.grad(out, (x, w), retain_graph=True), expected)
        assert sorted(far.taken()) == list(range(count))
    same(torch.autograd.grad(out, (x, w)), expected)
    del out
    assert far.on_host() == 0 and far.on_device() == 0


def test_with_a_policy_on_host_memory_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    remat(chain, policy=policies.offload(policies.save_matmuls))(x, w).sum().backward()
    assert copies.out == [] and copies.back == []


def test_an_offloaded_value_may_be_changed_in_place(far: Copies) -> None:
    """The saved value is a copy; without offloading the change would be an error."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w
        return h, (h * 1).sin()

    expected = torch.autograd.grad(fn(x, w)[1].sum(), (x, w))
    h, out = remat(fn, policy=policies.offload(policies.save_matmuls))(x, w)
    with torch.no_grad():
        h.zero_()
    same(torch.autograd.grad(out.sum(), (x, w)), expected)
