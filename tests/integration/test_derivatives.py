"""Libraries that take second derivatives or per-sample gradients, with models whose blocks are regions."""

import pytest
import torch
from cases import ROOT, assert_same

from benchmarks.derivatives import USES, Use, peaks, peaks_table, seeded, with_regions
from benchmarks.measure import leaked_bytes
from remat import policies

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collector_off")]

DOCS = ROOT / "docs" / "how-to" / "libraries.md"

uses = pytest.mark.parametrize("use", USES, ids=lambda use: use.name)


@uses
def test_results(use: Use) -> None:
    """They are those of the plain model, also in a second call."""
    pytest.importorskip(use.package)
    plain = use.make()
    models = [with_regions(use.make(), policy) for policy in (None, policies.save_matmuls)]
    for _ in range(2):
        expected = seeded(use, plain)
        for model in models:
            assert_same(seeded(use, model), expected, use.exact)


@uses
def test_peak(use: Use) -> None:
    """It is below that of the plain model, and about that of torch's checkpoint where this has right results."""
    pytest.importorskip(use.package)
    row = peaks(use)
    assert row.passed, row
    if torch.__version__.startswith("2.13."):  # other versions have other decompositions
        line = next(line for line in peaks_table([row]).splitlines() if line.startswith(f"| {use.name} |"))
        assert line in DOCS.read_text().splitlines()


@uses
def test_everything_is_freed(use: Use) -> None:
    """What the library itself keeps is not counted."""
    pytest.importorskip(use.package)
    plain, ours = use.make(), with_regions(use.make())
    for model in (plain, ours):
        seeded(use, model)
    assert leaked_bytes(seeded, use, ours) <= leaked_bytes(seeded, use, plain)
