"""The command line, the environment, the output and the exit status of all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["KIB", "MIB", "Row", "environment", "installed", "parse", "report", "verdict"]

KIB, MIB = 2**10, 2**20


class Row(Protocol):
    """One measured row of a table."""

    @property
    def passed(self) -> bool:
        """Whether it is within its limit."""

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""


R = TypeVar("R", bound=Row)


def environment() -> dict[str, str]:
    """Versions and hardware that the numbers may depend on."""
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{_cpu()} x {os.cpu_count()}",
    }
    return {**about, "gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else about


def _cpu() -> str:
    """The processor's name, which `platform` doesn't know everywhere."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def installed(package: str | None, row: str) -> bool:
    """Whether the package that a row needs is installed; if not, print that the row is skipped."""
    if package is None or find_spec(package) is not None:
        return True
    print(f"{row}: skipped, because {package} is not installed (pip install 'remat[benchmarks]')", file=sys.stderr)
    return False


def verdict(row: Row) -> str:
    """The last word of a row."""
    return "pass" if row.passed else "FAIL"


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, with the options that all benchmarks have."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON into this file as well")
    return parser.parse_args(argv)


def report(options: argparse.Namespace, rows: Sequence[R], table: Callable[[Sequence[R]], str]) -> int:
    """Print the rows in the format that the command line chose; return the exit status."""
    settings = {name: value for name, value in vars(options).items() if name not in ("json", "output")}
    about = {**environment(), "options": settings, "rows": [row.as_json() for row in rows]}
    text = json.dumps(about, indent=2, default=str)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        print(", ".join(f"{key} {value}" for key, value in environment().items()))
        print(table(rows))
    return 0 if all(row.passed for row in rows) else 1
