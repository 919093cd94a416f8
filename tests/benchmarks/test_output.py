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


def test_a_run_prints_a_table_or_json_and_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "new" / "rows.json"
    assert run(["--output", str(path)], True, True) == 0
    assert capsys.readouterr().out.endswith("2 rows\n")
    written = json.loads(path.read_text())
    assert written["rows"] == [{"passed": True}] * 2 and written["options"] == {"size": 3}
    assert written["torch"] == torch.__version__
    assert run(["--json", "--size", "4"], True, False) == 1
    assert json.loads(capsys.readouterr().out)["rows"] == [{"passed": True}, {"passed": False}]


def test_a_row_without_its_package_is_skipped_with_a_message(capsys: pytest.CaptureFixture) -> None:
    assert installed(None, "a row") and installed("torch", "a row")
    assert capsys.readouterr().err == ""
    assert not installed("no_such_package", "a row")
    assert capsys.readouterr().err.startswith("a row: skipped, because no_such_package is not installed")
