"""Features of a CUDA device: its generators, streams, autocast, allocator and backward threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator import DEVICE, backend
from torch import Tensor, nn

from benchmarks.measure import peak_bytes
from remat import RematError, is_recomputing, remat

pytestmark = pytest.mark.cuda
MIB = 2**20


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def plain(f: Callable, x: Tensor) -> Tensor:
    return torch.autograd.grad(f(x).sum(), x)[0]


def func(f: Callable, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: f(x).sum())(x.detach())


def per_sample(f: Callable, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda x: f(x).sum()), randomness="different")(x.detach())


WAYS = [plain, func, per_sample]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def take(request: pytest.FixtureRequest) -> Callable:
    return request.param


def states(*generators: torch.Generator) -> list[Tensor]:
    return [torch.get_rng_state(), backend.get_rng_state(), *(g.get_state() for g in generators)]


# --- generators -------------------------------------------------------------------------------------


def dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(x.sin(), 0.5).exp().sin() * torch.rand(x.shape[-1], device=DEVICE)


def draws_on_both(x: Tensor) -> Tensor:
    return dropout(x) * torch.rand(x.shape[-1]).to(DEVICE)


@pytest.mark.parametrize("fn", [dropout, draws_on_both])
def test_generators(fn: Callable, take: Callable) -> None:
    x, results = leaf(4, 8), []
    for f in (remat(fn), fn):
        torch.manual_seed(1)
        results.append((take(f, x), states()))
    same(*results)


def test_generators_do_not_move_in_the_backward() -> None:
    x = leaf(4, 8)
    loss = remat(draws_on_both)(x).sum()
    after = states()
    torch.autograd.grad(loss, x, retain_graph=True)
    same(states(), after)
    torch.manual_seed(7)
    between = states()
    torch.autograd.grad(loss, x)
    same(states(), between)


@pytest.mark.parametrize("how", ["argument", "closure"])
def test_explicit_generator(how: str, take: Callable) -> None:
    generator = torch.Generator(DEVICE)

    def with_argument(x: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.rand(x.shape[-1], device=DEVICE, generator=generator)
        return (x * noise).sin().exp()

    def with_closure(x: Tensor) -> Tensor:
        return with_argument(x, generator)

    x, results = leaf(4, 8), []
    for wrap in (remat, lambda f: f):
        generator.manual_seed(3)
        torch.manual_seed(3)
        if how == "argument":
            wrapped = wrap(with_argument)
            f = lambda x: wrapped(x, generator)
        else:
            f = wrap(with_closure)
        if take is per_sample:
            results.append((func(f, x), states(generator)))
        else:
            results.append((take(f, x), states(generator)))
    same(*results)


def test_generator_is_not_set_without_preserve_rng_state() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x + 0 * torch.rand(8, device=DEVICE)).sin().exp()

    x = leaf(8)
    torch.manual_seed(1)
    torch.rand(8, device=DEVICE), torch.rand(8, device=DEVICE)
    expected = states()
    torch.manual_seed(1)
    plain(remat(fn, preserve_rng_state=False), x)
    same(states(), expected)


# --- autocast ---------------------------------------------------------------------------------------


def mlp(width: int = 16, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("way", [plain, func], ids=lambda way: way.__name__)
def test_autocast(way: Callable, cache: bool) -> None:
    model, x = mlp(), leaf(4, 16)
    modes = []

    def under_autocast(f: Callable) -> Callable:
        def fn(x: Tensor) -> Tensor:
            with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=cache):
                return f(x)

        return fn

    def noted(x: Tensor) -> Tensor:
        modes.append((torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE)))
        return model(x)

    same(way(under_autocast(remat(noted)), x), way(under_autocast(model), x))
    assert len(modes) >= 2 and set(modes) == {(True, torch.bfloat16)}
    assert not torch.is_autocast_enabled(DEVICE)


def test_casts_are_up_to_date_after_an_optimizer_step() -> None:
    results, x = [], torch.randn(4, 16, device=DEVICE)
    for wrap in (remat, lambda f: f):
        model = mlp()
        f, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = f(x).float().square().mean()
            loss.backward()
            optimizer.step()
        results.append(list(model.parameters()))
    same(*results)


# --- streams ----------------------------------------------------------------------------------------


def test_region_on_two_streams() -> None:
    side = backend.Stream()
    seen = []

    def fn(x: Tensor) -> Tensor:
        current = backend.current_stream()
        seen.append((is_recomputing(), current.cuda_stream))
        y = x.sin()
        side.wait_stream(current)
        with backend.stream(side):
            z = (y @ y).exp()
            z.record_stream(current)
            y.record_stream(side)
        current.wait_stream(side)
        return (z * y).cos()

    x = torch.randn(256, 256, device=DEVICE).div(16).requires_grad_()
    expected = plain(fn, x)
    seen.clear()
    for _ in range(5):
        same(plain(remat(fn), x), expected)
    assert len({stream for _, stream in seen}) == 1


def test_region_called_on_a_side_stream() -> None:
    side, streams = backend.Stream(), []

    def fn(x: Tensor) -> Tensor:
        streams.append(backend.current_stream().cuda_stream)
        return (x @ x.sin()).exp().cos()

    x = torch.randn(256, 256, device=DEVICE).div(16).requires_grad_()
    expected = plain(fn, x)
    streams.clear()
    side.wait_stream(backend.current_stream())
    with backend.stream(side):
        loss = remat(fn)(x).sum()
    backend.current_stream().wait_stream(side)
    same(torch.autograd.grad(loss, x)[0], expected)
    assert streams == [side.cuda_stream] * 2
    assert backend.current_stream() == backend.default_stream()


# --- memory -----------------------------------------------------------------------------------------


def chain(depth: int, wrap: Callable) -> Callable:
    def block(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.sin().cos()
        return x

    blocks = [wrap(block) for _ in range(depth)]

    def fn(x: Tensor) -> Tensor:
        for each in blocks:
            x = each(x)
        return x.sum()

    return fn


def allocated_peak(run: Callable[[], Any]) -> int:
    """The peak of the bytes that `run` allocates in addition to those allocated before."""
    run()
    gc.collect()
    leaf(1).backward()  # after this the device's thread has released the previous graph
    backend.synchronize()
    backend.reset_peak_memory_stats()
    before = backend.memory_allocated()
    run()
    backend.synchronize()
    return backend.max_memory_allocated() - before


def of_autograd(f: Callable, x: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(f(x), x)


def of_func(f: Callable, x: Tensor) -> Callable[[], Any]:
    return lambda: torch.func.grad(f)(x.detach())


def of_vmap(f: Callable, x: Tensor) -> Callable[[], Any]:
    return lambda: torch.vmap(torch.func.grad(f))(x.detach())


@pytest.mark.parametrize("way", [of_autograd, of_func, of_vmap], ids=lambda way: way.__name__)
def test_peak_memory(way: Callable) -> None:
    x = torch.randn(4, MIB // 16, device=DEVICE, requires_grad=True)  # 1 MiB
    with_remat = allocated_peak(way(chain(8, remat), x))
    without = allocated_peak(way(chain(8, lambda f: f), x))
    # 8 blocks of 8 tensors, against 8 inputs, one block's tensors and a few temporaries.
    assert without > 60 * MIB
    assert with_remat < 28 * MIB


@pytest.mark.parametrize("way", [of_autograd, of_func, of_vmap], ids=lambda way: way.__name__)
def test_peak_is_as_low_as_on_the_cpu(way: Callable) -> None:
    # The backward runs on a thread of the device, but tensors are released as early as on the CPU.
    cpu = torch.randn(4, MIB // 16, requires_grad=True)
    cuda = cpu.detach().to(DEVICE).requires_grad_()
    on_cpu, on_cuda = (peak_bytes(way(chain(8, remat), x)) for x in (cpu, cuda))
    assert on_cuda <= on_cpu + 2 * MIB
    assert allocated_peak(way(chain(8, remat), cuda)) <= on_cpu + 4 * MIB


def test_backward_of_torch_func_runs_on_a_device_thread() -> None:
    threads = set()

    def fn(x: Tensor) -> Tensor:
        if is_recomputing():
            threads.add(threading.get_ident())
        return x.sin().exp().cos()

    x = leaf(8)
    same(func(remat(fn), x), func(fn, x))
    assert threads
    same(plain(remat(fn), x), plain(fn, x))


# --- transforms, modules ----------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_torch_func(transform: Callable) -> None:
    w = torch.randn(8, 8, device=DEVICE, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return (x @ w).sin().exp().sum()

    x = torch.randn(8, device=DEVICE)
    torch.testing.assert_close(transform(remat(fn))(x), transform(fn)(x))


def test_module_step() -> None:
    model, x = mlp(), torch.randn(4, 16, device=DEVICE)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    actual = torch.autograd.grad(remat(model)(x).sum(), list(model.parameters()))
    same(actual, expected)


def test_tensors_of_cpu_and_device_in_one_region() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        z = nn.functional.dropout(y.sin(), 0.5).to(DEVICE)
        return (nn.functional.dropout(x.exp(), 0.5) * z).cos()

    x, y = leaf(8), torch.randn(8, requires_grad=True)
    results = []
    for f in (remat(fn), fn):
        torch.manual_seed(5)
        out = f(x, y)
        results.append((out.detach(), torch.autograd.grad(out.sum(), (x, y)), states()))
    same(*results)


# --- threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_backward_inside_after_many_nodes(nested: bool, batched: bool) -> None:
    """Each thread numbers the autograd nodes that it makes, so those of the device's thread have lower numbers."""
    for _ in range(100):
        torch.ones(3, requires_grad=True).sin()

    def penalty(x: Tensor) -> Tensor:
        p = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((p.sin() * x).sum(), p, create_graph=True)
        return (g * g).exp()

    def run(wrap: Callable) -> Any:
        x = torch.arange(3.0, device=DEVICE).requires_grad_()
        fn = wrap(lambda x: wrap(penalty)(x).sin()) if nested else wrap(penalty)
        heads = torch.eye(3, device=DEVICE) if batched else torch.ones(3, device=DEVICE)
        return torch.autograd.grad(fn(x), x, heads, is_grads_batched=batched)

    same(run(remat), run(lambda fn: fn))


def test_backward_inside_after_many_nodes_saves_nothing_of_the_region() -> None:
    """Also where the argument of the region is on the CPU."""
    for _ in range(100):
        torch.ones(3, requires_grad=True).sin()

    def fn(x: Tensor) -> Tensor:
        y = x.to(DEVICE)
        (g,) = torch.autograd.grad((y.sin() * y.cos()).sum(), y, create_graph=True)
        return (g.sin() * y).exp().cpu()

    x = torch.randn(64, 64, requires_grad=True)
    leaf(1).backward()  # after this the device's thread has released the previous graph
    before = backend.memory_allocated()
    out = remat(fn)(x)
    assert backend.memory_allocated() == before
    same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(fn(x).sum(), x))


# --- graphs -----------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA has graphs")
def test_a_capture_needs_preserve_rng_state_false(monkeypatch: pytest.MonkeyPatch) -> None:
    x, small = leaf(4, 4), torch.ones(4, device=DEVICE)
    fn = lambda x: (x.sin() * small).exp()
    expected = plain(fn, x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RematError, match=r"CUDA graph is captured.*`preserve_rng_state=False`"):
            remat(fn)(x)
        same(plain(remat(fn, preserve_rng_state=False), x), expected)
    same(plain(remat(fn), x), expected)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="the simulated device has no CUDA graphs")
def test_a_graph_of_forward_and_backward() -> None:
    w, small = leaf(16, 16), torch.ones(16, device=DEVICE)
    fn = lambda x: ((x @ w).sin() * small).exp().sum()
    region = remat(fn, preserve_rng_state=False)
    x, side = torch.randn(16, 16, device=DEVICE), backend.Stream()
    side.wait_stream(backend.current_stream())
    with backend.stream(side):
        torch.autograd.grad(region(x), w)
    backend.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = torch.autograd.grad(region(x), w)
    for _ in range(2):
        x.normal_()
        graph.replay()
        same(found, torch.autograd.grad(fn(x), w)[0])
