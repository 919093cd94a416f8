"""The structure of the package: imports go one way, and the design page names every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import remat

PACKAGE = Path(remat.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
# Each may import the packages before it. `_modules`, `_scan` and `_budget` are above all, with the public modules.
PACKAGES = [
    "_core",
    "_policy",
    "_ambient",
    "_captured",
    "_region",
    "_selective",
    "_engine",
    "_functorch",
    "_compile",
    "_measure",
]


def imported(name: str, path: Path) -> set[str]:
    """The modules of the package that a module imports, also inside functions, but not for types only."""
    base_package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom):
            parts = base_package.split(".")[: len(base_package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {module for module in found if module in MODULES and module != name}


IMPORTS = {name: imported(name, path) for name, path in MODULES.items()}


def package(name: str) -> str:
    """The folder of a module, empty at the top."""
    parts = MODULES[name].relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def test_no_import_is_in_a_cycle() -> None:
    assert sum(map(len, IMPORTS.values())) > 200
    TopologicalSorter(IMPORTS).prepare()


def test_a_cycle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({**IMPORTS, "remat._core.private": {"remat.nn"}}).prepare()


def test_packages_import_lower_packages_only() -> None:
    used = {(package(name), package(other)) for name, others in IMPORTS.items() for other in others}
    between = {(a, b) for a, b in used if a in PACKAGES and b in PACKAGES and a != b}
    assert len(between) > 20
    assert all(PACKAGES.index(b) < PACKAGES.index(a) for a, b in between), between
    # Private packages import `remat.errors`, and no other public module.
    used_by_packages = set().union(*(others for name, others in IMPORTS.items() if package(name) in PACKAGES))
    assert {name for name in used_by_packages if not package(name)} == {"remat.errors"}


def test_the_top_is_what_users_call() -> None:
    private = [path.name for path in PACKAGE.glob("_*.py") if path.name != "__init__.py"]
    assert len(private) <= 12
    # No function has the name of a module.
    functions = {name for name in remat.__all__ if callable(getattr(remat, name))}
    assert functions.isdisjoint(path.stem for path in MODULES.values())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_a_docstring_of_one_line(name: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
    assert text and len(text.splitlines()) == 1


def test_the_design_page_names_every_file() -> None:
    text = (PACKAGE.parent / "docs" / "internals" / "design.md").read_text()
    entries = text.split("\n## Packages\n")[1].split("\n## ")[0].split("\n- **`")[1:]
    rows = {entry.split("/`")[0]: entry for entry in entries}
    folders = {folder.name for folder in PACKAGE.glob("_*") if (folder / "__init__.py").exists()}
    assert set(rows) == folders
    for folder in folders:
        files = {path.name for path in (PACKAGE / folder).glob("*.py")} - {"__init__.py"}
        assert {name for name in files if f"`{name}`" not in rows[folder]} == set()
    top = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert {name for name in top if f"`{name}`" not in text} == set()


def test_the_package_does_not_import_dynamo() -> None:
    """Its import takes as long as that of torch."""
    code = "import sys, remat, remat.nn; print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert run.stdout.strip() == "[]"
