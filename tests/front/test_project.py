"""The project's files agree with each other."""

import re
from pathlib import Path

import remat

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
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    tested = re.search(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert tested and re.findall(r"[\d.]+", tested.group(1)) == pythons


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]


def test_relative_links_lead_to_a_file() -> None:
    links = [(page, link) for page in pages() for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))]
    local = [(page, link) for page, link in links if not link.startswith("http")]
    assert len(local) > 50
    assert [(page.name, link) for page, link in local if not (page.parent / link).exists()] == []
