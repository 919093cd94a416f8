"""The notebook runs from top to bottom, and prints what is stored in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/tutorials/tour.ipynb"
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for jvp


def without_version(text: str) -> str:
    return re.sub(r"torch \d\S*,", "torch ...,", text)


def test_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change, store new outputs: `jupyter nbconvert --to notebook --execute --inplace`."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    pyplot.close("all")  # figures of other tests
    namespace: dict[str, Any] = {}
    printed = plots = 0
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec("".join(cell["source"]), namespace)
        streams = [output for output in cell["outputs"] if output["output_type"] == "stream"]
        assert {output["name"] for output in streams} <= {"stdout"}  # warnings would have paths of a machine
        expected = "".join("".join(output["text"]) for output in streams)
        assert without_version(capsys.readouterr().out) == without_version(expected)
        images = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        assert len(images) == len(pyplot.get_fignums())
        pyplot.close("all")
        printed, plots = printed + bool(expected), plots + len(images)
    assert printed >= 5 and plots == 2
