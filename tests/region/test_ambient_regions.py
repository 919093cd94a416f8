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
from cases import default_dtype, run_program
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat import is_recomputing, policies, remat


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def in_thread(fn: Callable[[], Any]) -> Any:
    """Return `fn()`, called in another thread, whose thread-local state is the initial one."""
    results: list[Any] = []

    def target() -> None:
        try:
            results.append((fn(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    value, error = results[0]
    if error is not None:
        raise error
    return value


# How a gradient is taken: `take(f, during, x)` calls `f` under `during()` and returns the gradient
# of the sum of its result; the backward is outside of `during()` where possible.


def plain(f: Callable, during: Callable, x: Tensor) -> Tensor:
    with during():
        out = f(x)
    return torch.autograd.grad(out.sum(), x)[0]


def other_thread(f: Callable, during: Callable, x: Tensor) -> Tensor:
    with during():
        out = f(x)
    return in_thread(lambda: torch.autograd.grad(out.sum(), x)[0])


def kept_graph(f: Callable, during: Callable, x: Tensor) -> Tensor:
    with during():
        out = f(x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    same(torch.autograd.grad(out.sum(), x)[0], first)
    return first


def func_grad(f: Callable, during: Callable, x: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        with during():
            out = f(x)
        return out.sum()

    return torch.func.grad(loss)(x).detach()


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


WAYS = [plain, other_thread, kept_graph, func_grad, func_vjp, per_sample]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def take(request: pytest.FixtureRequest) -> Callable:
    return request.param


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def generators() -> tuple:
    bits, key, *rest = np.random.get_state()
    numpy = (bits, key.tolist(), *rest)
    return torch.get_rng_state().tolist(), random.getstate(), numpy


def compare(fn: Callable, take: Callable, during: Callable = nullcontext, **options: Any) -> None:
    """The gradient of `remat(fn)` and the generators after it are those of `fn`."""
    x = torch.randn(2, 4, 8, requires_grad=True)
    results, after = [], []
    for f in (remat(fn, **options), fn):
        seed()
        results.append(take(f, during, x))
        after.append(generators())
    same(*results)
    assert after[0] == after[1]


# --- generators -------------------------------------------------------------------------------------


def dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(x.sin(), 0.5).exp().sin()


def two_dropouts(x: Tensor) -> Tensor:
    y = nn.functional.dropout(x.sin(), 0.2).exp()
    return nn.functional.dropout(y.sin(), 0.5) * torch.rand_like(x)


def draws_from_all(x: Tensor) -> Tensor:
    y = x * torch.rand(8) * random.random() * float(np.random.rand())
    return (y + torch.randn(8) + random.gauss(0, 1) + np.random.randn()).sin().exp()


@pytest.mark.parametrize("fn", [dropout, two_dropouts])
@pytest.mark.parametrize("early_stop", [True, False])
def test_dropout(fn: Callable, early_stop: bool, take: Callable) -> None:
    compare(fn, take, early_stop=early_stop)


def test_every_generator(take: Callable) -> None:
    compare(draws_from_all, take)


def test_several_regions_one_after_the_other(take: Callable) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    results = []
    for wrap in (remat, lambda f: f):
        seed()
        f, g = wrap(dropout), wrap(two_dropouts)
        results.append((take(lambda x: g(f(nn.functional.dropout(f(x)))), nullcontext, x), generators()))
    same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_nested_regions(take: Callable) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    results = []
    for wrap in (remat, lambda f: f):
        seed()
        inner = wrap(two_dropouts)
        outer = wrap(lambda x: inner(inner(dropout(x))).sin())
        results.append((take(outer, nullcontext, x), generators()))
    same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("fn", [dropout, draws_from_all])
def test_generators_do_not_move_in_the_backward(fn: Callable) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    out = remat(fn)(x)
    after = generators()
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert generators() == after
    draws = torch.rand(2).tolist(), random.random(), np.random.rand()
    seed()
    between = generators()
    torch.autograd.grad(out.sum(), x)
    assert generators() == between
    assert draws != (torch.rand(2).tolist(), random.random(), np.random.rand())


def test_generators_moved_and_seeded_between_forward_and_backward() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    grads = []
    for f in (remat(draws_from_all), draws_from_all):
        seed()
        out = f(x)
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)
        grads.append(torch.autograd.grad(out.sum(), x)[0])
        assert random.random() == random.Random(99).random()
    same(*grads)


def test_a_hook_that_draws_in_the_backward_draws_the_same_numbers_as_without_remat() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    drawn = []
    for f in (remat(dropout), dropout):
        seed()
        y = x * 1
        y.register_hook(lambda grad: drawn.append(torch.rand(3)))
        out = f(y)
        out.register_hook(lambda grad: drawn.append(torch.rand(3)))
        out.sum().backward()
    same(drawn[:2], drawn[2:])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_randomness(randomness: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    results = []
    for f in (remat(dropout), dropout):
        seed()
        per_row = torch.func.grad(lambda row: f(row).sum())
        seed()
        mapped = torch.vmap(per_row, randomness=randomness)(x)
        out = torch.vmap(f, randomness=randomness)(x)
        results.append((mapped, out.detach(), torch.autograd.grad(out.sum(), x)[0], torch.rand(2)))
    same(*results)


def test_vmap_randomness_error() -> None:
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(torch.func.grad(lambda row: remat(dropout)(row).sum()))(torch.randn(3, 4))


class OwnRandom(random.Random):
    pass


# Generators that user code owns, each with a way to draw from it.
HELD: dict[str, tuple[Callable, Callable]] = {
    "random.Random": (random.Random, lambda g: g.gauss(0, 1)),
    "a subclass": (OwnRandom, lambda g: g.random()),
    "NumPy's Generator": (np.random.default_rng, lambda g: g.normal()),
    "with MT19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda g: g.random()),
    "NumPy's RandomState": (np.random.RandomState, lambda g: g.randn()),
    "a bound method": (lambda seed: np.random.default_rng(seed).random, lambda draw: draw()),
    "a bound method of Python's": (lambda seed: random.Random(seed).random, lambda draw: draw()),
}


class Noisy(nn.Module):
    def __init__(self, generator: Any, draw: Callable) -> None:
        super().__init__()
        self.generator, self.draw = [generator], draw

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * self.draw(self.generator[0])).exp() * self.draw(self.generator[0])


def closed_over(generator: Any, draw: Callable) -> Callable:
    return lambda x: (x.sin() * draw(generator)).exp() * draw(generator)


def passed(generator: Any, draw: Callable) -> Callable:
    return lambda x, held: (x.sin() * draw(held["g"])).exp() * draw(held["g"])


@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=["none", "sin"])
@pytest.mark.parametrize("build", [closed_over, passed, Noisy])
@pytest.mark.parametrize("kind", HELD)
def test_generators_that_user_code_owns(kind: str, build: Callable, policy: Any, take: Callable) -> None:
    make, draw = HELD[kind]
    x = torch.randn(2, 4, 8, requires_grad=True)
    results = []
    for wrap in (remat(policy=policy), lambda fn: fn):
        generator = make(3)
        fn = wrap(build(generator, draw))
        gradient = take(lambda x: fn(x, {"g": generator}) if build is passed else fn(x), nullcontext, x)
        results.append((gradient, torch.tensor(draw(generator))))
    same(*results)


def test_a_generator_of_the_system_has_no_state() -> None:
    system, x = random.SystemRandom(), torch.randn(3, requires_grad=True)
    out = remat(lambda x: x.sin() * (system.random() < 2))(x)
    same(torch.autograd.grad(out.sum(), x)[0], x.cos())


# --- generators that are left alone -----------------------------------------------------------------


def test_not_preserved_is_correct_without_random_numbers(take: Callable) -> None:
    compare(lambda x: x.sin().exp().sin(), take, preserve_rng_state=False)


@pytest.mark.parametrize("way", [plain, other_thread, func_grad, func_vjp])
def test_not_preserved_sets_no_generator(way: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recompute draws later numbers: three numbers in the forward and three in the backward."""

    def fn(x: Tensor) -> Tensor:
        return (x + torch.rand(3) * 0 + random.random() * 0).sin().exp()

    def touched(*args: Any) -> None:
        raise AssertionError("a generator was set")

    x = torch.randn(3).requires_grad_(way in (plain, other_thread))
    f = remat(fn, preserve_rng_state=False, early_stop=False)
    seed()
    for _ in range(2):
        torch.rand(3), random.random()
    expected = generators()
    seed()
    monkeypatch.setattr(random, "setstate", touched)
    monkeypatch.setattr(np.random, "set_state", touched)
    monkeypatch.setattr(torch, "set_rng_state", touched)
    way(f, nullcontext, x)
    monkeypatch.undo()
    assert generators() == expected


# --- autocast -----------------------------------------------------------------------------------------


class Autocast:
    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, **self.options)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


CASTS = {"cache": Autocast(), "no cache": Autocast(cache_enabled=False)}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_forward_under_autocast(cast: Autocast, take: Callable) -> None:
    compare(mlp(), take, cast)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_autocast_inside_the_region(cast: Autocast, take: Callable) -> None:
    model = mlp()

    def fn(x: Tensor) -> Tensor:
        with cast():
            return model(x).float()

    compare(fn, take)


def test_autocast_off_inside_the_region_under_autocast(take: Callable) -> None:
    model = mlp()

    def fn(x: Tensor) -> Tensor:
        y = model[:2](x)
        with torch.autocast("cpu", enabled=False):
            return model[2:](y.float())

    compare(fn, take, Autocast())


@pytest.mark.parametrize("way", [plain, kept_graph])
def test_backward_under_autocast(way: Callable) -> None:
    x = torch.randn(2, 8, requires_grad=True)
    model, grads = mlp(), []
    for f in (remat(model), model):
        out = f(x)
        assert out.dtype is torch.float32
        with Autocast()():
            grads.append(torch.autograd.grad(out.sum(), [x, *model.parameters()]))
            assert torch.is_autocast_enabled("cpu")
    same(*grads)


def test_backward_under_another_autocast_dtype() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    model, grads = mlp(), []
    for f in (remat(model), model):
        with Autocast()():
            out = f(x)
        with torch.autocast("cpu", dtype=torch.float16):
            grads.append(torch.autograd.grad(out.float().sum(), x))
            assert torch.get_autocast_dtype("cpu") is torch.float16
    same(*grads)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_casts_are_up_to_date_after_an_optimizer_step(cast: Autocast, inside: bool) -> None:
    results = []
    x = torch.randn(4, 8)
    for wrap in (remat, lambda f: f):
        model = mlp()
        f, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            with cast():
                loss = f(x).float().square().mean()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append((losses, list(model.parameters())))
    same(*results)


def test_casts_are_up_to_date_where_autocast_spans_the_steps() -> None:
    # torch caches a parameter's cast until the outermost autocast ends; steps inside need the cache disabled.
    results = []
    x = torch.randn(4, 8)
    for wrap in (remat, lambda f: f):
        model = mlp()
        f, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        with Autocast(cache_enabled=False)():
            for _ in range(3):
                optimizer.zero_grad()
                loss = f(x).float().square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        results.append((losses, list(model.parameters())))
    same(*results)


def test_one_weight_used_twice_under_autocast(take: Callable) -> None:
    layer = nn.Linear(8, 8)
    compare(lambda x: layer(layer(x).sin()).sin(), take, Autocast())


@pytest.mark.parametrize("outer_first", [True, False])
def test_weight_used_outside_and_inside_under_one_autocast(outer_first: bool) -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(2, 8, requires_grad=True)
    grads = []
    for wrap in (remat, lambda f: f):
        f = wrap(lambda x: layer(x).sin().exp())
        with Autocast()():
            out = f(layer(x)) if outer_first else layer(f(x))
        grads.append(torch.autograd.grad(out.float().sum(), [x, *layer.parameters()]))
    same(*grads)


def test_nested_autocast_around_and_inside_regions(take: Callable) -> None:
    model = mlp()
    x = torch.randn(2, 4, 8, requires_grad=True)
    results = []
    for wrap in (remat, lambda f: f):
        inner = wrap(model[2:])

        def fn(x: Tensor) -> Tensor:
            y = model[:2](x)
            with torch.autocast("cpu", enabled=False):
                z = inner(y.float())
            return inner(y) + z

        results.append(take(wrap(fn), Autocast(), x))
    same(*results)


def test_autocast_is_left_completely(take: Callable) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    take(remat(mlp()), Autocast(), x)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


# --- grad mode ----------------------------------------------------------------------------------------


def partly_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.sin().exp()
    return (x * scale).sin().exp()


def notes_modes(seen: list) -> Callable:
    def fn(x: Tensor) -> Tensor:
        seen.append((is_recomputing(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x.sin().exp().sin()

    return fn


def test_no_grad_inside_the_region(take: Callable) -> None:
    compare(partly_without_grad, take)


def test_grad_mode_of_a_recompute() -> None:
    seen: list = []
    x = torch.randn(3, requires_grad=True)
    loss = remat(notes_modes(seen))(x).sum()
    with torch.no_grad():
        torch.autograd.grad(loss, x)
        assert not torch.is_grad_enabled()
    assert seen == [(False, True, False), (True, True, False)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_recomputed(context: Callable) -> None:
    seen: list = []
    x = torch.randn(3, requires_grad=True)
    with context():
        out = remat(notes_modes(seen))(x)
    assert not out.requires_grad and len(seen) == 1


def test_no_grad_around_a_region_inside_a_region() -> None:
    inner = remat(lambda x: x.sin().exp())

    def outer(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = inner(x)
        return inner(x * scale).sin()

    compare(outer, plain)


def test_enable_grad_inside_a_region_under_no_grad() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return torch.autograd.grad(y.sin().exp().sum(), y)[0]

    x = torch.randn(3)
    with torch.no_grad():
        same(remat(fn)(x), fn(x))


# --- default dtype and device -------------------------------------------------------------------------


def makes_constants(x: Tensor) -> Tensor:
    y = x * torch.linspace(0, 1, 8) + torch.arange(8) / 3
    return (y * torch.ones(8)).sin().exp()


def test_default_dtype(take: Callable) -> None:
    compare(makes_constants, take, lambda: default_dtype(torch.float64))


def test_default_dtype_of_the_backward(take: Callable) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    expected = take(makes_constants, nullcontext, x)

    @contextmanager
    def changed_after() -> Iterator[None]:
        yield
        torch.set_default_dtype(torch.float64)

    try:
        same(take(remat(makes_constants), changed_after, x), expected)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_dtype_changed_inside_the_region(take: Callable) -> None:
    def fn(x: Tensor) -> Tensor:
        with default_dtype(torch.float64):
            return makes_constants(x).float()

    compare(fn, take)


def tells_of_algorithms(x: Tensor) -> Tensor:
    """Numbers on a device may depend on these settings."""
    modes = 1 + torch.get_deterministic_debug_mode(), {"highest": 1, "high": 2, "medium": 3}
    return (x.sin() * modes[0] * modes[1][torch.get_float32_matmul_precision()]).exp().sin()


def set_algorithms(mode: int, precision: str) -> None:
    torch.set_deterministic_debug_mode(mode)
    torch.set_float32_matmul_precision(precision)


@contextmanager
def algorithms(mode: int, precision: str) -> Iterator[None]:
    set_algorithms(mode, precision)
    try:
        yield
    finally:
        set_algorithms(0, "highest")


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_algorithms_of_the_forward(take: Callable, mode: int, precision: str) -> None:
    compare(tells_of_algorithms, take, lambda: algorithms(mode, precision))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_algorithms_of_the_backward(take: Callable, precision: str) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    expected = take(tells_of_algorithms, nullcontext, x)

    @contextmanager
    def changed_after() -> Iterator[None]:
        yield
        set_algorithms(2, precision)

    try:
        same(take(remat(tells_of_algorithms), changed_after, x), expected)
        assert (torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()) == (2, precision)
    finally:
        set_algorithms(0, "highest")


NEWER_PRECISION = """
import torch
from remat import remat

def precision():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision

def run(change):
    seen = []
    x = torch.ones(3, 3, requires_grad=True)
    out = remat(lambda x: (seen.append(precision()), x.sin().exp() @ x)[1])(x).sum()
    change()
    now = precision()
    out.backward()
    assert precision() == now
    return seen

def by_backend(value):
    torch.backends.cuda.matmul.fp32_precision = value

before = precision()
assert run(lambda: None) == [before] * 2
assert run(lambda: by_backend("tf32"))[0] == before
torch.backends.fp32_precision = "tf32"
assert run(lambda: None) == [("tf32", "none")] * 2 or run(lambda: None) == [("tf32", "tf32")] * 2
run(lambda: setattr(torch.backends, "fp32_precision", "ieee"))
by_backend("none")
assert precision()[0] == "ieee"  # what is inherited is inherited still
"""


def test_precision_that_was_set_by_backend_is_unchanged() -> None:
    """In a process of its own, as the setting can't be undone."""
    run_program(NEWER_PRECISION)


def shapes_on_meta(x: Tensor) -> Tensor:
    with torch.device("meta"):
        rows = torch.empty(x.shape).sum(-1).shape
        width = torch.ones(3, 8).mT.shape[0]
    return (x.sin() * width + len(rows)).exp() * torch.ones(8)


def test_meta_device_inside_the_region(take: Callable) -> None:
    compare(shapes_on_meta, take)


@pytest.mark.parametrize("way", [plain, other_thread, kept_graph, func_vjp])
def test_device_context_of_the_forward_only(way: Callable) -> None:
    def fn(x: Tensor) -> Tensor:
        y = (x.sin() * 2).exp()
        return y * torch.ones(8, device="cpu") * torch.ones(()).ndim + y

    compare(fn, way, lambda: torch.device("cpu"))


def test_meta_device_of_the_forward() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * torch.ones(3)).sin().exp()

    x = torch.ones(3, device="meta", requires_grad=True)
    with torch.device("meta"):
        out = remat(fn)(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.device.type == "meta" and grad.shape == (3,)
    assert torch.ones(1).device.type == "cpu"


def test_default_device_of_the_backward_only() -> None:
    x = torch.randn(8, requires_grad=True)
    out = remat(makes_constants)(x)
    (expected,) = torch.autograd.grad(makes_constants(x).sum(), x)
    loss = out.sum()
    with torch.device("meta"):
        (grad,) = torch.autograd.grad(loss, x, torch.ones((), device="cpu"))
        assert torch.ones(1).device.type == "meta"
    same(grad, expected)
    assert torch.ones(1).device.type == "cpu"


# --- attention kernels --------------------------------------------------------------------------------


def attend(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(-2, -3)
    return nn.functional.scaled_dot_product_attention(q.sin(), q.cos(), q).exp()


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_backend_of_the_forward(backend: SDPBackend, take: Callable) -> None:
    compare(attend, take, lambda: sdpa_kernel(backend))
    assert torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_backend_of_the_backward(backend: SDPBackend) -> None:
    x = torch.randn(2, 4, 8, requires_grad=True)
    grads = []
    for f in (remat(attend), attend):
        out = f(x)
        with sdpa_kernel(backend):
            grads.append(torch.autograd.grad(out.sum(), x)[0])
            assert torch.backends.cuda.math_sdp_enabled() is (backend is SDPBackend.MATH)
    same(*grads)


def test_attention_backend_inside_the_region(take: Callable) -> None:
    def fn(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(x)

    compare(fn, take)


# --- all ambient state, in another thread ---------------------------------------------------------------------


def test_a_backward_in_another_thread_leaves_that_thread_as_it_was() -> None:
    model = mlp()
    x = torch.randn(2, 8, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(model(x), 0.5).sin() * torch.rand(8)

    def settings() -> tuple:
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            generators(),
        )

    def backward(loss: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            before = settings()
            (grad,) = torch.autograd.grad(loss, x)
            assert settings() == before
        return grad

    grads = []
    for f in (remat(fn), fn):
        seed()
        with Autocast()():
            loss = f(x).float().sum()
        grads.append(in_thread(lambda: backward(loss)))
    same(*grads)


def test_many_threads_run_backward_passes_at_once() -> None:
    model = mlp()
    x = torch.randn(4, 8, requires_grad=True)
    f = remat(lambda x: model(x).sin() * 2)
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    results: list[Any] = []

    def step() -> None:
        for _ in range(5):
            results.append(torch.autograd.grad(f(x).sum(), x)[0])

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for result in results:
        same(result, expected)
