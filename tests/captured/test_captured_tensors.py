"""Regions that capture tensors: the tensors of the first run are used again, and changes of them are noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import assert_same
from places import HIDDEN, PLACES, Build, work
from torch import Tensor, nn

from remat import MutationError, remat

CHANGED = (
    " was changed in place between the region's forward and its backward, which recomputes the region and would give "
    "wrong gradients. "
)  # fmt: skip
OF_PARAMETERS = "The usual cause is an `optimizer.step()` between the two: call it after the backward."
OF_OTHERS = "Change it after the backward, use the out-of-place operation, or give the region a copy: `.clone()`."
every_place = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(params=[True, False], ids=["requires grad", "plain"])
def w(request: pytest.FixtureRequest) -> Tensor:
    return torch.randn(3).requires_grad_(request.param)


def check_bound_anew(build: Build, w: Tensor, wrap: Callable = remat) -> None:
    """The gradients are those of `w`, though the place has another tensor since, which remains there."""
    x, other = torch.randn(3, requires_grad=True), torch.full((3,), 7.0)
    inputs = [t for t in (x, w) if t.requires_grad]
    fn, rebind = build(w)
    out, expected = wrap(fn)(x), work(x, w)
    rebind(other)
    gradients = [torch.autograd.grad(out.sum(), inputs, retain_graph=True) for _ in range(2)]
    assert_same((out.detach(), gradients), (expected.detach(), [torch.autograd.grad(expected.sum(), inputs)] * 2))
    assert torch.equal(fn(x), work(x, other))


@every_place
def test_another_tensor_in_the_place_before_the_backward(place: str, w: Tensor) -> None:
    check_bound_anew(PLACES[place][1], w)


@every_place
def test_a_change_in_place_is_an_error_that_names_the_place(place: str, w: Tensor) -> None:
    path, build = PLACES[place]
    x = torch.randn(3, requires_grad=True)
    loss = remat(build(w).fn)(x).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError) as raised:
        loss.backward()
    text, _, region = str(raised.value).partition("\nThe region is ")
    assert text == f"captured {path}{CHANGED}{OF_PARAMETERS if w.requires_grad else OF_OTHERS}"
    assert region == f"{raised.value.region}." and f" called at {__file__}:" in region
    assert x.grad is None and w.grad is None


@every_place
def test_transforms_follow_the_tensor(place: str) -> None:
    def second_gradient(wrap: Callable) -> Tensor:
        first = torch.func.grad(lambda w: wrap(PLACES[place][1](w).fn)(torch.ones(3)).sum())
        return torch.func.grad(lambda w: first(w).sum())(torch.linspace(0.1, 1, 3))

    assert_same(second_gradient(remat), second_gradient(lambda fn: fn))


@pytest.mark.parametrize("place", HIDDEN)
def test_a_place_that_is_not_found(place: str, w: Tensor) -> None:
    """A change in place is an error. With another tensor in the place the result is right, or an error."""
    x = torch.randn(3, requires_grad=True)
    out, expected = remat(HIDDEN[place](w).fn)(x), work(x, w)
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x))
    loss = remat(HIDDEN[place](w).fn)(x).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError, match=r"[Cc]aptured .* changed in place"):
        loss.backward()
    # Where autograd doesn't follow the tensor, only its values show the change.
    try:
        check_bound_anew(HIDDEN[place], w, remat if w.requires_grad else remat(determinism_check="values"))
    except RuntimeError as error:
        assert "captured" in str(error) or "same each time" in str(error)


def test_a_parameter_that_hooks_of_the_module_replace_around_the_forward() -> None:
    """`remat.remat(module)` runs them outside the region, whose recompute uses the parameter of the first run."""
    module, x, full = nn.Linear(3, 3), torch.randn(2, 3), nn.Parameter(torch.randn(3, 3))
    region, shard = remat(module), module.weight
    region.register_forward_pre_hook(lambda module, args: setattr(module, "weight", full))
    region.register_forward_hook(lambda module, args, out: setattr(module, "weight", shard))
    region(x).exp().sum().backward()
    assert_same((full.grad,), torch.autograd.grad(nn.functional.linear(x, full, module.bias).exp().sum(), full))
    assert module.weight is shard and shard.grad is None
