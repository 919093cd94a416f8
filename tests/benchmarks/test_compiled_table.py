"""The benchmark of compiled steps: its cases, the limits of rows, and the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import compiled
from benchmarks.compiled import CASES, Case, Row, rows_of, table
from benchmarks.wrappers import plain, torch_checkpoint
from remat import remat


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEPTH": 3, "ROWS": 32, "WIDTH": 16, "STEPS": 1}.items():
        monkeypatch.setattr(compiled, name, value)
    torch._dynamo.reset()


def test_cases() -> None:
    assert len({(case.transform, case.name, case.compiles) for case in CASES}) == len(CASES)
    assert len({(case.transform, case.compiles) for case in CASES}) == 2 * len(compiled.TRANSFORMS)
    assert all(case.compiles and case.transform == "autograd" for case in CASES if case.budget < 1)


@pytest.mark.parametrize("transform", ["autograd", "func.grad"])
def test_rows(transform: str) -> None:
    cases = [Case(transform, "plain", plain, True), Case(transform, "remat", remat, True)]
    if transform == "autograd":
        cases.append(Case(transform, "torch's checkpoint", torch_checkpoint, True))
    rows = {row.name: row for row in rows_of(cases, "aot_eager")}
    ours, without = rows["remat"], rows["plain"]
    assert ours.peak_bytes < without.peak_bytes < without.limit_bytes
    assert ours.limit_bytes == min(row.peak_bytes for row in rows.values() if row is not ours)
    assert ours.passed and ours.step_ms > 0
    text = table(list(rows.values()))
    assert text.splitlines()[0].split()[0] == transform
    assert [line.split()[-1] for line in text.splitlines()[1:]] == ["pass"] * len(cases)


def test_a_row_above_its_limit_fails() -> None:
    row = Row("func.grad", "remat", True, peak_bytes=2, step_ms=1.0, limit_bytes=2)
    assert row.passed and not replace(row, peak_bytes=3).passed
    assert "FAIL" in table([replace(row, peak_bytes=3)])
