"""`GraphExecGroup` compared with torch's checkpoint: one recompute for several backward passes in its scope."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import assert_same, rand
from side_by_side import Runs, both, is_torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import remat.compat
from benchmarks.measure import PeakMemory, count_ops, gc_disabled
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


@both
@pytest.mark.parametrize("retain", [False, True])
def test_one_recompute_for_two_passes(module: Any, retain: bool) -> None:
    x, runs = rand(3), Runs(two)
    first, second = module.checkpoint(runs, x, use_reentrant=False)
    with module.GraphExecGroup():
        one = gradient(first, x, retain_graph=True)
        other = gradient(second, x, retain_graph=retain)
    assert runs.count == 2
    first, second = two(x)
    assert_same((one, other), (gradient(first, x), gradient(second, x)))


@both
def test_outside_of_a_group_each_pass_recomputes(module: Any) -> None:
    x, runs = rand(3), Runs(two)
    first, second = module.checkpoint(runs, x, use_reentrant=False)
    gradient(first, x, retain_graph=True)
    with module.GraphExecGroup():
        gradient(first, x, retain_graph=True)
    with module.GraphExecGroup():
        gradient(first, x, retain_graph=True)
        gradient(second, x)
    assert runs.count == 4


@both
def test_backward_accumulates(module: Any) -> None:
    x = rand(3)
    first, second = module.checkpoint(two, x, use_reentrant=False)
    with module.GraphExecGroup():
        first.sum().backward(retain_graph=True)
        second.sum().backward()
    expected = rand(3)
    for out in two(expected):
        out.sum().backward()
    assert_same(x.grad, expected.grad)


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
def test_groups_in_groups_are_an_error(module: Any) -> None:
    with module.GraphExecGroup():
        with pytest.raises(RuntimeError, match="cannot be nested"):
            with module.GraphExecGroup():
                pass


@both
def test_a_group_for_more_than_one_graph(module: Any) -> None:
    x, runs = rand(3), Runs(two)
    group = module.GraphExecGroup()
    for count in (2, 4, 6):
        with group:
            first, second = module.checkpoint(runs, x, use_reentrant=False)
            one = gradient(first, x, retain_graph=True)
        with group:
            other = gradient(second, x)
        assert runs.count == count
        assert_same((one, other), (gradient(two(x)[0], x), gradient(two(x)[1], x)))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("user")


@both
def test_an_exception_in_a_group(module: Any) -> None:
    x, runs = rand(3), Runs(two)
    first, second = module.checkpoint(runs, x, use_reentrant=False)
    with pytest.raises(KeyError), module.GraphExecGroup():
        gradient(first * Fails.apply(x), x, retain_graph=True)
    with module.GraphExecGroup():  # the one before has ended
        with pytest.raises(KeyError):
            gradient(first * Fails.apply(x), x, retain_graph=True)
        found = gradient(second, x)
    assert_same(found, gradient(two(x)[1], x))


@both
def test_regions_in_a_region(module: Any) -> None:
    """Both passes read what the inner region got from the outer one; each region is recomputed once."""
    inner = Runs(lambda h, v, w: ((h @ v).sin(), (h @ w).sin()))
    outer = Runs(lambda x, v, w: module.checkpoint(inner, x.exp(), v, w, use_reentrant=False))
    x, v, w = rand(3, 3), rand(3, 3, seed=1), rand(3, 3, seed=2)
    first, second = module.checkpoint(outer, x, v, w, use_reentrant=False)
    with module.GraphExecGroup():
        one = gradient(first, v, retain_graph=True)
        other = gradient(second, w)
    assert (inner.count, outer.count) == (2, 2)
    first, second = inner.fn(x.exp(), v, w)
    assert_same((one, other), (gradient(first, v), gradient(second, w)))


@both
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_regions(module: Any, depth: int) -> None:
    """A chain of regions with two heads, in `depth` nested regions, and a pass for each head."""
    runs = [Runs(two) for _ in range(3)]

    def row(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for fn in runs:
            x, y = module.checkpoint(lambda x, y, fn=fn: (fn(x)[0], fn.fn(y)[1]), x, y, use_reentrant=False)
        return x, y

    def nested(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
        if levels == 0:
            return row(x)
        return module.checkpoint(nested, x, levels - 1, use_reentrant=False)

    x = rand(3)
    first, second = nested(x, depth)
    with module.GraphExecGroup():
        found = gradient(first, x, retain_graph=True), gradient(second, x)
    counts = [fn.count for fn in runs]
    y = z = x
    for _ in runs:
        y, z = two(y)[0], two(z)[1]
    assert_same(found, (gradient(y, x), gradient(z, x)))
    for fn in runs:
        fn.count = 0
    first, second = nested(x, depth)
    gradient(first.sum() + second.sum(), x)
    assert counts == [fn.count for fn in runs]  # as many as for one pass


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


@both
def test_inputs_of_inner_regions_stay_alive_for_the_next_pass(module: Any) -> None:
    def inner(h: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (h * v).sin(), (h * w).sin()

    x, v, w = rand(64), rand(64, seed=1), rand(64, seed=2)
    with gc_disabled(), PeakMemory() as memory:
        outs = module.checkpoint(
            lambda x, v, w: module.checkpoint(inner, x.exp(), v, w, use_reentrant=False), x, v, w, use_reentrant=False
        )
        with module.GraphExecGroup():
            torch.autograd.grad(outs[0].sum(), v, retain_graph=True)
            assert live(memory, x) == 4  # results, the inner region's input, and a product
            torch.autograd.grad(outs[1].sum(), w)
            assert live(memory, x) == 3  # that input, for the gradient of x
        del outs
    assert live(memory, x) == 0


@both
def test_selective_contexts_in_a_group(module: Any) -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).sin().exp(), (w @ x).sin().exp()

    context_fn = functools.partial(module.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    first, second = module.checkpoint(fn, x, w, use_reentrant=False, context_fn=context_fn)

    def passes() -> None:
        with module.GraphExecGroup():
            found.append(gradient(first, x, retain_graph=True))
            found.append(gradient(second, x))

    found: list[Tensor] = []
    counts = count_ops(passes)
    assert (counts["aten.mm"], counts["aten.sin"]) == (2, 2)
    assert_same(tuple(found), tuple(gradient(out, x) for out in fn(x, w)))


def shares_a_product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return h.sin().exp(), h.cos().exp()


def test_values_that_a_policy_saves_can_be_read_by_both() -> None:
    """Both passes need the product. It isn't recomputed, so the order of the passes doesn't matter."""
    x, w = rand(4, 4), rand(4, 4, seed=1)
    outs = shares_a_product(x, w)
    expected = gradient(outs[0], x, retain_graph=True), gradient(outs[1], x)
    runs = Runs(shares_a_product)
    first, second = checkpoint(runs, x, w, policy=policies.save_matmuls)
    with GraphExecGroup():
        assert_same((gradient(first, x, retain_graph=True), gradient(second, x)), expected)
    assert runs.count == 2


def test_values_that_a_policy_does_not_save_cannot_be_read_by_both() -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)
    out = checkpoint(shares_a_product, x, w, policy=policies.save_matmuls)[0]
    with GraphExecGroup():
        gradient(out, x, retain_graph=True)
        with pytest.raises(CheckpointError, match="need the same value"):
            gradient(out, x)


def test_regions_of_the_transform_in_a_group() -> None:
    x, runs = rand(3), Runs(two)
    first, second = transform(runs)(x)
    with torch.utils.checkpoint.GraphExecGroup():
        found = gradient(first, x, retain_graph=True), gradient(second, x)
    assert_same(found, tuple(gradient(out, x) for out in two(x)))
    assert runs.count == 2


@both
def test_double_backward_of_a_pass_in_a_group(module: Any) -> None:
    def second(fn: Callable, group: Any) -> Any:
        x = rand(3)
        with group:
            first = gradient(fn(x), x, create_graph=True)
        return first, gradient(first.sin(), x)

    found = second(lambda x: module.checkpoint(deep, x, use_reentrant=False), module.GraphExecGroup())
    assert_same(found, second(deep, nullcontext()))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda fn: torch.func.grad(lambda x: fn(x).sum()),
        lambda fn: torch.func.grad(lambda x: torch.func.grad(lambda x: fn(x).sum())(x).sum()),
        lambda fn: torch.func.hessian(lambda x: fn(x).sum()),
        lambda fn: torch.func.vmap(torch.func.grad(fn)),
        torch.func.jacrev,
        torch.func.jacfwd,
    ],
    ids=["grad", "grad of grad", "hessian", "vmap of grad", "jacrev", "jacfwd"],
)
def test_torch_func_in_a_group(transformed: Callable) -> None:
    x = rand(3, grad=False)
    with GraphExecGroup():
        found = transformed(transform(deep))(x)
    assert_same(found, transformed(deep)(x), exact=False)


@both
def test_a_backward_inside_of_a_region(module: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        y = deep(x)
        return y * gradient(y, x, create_graph=True).exp()

    x = rand(3)
    out = module.checkpoint(fn, x, use_reentrant=False)
    with module.GraphExecGroup():
        found = gradient(out, x)
    assert_same(found, gradient(fn(x), x))


@both
def test_training_with_two_losses(module: Any) -> None:
    """Each step is a forward and two backward passes, over heads that share no saved tensor."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    def trained(call: Callable, group: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            left, right = call(model, torch.randn(5, 3))
            with group():
                left.square().mean().backward(retain_graph=True)
                right.square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    found = trained(lambda model, x: module.checkpoint(model, x, use_reentrant=False), module.GraphExecGroup)
    assert_same(found, trained(lambda model, x: model(x), nullcontext))
