"""What every test runs under: one thread, a fixed seed, and CUDA tests only where CUDA is.

What is marked `long`, or `sampled` and not drawn, runs with `--all` only, which is `make test-all`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo  # an import in a test would leave its frames in reference cycles, and the tensors that they hold
from host_copies import Copies

from benchmarks.measure import gc_disabled
from remat._core import host_memory

DEVICE = Path(__file__).parent / "device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `long` and `sampled` too, all of them")
    parser.addoption("--simulate", choices=["cuda", "sim"], help="a simulated device, under this name: tests/device")


def pytest_configure(config: pytest.Config) -> None:
    """One thread, so that sums are added in one order whatever the machine; and a simulated device if one is wanted."""
    torch.set_num_threads(1)
    if name := config.getoption("--simulate"):
        from device import plugin

        plugin.start(name)
        config.pluginmanager.register(plugin)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The simulated device's own tests need it."""
    return True if collection_path == DEVICE and not config.getoption("--simulate") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is for `--all`, and skips the tests marked `cuda` where there is no device."""
    if not config.getoption("--all"):
        numbers: Counter[str] = Counter()
        left_out = [item for item in items if _is_for_all(item, numbers)]
        config.hook.pytest_deselected(items=left_out)
        out = set(left_out)
        items[:] = [item for item in items if item not in out]
    if torch.cuda.is_available() or config.getoption("--simulate"):
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _is_for_all(item: pytest.Item, numbers: Counter[str]) -> bool:
    """One in so many cases of a test that is `sampled` is not."""
    if item.get_closest_marker("long"):
        return True
    sampled = item.get_closest_marker("sampled")
    if sampled is None:
        return False
    test = item.nodeid.partition("[")[0]
    numbers[test] += 1
    return (numbers[test] - 1) % sampled.args[0] > 0


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What there is already need not be looked at whenever a test of the file collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def collector_off() -> Iterator[None]:
    """One collection for all tests of a file, not one for each measurement."""
    with gc_disabled():
        yield


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Tensors of the CPU count as those of a device without streams."""
    monkeypatch.setattr(host_memory, "in_host_memory", lambda tensor: False)
    return Copies(monkeypatch)
