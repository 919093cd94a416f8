"""The structure of the package and the types of its public names; the project's files agree with each other."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest
from cases import ROOT, run_program

import remat
from remat._core import versions

PACKAGE = Path(remat.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
# Each may import the packages before it. `_modules` and `_planning` are above all, with the public modules.
ORDER = "core, policy, ambient, captured, region, selective, engine, functorch, compile, measure"
PACKAGES = [f"_{name}" for name in ORDER.split(", ")]
CASES = "tests/typing_cases.py"
BIN = Path(sys.executable).parent
PYRIGHT = shutil.which("pyright", path=str(BIN))


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
    text = (ROOT / "docs" / "internals" / "design.md").read_text()
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


def test_the_versions_are_the_same_everywhere() -> None:
    texts = {path: (ROOT / path).read_text("utf-8") for path in ("pyproject.toml", "CHANGELOG.md", "Makefile")}
    project = texts["pyproject.toml"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", remat.__version__)
    assert 'dynamic = ["version"]' in project and not re.search(r"^version\b", project, re.MULTILINE)
    assert re.findall(r"^## (\S+)", texts["CHANGELOG.md"], re.MULTILINE)[0] == remat.__version__
    tested = json.loads((ROOT / ".ci/versions.json").read_text(encoding="utf-8"))
    assert "fromJSON" in (workflow := (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    assert "< .ci/versions.json" in workflow
    pythons, torches = tested["python"], [version.removesuffix(".0") for version in tested["torch"]]
    assert re.findall(r"Programming Language :: Python :: (3\.\d+)", project) == pythons
    assert f'"torch>={torches[0]}"' in project and f'requires-python = ">={pythons[0]}"' in project
    assert f'target-version = "py{pythons[0].replace(".", "")}"' in project
    assert [f"{major}.{minor}" for major, minor in (versions.OLDEST, versions.NEWEST)] == [torches[0], torches[-1]]
    default = re.search(r"^TORCH \?= (.*)$", texts["Makefile"], re.MULTILINE)
    assert default and default.group(1) in tested["torch"]
    (without,) = tested["exclude"]
    sentence = (
        f"with Python {pythons[0]} to {pythons[-1]} and torch {', '.join(torches[:-1])} and {torches[-1]} "
        f"(not {without['torch'].removesuffix('.0')} with Python {without['python']})"
    )
    for page in ("README.md", "CHANGELOG.md", "docs/index.md", "docs/reference/limits.md"):
        assert sentence in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_relative_links_lead_to_a_file() -> None:
    pages = [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))]
    local = [(page, link) for page, link in links if not link.startswith("http")]
    assert len(local) > 50
    assert [(page.name, link) for page, link in local if not (page.parent / link).exists()] == []
