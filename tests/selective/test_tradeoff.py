"""``remat.pareto``: the choices of a function, or an error if there is nothing to choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat

X, COUNTS = torch.ones(4, 4), torch.ones(4, dtype=torch.int64)
frozen = nn.Linear(4, 4).requires_grad_(False)

NOTHING: dict[str, tuple[Callable, Any]] = {
    "no floating-point tensor": (lambda i: (i * 2).sin(), COUNTS),
    "no tensor": (lambda scale: torch.ones(3).mul(scale).sin(), 2.0),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_choose_is_an_error(name: str) -> None:
    fn, x = NOTHING[name]
    with pytest.raises(remat.RematError, match="There is nothing to choose"):
        remat.pareto(fn, x)


def test_without_regions_there_is_nothing_to_choose() -> None:
    with remat.disable_remat(), pytest.raises(remat.RematError, match="or remat is disabled here"):
        remat.pareto(torch.sin, X)
    assert len(remat.pareto(torch.func.grad(lambda x: x.sin().exp().sum()), X).points) == 1


def test_a_curve_says_whether_it_has_all_choices() -> None:
    curve = remat.pareto(lambda x: torch.tanh(x @ x).sin(), X)
    assert curve.is_exact and "hull" not in str(curve)
    assert str(replace(curve, is_exact=False)).endswith("(the corners of the convex hull)")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_choices_are_what_a_region_saves_then(requires_grad: bool) -> None:
    """If no tensor requires grad, all that can be differentiated are."""
    fn = lambda x: frozen(torch.tanh(x @ x)).sin()
    curve = remat.pareto(fn, X.clone().requires_grad_(requires_grad), cost="flops")
    assert [point.nbytes for point in curve.points] == sorted({point.nbytes for point in curve.points})
    assert curve.points[0].flops > curve.points[-1].flops == 0
    for point in curve.points:
        region, x = remat.remat(fn, policy=curve.at(point.nbytes)), X.clone().requires_grad_()
        assert sum(row.nbytes for row in remat.saved_residuals(region, x)) == point.nbytes
