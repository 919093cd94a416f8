"""The structure of the package: imports go one way, and the design page names every file."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from cases import run_program

import remat

PACKAGE = Path(remat.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
# Each may import the packages before it. `_modules` and `_planning` are above all, with the public modules.
ORDER = "core, policy, ambient, captured, region, selective, engine, functorch, compile, measure"
PACKAGES = [f"_{name}" for name in ORDER.split(", ")]


def imported(name: str, path: Path) -> set[str]:
    """The modules of the package that a module imports, also inside functions and for types only."""
    inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = inside.split(".")[: inside.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {module for module in found if module in MODULES and module != name}


IMPORTS = {name: imported(name, path) for name, path in MODULES.items()}


def package(name: str) -> str:
    """The folder of a module, empty at the top."""
    parts = MODULES[name].relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def test_no_import_is_in_a_cycle() -> None:
    assert sum(map(len, IMPORTS.values())) > 200
    TopologicalSorter(IMPORTS).prepare()
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


def test_few_private_files_are_beside_what_users_call_and_no_function_has_the_name_of_a_file() -> None:
    assert len([path for path in PACKAGE.glob("_*.py") if path.name != "__init__.py"]) <= 12
    functions = {name for name in remat.__all__ if callable(getattr(remat, name))}
    assert functions.isdisjoint(path.stem for path in MODULES.values())
    assert set(dir(remat)) == {*remat.__all__, "__version__"}


def test_the_design_page_names_every_file_and_each_package_has_a_docstring_of_one_line() -> None:
    text = (PACKAGE.parent / "docs" / "internals" / "design.md").read_text()
    entries = text.split("\n## Packages\n")[1].split("\n## ")[0].split("\n- **`")[1:]
    rows = {entry.split("/`")[0]: entry for entry in entries}
    folders = {folder.name: folder for folder in PACKAGE.glob("_*") if (folder / "__init__.py").exists()}
    assert set(rows) == set(folders) and set(PACKAGES) <= set(folders)
    for row, folder in [(text, PACKAGE), *((rows[name], folders[name]) for name in folders)]:
        files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert {name for name in files if f"`{name}`" not in row} == set()
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert folder == PACKAGE or (docstring and len(docstring.splitlines()) == 1)


def test_the_package_does_not_import_dynamo() -> None:
    """Its import takes as long as that of torch."""
    code = "import sys, remat, remat.nn; print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    assert run_program(code).strip() == "[]"
