"""With `--all-packages`, a test or file that is skipped because a package is missing fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
FILES = {
    "test_file.py": "import pytest\npytest.importorskip('a_missing_package')",
    "test_cases.py": "import pytest\ndef test_that_needs_a_package(): pytest.importorskip('a_missing_package')\n"
    "def test_that_is_skipped(): pytest.skip('another reason')",
}


def test_a_missing_package_is_a_failure(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    options = ["--all-packages", "--continue-on-collection-errors", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", "-p", "conftest", *options, tmp_path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "1 failed, 1 skipped, 1 error" in run.stdout, run.stdout + run.stderr
    assert "--all-packages" in (TESTS.parent / ".ci" / "run").read_text()
