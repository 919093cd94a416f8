"""Ambient state: a second run sees the state of the first one, and has changed nothing after it."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from cases import default_dtype
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat._ambient import ambient as ambient_module
from remat._ambient import generators
from remat._ambient import settings as settings_module
from remat._ambient.ambient import Ambient
from remat._ambient.generators import HostGenerator

CPU = torch.device("cpu")
DRAWS = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch.randn": lambda: torch.randn(1).tolist(),  # the generator stores half a pair of normals
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),  # the same
    "random.shuffle": lambda: random.sample(range(100), 5),
    "numpy": lambda: np.random.rand(2).tolist(),
    "numpy.randn": np.random.randn,  # the same
    "numpy.permutation": lambda: np.random.permutation(20).tolist(),
}


def draw_all():
    return [draw() for draw in DRAWS.values()]


def capture(generators=(), preserve=True):
    return Ambient.capture({CPU}, generators, preserve)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class TestGenerators:
    @pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
    @pytest.mark.parametrize("before", [0, 1, 2, 700])
    def test_same_draws_inside_and_same_states_after(self, draw, before):
        for _ in range(before):
            draw()
        ambient = capture()
        first = [draw() for _ in range(3)]
        after = capture()
        expected = [draw() for _ in range(3)]
        after.rewind()
        for _ in range(2):
            with ambient.restored():
                assert [draw() for _ in range(3)] == first
        assert [draw() for _ in range(3)] == expected

    def test_exception_inside(self):
        ambient = capture()
        draw_all()
        after = capture()
        expected = draw_all()
        after.rewind()
        with pytest.raises(KeyError), ambient.restored():
            draw_all()
            raise KeyError
        assert draw_all() == expected

    def test_nested(self):
        outer = capture()
        first = draw_all()
        inner = capture()
        second = draw_all()
        third = capture()
        expected = draw_all()
        third.rewind()
        with outer.restored():
            assert draw_all() == first
            with inner.restored(), outer.restored(), inner.restored():
                assert draw_all() == second
            assert draw_all() == second  # the numbers that follow the first ones
        assert draw_all() == expected

    def test_rewind(self):
        ambient = capture()
        first = draw_all()
        ambient.rewind()
        assert draw_all() == first

    def test_explicit_generators(self):
        g, h = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        ambient = capture([g])
        first = torch.rand(3, generator=g)
        h_before = h.get_state()
        g_before = g.get_state()
        with ambient.restored():
            assert torch.equal(torch.rand(3, generator=g), first)
            torch.rand(1, generator=h)
        assert torch.equal(g.get_state(), g_before)
        assert not torch.equal(h.get_state(), h_before)  # not captured
        ambient.rewind()
        assert torch.equal(torch.rand(3, generator=g), first)

    def test_any_iterable(self):
        g = torch.Generator()
        ambient = Ambient.capture(iter([CPU]), iter([g]), True)
        first = torch.rand(1, generator=g)
        for _ in range(2):
            with ambient.restored():
                assert torch.equal(torch.rand(1, generator=g), first)

    def test_not_preserved(self):
        g = torch.Generator()
        with mock.patch.object(ambient_module, "global_generators", None):
            ambient = capture([g], preserve=False)
            before = torch.default_generator.get_state(), g.get_state(), random.getstate()
            with ambient.restored():
                torch.rand(1), torch.rand(1, generator=g), random.random()
            ambient.rewind()
        assert not torch.equal(torch.default_generator.get_state(), before[0])
        assert not torch.equal(g.get_state(), before[1])
        assert random.getstate() != before[2]

    def test_devices_without_generator_and_backends_that_are_not_initialized(self):
        devices = [torch.device(d) for d in ("cpu", "meta", "mps", "xla:3", "mtia")]
        with mock.patch.object(torch.cuda, "is_initialized", lambda: False):
            with Ambient.capture([*devices, torch.device("cuda:5")], (), True).restored():
                pass
            with FakeTensorMode(allow_non_fake_inputs=True):
                Ambient.capture([torch.device("cuda", 0)], (), True).rewind()

    @pytest.mark.parametrize("name", ["xpu", "hpu", "mps"])
    def test_backends_with_and_without_generator_objects(self, name):
        """Placeholders for backends that this machine doesn't have."""
        gs = [torch.Generator().manual_seed(i) for i in range(2)]
        current = 1
        if name == "xpu":
            backend = SimpleNamespace(default_generators=gs, current_device=lambda: current)
        elif name == "hpu":
            backend = SimpleNamespace(
                get_rng_state=lambda device: gs[device.index].get_state(),
                set_rng_state=lambda state, device: gs[device.index].set_state(state),
            )
        else:
            current = 0
            backend = SimpleNamespace(get_rng_state=gs[0].get_state, set_rng_state=gs[0].set_state)
        backend.is_available = lambda: True
        index = current if name != "hpu" else 1
        device = torch.device(name, 1) if name == "hpu" else torch.device(name)
        with mock.patch.object(torch, name, backend, create=True):
            ambient = Ambient.capture([device], (), True)
            first = torch.rand(3, generator=gs[index])
            after = gs[index].get_state()
            with ambient.restored():
                assert torch.equal(torch.rand(3, generator=gs[index]), first)
            assert torch.equal(gs[index].get_state(), after)

    def test_numpy_imported_later_is_restored_too(self):
        with mock.patch.dict("sys.modules"):
            import sys

            del sys.modules["numpy"]
            ambient = capture()
        state = np.random.get_state()[1].tolist(), np.random.get_state()[2]
        with ambient.restored():
            np.random.rand(1000)
        assert (np.random.get_state()[1].tolist(), np.random.get_state()[2]) == state

    def test_another_bit_generator_of_numpy(self):
        old = np.random.get_bit_generator()
        np.random.set_bit_generator(np.random.PCG64(3))
        try:
            ambient = capture()
            first = np.random.rand(), np.random.randn()
            after = capture()
            expected = np.random.rand(), np.random.randn()
            after.rewind()
            with ambient.restored():
                assert (np.random.rand(), np.random.randn()) == first
            assert (np.random.rand(), np.random.randn()) == expected
        finally:
            np.random.set_bit_generator(old)

    def test_a_state_that_has_not_changed_is_shared(self):
        states = [dict(capture()._pairs()) for _ in range(2)]
        host = [each for each in states[0] if isinstance(each, HostGenerator)]
        assert len(host) == 3
        assert all(states[0][each] is states[1][each] for each in host)
        draw_all()
        assert not any(each.get_state() is states[0][each] for each in host)

    def test_a_stored_half_of_a_pair_of_normals_of_numpy(self):
        """The bits of the state are the same, whether or not half a pair is stored."""
        np.random.randn()
        half = np.random.get_state()
        with_half = capture()
        first = np.random.randn()
        capture()
        np.random.set_state(half)
        again = capture()
        assert np.random.randn() == first
        for ambient in (with_half, again):
            with ambient.restored():
                assert np.random.randn() == first

    def test_many_threads_draw(self):
        stop, errors = threading.Event(), []

        def work():
            try:
                while not stop.is_set():
                    random.random(), np.random.rand(3)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            capture().rewind()
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [
        Functions,
        Dispatches,
        FakeTensorMode,
        lambda: torch.device("meta"),
        torch.no_grad,
        torch.inference_mode,
    ],
)
def test_states_are_plain_under_modes(mode):
    torch.rand(1)  # so that the state is read under the mode
    expected = torch.default_generator.get_state()
    with mode():
        ambient = capture()
        with ambient.restored():
            pass
        ambient.rewind()
    state = ambient._states[0]
    assert type(state) is torch.Tensor and state.device == CPU
    assert torch.equal(state, expected)
    torch.rand(1)
    with ambient.restored():
        assert torch.equal(torch.default_generator.get_state(), expected)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f, randomness="different"),
        torch.func.grad,
        lambda f: torch.vmap(torch.func.grad(f), randomness="same"),
        lambda f: torch.func.functionalize(f),
    ],
)
def test_states_are_plain_under_torch_func(transform):
    expected = torch.rand(3)
    torch.manual_seed(0)
    seen = []

    def f(x):
        seen.append(capture())
        torch.rand(3)
        with seen[0].restored():
            pass
        seen[0].rewind()
        return x.sum()

    transform(f)(torch.ones(2, 2) if transform is not torch.func.grad else torch.ones(2))
    state = seen[0]._states[0]
    assert not torch._C._functorch.is_functorch_wrapped_tensor(state)
    assert torch.equal(torch.rand(3), expected)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def autocast_dtype(dtype):
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def modes():
    """The stack of function modes."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def observed():
    """The settings that user code can observe."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.empty(0).device.type,
        torch.get_default_device().type,
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.mm(torch.ones(1, 1, device="cpu"), torch.ones(1, 1, device="cpu")).dtype,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


@contextmanager
def deterministic(**how):
    torch.use_deterministic_algorithms(True, **how)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def matmul_precision(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


SETTINGS = {
    "default": nullcontext,
    "no_grad": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "set_default_device": lambda: default_device("meta"),
    "with device": lambda: torch.device("meta"),
    "with cpu": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast dtype": lambda: autocast_dtype(torch.float16),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "priority": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "deterministic": deterministic,
    "deterministic, warn only": lambda: deterministic(warn_only=True),
    "high": lambda: matmul_precision("high"),
    "medium": lambda: matmul_precision("medium"),
}


class TestSettings:
    @pytest.mark.parametrize("now", SETTINGS.values(), ids=SETTINGS)
    @pytest.mark.parametrize("then", SETTINGS.values(), ids=SETTINGS)
    @pytest.mark.parametrize("preserve", [True, False])
    def test_then_and_now(self, then, now, preserve):
        start = observed()
        with then():
            ambient, first = capture(preserve=preserve), observed()
        with now():
            before = observed()
            with ambient.restored():
                assert observed() == first
                with ambient.restored():  # nested
                    assert observed() == first
                with torch.device("meta"), torch.autocast("cpu"), torch.no_grad():
                    assert torch.empty(0).device.type == "meta"
                assert observed() == first
            assert observed() == before
            with pytest.raises(KeyError), ambient.restored():
                torch.set_default_dtype(torch.float16)  # the body's own changes are undone as well
                torch.set_grad_enabled(not torch.is_grad_enabled())
                raise KeyError
            assert observed() == before
        assert observed() == start

    @pytest.mark.parametrize("then", SETTINGS.values(), ids=SETTINGS)
    def test_another_thread(self, then):
        results = []
        with then():
            ambient, first = capture(), observed()

        def work():
            results.append(observed())
            with ambient.restored():
                results.append(observed())
            results.append(observed())

        with torch.device("meta"):
            here = observed()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert observed() == here
        assert results[1] == first
        assert results[0] == results[2]

    def test_body_sets_the_default_device(self):
        ambient = capture()
        with default_device("meta"):
            before = observed()
            with ambient.restored():
                torch.set_default_device("cpu")
            assert observed() == before
        assert torch.empty(0).device == CPU

    def test_function_modes_stay_on_top_of_the_default_device(self):
        ambient = capture()
        seen = []

        class Record(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with torch.device("meta"), Record():
            with ambient.restored():
                assert torch.ones(1).device == CPU and torch.ones in seen
            seen.clear()
            assert torch.ones(1).device.type == "meta" and torch.ones in seen

    @pytest.mark.parametrize("default", [None, "cpu", "meta"])
    @pytest.mark.parametrize("between", [nullcontext, lambda: Passing()])
    def test_a_device_over_a_default_device(self, default, between):
        with default_device(default), between():
            with torch.device("meta"), between():
                with torch.device("cpu"):
                    inner = capture()
                ambient = capture()
                stack = modes()
                with inner.restored():
                    assert torch.ones(1).device == CPU
                assert modes() == stack and torch.ones(1).device.type == "meta"
            stack, device = modes(), torch.ones(1).device.type
            with ambient.restored():
                assert torch.ones(1).device.type == "meta"
                with torch.device("cpu"), inner.restored():
                    assert torch.ones(1).device == CPU
                assert torch.ones(1).device.type == "meta"
            assert modes() == stack and torch.ones(1).device.type == device == (default or "cpu")

    def test_casts_are_not_cached_between_runs(self):
        w = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            ambient = capture()
        with ambient.restored():
            y = w @ w
        with ambient.restored():
            z = w @ w
        cast = [out.grad_fn.next_functions[0][0] for out in (y, z)]
        assert cast[0] is not cast[1]

    def test_everything_is_restored_when_something_fails(self):
        g = torch.Generator()

        class Broken:
            def get_state(self):
                return None

            def set_state(self, state):
                raise RuntimeError("broken")

        with torch.no_grad():
            ambient = capture([Broken(), g])
        state = g.get_state()
        with pytest.raises(RuntimeError, match="broken"), ambient.restored():
            raise AssertionError("not reached")
        assert torch.is_grad_enabled() and torch.equal(g.get_state(), state)

        gets, puts = settings_module._settings()
        settings = (lambda: None, lambda: object(), *gets[1:]), (puts[0], Broken().set_state, *puts[1:])
        with default_dtype(torch.float64), torch.autocast("cpu"):
            with mock.patch.object(settings_module, "_settings", lambda: settings):
                other = capture()
        with mock.patch.object(settings_module, "_settings", lambda: settings):
            state, before = torch.default_generator.get_state(), observed()
            with pytest.raises(RuntimeError, match="broken"), other.restored():
                raise AssertionError("not reached")
        assert observed() == before
        assert torch.equal(torch.default_generator.get_state(), state)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_generators(self):
        torch.cuda.init()
        cuda = torch.device("cuda", 0)
        g = torch.Generator(cuda)
        for devices in ([cuda], [torch.device("cuda")], []):  # always of the current device
            ambient = Ambient.capture(devices, [g], True)
            first = torch.rand(3, device=cuda), torch.rand(3, device=cuda, generator=g)
            after = torch.cuda.get_rng_state()
            with ambient.restored():
                again = torch.rand(3, device=cuda), torch.rand(3, device=cuda, generator=g)
            assert all(map(torch.equal, first, again))
            assert torch.equal(torch.cuda.get_rng_state(), after)

    def test_autocast(self):
        with torch.autocast("cuda", torch.bfloat16):
            ambient = Ambient.capture([torch.device("cuda")], (), True)
        with ambient.restored():
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")


def test_cuda_is_not_initialized():
    if torch.cuda.is_initialized():
        pytest.skip("it has been started already")
    with capture().restored():
        pass
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_build_of_torch_with_cuda_and_no_gpu(monkeypatch):
    """There torch reports CUDA as its accelerator, but every query of it raises."""

    def no_driver(*args):
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))
    for module, name in ((torch.cuda, "is_current_stream_capturing"), (torch.cuda, "current_device")):
        monkeypatch.setattr(module, name, no_driver)
    generators.accelerator.cache_clear()
    try:
        x = torch.ones(3, requires_grad=True)
        remat.remat(torch.sin)(x).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
    finally:
        generators.accelerator.cache_clear()
