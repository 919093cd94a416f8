"""Regions on a device: results and generators as in a plain run, and as much saved and recomputed as on the CPU.

Any device with generators and streams is suitable: `--simulate cuda`, `--simulate sim`, or a real one.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerator import DEVICE, backend
from cases import assert_same, assert_same_results, repeated
from on_device import MATMULS, allocated, leaf, states
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import remat
from benchmarks.measure import count_ops, peak_bytes
from remat import checkpoint_name, policies

pytestmark = pytest.mark.cuda
MIB = 2**20


def chain(x: Tensor, w: Tensor) -> Tensor:
    for i in range(3):
        x = checkpoint_name(torch.sin(x @ w), f"h{i}")
    return x.sin()


def draws(x: Tensor, w: Tensor) -> Tensor:
    """Draws random numbers on the device and on the host."""
    h = F.dropout((x @ w).sin(), 0.5) @ w * torch.rand(x.shape[-1], device=x.device)
    return h.sin() * torch.rand(x.shape[-1]).to(x.device)


def norms(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w), (8,)).softmax(-1) @ w.t()


def attention(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).reshape(1, 2, -1, 4)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos()).exp()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh().mul(2).add_(1).sin_() @ w


def nested(x: Tensor, w: Tensor) -> Tensor:
    return remat.remat(lambda x: (x @ w).sin() @ w)(x).tanh()


def autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return ((x @ w).sin() @ w).float().tanh()


FUNCTIONS = [chain, draws, norms, attention, in_place, nested, autocast]
POLICIES = {
    "none": None, "save_matmuls": MATMULS, "names": policies.save_only_these_names("h1"),
    "either": MATMULS | policies.save_only_these_names("h*"), "offload": policies.offload(MATMULS),
}  # fmt: skip


def by_autograd(f: Callable, x: Tensor, w: Tensor) -> Any:
    return torch.autograd.grad(f(x, w).sum(), (x, w))


def by_grad(f: Callable, x: Tensor, w: Tensor) -> Any:
    return grad(lambda x, w: f(x, w).sum(), (0, 1))(x.detach(), w.detach())


def by_vmap_of_grad(f: Callable, x: Tensor, w: Tensor) -> Any:
    per_sample = grad(lambda w, x: f(x, w).sum())
    return vmap(per_sample, (None, 0), randomness="different")(w.detach(), x.detach().reshape(2, 4, 8))


def by_jvp(f: Callable, x: Tensor, w: Tensor) -> Any:
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivative
        return jvp(f, (x.detach(), w.detach()), (x.detach().cos(), w.detach().sin()))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", [by_autograd, by_grad, by_vmap_of_grad, by_jvp])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_functions_and_policies(fn: Callable, way: Callable, policy: str) -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    region = remat.remat(fn, policy=POLICIES[policy])
    assert_same_results(lambda f: (way(f, x, w), states()), region, fn, exact=way is by_autograd)


@pytest.mark.parametrize("how", ["argument", "closure"])
@pytest.mark.parametrize("way", [by_autograd, by_grad])
def test_a_generator_of_the_user(way: Callable, how: str) -> None:
    own = torch.Generator(DEVICE)
    fn = lambda x, w, generator=own: (x @ w * torch.rand(8, device=DEVICE, generator=generator)).sin().exp()

    def run(f: Callable) -> Any:
        own.manual_seed(3)
        return way(f if how == "closure" else lambda x, w: f(x, w, own), x, w), states(own)

    x, w = leaf(8, 8), leaf(8, 8)
    assert_same_results(run, remat.remat(fn), fn, exact=way is by_autograd)


MAPS: dict[str, Callable] = {
    "forward": lambda f, x, w: vmap(f, (0, None), randomness="same")(x, w),
    "autograd": lambda f, x, w: torch.autograd.grad(vmap(f, (0, None), randomness="same")(x, w).sin().sum(), (x, w)),
    "grad": lambda f, x, w: grad(lambda w: vmap(f, (0, None), randomness="same")(x, w).sin().sum())(w),
    "vmap of grad": lambda f, x, w: vmap(grad(lambda w, x: f(x, w).sum()), (None, 0), randomness="same")(w, x),
    "jacobian": lambda f, x, w: vmap(jacrev(lambda w, x: f(x, w)), (None, 0), randomness="same")(w, x),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", MAPS)
def test_dropout_in_a_region_of_a_vmap_that_maps_none_of_its_operands(way: str, policy: str) -> None:
    """A device's own kernel of dropout draws other numbers than ``vmap`` with one mask for all."""
    drops = lambda w: F.dropout((w @ w).sin(), 0.5).exp()
    region = remat.remat(drops, policy=POLICIES[policy])
    x, w = leaf(4, 8), leaf(8, 8)
    run = lambda f: (MAPS[way](lambda x, w: (x @ f(w)).sin(), x, w), states())
    assert_same_results(run, region, drops, exact=False)


def test_without_preserve_rng_state_the_recompute_draws_further_numbers() -> None:
    fn = lambda x: (x + 0 * torch.rand(8, device=DEVICE)).sin().exp()
    x = leaf(8)
    torch.manual_seed(1)
    torch.rand(8, device=DEVICE), torch.rand(8, device=DEVICE)
    expected = states()
    torch.manual_seed(1)
    remat.remat(fn, preserve_rng_state=False)(x).sum().backward()
    assert_same(states(), expected)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("way", [by_autograd, by_grad])
def test_a_recompute_runs_under_the_autocast_of_the_forward(way: Callable, cache: bool) -> None:
    modes = []

    def noted(x: Tensor, w: Tensor) -> Tensor:
        modes.append((torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE)))
        return (x @ w).sin() @ w

    def under_autocast(f: Callable) -> Callable:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=cache):
                return f(x, w)

        return fn

    x, w = leaf(8, 8), leaf(8, 8)
    assert_same(way(under_autocast(remat.remat(noted)), x, w), way(under_autocast(noted), x, w))
    assert modes == [(True, torch.bfloat16)] * 3
    assert not torch.is_autocast_enabled(DEVICE)


@pytest.mark.skipif(not hasattr(backend, "host_waits"), reason="only the simulated device counts it")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_does_not_wait_for_the_device(policy: str) -> None:
    """Not for small arguments either, which are compared with copies."""
    x, small, captured = leaf(8, 8), torch.ones(8, device=DEVICE), torch.ones(8, device=DEVICE)
    before = backend.host_waits()
    fn = lambda x, small: F.dropout((x @ x).sin() * small * captured, 0.5).cos()
    remat.remat(fn, policy=POLICIES[policy])(x, small).sum().backward()
    assert backend.host_waits() == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", [chain, norms, in_place, nested])
def test_as_much_is_saved_and_recomputed_as_on_the_cpu(fn: Callable, policy: str) -> None:
    found = []
    for device in ("cpu", DEVICE):
        x, w = leaf(8, 8, device=device), leaf(8, 8, device=device)
        f = remat.remat(fn, policy=POLICIES[policy])
        kept = sorted(str((each.shape, each.dtype)) for each in remat.saved_residuals(f, x, w, inputs=True))
        out = f(x, w).sum()
        ops = count_ops(lambda: torch.autograd.grad(out, (x, w)))
        found.append((kept, [ops[name] for name in ("aten.mm", "aten.sin", "aten.tanh")]))
    assert found[1] == found[0]


def blocks(wrap: Callable) -> Callable:
    block = wrap(repeated(lambda x: x.sin().cos(), 4))
    return lambda x: repeated(block, 8)(x).sum()


def peak_of_device(run: Callable[..., Any], x: Tensor) -> int:
    run(x)
    gc.collect()
    (before, *_) = allocated()
    backend.reset_peak_memory_stats()
    run(x)
    backend.synchronize()
    return backend.max_memory_allocated() - before


WAYS: dict[str, Callable] = {
    "autograd": lambda f: lambda x: torch.autograd.grad(f(x), x),
    "grad": lambda f: lambda x: grad(f)(x.detach()),
    "vmap of grad": lambda f: lambda x: vmap(grad(f))(x.detach()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_peak_is_low_and_about_that_on_the_cpu(way: Callable) -> None:
    """The backward runs in a thread of the device, but tensors are released as early as on the CPU."""
    cpu = torch.randn(4, MIB // 16, requires_grad=True)  # 1 MiB
    x = cpu.detach().to(DEVICE).requires_grad_()
    ours, plain = (peak_of_device(way(blocks(wrap)), x) for wrap in (remat.remat, lambda f: f))
    # 8 blocks of 8 tensors, against 8 inputs, one block's tensors and a few temporaries.
    assert ours < 28 * MIB and plain > 60 * MIB
    on_cpu, on_device = (peak_bytes(way(blocks(remat.remat)), each) for each in (cpu, x))
    assert on_device <= on_cpu + 2 * MIB and ours <= on_cpu + 4 * MIB


@pytest.mark.parametrize("devices", [[0], [1], [0, 1]], ids=str)
def test_offload_saves_nothing_on_the_device(devices: list[int]) -> None:
    """A region on each device, as in a model that is distributed over the devices."""
    if max(devices) >= backend.device_count():
        pytest.skip("there is one device")
    first = f"{DEVICE}:{devices[0]}"
    x, w = leaf(1024, 64, device=first), leaf(64, 64, device=first)

    def model(x: Tensor, w: Tensor, f: Callable = chain) -> Tensor:
        for i in devices:
            x = f(x.to(f"{DEVICE}:{i}"), w.to(f"{DEVICE}:{i}"))
        return x

    held, expected = {}, by_autograd(model, x, w)
    for name in ("none", "save_matmuls", "offload"):
        before = allocated()
        out = model(x, w, remat.remat(chain, policy=POLICIES[name])).sum()
        held[name] = [after - b for after, b in zip(allocated(), before)]
        assert_same(torch.autograd.grad(out, (x, w)), expected)
        del out
    assert held["offload"] == held["none"]
    more = [a - b for a, b in zip(held["save_matmuls"], held["none"])]
    assert more == [3 * x.nbytes if i in devices else 0 for i in range(len(more))]


def test_a_backward_inside_saves_nothing_of_the_region() -> None:
    """Also where the argument of the region is on the CPU."""

    def fn(x: Tensor) -> Tensor:
        y = x.to(DEVICE)
        (g,) = torch.autograd.grad((y.sin() * y.cos()).sum(), y, create_graph=True)
        return (g.sin() * y).exp().cpu()

    x = leaf(64, 64, device="cpu")
    before = allocated()
    out = remat.remat(fn)(x)
    assert allocated() == before
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(fn(x).sum(), x))


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))


@pytest.mark.parametrize("policy", POLICIES)
def test_training(policy: str) -> None:
    def trained(wrap: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*(Block() for _ in range(3))).to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(i)
            optimizer.zero_grad()
            model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values())

    region = lambda model: remat.nn.apply(model, Block, policy=POLICIES[policy])
    assert_same(trained(region), trained(lambda model: model))


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="the simulated device has no CUDA graphs")
def test_a_graph_of_forward_and_backward() -> None:
    w, small = leaf(16, 16), torch.ones(16, device=DEVICE)
    fn = lambda x: ((x @ w).sin() * small).exp().sum()
    region = remat.remat(fn, preserve_rng_state=False)
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
        assert_same(found, torch.autograd.grad(fn(x), w)[0])


def model() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
    return nn.Sequential(*(block() for _ in range(6))).to(DEVICE)


def step(module: nn.Module, x: Tensor) -> tuple[list[Any], int]:
    """The gradients of a step, and the peak of the device's allocator beyond what it had before."""
    module.zero_grad()
    torch.manual_seed(1)
    backend.synchronize()
    backend.reset_peak_memory_stats()
    before = backend.memory_allocated()
    module(x).square().mean().backward()
    backend.synchronize()
    return [p.grad for p in module.parameters()], backend.max_memory_allocated() - before


def test_the_peak_of_the_allocator_is_within_the_amount() -> None:
    module, x = model(), torch.randn(8, 32, 32, device=DEVICE)
    step(module, x)  # kernels may take memory that they keep
    expected, plain = step(module, x)
    plan = remat.nn.budget(module, 0.5, x, loss=lambda out: out.square().mean())
    found, peak = step(module, x)
    assert all(map(torch.equal, found, expected))
    assert peak <= plan.amount < plain and plan.regions and plan.without == pytest.approx(plain, rel=0.1)


@pytest.mark.skipif(not hasattr(backend, "mem_get_info"), reason="the backend does not tell its free memory")
def test_an_amount_is_a_part_of_the_free_memory() -> None:
    module, x = model(), torch.randn(8, 32, 32, device=DEVICE)
    free = backend.mem_get_info()[0]
    assert remat.nn.budget(module, "50%", x).amount == pytest.approx(free / 2, rel=0.2)
    assert remat.nn.budget(module, None, x).amount == pytest.approx(free, rel=0.2)
    with pytest.raises(remat.PolicyError, match="On a CPU a budget needs an amount"):
        remat.nn.budget(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), None, torch.randn(2, 3))
