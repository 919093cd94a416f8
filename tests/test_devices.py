"""Functions and policies on a device: the numbers of the CPU's kernels, and as much kept and recomputed as there.

Any device with generators and streams will do: `--simulate cuda`, `--simulate sim`, or a real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerator import DEVICE
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


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", [chain, norms, in_place, nested], ids=lambda fn: fn.__name__)
def test_as_much_is_kept_and_recomputed_as_on_the_cpu(fn: Callable, policy: str) -> None:
    found = []
    for device in ("cpu", DEVICE):
        x, w = leaf(device, 8, 8), leaf(device, 8, 8)
        f = remat.remat(fn, policy=POLICIES[policy])
        kept = sorted(str((each.shape, each.dtype)) for each in remat.saved_residuals(f, x, w))
        out = f(x, w).sum()
        with (counting := Counting()):
            torch.autograd.grad(out, (x, w))
        work = {name: n for name, n in counting.counts.items() if name in ("aten::mm", "aten::sin", "aten::tanh")}
        found.append((kept, work))
    assert found[1] == found[0]


def test_offload_holds_nothing_on_the_device() -> None:
    memory = torch.get_device_module(DEVICE).memory_allocated
    x, w, held = leaf(DEVICE, 1024, 64), leaf(DEVICE, 64, 64), {}
    expected = by_autograd(chain, x, w)
    for name in ("none", "save_matmuls", "offload"):
        leaf(DEVICE, 1).backward()  # by now the device's thread has let go of the graph before this one
        torch.accelerator.synchronize()
        before = memory()
        out = remat.remat(chain, policy=POLICIES[name])(x, w).sum()
        torch.accelerator.synchronize()
        held[name] = memory() - before
        assert_same(torch.autograd.grad(out, (x, w)), expected)
        del out
    assert held["offload"] == held["none"] and held["save_matmuls"] - held["none"] == 3 * x.nbytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("policy", POLICIES)
def test_training_with_adamw(policy: str) -> None:
    results = []
    for applied in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3))).to(DEVICE)
        if applied:
            remat.nn.apply(model, Block, policy=POLICIES[policy])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(i)
            optimizer.zero_grad()
            model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
            optimizer.step()
        results.append(list(model.state_dict().values()))
    assert_same(*results)


def test_gradient_hooks_see_each_gradient_once() -> None:
    """As those by which data-parallel training sums them over processes."""
    model, seen = nn.Sequential(*(Block() for _ in range(2))).to(DEVICE), Counter()
    remat.nn.apply(model, Block)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update([name]))
    model(torch.randn(4, 8, device=DEVICE)).sum().backward()
    assert seen == Counter(dict.fromkeys(dict(model.named_parameters()), 1))
