"""All rows of the benchmark of memory against time have the same loss and gradients, on the CPU with tiny sizes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import CANDIDATES, Row, main, measure, table
from benchmarks.picture import draw
from benchmarks.report import MIB

SIZES = {"layers": 4, "width": 32, "heads": 2, "batch": 4, "time": 64}
EAGER = [candidate for candidate in CANDIDATES if not candidate.family.startswith("torch.compile")]


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Row]:
    settings = {"device": "cpu", "dtype": "float32", "rounds": 1, "backend": "aot_eager"}
    return {(row.family, row.policy): row for row in measure(argparse.Namespace(**SIZES, **settings))}


def test_losses_and_gradients_are_those_of_the_plain_step(rows: dict[tuple[str, str], Row]) -> None:
    assert len(rows) == len(CANDIDATES)
    for candidate in CANDIDATES:
        row = rows[candidate.family, candidate.policy]
        assert row.passed and row.ms > 0 and row.peak_bytes > 0, table([row])
        assert row.gradient_error < 1e-5
        if candidate in EAGER:
            plain = rows["plain", "none"]
            assert (row.loss_error, row.gradient_error) == (plain.loss_error, plain.gradient_error)


def test_a_wrong_loss_or_gradient_is_a_failure() -> None:
    near, far = 1e-6, 1e-3
    passed = [Row("", "", 1, 1.0, 1.0, *errors, 1e-4).passed for errors in ((near, near), (far, near), (near, far))]
    assert passed == [True, False, False] and not Row("", "", 1, 1.0, 1.0, near, float("nan"), 1e-4).passed


def test_rows_that_save_more_take_more_memory(rows: dict[tuple[str, str], Row]) -> None:
    none = rows["plain", "none"].peak_bytes
    for family in ("remat", "torch"):
        full, names, matmuls = (rows[family, policy].peak_bytes for policy in ("full", "names", "save_matmuls"))
        assert full < names < matmuls < none
    for policy in ("full", "names", "save_matmuls"):
        assert rows["remat", policy].recomputed_flops == rows["torch", policy].recomputed_flops
        assert rows["remat", policy].peak_bytes <= 1.01 * rows["torch", policy].peak_bytes
    assert rows["plain", "none"].recomputed_flops == 0 < rows["remat", "full"].recomputed_flops
    compiled = rows["torch.compile", "none"].peak_bytes
    for family, policy in (("of remat", "full"), ("of remat", "save_matmuls"), ("", "budget 0.5"), ("", "budget 0.2")):
        row = rows[f"torch.compile {family}".strip(), policy]
        assert row.recomputed_flops is None and row.peak_bytes < compiled


def some_rows() -> list[Row]:
    return [
        Row(family, policy, peak * MIB, 1.0, 1.0, 0.0, 0.0, 1e-4, flops)
        for family, policy, peak, flops in [
            ("plain", "none", 100, 0),
            ("remat", "full", 40, 1000),
            ("torch.compile", "compiled", 40, None),
        ]
    ]


def test_the_picture_has_every_eager_row_and_is_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "new" / name for name in ("first.svg", "second.svg")]
    for path in paths:
        draw(some_rows(), path, "some title")
    text = paths[0].read_text()
    words = ("plain: none", "remat: full", "some title", "32 MiB", "FLOPs recomputed")
    assert all(f">{word}<" in text for word in words)
    assert text == paths[1].read_text() and "compiled" not in text


def test_one_run_writes_table_json_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("benchmarks.gpu.measure", lambda options: some_rows())
    arguments = ["--device", "cpu", "--layers", "7", "--output", str(tmp_path / "a"), "--picture", str(tmp_path / "b")]
    assert main(arguments) == 0
    assert "remat: full" in capsys.readouterr().out
    assert json.loads((tmp_path / "a").read_text())["options"]["layers"] == 7
    assert "7 blocks" in (tmp_path / "b").read_text()


def test_without_a_gpu_it_prints_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--output", str(tmp_path / "a"), "--picture", str(tmp_path / "b")]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("benchmarks.gpu: no GPU")
    assert len(printed.err.splitlines()) == 1 and not list(tmp_path.iterdir())
