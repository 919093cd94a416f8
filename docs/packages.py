"""The picture of the packages: ``python docs/packages.py`` reads the imports and writes docs/internals/packages.svg."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "remat").glob("_*/__init__.py"))


def imports(package: Path) -> dict[str, int]:
    """The packages that a package imports, each with the number of names."""
    found: dict[str, int] = {}
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and (node.module or "").startswith("_"):
                name = str(node.module).partition(".")[0]
                found[name] = found.get(name, 0) + len(node.names)
    return {name: count for name, count in found.items() if (ROOT / "remat" / name).is_dir()}


def draw(axes: Axes) -> None:
    """One row for each package, below all that it imports; a number says how many names it imports from a column."""
    found = {package.name: imports(package) for package in PACKAGES}
    order = [*TopologicalSorter(found).static_order()]
    lines = {path.name: sum(len(file.read_text().splitlines()) for file in path.glob("*.py")) for path in PACKAGES}
    for y, row in enumerate(order):
        axes.barh(y, y + 1, left=0, height=0.9, color="#f0f4f8")
        axes.text(y + 0.5, y, row.strip("_"), ha="center", va="center", weight="bold", size=8)
        for name, count in found[row].items():
            axes.text(order.index(name) + 0.5, y, str(count), ha="center", va="center", size=8)
        axes.text(len(order) + 0.2, y, f"{lines[row]:,} lines", va="center", size=8)
    axes.set(xlim=(0, len(order) + 2), ylim=(len(order) - 0.4, -0.6))
    axes.axis("off")


if __name__ == "__main__":
    axes = Figure((9, 4), layout="constrained").subplots()
    draw(axes)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "remat"}):
        axes.figure.savefig(ROOT / "docs" / "internals" / "packages.svg", metadata={"Date": None})
