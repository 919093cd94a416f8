"""Regions and ambient state: a recompute sees the state of the first run, and leaves no trace."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_same, module
from test_ambient import SETTINGS, observed
from torch import Tensor, nn

from remat import policies, remat

MODEL = module(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))).float()


def grad(out: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(out, x, torch.ones_like(out, device=x.device), **options)[0]


# How a gradient is taken: of the sum of `f(x)`, which is called under `during()`; the backward is outside of that.


def plain(f: Callable, during: Callable, x: Tensor) -> Tensor:
    with during():
        out = f(x)
    first = grad(out, x, retain_graph=True)
    assert torch.equal(grad(out, x), first)
    return first


def other_thread(f: Callable, during: Callable, x: Tensor) -> Tensor:
    """The backward is in a thread whose thread-local state is the initial one."""
    with during():
        out = f(x)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(grad(out, x)))
    thread.start()
    thread.join()
    return found[0]


def func_vjp(f: Callable, during: Callable, x: Tensor) -> Tensor:
    with during():
        out, pull = torch.func.vjp(f, x)
    return pull(torch.ones_like(out))[0].detach()


def per_sample(f: Callable, during: Callable, x: Tensor) -> Tensor:
    def loss(row: Tensor) -> Tensor:
        with during():
            out = f(row.unsqueeze(0))
        return out.sum()

    return torch.vmap(torch.func.grad(loss), randomness="different")(x).detach()


every_way = pytest.mark.parametrize("take", [plain, other_thread, func_vjp, per_sample], ids=lambda way: way.__name__)


def seed(number: int = 1) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def states() -> Any:
    kind, key, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, key.tolist(), *rest)


def dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(x.sin(), 0.5).exp().sin()


def draws(x: Tensor) -> Tensor:
    y = x * torch.rand(8) * random.random() * float(np.random.rand())
    return (dropout(y) + torch.randn(8) + random.gauss(0, 1) + np.random.randn()).sin().exp()


def regions_that_draw(x: Tensor) -> Tensor:
    inner = remat(draws)
    return remat(lambda x: inner(inner(dropout(x))).sin())(inner(nn.functional.dropout(inner(x))))


def makes_constants(x: Tensor) -> Tensor:
    y = x * torch.linspace(0, 1, 8) + torch.arange(8) / 3
    return (y * torch.ones(8)).sin().exp()


def casts(x: Tensor) -> Tensor:
    """A weight is cast in the function, in an inner region, and used without autocast."""
    y = remat(MODEL[:2])(x) + MODEL[0](x)
    with torch.autocast("cpu", enabled=False):
        z = remat(MODEL[2:])(y.float())
    with torch.autocast("cpu", torch.bfloat16):
        return MODEL(y).float() + z


def inside(f: Callable, x: Tensor) -> Tensor:
    return grad(f(x), x)


def forces(f: Callable, x: Tensor) -> Tensor:
    return grad(grad(f(x), x, create_graph=True), x)


def func_forces(f: Callable, x: Tensor) -> Tensor:
    return grad(torch.func.grad(lambda x: f(x).sum())(x), x)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("policy", [None, policies.save_matmuls, ~policies.save_matmuls, policies.everything_saveable])
@pytest.mark.parametrize("take", [inside, forces, func_forces])
def test_a_backward_inside_of_autocast(take: Callable, policy: Any, debug: bool) -> None:
    def results(wrap: Callable) -> list[Tensor]:
        inner, x = wrap(MODEL[2]), torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        f = wrap(lambda x: MODEL[4](MODEL[3](inner(MODEL[:2](x)))).float())
        with torch.autocast("cpu", torch.bfloat16):
            cast_before = MODEL[2](x).float()
            return [take(f, x), take(lambda x: f(x) + cast_before, x)]

    assert_same(results(remat(policy=policy, debug=debug)), results(lambda f: f))


def test_a_region_keeps_no_casts() -> None:
    layer, x = MODEL[0], torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        casts = [f(x).grad_fn.next_functions[0][0] for f in (layer, layer, remat(layer), layer, layer)]
    assert casts[0] is casts[1] is not casts[2] is not casts[3] is casts[4]


def test_the_precision_of_one_backend_is_left_alone() -> None:
    def now() -> tuple[str, str]:
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision

    before, x = torch.get_float32_matmul_precision(), torch.ones(3, requires_grad=True)
    try:
        torch.set_float32_matmul_precision("highest")
        out = remat(lambda x: x.sin().exp())(x)
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        set_by_user = now()
        out.sum().backward()
        assert now() == set_by_user
    finally:
        torch.set_float32_matmul_precision(before)


def attend(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(-2, -3)
    return nn.functional.scaled_dot_product_attention(q.sin(), q.cos(), q).exp()


def test_a_derivative_inside_of_autocast_is_recomputed_outside() -> None:
    def penalty(wrap: Callable) -> Tensor:
        attention = wrap(lambda x: nn.functional.scaled_dot_product_attention(*3 * [x * 2]).float().square().sum())
        seed()
        x = torch.randn(1, 3, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.func.grad(attention)(x).square().mean()
        return grad(loss, x)

    actual, expected = penalty(remat), penalty(lambda f: f)
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()  # plain bfloat16 rounds sums in another order


PROGRAMS: dict[str, tuple[Callable, str]] = {
    "draws": (draws, "default"),
    "regions that draw": (regions_that_draw, "default"),
    "constants": (makes_constants, "float64"),
    "casts": (casts, "autocast"),
    "casts without a cache": (casts, "autocast without cache"),
    "casts inside": (casts, "default"),
    "attention": (attend, "math"),
}


@every_way
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_and_generators_are_those_without_remat(name: str, take: Callable) -> None:
    fn, setting = PROGRAMS[name]
    x, results = torch.randn(2, 4, 8, requires_grad=True), []
    for f in (remat(fn), fn):
        seed()
        results.append((take(f, SETTINGS[setting], x), states()))
    assert_same(*results)


@pytest.mark.parametrize("take", [plain, other_thread, func_vjp])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "no_grad"])
def test_a_recompute_observes_the_settings_of_the_forward(name: str, take: Callable) -> None:
    seen: list[Any] = []
    take(remat(lambda x: (seen.append(observed()), x.sin().exp())[1]), SETTINGS[name], torch.ones(3).requires_grad_())
    assert len(seen) >= 2 and all(each == seen[0] for each in seen)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("take", [plain, other_thread, func_vjp])
@pytest.mark.parametrize("fn", [draws, makes_constants, MODEL, attend], ids=["draws", "constants", "model", "attend"])
@pytest.mark.parametrize("name", ["float64", "with device", "autocast", "math", "deterministic", "medium", "no_grad"])
def test_the_state_of_the_backward_does_not_matter_and_remains(fn: Callable, name: str, take: Callable) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)

    def run(f: Callable) -> Any:
        since = SETTINGS[name]()

        @contextmanager
        def changed_after() -> Iterator[None]:
            yield
            seed(99)
            since.__enter__()

        seed()
        try:
            return take(f, changed_after, x), observed(), states()
        finally:
            since.__exit__(None, None, None)

    assert_same(run(remat(fn)), run(fn))


# Generators that a user's code owns, each with a way to draw from it.
HELD: dict[str, tuple[Callable, Callable]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.rand((), generator=g)),
    "Python": (type("OwnRandom", (random.Random,), {}), lambda g: g.gauss(0, 1)),
    "NumPy's Generator": (np.random.default_rng, lambda g: g.normal()),
    "with MT19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.random()),
    "NumPy's RandomState": (np.random.RandomState, lambda g: g.randn()),
    "the system's, which has no state": (lambda seed: random.SystemRandom(), lambda g: float(g.random() < 2)),
    "a bound method": (lambda seed: np.random.default_rng(seed).random, lambda draw: draw()),
    "a bound method of Python's": (lambda seed: random.Random(seed).random, lambda draw: draw()),
}


class Noisy(nn.Module):
    def __init__(self, generator: Any, draw: Callable) -> None:
        super().__init__()
        self.generator, self.draw = [generator], draw

    def forward(self, x: Tensor, held: Any) -> Tensor:
        return (x.sin() * self.draw(self.generator[0])).exp() * self.draw(self.generator[0])


def passed(generator: Any, draw: Callable) -> Callable:
    return lambda x, held: (x.sin() * draw(held["g"])).exp() * draw(held["g"])


@pytest.mark.sampled(3)
@every_way
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=["none", "sin"])
@pytest.mark.parametrize("build", [passed, Noisy])
@pytest.mark.parametrize("kind", HELD)
def test_generators_that_a_users_code_owns(kind: str, build: Callable, policy: Any, take: Callable) -> None:
    make, draw = HELD[kind]
    x, results = torch.randn(2, 4, 8, requires_grad=True), []
    for wrap in (remat(policy=policy), lambda fn: fn):
        generator = make(3)
        fn = wrap(build(generator, draw))
        results.append((take(lambda x: fn(x, {"g": generator}), nullcontext, x), draw(generator)))
    assert_same(*results)


@pytest.mark.parametrize("take", [plain, func_vjp])
def test_without_preserve_rng_state_the_recompute_draws_later_numbers(take: Callable) -> None:
    x, drawn = torch.randn(2, 3, requires_grad=True), list[Any]()
    f = remat(lambda x: (drawn.append(torch.rand(3).tolist()), x.sin().exp())[1], preserve_rng_state=False)
    seed()
    gradient = take(f, nullcontext, x)
    seed()
    assert drawn == [torch.rand(3).tolist() for _ in drawn] and len(drawn) > 1
    assert_same(gradient, take(lambda x: x.sin().exp(), nullcontext, x))
