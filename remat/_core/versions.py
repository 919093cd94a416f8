"""The versions of torch that the tests have passed with."""

from __future__ import annotations

import re

from .lines import warn

OLDEST, NEWEST = (2, 11), (2, 15)


def check_version(version: str) -> None:
    """Warn of an untested version of torch, whose private parts may differ."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        tested = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        warn(f"remat was tested with {tested}, and this is torch {version}. Run its tests, or use one of these.")
