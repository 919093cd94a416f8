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


def case_named(name: str) -> Case:
    (case,) = (case for case in CASES if case.name == name)
    return case


def test_figures_without_a_policy_are_those_counted_by_hand() -> None:
    """Only inputs are saved. All layers are recomputed except the last, whose output the backward doesn't need."""
    row = case_named("none").measure("autograd.grad", SIZES)
    recomputed = (4 + 4) * LINEAR + 2 * SCORES  # q, k, v, the projection, and up, which is four times as wide
    assert row.remat == Figures(kept_bytes=OUTPUT + SCALAR, recomputed_flops=recomputed)
    assert row.bound.recomputed_flops == recomputed + 4 * LINEAR
    assert row.torch == row.remat


def test_figures_of_a_policy_are_those_counted_by_hand() -> None:
    row = case_named("names q, k, v").measure("autograd.grad", SIZES)
    assert row.remat == Figures(4 * OUTPUT + SCALAR, (1 + 4) * LINEAR + 2 * SCORES)


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
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_all_sides_have_the_same_gradients(transform: str, case: Case) -> None:
    arguments = SIZES.arguments()
    expected = program(transform, plain)(*arguments)
    torch.testing.assert_close(program(transform, partial(remat, policy=case.policy))(*arguments), expected)
    if transform == "autograd.grad":
        torch.testing.assert_close(program(transform, case.torch)(*arguments), expected)
