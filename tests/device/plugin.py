"""The pytest plugin for `--simulate cuda` and `--simulate sim`."""

import os
from collections.abc import Iterator

import pytest

from . import install, races, why_not


def start(name: str) -> None:
    """Install the device, or end the run with the reason why it isn't available."""
    reason = why_not(name)
    if reason is None:
        install(name)
        return
    required = os.environ.get("CI") == "true" and "CPU build" not in reason
    pytest.exit(f"no tests on the simulated device: {reason}", returncode=int(required))


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """A test fails if it has a race."""
    races()
    yield
    found = races()
    assert found == [], found
