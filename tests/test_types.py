"""Type checkers accept correct calls and reject wrong ones, and know the types of all public names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = "tests/typing_cases.py"
BIN = Path(sys.executable).parent
PYRIGHT = shutil.which("pyright", path=str(BIN))


def run(*command: str) -> str:
    paths = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}  # pyright finds packages by PATH
    done = subprocess.run(command, cwd=ROOT, env=paths, capture_output=True, text=True, timeout=110)
    return done.stdout + done.stderr


@pytest.mark.skipif(find_spec("mypy") is None, reason="no mypy")
def test_mypy() -> None:
    assert "Success: no issues" in run(sys.executable, "-m", "mypy", CASES)


@pytest.mark.skipif(PYRIGHT is None, reason="no pyright")
def test_pyright_and_the_types_of_all_public_names() -> None:
    assert PYRIGHT is not None
    assert "\n0 errors, 0 warnings" in "\n" + run(PYRIGHT, CASES)
    score = re.search(r"Type completeness score: ([\d.]+)%", run(PYRIGHT, "--verifytypes", "remat", "--ignoreexternal"))
    assert score is not None and float(score[1]) >= 95


def test_the_accepted_cases_run() -> None:
    text = (ROOT / CASES).read_text()
    assert text.count("# type: ignore") == 13
    exec(compile(text.partition("# --- rejected")[0], CASES, "exec"), {"__name__": "typing_cases"})
