"""Ambient state: a second run sees the generators and settings of the first one, and has changed none after it.

The second half runs regions.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import assert_same, assert_same_results, default_dtype, in_threads, module, seed_all, setting
from cases import plain as plain_function
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import cached

from remat import RematError, policies, remat
from remat._ambient import ambient as ambient_module
from remat._ambient import generators
from remat._ambient.ambient import Ambient

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch.randn": lambda: torch.randn(1).tolist(),  # the generator stores half a pair of normals
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),  # the same
    "random.sample": lambda: random.sample(range(100), 5),
    "numpy": lambda: np.random.rand(2).tolist(),
    "numpy.randn": np.random.randn,  # the same
    "numpy.permutation": lambda: np.random.permutation(20).tolist(),
}
draw_all = lambda: [draw() for draw in DRAWS.values()]


def capture(held: Any = (), preserve: bool = True, devices: Any = (CPU,)) -> Ambient:
    return Ambient(devices, held, preserve)


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed_all()


other_bits = lambda: setting(np.random.set_bit_generator, np.random.PCG64(3), np.random.get_bit_generator())


@pytest.mark.parametrize(
    "draw, around", [*((draw, nullcontext) for draw in DRAWS.values()), (draw_all, other_bits)], ids=[*DRAWS, "PCG64"]
)
@pytest.mark.parametrize("before", [0, 1, 700])
def test_the_same_numbers_inside_and_the_next_ones_after_it(draw: Callable, around: Callable, before: int) -> None:
    with around():
        for _ in range(before):
            draw()
        count = 1 if before else 3  # the first may be a stored normal, which leaves the generator's words as they were
        ambient, first = capture(), [draw() for _ in range(count)]
        later, expected = capture(), draw()
        later.rewind()
        for _ in range(2):
            with ambient.restored():
                assert [draw() for _ in range(count)] == first
        with pytest.raises(KeyError), ambient.restored():
            draw()
            raise KeyError
        assert draw() == expected


def test_only_generators_of_torch_count_as_moved() -> None:
    ambient = capture()
    random.random(), np.random.rand()
    assert not ambient.moved()
    torch.rand(1)
    assert ambient.moved()


def test_numpys_state_is_read_again_only_if_it_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, reads, read = generators._NUMPY, list[int](), np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda legacy: reads.append(1) or read(legacy=legacy))

    def after(draw: Callable[[], object]) -> tuple[int, bool]:
        """How often two lookups read the state, and whether they return that of before."""
        before, _, count = generator.get_state(), draw(), len(reads)
        first, second = generator.get_state(), generator.get_state()
        assert second is first
        return len(reads) - count, first is before

    assert after(lambda: None) == (0, True) and after(np.random.rand) == (1, False)
    assert after(np.random.randn) == (2, False)  # one more is stored, which a draw takes without a trace
    assert after(np.random.randn) == (2, False) and after(lambda: None) == (2, True)
    assert after(np.random.rand) == (1, False)


def test_devices_without_a_generator_and_backends_that_have_not_started() -> None:
    started = torch.cuda.is_initialized()
    devices = [torch.device(d) for d in ("cpu", "meta", "mps", "xla:3", "mtia")]
    with mock.patch.object(torch.cuda, "is_initialized", lambda: False):
        with capture(devices=[*devices, torch.device("cuda:5")]).restored():
            pass
        with FakeTensorMode(allow_non_fake_inputs=True):
            capture(devices=[torch.device("cuda", 0)]).rewind()
    assert torch.cuda.is_initialized() is started


@pytest.mark.parametrize("name", ["xpu", "hpu:1", "mps"])
def test_backends_have_a_list_of_generators_or_functions_for_their_states(name: str) -> None:
    """Placeholders for backends that this machine doesn't have."""
    gs, device = [torch.Generator().manual_seed(i) for i in range(2)], torch.device(name)
    used = gs[device.index or 0]
    get, put = lambda device: gs[device.index].get_state(), lambda state, device: gs[device.index].set_state(state)
    backend = {
        "xpu": SimpleNamespace(default_generators=gs, is_available=lambda: True),
        "hpu": SimpleNamespace(get_rng_state=get, set_rng_state=put, is_available=lambda: True),
        "mps": SimpleNamespace(get_rng_state=used.get_state, set_rng_state=used.set_state, is_available=lambda: True),
    }[device.type]
    with mock.patch.object(torch, device.type, backend, create=True):
        ambient = capture(devices=[device])
        first, after = torch.rand(3, generator=used), used.get_state()
        with ambient.restored():
            assert torch.equal(torch.rand(3, generator=used), first)
        assert torch.equal(used.get_state(), after)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_build_of_torch_with_cuda_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch reports CUDA as its accelerator, but every query of it raises."""
    no_driver = mock.Mock(side_effect=RuntimeError("CUDA driver version is insufficient"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_driver)
    monkeypatch.setattr(torch.cuda, "current_device", no_driver)
    generators.accelerator.cache_clear()
    try:
        x = torch.ones(3, requires_grad=True)
        remat(torch.sin)(x).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
    finally:
        generators.accelerator.cache_clear()


def test_a_capture_of_a_cuda_graph_needs_preserve_rng_state_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ambient_module, "is_capturing", lambda: True)
    with pytest.raises(RematError, match="Pass `preserve_rng_state=False`"):
        capture()
    capture(preserve=False)


cuda = torch.backends.cuda


def observed() -> Any:
    """The settings that a user's code can observe."""
    one = torch.ones(1, 1, device="cpu")
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.empty(0).device.type, torch.get_default_device().type,
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        torch.mm(one, one).dtype, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed(), torch._C._get_sdp_priority_order(),
        torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision(),
        torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled,
    )  # fmt: skip


SETTINGS: dict[str, Callable[[], Any]] = {
    "default": nullcontext,
    "no_grad": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "set_default_device": lambda: setting(torch.set_default_device, "meta", None),
    "with device": lambda: torch.device("meta"),
    "with cpu": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast dtype": lambda: setting(lambda d: torch.set_autocast_dtype("cpu", d), torch.float16, torch.bfloat16),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "priority": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "reduction": lambda: setting(cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
    "deterministic": lambda: setting(torch.set_deterministic_debug_mode, 2, 0),
    "without cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),  # for second derivatives of an LSTM
    "without mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "medium": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
}
NAMES = list(SETTINGS)
PAIRS = [(a, b) for i, a in enumerate(NAMES) for b in sorted({NAMES[0], NAMES[i - 1], NAMES[i - 5]})]


@pytest.mark.parametrize("one, other", PAIRS)
def test_settings_then_and_now(one: str, other: str) -> None:
    for then, now, preserve in ((one, other, True), (other, one, False)):
        start = observed()
        with SETTINGS[then]():
            ambient, first = capture(preserve=preserve), observed()
        with SETTINGS[now]():
            before = observed()
            with ambient.restored():
                assert observed() == first
                with ambient.restored():
                    assert observed() == first
                with torch.device("meta"), torch.autocast("cpu"), torch.no_grad():
                    assert torch.empty(0).device.type == "meta"
                assert observed() == first
            assert observed() == before
            with pytest.raises(KeyError), ambient.restored():
                torch.set_default_dtype(torch.float16)  # what the body changes is undone as well
                torch.set_grad_enabled(not torch.is_grad_enabled())
                raise KeyError
            assert observed() == before
        assert observed() == start


def test_the_end_of_an_inner_autocast_drops_no_casts() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ambient = capture()
    with ambient.restored():
        before = (w @ w).grad_fn.next_functions[0][0]
        with torch.autocast("cpu", torch.bfloat16):
            pass
        assert (w @ w).grad_fn.next_functions[0][0] is before
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0
    torch.clear_autocast_cache()


def test_cached_weights_of_parametrizations_are_restored() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    with cached():
        empty, weight, full = capture(), layer.weight, capture()
        with empty.restored():
            assert layer.weight is not weight  # as in the first run, which made the weight
        assert layer.weight is weight
        empty.rewind()
        assert layer.weight is layer.weight is not weight
    with full.restored():
        assert layer.weight is weight
    assert layer.weight is not layer.weight
    with cached(), capture().restored():  # the last list of settings does not keep weights
        assert layer.weight is not weight


def broken(state: Any) -> None:
    raise RuntimeError("broken")


def test_all_is_put_back_if_a_generator_cannot_be_set() -> None:
    g = torch.Generator()
    with torch.no_grad():
        ambient = capture([SimpleNamespace(get_state=object, set_state=broken), g])
    first = torch.rand(1, generator=g)
    state = g.get_state()
    with pytest.raises(RuntimeError, match="broken"), ambient.restored():
        raise AssertionError("not reached")
    assert torch.is_grad_enabled() and torch.equal(g.get_state(), state)
    with pytest.raises(RuntimeError, match="broken"):
        ambient.rewind()
    assert torch.equal(torch.rand(1, generator=g), first)


@pytest.mark.parametrize("differs", [True, False])
def test_only_settings_that_differ_are_set_and_all_are_put_back_if_one_cannot_be_set(differs: bool) -> None:
    """A setter may refuse a value that its getter has returned."""
    first, *others = ambient_module.settings()
    changed = [first, (object if differs else lambda: "unknown", broken), *others]
    with mock.patch.object(ambient_module, "settings", lambda: changed):
        with default_dtype(torch.float64), torch.autocast("cpu"):
            ambient = capture()
        state, before = torch.default_generator.get_state(), observed()
        with pytest.raises(RuntimeError, match="broken") if differs else nullcontext(), ambient.restored():
            assert torch.get_default_dtype() == torch.float64 and not differs
    assert observed() == before and torch.equal(torch.default_generator.get_state(), state)


def test_generators_that_have_not_moved_are_only_set_back() -> None:
    state = capture()
    for moved, expected in ((False, 1), (True, 2)):
        if moved:
            random.random()
        with mock.patch.object(generators._HOST[1], "set_state") as of_python, state.restored():
            pass
        assert of_python.call_count == expected


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
    return in_threads(lambda: grad(out, x))[0]


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


def dropout(x: Tensor) -> Tensor:
    return nn.functional.dropout(x.sin(), 0.5).exp().sin()


def draws(x: Tensor) -> Tensor:
    y = x * torch.rand(8) * random.random() * float(np.random.rand())
    return (dropout(y) + torch.randn(8) + random.gauss(0, 1) + np.random.randn()).sin().exp()


def regions_that_draw(x: Tensor) -> Tensor:
    inner = remat(draws)
    return remat(lambda x: inner(inner(dropout(x))).sin())(inner(nn.functional.dropout(inner(x))))


def casts(x: Tensor) -> Tensor:
    """A weight is cast in the function, in an inner region, and used without autocast."""
    y = remat(MODEL[:2])(x) + MODEL[0](x)
    with torch.autocast("cpu", enabled=False):
        z = remat(MODEL[2:])(y.float())
    with torch.autocast("cpu", torch.bfloat16):
        return MODEL(y).float() + z


DERIVATIVES: dict[str, Callable[[Callable, Tensor], Tensor]] = {
    "gradient": lambda f, x: grad(f(x), x),
    "forces": lambda f, x: grad(grad(f(x), x, create_graph=True), x),
    "forces by torch.func": lambda f, x: grad(torch.func.grad(lambda x: f(x).sum())(x), x),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("policy", [None, policies.save_matmuls, ~policies.save_matmuls, policies.everything_saveable])
@pytest.mark.parametrize("take", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_backward_inside_of_autocast(take: Callable, policy: Any, debug: bool) -> None:
    def results(wrap: Callable) -> list[Tensor]:
        inner, x = wrap(MODEL[2]), torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        f = wrap(lambda x: MODEL[4](MODEL[3](inner(MODEL[:2](x)))).float())
        with torch.autocast("cpu", torch.bfloat16):
            cast_before = MODEL[2](x).float()
            return [take(f, x), take(lambda x: f(x) + cast_before, x)]

    assert_same(results(remat(policy=policy, debug=debug)), results(plain_function))


def test_the_precision_of_one_backend_is_left_alone() -> None:
    now = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
    x = torch.ones(3, requires_grad=True)
    with setting(torch.set_float32_matmul_precision, "highest", torch.get_float32_matmul_precision()):
        out = remat(lambda x: x.sin().exp())(x)
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        set_by_user = now()
        out.sum().backward()
        assert now() == set_by_user


@pytest.mark.parametrize("around", [torch.autocast("cpu", torch.bfloat16), nullcontext()], ids=["autocast", "none"])
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten._to_copy"), policies.everything_saveable], ids=str)
def test_autocast_contexts_in_nested_regions_drop_the_same_casts(policy: Any, around: Any) -> None:
    x, w = torch.rand(3, 8, 8).requires_grad_(), torch.rand(8, 8).requires_grad_()

    def fn(x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                x = (x @ w).float().sin()
        return x

    def program(wrap: Callable) -> Any:
        inner = wrap(fn, policy=policy)
        with around:
            out = wrap(lambda x: inner(x).exp())(x)
        return torch.autograd.grad(out.sum(), (x, w))

    assert_same_results(program, remat, plain_function)


def test_a_derivative_inside_of_autocast_is_recomputed_outside() -> None:
    def penalty(wrap: Callable) -> Tensor:
        attention = lambda x: nn.functional.scaled_dot_product_attention(*3 * [x * 2]).float().square().sum()
        region = wrap(sdpa_kernel(SDPBackend.MATH)(attention))
        seed_all(1)
        x = torch.randn(1, 3, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.func.grad(region)(x).square().mean()
        return grad(loss, x)

    actual, expected = penalty(remat), penalty(plain_function)
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()  # plain bfloat16 rounds sums in another order


PROGRAMS: dict[str, tuple[Callable, str]] = {
    "draws": (draws, "float64"),
    "regions that draw": (regions_that_draw, "default"),
    "casts": (casts, "autocast"),
    "casts without a cache": (casts, "autocast without cache"),
    "casts inside": (casts, "default"),
}


@every_way
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_and_generators_are_those_without_remat(name: str, take: Callable) -> None:
    fn, settings = PROGRAMS[name]
    x = torch.randn(2, 4, 8, requires_grad=True)

    @contextmanager
    def during() -> Iterator[None]:
        with SETTINGS[settings]():
            yield
        seed_all(99)

    assert_same_results(lambda f: (take(f, during, x), draw_all()), remat(fn), fn)


@pytest.mark.parametrize("take", [plain, other_thread, func_vjp])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "no_grad"])
def test_a_recompute_observes_the_settings_of_the_forward(name: str, take: Callable) -> None:
    seen: list[Any] = []
    take(remat(lambda x: (seen.append(observed()), x.sin().exp())[1]), SETTINGS[name], torch.ones(3).requires_grad_())
    assert len(seen) >= 2 and all(each == seen[0] for each in seen)


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


def passed(generator: Any, draw: Callable) -> Callable:
    return lambda x, held: (x.sin() * draw(held["g"])).exp() * draw(held["g"])


def captured(generator: Any, draw: Callable) -> Callable:
    module = nn.Module()
    module.held, fn = {"g": generator}, passed(generator, draw)
    return lambda x, held: fn(x, module.held)


@pytest.mark.sampled(3)
@every_way
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=["none", "sin"])
@pytest.mark.parametrize("build", [passed, captured])
@pytest.mark.parametrize("kind", HELD)
def test_generators_that_a_users_code_owns(kind: str, build: Callable, policy: Any, take: Callable) -> None:
    make, draw = HELD[kind]
    x = torch.randn(2, 4, 8, requires_grad=True)

    def run(wrap: Callable) -> Any:
        generator = make(3)
        fn, held = wrap(build(generator, draw)), {"g": generator} if build is passed else {}
        return take(lambda x: fn(x, held), nullcontext, x), draw(generator)

    assert_same_results(run, remat(policy=policy), plain_function)
