"""Ambient state: a second run sees the generators and settings of the first one, and has changed none after it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import default_dtype
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import cached

import remat
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


def draw_all() -> list[Any]:
    return [draw() for draw in DRAWS.values()]


def capture(held: Any = (), preserve: bool = True, devices: Any = (CPU,)) -> Ambient:
    return Ambient(devices, held, preserve)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)


def following(ambient: Ambient, draw: Callable[[], Any] = draw_all) -> Any:
    """The numbers that are drawn next, which stay the next ones."""
    numbers = draw()
    ambient.rewind()
    return numbers


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("before", [0, 1, 700])
def test_the_same_numbers_inside_and_the_next_ones_after_it(draw: Callable, before: int) -> None:
    for _ in range(before):
        draw()
    ambient, first = capture(), [draw() for _ in range(3)]
    expected = following(capture(), draw)
    for _ in range(2):
        with ambient.restored():
            assert [draw() for _ in range(3)] == first
    with pytest.raises(KeyError), ambient.restored():
        draw()
        raise KeyError
    assert draw() == expected


def test_numpy_has_drawn_though_only_its_stored_number_was_taken() -> None:
    """It makes normal variates in pairs, so every second one leaves the Mersenne twister as it was."""
    np.random.randn()
    before, stored = capture(), np.random.randn()
    after, following = capture(), np.random.randn()
    for state, number in ((after, following), (before, stored), (after, following)):
        state.rewind()
        assert np.random.randn() == number


def test_states_are_restored_in_each_other() -> None:
    g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    draw = lambda: (draw_all(), torch.rand(3, generator=g).tolist())
    outer, first = capture(iter([g]), devices=iter([CPU])), draw()
    inner, second = capture([g]), draw()
    expected, other = following(capture([g]), draw), h.get_state()
    with outer.restored():
        assert draw() == first
        with inner.restored(), outer.restored(), inner.restored():
            assert draw() == second
            torch.rand(1, generator=h)
        assert draw() == second  # the numbers that follow the first ones
    assert draw() == expected and not torch.equal(h.get_state(), other)  # which nobody has named


def test_only_generators_of_torch_count_as_moved() -> None:
    ambient = capture()
    random.random(), np.random.rand()
    assert not ambient.moved()
    torch.rand(1)
    assert ambient.moved()


def test_numpys_state_is_read_again_only_if_it_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    (generator,) = (
        each for each in generators.global_generators(()) if getattr(each, "name", None) == "NumPy's random"
    )
    reads, read = list[int](), np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda legacy: reads.append(1) or read(legacy=legacy))

    def after(draw: Callable[[], object]) -> tuple[int, bool, bool]:
        """How often two lookups read the state, and whether they return the state of before, and the same one."""
        before, _, count = generator.get_state(), draw(), len(reads)
        first, second = generator.get_state(), generator.get_state()
        return len(reads) - count, first is before, second is first

    np.random.seed(0)
    assert after(lambda: None) == (0, True, True)
    assert after(np.random.rand) == (1, False, True)
    assert after(np.random.randn) == (2, False, True)  # one more is stored, which a draw takes without a trace
    assert after(np.random.randn) == (2, False, True)
    assert after(lambda: None) == (2, True, True)
    assert after(np.random.rand) == (1, False, True)


def test_numpy_may_use_another_bit_generator() -> None:
    old, draw = np.random.get_bit_generator(), lambda: (np.random.rand(), np.random.randn())
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        ambient, first = capture(), draw()
        expected = following(capture(), draw)
        with ambient.restored():
            assert draw() == first
        assert draw() == expected
    finally:
        np.random.set_bit_generator(old)


def test_devices_without_a_generator_and_backends_that_have_not_started() -> None:
    started = torch.cuda.is_initialized()
    devices = [torch.device(d) for d in ("cpu", "meta", "mps", "xla:3", "mtia")]
    with mock.patch.object(torch.cuda, "is_initialized", lambda: False):
        with capture(devices=[*devices, torch.device("cuda:5")]).restored():
            pass
        with FakeTensorMode(allow_non_fake_inputs=True):
            capture(devices=[torch.device("cuda", 0)]).rewind()
    assert torch.cuda.is_initialized() is started


@pytest.mark.parametrize("name, index", [("xpu", None), ("hpu", 1), ("mps", None)])
def test_backends_have_a_list_of_generators_or_functions_for_their_states(name: str, index: int | None) -> None:
    """Placeholders for backends that this machine doesn't have."""
    gs = [torch.Generator().manual_seed(i) for i in range(2)]
    used = gs[1 if name == "hpu" else 0]
    get, put = lambda device: gs[device.index].get_state(), lambda state, device: gs[device.index].set_state(state)
    backend = {
        "xpu": SimpleNamespace(default_generators=gs, is_available=lambda: True),
        "hpu": SimpleNamespace(get_rng_state=get, set_rng_state=put, is_available=lambda: True),
        "mps": SimpleNamespace(get_rng_state=used.get_state, set_rng_state=used.set_state, is_available=lambda: True),
    }[name]
    with mock.patch.object(torch, name, backend, create=True):
        ambient = capture(devices=[torch.device(name, index) if index else torch.device(name)])
        first, after = torch.rand(3, generator=used), used.get_state()
        with ambient.restored():
            assert torch.equal(torch.rand(3, generator=used), first)
        assert torch.equal(used.get_state(), after)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_build_of_torch_with_cuda_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch reports CUDA as its accelerator, but every query of it raises."""

    def no_driver(*args: Any) -> None:
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_driver)
    monkeypatch.setattr(torch.cuda, "current_device", no_driver)
    generators.accelerator.cache_clear()
    try:
        x = torch.ones(3, requires_grad=True)
        remat.remat(torch.sin)(x).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
    finally:
        generators.accelerator.cache_clear()


def test_a_capture_of_a_cuda_graph_needs_preserve_rng_state_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ambient_module, "is_capturing", lambda: True)
    with pytest.raises(remat.RematError, match="Pass `preserve_rng_state=False`"):
        capture()
    capture(preserve=False)


cuda = torch.backends.cuda


@contextmanager
def setting(put: Callable, value: Any, before: Any) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


def default_device(device: Any) -> Any:
    return setting(torch.set_default_device, device, None)


def observed() -> Any:
    """The settings that a user's code can observe."""
    one = torch.ones(1, 1, device="cpu")
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.empty(0).device.type, torch.get_default_device().type,
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        torch.mm(one, one).dtype, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed(), torch._C._get_sdp_priority_order(),
        torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision(),
    )  # fmt: skip


SETTINGS: dict[str, Callable[[], Any]] = {
    "default": nullcontext,
    "no_grad": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "set_default_device": lambda: default_device("meta"),
    "with device": lambda: torch.device("meta"),
    "with cpu": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast dtype": lambda: setting(lambda d: torch.set_autocast_dtype("cpu", d), torch.float16, torch.bfloat16),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "priority": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "reduction": lambda: setting(cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
    "deterministic": lambda: setting(torch.set_deterministic_debug_mode, 2, 0),
    "deterministic, warn only": lambda: setting(torch.set_deterministic_debug_mode, 1, 0),
    "high": lambda: setting(torch.set_float32_matmul_precision, "high", "highest"),
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


class Broken:
    def get_state(self) -> Any:
        return None

    def set_state(self, state: Any) -> None:
        raise RuntimeError("broken")


def test_all_is_put_back_if_a_generator_cannot_be_set() -> None:
    g = torch.Generator()
    with torch.no_grad():
        ambient = capture([Broken(), g])
    first = torch.rand(1, generator=g)
    state = g.get_state()
    with pytest.raises(RuntimeError, match="broken"), ambient.restored():
        raise AssertionError("not reached")
    assert torch.is_grad_enabled() and torch.equal(g.get_state(), state)
    with pytest.raises(RuntimeError, match="broken"):
        ambient.rewind()
    assert torch.equal(torch.rand(1, generator=g), first)


def test_all_is_put_back_if_a_setting_cannot_be_set() -> None:
    first, *others = ambient_module.settings()
    changed = [first, (object, Broken().set_state), *others]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ambient_module, "settings", lambda: changed)
        with default_dtype(torch.float64), torch.autocast("cpu"):
            ambient = capture()
        state, before = torch.default_generator.get_state(), observed()
        with pytest.raises(RuntimeError, match="broken"), ambient.restored():
            raise AssertionError("not reached")
    assert observed() == before and torch.equal(torch.default_generator.get_state(), state)


def test_generators_that_have_not_moved_are_only_set_back() -> None:
    state = capture()
    for moved, expected in ((False, 1), (True, 2)):
        if moved:
            random.random()
        with mock.patch.object(generators._HOST[1], "set_state") as of_python, state.restored():
            pass
        assert of_python.call_count == expected


def test_only_settings_that_differ_are_set() -> None:
    """Another setter may refuse a value that its getter has returned."""
    changed = [*ambient_module.settings(), (lambda: "unknown", Broken().set_state)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ambient_module, "settings", lambda: changed)
        with default_dtype(torch.float64):
            ambient = capture()
        with ambient.restored():
            assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == torch.float32
