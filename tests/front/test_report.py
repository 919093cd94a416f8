"""The output of all benchmarks: a table or JSON, a file, and the exit status."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report import installed, parse, report


@dataclass
class Row:
    passed: bool

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed}


def run(argv: list[str], *passed: bool) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=3)
    return report(parse(parser, argv), [Row(each) for each in passed], lambda rows: f"{len(rows)} rows")


def test_a_failing_row_sets_the_exit_status(capsys: pytest.CaptureFixture) -> None:
    assert run([], True, True) == 0
    assert run([], True, False) == 1
    assert capsys.readouterr().out.count("2 rows") == 2


def test_one_run_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "new" / "rows.json"
    run(["--output", str(path)], True)
    assert capsys.readouterr().out.endswith("1 rows\n")
    written = json.loads(path.read_text())
    assert written["rows"] == [{"passed": True}] and written["options"] == {"size": 3}
    assert written["torch"] == torch.__version__
    run(["--json"], True)
    assert json.loads(capsys.readouterr().out) == written


def test_a_row_without_its_package_is_skipped_with_a_message(capsys: pytest.CaptureFixture) -> None:
    assert installed(None, "a row") and installed("torch", "a row")
    assert capsys.readouterr().err == ""
    assert not installed("no_such_package", "a row")
    assert capsys.readouterr().err.startswith("a row: skipped, because no_such_package is not installed")
