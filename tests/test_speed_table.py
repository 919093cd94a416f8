"""The two sides of each row of the speed benchmark compute the same, so that their times can be compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import CASES, Case, table

SAME = [case for case in CASES if case.numerator.factor == case.denominator.factor]


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_both_sides_have_the_same_gradients(case: Case) -> None:
    gradients = [leaves(side.programs[0]()()) for side in (case.numerator, case.denominator)]
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(map(torch.equal, *gradients))


def leaves(result) -> list[torch.Tensor]:
    """The gradients, in whatever structure a transform gives them."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for each in (result.values() if isinstance(result, dict) else result) for leaf in leaves(each)]


def test_the_table_has_every_row() -> None:
    measurements = [case.measure(seconds=0) for case in CASES[:2]]
    assert all(m.rounds == 3 and m.ratio > 0 for m in measurements)
    text = table(measurements)
    assert all(m.name in text for m in measurements)
