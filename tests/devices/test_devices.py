"""Functions and policies on a device: results as in a plain run, and as much saved and recomputed as on the CPU.

Any device with generators and streams is suitable: `--simulate cuda`, `--simulate sim`, or a real one.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerator import DEVICE, backend
from cases import assert_same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat import checkpoint_name, policies

pytestmark = pytest.mark.cuda


def leaf(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device).requires_grad_()


def chain(x: Tensor, w: Tensor) -> Tensor:
    for i in range(3):
        x = checkpoint_name(torch.sin(x @ w), f"h{i}")
    return x.sin()


def dropout(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout((x @ w).sin(), 0.5) @ w * torch.rand(x.shape[-1], device=x.device)


def norms(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w), (8,)).softmax(-1) @ w.t()


def attention(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).reshape(1, 2, -1, 4)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos()).exp()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).tanh()
    return y.mul(2).add_(1).sin_() @ w


def nested(x: Tensor, w: Tensor) -> Tensor:
    return remat.remat(lambda x: (x @ w).sin() @ w)(x).tanh()


def autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return ((x @ w).sin() @ w).float().tanh()


FUNCTIONS = [chain, dropout, norms, attention, in_place, nested, autocast]
POLICIES = {
    "none": None,
    "save_matmuls": policies.save_matmuls,
    "names": policies.save_only_these_names("h1"),
    "either": policies.save_matmuls | policies.save_only_these_names("h*"),
    "offload": policies.offload(policies.save_matmuls),
}


def by_autograd(f: Callable, x: Tensor, w: Tensor) -> Any:
    return torch.autograd.grad(f(x, w).sum(), (x, w))


def by_grad(f: Callable, x: Tensor, w: Tensor) -> Any:
    return torch.func.grad(lambda x, w: f(x, w).sum(), (0, 1))(x.detach(), w.detach())


def by_vmap_of_grad(f: Callable, x: Tensor, w: Tensor) -> Any:
    per_sample = torch.func.grad(lambda w, x: f(x, w).sum())
    return torch.vmap(per_sample, (None, 0), randomness="different")(w.detach(), x.detach().reshape(2, 4, 8))


def by_jvp(f: Callable, x: Tensor, w: Tensor) -> Any:
    return torch.func.jvp(f, (x.detach(), w.detach()), (x.detach().cos(), w.detach().sin()))


def states() -> list[Tensor]:
    module = torch.get_device_module(DEVICE)
    return [torch.get_rng_state(), *(module.get_rng_state(i) for i in range(module.device_count()))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", [by_autograd, by_grad, by_vmap_of_grad, by_jvp], ids=lambda way: way.__name__)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_functions_and_policies(fn: Callable, way: Callable, policy: str) -> None:
    x, w, results = leaf(DEVICE, 8, 8), leaf(DEVICE, 8, 8), []
    for f in (remat.remat(fn, policy=POLICIES[policy]), fn):
        torch.manual_seed(1)
        results.append((way(f, x, w), states()))
    assert_same(*results, exact=way is by_autograd)


@pytest.mark.parametrize("way", [by_autograd, by_grad, by_vmap_of_grad, by_jvp], ids=lambda way: way.__name__)
def test_loops(way: Callable) -> None:
    x, w, results = leaf(DEVICE, 8, 8), leaf(DEVICE, 8, 8), []

    def fn(loop: Callable) -> Callable:
        def run(x: Tensor, w: Tensor) -> Tensor:
            def step(h: Tensor, _: None) -> tuple[Tensor, Tensor]:
                h = F.dropout((h @ w).tanh(), 0.3)
                return h, h * 2

            h, ys = loop(step, x, length=6)
            return h + ys.prod(0)

        return run

    def plain(step: Callable, h: Tensor, length: int) -> tuple[Tensor, Tensor]:
        ys = []
        for _ in range(length):
            h, y = step(h, None)
            ys.append(y)
        return h, torch.stack(ys)

    for loop in (partial(remat.scan, checkpoints=2), plain):
        torch.manual_seed(1)
        results.append((way(fn(loop), x, w), states()))
    assert_same(*results, exact=way is by_autograd)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", [chain, norms, in_place, nested], ids=lambda fn: fn.__name__)
def test_as_much_is_saved_and_recomputed_as_on_the_cpu(fn: Callable, policy: str) -> None:
    found = []
    for device in ("cpu", DEVICE):
        x, w = leaf(device, 8, 8), leaf(device, 8, 8)
        f = remat.remat(fn, policy=POLICIES[policy])
        kept = sorted(str((each.shape, each.dtype)) for each in remat.saved_residuals(f, x, w, inputs=True))
        out = f(x, w).sum()
        with (counting := Counting()):
            torch.autograd.grad(out, (x, w))
        work = {name: n for name, n in counting.counts.items() if name in ("aten::mm", "aten::sin", "aten::tanh")}
        found.append((kept, work))
    assert found[1] == found[0]


def allocated() -> list[int]:
    for i in range(backend.device_count()):
        leaf(f"{DEVICE}:{i}", 1).backward()  # after this the device's thread has released the previous graph
        backend.synchronize(i)
    return [backend.memory_allocated(i) for i in range(backend.device_count())]


@pytest.mark.parametrize("devices", [[0], [1], [0, 1]], ids=str)
def test_offload_saves_nothing_on_the_device(devices: list[int]) -> None:
    """A region on each device, as in a model that is distributed over the devices."""
    if max(devices) >= backend.device_count():
        pytest.skip("there is one device")
    x, w = leaf(f"{DEVICE}:{devices[0]}", 1024, 64), leaf(f"{DEVICE}:{devices[0]}", 64, 64)

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def results_of(train: Callable[[nn.Module], Any], policy: str) -> list[tuple[Any, list[Tensor]]]:
    """The results of training, and the state of the model after it: without regions, and with them."""
    results = []
    for applied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3))).to(DEVICE)
        if applied:
            remat.nn.apply(model, Block, policy=POLICIES[policy])
        results.append((train(model), list(model.state_dict().values())))
    return results


@pytest.mark.parametrize("policy", POLICIES)
def test_training_with_adamw(policy: str) -> None:
    def train(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(i)
            optimizer.zero_grad()
            model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
            optimizer.step()

    assert_same(*results_of(train, policy))


def test_gradient_hooks_see_each_gradient_once() -> None:
    """Data-parallel training uses such hooks to sum gradients over processes."""
    model, seen = nn.Sequential(*(Block() for _ in range(2))).to(DEVICE), Counter()
    remat.nn.apply(model, Block)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update([name]))
    model(torch.randn(4, 8, device=DEVICE)).sum().backward()
    assert seen == Counter(dict.fromkeys(dict(model.named_parameters()), 1))


def losses_of(model: nn.Module, steps: int = 4) -> list[Tensor]:
    """The losses with a GradScaler, which skips one step as its gradients are not finite."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=2)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for i in range(steps):
        torch.manual_seed(i)
        x = torch.randn(4, 8, device=DEVICE)
        with torch.autocast(DEVICE, torch.float16):
            loss = model(x * (1e5 if i == 1 else 1)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.detach(), torch.tensor(scaler.get_scale())]
    return losses


@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_precision(policy: str) -> None:
    results = results_of(losses_of, policy)
    assert_same(*results)
    assert results[0][0][3] < results[0][0][1]  # the scale was reduced


def ensemble(models: list[nn.Module], wrap: Callable) -> Callable:
    """The gradients of several models at once, on the same samples."""
    call, shape = wrap(torch.func.functional_call), models[0]

    def loss(state: dict[str, Tensor], x: Tensor) -> Tensor:
        return call(shape, state, (x,)).square().mean()

    state = torch.func.stack_module_state(models)[0]
    return lambda x: torch.vmap(torch.func.grad(loss), (0, None), randomness="different")(state, x)


def samples(models: list[nn.Module], wrap: Callable) -> Callable:
    """The gradients of one model for each sample."""
    call, state = wrap(torch.func.functional_call), dict(models[0].named_parameters())

    def loss(state: dict[str, Tensor], x: Tensor) -> Tensor:
        return call(models[0], state, (x[None],)).square().mean()

    return lambda x: torch.vmap(torch.func.grad(loss), (None, 0), randomness="different")(state, x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", [ensemble, samples], ids=lambda way: way.__name__)
def test_many_gradients_at_once(way: Callable, policy: str) -> None:
    layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4)]
    models, results = [nn.Sequential(*copy.deepcopy(layers)).to(DEVICE) for _ in range(3)], []
    x = torch.randn(4, 8, device=DEVICE)
    for wrap in (lambda f: f, lambda f: remat.remat(f, policy=POLICIES[policy])):
        torch.manual_seed(1)
        results.append((way(models, wrap)(x), states()))
    assert_same(results[1], results[0], exact=False)
