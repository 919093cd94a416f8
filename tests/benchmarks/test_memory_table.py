"""Every row of the memory benchmark keeps to its limit."""

from __future__ import annotations

import pytest

from benchmarks.memory import CASES, Case, table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peak_ratio_keeps_to_its_limit(case: Case) -> None:
    measurement = case.measure()
    assert measurement.numerator > 0
    assert measurement.ratio <= case.limit, table([measurement])
