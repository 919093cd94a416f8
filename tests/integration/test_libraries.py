"""Each library in the table of `benchmarks.libraries`: correct, at no higher cost than its own checkpointing."""

import copy
from typing import Any

import pytest
import torch
from cases import ROOT, assert_same
from torch import Tensor

from benchmarks.libraries import LIBRARIES, Library, measure, step, table
from benchmarks.measure import leaked_bytes
from remat import policies

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collector_off")]

DOCS = ROOT / "docs" / "how-to" / "libraries.md"

libraries = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: f"{library.name}, {library.write}")


def made(library: Library) -> Any:
    pytest.importorskip(library.package)
    return library.make()


@libraries
def test_loss_and_gradients(library: Library) -> None:
    """They are those of the plain model in two steps, with dropout, router logits, batch norm and a policy."""
    plain = made(library)
    models = [library.ours(copy.deepcopy(plain), policy) for policy in (None, policies.save_matmuls)]
    for _ in range(2):
        expected = step(library, plain)
        for model in models:
            assert_same(step(library, model), expected)
            assert_same(list(model.buffers()), list(plain.buffers()))


@libraries
def test_costs(library: Library) -> None:
    made(library)
    row = measure(library)
    assert row.passed, row
    assert row.ours.kept < row.save_matmuls.kept < row.plain.kept
    assert row.save_matmuls.products <= row.ours.products
    assert row.own.products > row.plain.products  # the reference does recompute
    if library is next(each for each in LIBRARIES if each.name == library.name):
        assert lines_of(library, table([row])) == lines_of(library, DOCS.read_text())


def lines_of(library: Library, text: str) -> list[str]:
    """A library's lines in the tables that `python -m benchmarks.libraries` prints: saved, peak and recomputed."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {library.name} |")]
    assert len(lines) == 3
    return lines


@libraries
def test_everything_is_freed_after_a_step(library: Library) -> None:
    """Also between steps: models collect attentions and router logits in lists."""
    model = library.ours(made(library), None)
    step(library, model)
    assert leaked_bytes(step, library, model) <= sum(p.nbytes for p in model.parameters() if p.requires_grad)
    parameters = dict(model.named_parameters())
    gradients = [torch.zeros_like(p) for p in parameters.values() if p.requires_grad]

    def two_steps() -> None:
        for _ in range(2):
            loss = library.loss(model)
            found = torch.autograd.grad(loss, [p for p in parameters.values() if p.requires_grad], allow_unused=True)
            for total, gradient in zip(gradients, found, strict=True):
                if isinstance(gradient, Tensor):
                    total.add_(gradient)

    two_steps()
    assert leaked_bytes(two_steps) == 0
