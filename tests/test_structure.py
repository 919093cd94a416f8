"""The package is read room by room: imports go one way, and no file is too long to hold in mind."""

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
# Each may use those before it. `_modules` is above all of them, with what users call.
ROOMS = [
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
    """The modules of the package that one imports, also within functions, but not for types alone."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
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


def room(name: str) -> str:
    """The folder that a module is in; empty for those at the top."""
    parts = MODULES[name].relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def test_no_import_is_in_a_cycle() -> None:
    assert sum(map(len, IMPORTS.values())) > 200
    TopologicalSorter(IMPORTS).prepare()


def test_a_cycle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({**IMPORTS, "remat._core.private": {"remat.nn"}}).prepare()


def test_rooms_import_those_below() -> None:
    used = {(room(name), room(other)) for name, others in IMPORTS.items() for other in others}
    between = {(a, b) for a, b in used if a in ROOMS and b in ROOMS and a != b}
    assert len(between) > 20
    assert all(ROOMS.index(b) < ROOMS.index(a) for a, b in between), between
    # Below what users call there are rooms, and the family of errors.
    used_by_rooms = set().union(*(others for name, others in IMPORTS.items() if room(name) in ROOMS))
    assert {name for name in used_by_rooms if not room(name)} == {"remat.errors"}


def test_files_are_short() -> None:
    lines = {path: path.read_text().splitlines() for path in MODULES.values()}
    assert {path.name: len(text) for path, text in lines.items() if len(text) > 300} == {}
    assert max(len(line) for text in lines.values() for line in text) <= 120


def test_the_top_is_what_users_call() -> None:
    private = [path.name for path in PACKAGE.glob("_*.py") if path.name != "__init__.py"]
    assert len(private) <= 12
    # Whoever looks for a function finds no module of its name, and the other way round.
    functions = {name for name in remat.__all__ if callable(getattr(remat, name))}
    assert functions.isdisjoint(path.stem for path in MODULES.values())


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_what_it_is_for(name: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text()))
    assert text and len(text.splitlines()) == 1


def test_the_import_does_not_take_in_dynamo() -> None:
    """That takes as long as to import torch."""
    code = "import sys, remat, remat.nn; print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert run.stdout.strip() == "[]"
