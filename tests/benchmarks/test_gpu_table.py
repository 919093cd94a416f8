"""All rows of the benchmark of memory against time have the same loss and gradients, on the CPU with tiny sizes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.gpu import CANDIDATES, Block, Row, Step, main, measure, table
from benchmarks.measure import count_ops
from benchmarks.picture import draw
from benchmarks.report import MIB
from benchmarks.wrappers import ATTENTION

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
    assert Row("", "", 1, 1.0, 1.0, near, near, 1e-4).passed
    assert not Row("", "", 1, 1.0, 1.0, far, near, 1e-4).passed
    assert not Row("", "", 1, 1.0, 1.0, near, far, 1e-4).passed
    assert not Row("", "", 1, 1.0, 1.0, near, float("nan"), 1e-4).passed


def test_rows_that_save_more_take_more_memory(rows: dict[tuple[str, str], Row]) -> None:
    none = rows["plain", "none"].peak_bytes
    for family in ("remat", "torch"):
        full, names, matmuls = (rows[family, policy].peak_bytes for policy in ("full", "names", "save_matmuls"))
        assert full < names < matmuls < none
    for policy in ("full", "names", "save_matmuls"):
        assert rows["remat", policy].recomputed_flops == rows["torch", policy].recomputed_flops
        assert rows["remat", policy].peak_bytes <= 1.01 * rows["torch", policy].peak_bytes
    assert rows["plain", "none"].recomputed_flops == 0 < rows["remat", "full"].recomputed_flops
    for policy in ("full", "save_matmuls"):
        assert rows["torch.compile of remat", policy].recomputed_flops is None
        assert rows["torch.compile of remat", policy].peak_bytes < rows["torch.compile", "none"].peak_bytes
    for policy in ("budget 0.5", "budget 0.2"):
        assert rows["torch.compile", policy].peak_bytes < rows["torch.compile", "none"].peak_bytes


def test_eager_rows_have_the_same_results_and_equal_policies_run_the_same_operations() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(SIZES["width"], SIZES["heads"]) for _ in range(SIZES["layers"]))
    x = torch.randn(SIZES["batch"], SIZES["time"], SIZES["width"])
    results = [Step(each.build(blocks, "aot_eager"), blocks, x).results() for each in EAGER]
    assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0]))
    net = {(each.family, each.policy): each.build(blocks, "aot_eager") for each in EAGER}
    ops = {key: count_ops(lambda net: net(x).sum().backward(), each) for key, each in net.items()}
    kernel = next(str(op.overloadpacket) for op in ATTENTION if ops["plain", "none"][str(op.overloadpacket)])
    # A block has four products and two more for the gradients of each. The last of the four is never recomputed.
    for policy, products, attentions in [("full", 3, 1), ("names", 2, 0), ("save_matmuls", 0, 1)]:
        for family in ("remat", "torch"):
            assert ops[family, policy]["aten.mm"] == SIZES["layers"] * (4 + 8 + products)
            assert ops[family, policy][kernel] == SIZES["layers"] * (1 + attentions)
    assert ops["remat", "offload"] == ops["remat", "names"]
    assert ops["torch", "offload"]["aten.mm"] == ops["plain", "none"]["aten.mm"]


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
