"""`GraphExecGroup` compared with torch's checkpoint: one recompute for several backward passes in its scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import assert_same, rand
from side_by_side import Runs, both, is_torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

import remat.compat
from benchmarks.measure import PeakMemory, gc_disabled
from remat import policies
from remat import remat as transform
from remat.compat import GraphExecGroup, checkpoint


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results that have nothing in common but the input."""
    return x.sin().exp(), x.cos().exp()


def deep(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


def gradient(out: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(out.sum(), x, **options)[0]


def gradients(fn: Callable, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(gradient(out, x, retain_graph=True) for out in fn(x))


@both
@pytest.mark.parametrize("retain", [False, True])
def test_one_recompute_for_two_passes(module: Any, retain: bool) -> None:
    x, runs = rand(3), Runs(two)
    first, second = module.checkpoint(runs, x, use_reentrant=False)
    with module.GraphExecGroup():
        found = gradient(first, x, retain_graph=True), gradient(second, x, retain_graph=retain)
    assert runs.count == 2
    assert_same(found, gradients(two, x))
    first, second = transform(runs)(x)
    with torch.utils.checkpoint.GraphExecGroup():
        found = gradient(first, x, retain_graph=True), gradient(second, x)
    assert_same(found, gradients(two, x))
    assert runs.count == 4


@both
def test_a_pass_in_no_group_or_in_another_one_recomputes(module: Any) -> None:
    x, runs = rand(3), Runs(two)
    group = module.GraphExecGroup()
    for i in range(2):  # a group can be used for another graph
        first, second = module.checkpoint(runs, x, use_reentrant=False)
        gradient(first, x, retain_graph=True)
        with group:
            one = gradient(first, x, retain_graph=True)
        with group:  # the same one
            other = gradient(second, x, retain_graph=True)
        assert runs.count == 4 * i + 3
        with module.GraphExecGroup():
            assert_same((one, other, gradient(second, x)), (*gradients(two, x), other))
        assert runs.count == 4 * i + 4


@both
@pytest.mark.parametrize("retain", [False, True])
def test_passes_that_overlap_are_an_error(module: Any, retain: bool) -> None:
    x = rand(3)
    out = module.checkpoint(deep, x, use_reentrant=False)
    with module.GraphExecGroup():
        gradient(out, x, retain_graph=True)
        with pytest.raises(CheckpointError, match=r"[Oo]verlap"):
            gradient(out, x, retain_graph=retain)
    assert_same(gradient(out, x), gradient(deep(x), x))


def test_passes_may_have_inputs_in_common() -> None:
    """Saved inputs need no recompute, so all passes may read them; torch raises an error for that too."""
    x = rand(3)
    for module in (torch.utils.checkpoint, remat.compat):
        out = module.checkpoint(torch.sin, x, use_reentrant=False)
        with module.GraphExecGroup():
            found = gradient(out, x, retain_graph=True)
            if is_torch(module):
                with pytest.raises(CheckpointError, match="overlap"):
                    gradient(out, x)
            else:
                assert_same(gradient(out, x), found)


def shares_a_product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return h.sin().exp(), h.cos().exp()


def test_values_that_a_policy_saves_can_be_read_by_both() -> None:
    """Both passes need the product. Other values can't be read by both."""
    x, w = rand(4, 4), rand(4, 4, seed=1)
    runs = Runs(shares_a_product)
    first, second = checkpoint(runs, x, w, policy=policies.save_matmuls)
    with GraphExecGroup():
        found = gradient(first, x, retain_graph=True), gradient(second, x, retain_graph=True)
        assert runs.count == 2
        with pytest.raises(CheckpointError, match="need the same value"):
            gradient(first, x)
    assert_same(found, gradients(lambda x: shares_a_product(x, w), x))


def test_reading_a_saved_tensor_outside_of_a_pass_releases_nothing() -> None:
    x, runs = rand(3), Runs(deep)
    out = checkpoint(runs, x)
    with GraphExecGroup():
        looked = out.grad_fn._saved_self
        found = gradient(out, x)
    assert torch.equal(looked, x.sin().exp())
    assert_same(found, gradient(deep(x), x))
    assert runs.count == 3


@both
def test_nested_regions_are_recomputed_as_often_as_for_one_pass(module: Any) -> None:
    """A chain of regions with two heads, in two nested regions, and a pass for each head."""
    runs = [Runs(two) for _ in range(3)]

    def nested(x: Tensor, levels: int = 2) -> tuple[Tensor, Tensor]:
        if levels:
            return module.checkpoint(nested, x, levels - 1, use_reentrant=False)
        y = x
        for fn in runs:
            x, y = module.checkpoint(lambda x, y, fn=fn: (fn(x)[0], fn.fn(y)[1]), x, y, use_reentrant=False)
        return x, y

    x = rand(3)
    first, second = nested(x)
    with module.GraphExecGroup():
        found = gradient(first, x, retain_graph=True), gradient(second, x)
    counts = [fn.count for fn in runs]
    y = z = x
    for fn in runs:
        y, z, fn.count = two(y)[0], two(z)[1], 0
    assert_same(found, (gradient(y, x), gradient(z, x)))
    gradient(sum(nested(x)), x)
    assert counts == [fn.count for fn in runs]


def live(memory: PeakMemory, x: Tensor) -> int:
    return memory.live // x.nbytes


@both
@pytest.mark.parametrize("retain", [False, True])
def test_values_live_as_long_as_a_pass_can_need_them(module: Any, retain: bool) -> None:
    x = rand(64)
    with gc_disabled(), PeakMemory() as memory:
        first, second = module.checkpoint(two, x, use_reentrant=False)
        assert live(memory, x) == 2
        with module.GraphExecGroup() as group:
            torch.autograd.grad(first.sum(), x, retain_graph=True)
            assert live(memory, x) == 3  # what the second pass needs
            torch.autograd.grad(second.sum(), x, retain_graph=retain)
            assert live(memory, x) == 2
        del group
        assert live(memory, x) == 2
        del first, second
        assert live(memory, x) == 0


def test_values_that_no_pass_has_read_are_freed_with_the_group() -> None:
    """torch saves them as long as the graph lives."""
    x = rand(64)
    found = []
    for module in (torch.utils.checkpoint, remat.compat):
        with gc_disabled(), PeakMemory() as memory:
            outs = module.checkpoint(two, x, use_reentrant=False)
            with module.GraphExecGroup():
                torch.autograd.grad(outs[0].sum(), x, retain_graph=True)
            found.append(live(memory, x))
    assert found == [3, 2]
