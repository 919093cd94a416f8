"""The project's files agree with each other."""

import json
import re
from pathlib import Path

import remat
from remat._core import versions

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_defined_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", remat.__version__)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project and not re.search(r"^version\b", project, re.MULTILINE)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == remat.__version__


def test_the_oldest_python_is_the_same_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    assert f'requires-python = ">={pythons[0]}"' in project
    assert f'target-version = "py{pythons[0].replace(".", "")}"' in project


def test_the_tested_versions_are_those_that_ci_reads() -> None:
    tested = json.loads((ROOT / ".ci/versions.json").read_text(encoding="utf-8"))
    assert "fromJSON" in (workflow := (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    assert "< .ci/versions.json" in workflow
    pythons, torches = tested["python"], [version.removesuffix(".0") for version in tested["torch"]]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r"Programming Language :: Python :: (3\.\d+)", project) == pythons
    assert f'"torch>={torches[0]}"' in project
    assert [f"{major}.{minor}" for major, minor in (versions.OLDEST, versions.NEWEST)] == [torches[0], torches[-1]]
    default = re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
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
