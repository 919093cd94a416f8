"""The setup of all tests: one thread, a fixed seed, and tests marked `cuda` only where there is a device.

Tests marked `long`, and the unselected cases of tests marked `sampled`, run only with `--all` (`make test-all`).
Tests of a library that isn't installed are skipped; with `--all-packages`, as in `.ci/run`, they fail.
"""

import gc
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo  # an import in a test would leave its frames, and their tensors, in reference cycles
from host_copies import Copies
from surroundings import assert_as_before, surroundings
from torch._dynamo.utils import counters

from benchmarks.measure import gc_disabled
from remat._core import host_memory

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
DEVICE = Path(__file__).parent / "device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run `long` tests, and all cases of `sampled` tests")
    parser.addoption("--all-packages", action="store_true", help="fail where a test is skipped for a missing package")
    parser.addoption("--simulate", choices=["cuda", "sim"], help="simulate a device with this name (tests/device)")


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread, so that sums have the same order on every machine, and install the simulated device if chosen."""
    torch.set_num_threads(1)
    if name := config.getoption("--simulate"):
        from device import plugin

        plugin.start(name)
        config.pluginmanager.register(plugin)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the simulated device's own tests without it."""
    return True if collection_path == DEVICE and not config.getoption("--simulate") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that run only with `--all`, and skip the tests marked `cuda` if there is no device."""
    if not config.getoption("--all"):
        numbers: Counter[str] = Counter()
        deselected = [item for item in items if _only_with_all(item, numbers)]
        config.hook.pytest_deselected(items=deselected)
        out = set(deselected)
        items[:] = [item for item in items if item not in out]
    if torch.cuda.is_available() or config.getoption("--simulate"):
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _failed_without_package(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, pytest.CollectReport]:
    return _failed_without_package(collector.config, (yield))


def _failed_without_package(config: pytest.Config, report: Report) -> Report:
    """With `--all-packages`, change the report of a test or file that `pytest.importorskip` has skipped."""
    if report.skipped and config.getoption("--all-packages") and "could not import" in str(report.longrepr):
        report.outcome, report.longrepr = "failed", str(report.longrepr)
    return report


def _only_with_all(item: pytest.Item, numbers: Counter[str]) -> bool:
    """Whether a test runs only with `--all`. One in n cases of a test marked `sampled(n)` always runs."""
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
    """Exclude existing objects from the garbage collections of a file's tests, which makes these faster."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """The same random numbers in every test, whatever tests ran before. It may leave nothing switched."""
    torch.manual_seed(0)
    before = surroundings()
    yield
    assert_as_before(before, drawn=True)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start with an empty cache of Dynamo, and check that saved-tensor hooks are still enabled at the end."""
    torch._dynamo.reset()
    counters.clear()
    yield
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()
    torch._C._autograd._saved_tensors_hooks_enable()
    torch._dynamo.reset()
    assert enabled


@pytest.fixture(scope="module")
def collector_off() -> Iterator[None]:
    """Turn the garbage collector off for a whole file, with one collection instead of one for each measurement."""
    with gc_disabled():
        yield


@pytest.fixture(scope="module")
def filled_memory() -> Iterator[None]:
    """Fill the memory that `torch.empty` returns with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Treat tensors on the CPU as tensors on a device without streams."""
    monkeypatch.setattr(host_memory, "NEAR", ())
    return Copies(monkeypatch)
