"""Every row of the memory benchmark is within its limit."""

from __future__ import annotations

import pytest

from benchmarks.memory import CASES, Case, table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peak_ratio_is_within_its_limit(case: Case) -> None:
    measurement = case.measure()
    assert measurement.numerator > 0
    assert measurement.ratio <= case.limit, table([measurement])
