"""What every test runs under: one thread, a fixed seed, and CUDA tests only where CUDA is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.measure import gc_disabled


def pytest_configure() -> None:
    """One thread, so that sums are added in one order whatever the machine."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `cuda` where there is no device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def collector_off() -> Iterator[None]:
    """One collection for all tests of a file, not one for each measurement."""
    with gc_disabled():
        yield
