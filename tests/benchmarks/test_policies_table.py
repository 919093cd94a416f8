"""Under every policy a block saves and recomputes no more than under torch's selective checkpoint."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.policies import CASES, TRANSFORMS, Case, Figures, Row, Sizes, program, table
from benchmarks.wrappers import plain
from remat import remat

SIZES = Sizes(batch=2, time=16, width=32)
BATCH, TIME, WIDTH = SIZES.batch, SIZES.time, SIZES.width
POSITIONS = BATCH * TIME
OUTPUT = POSITIONS * WIDTH * 4  # bytes of the block's output, which the loss saves
SCALAR = 4
LINEAR = 2 * POSITIONS * WIDTH * WIDTH  # floating-point operations of a linear layer with equal widths
SCORES = 2 * BATCH * TIME * TIME * WIDTH  # floating-point operations of one of attention's two products


pytestmark = pytest.mark.usefixtures("collector_off")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_figures_are_within_their_bounds(transform: str, case: Case) -> None:
    row = case.measure(transform, SIZES)
    assert row.passed, table([row])


def test_figures_are_those_counted_by_hand() -> None:
    """Without a policy only inputs are saved, and all layers but the last are recomputed."""
    cases = {
        case.name: case.measure("autograd.grad", SIZES) for case in CASES if case.name in ("none", "names q, k, v")
    }
    recomputed = (4 + 4) * LINEAR + 2 * SCORES  # q, k, v, the projection, and up, which is four times as wide
    row = cases["none"]
    assert row.remat == row.torch == Figures(kept_bytes=OUTPUT + SCALAR, recomputed_flops=recomputed)
    assert row.bound.recomputed_flops == recomputed + 4 * LINEAR
    assert cases["names q, k, v"].remat == Figures(4 * OUTPUT + SCALAR, (1 + 4) * LINEAR + 2 * SCORES)


def test_more_in_either_figure_is_a_failure() -> None:
    few, many = Figures(1, 1), Figures(2, 2)
    assert Row("", "", few, few, few).passed
    assert Row("", "", few, None, many).passed
    for more in (Figures(2, 1), Figures(1, 2)):
        assert not Row("", "", more, few, many).passed
        assert not Row("", "", more, many, few).passed
        assert not Row("", "", more, None, few).passed
        assert table([Row("", "", more, None, few)]).endswith("FAIL")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_sides_have_the_same_gradients(case: Case) -> None:
    arguments = SIZES.arguments()
    expected = program("autograd.grad", plain)(*arguments)
    for wrap in (partial(remat, policy=case.policy), case.torch):
        torch.testing.assert_close(program("autograd.grad", wrap)(*arguments), expected)
