"""What the first run of a region saves as it is, without a slot, and what becomes of changes in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import KB, N, Wrap, assert_same, grad, plain, rand
from host_copies import Copies
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.measure import count_ops, held_bytes
from remat import MutationError, RematWarning, policies, remat
from remat.compat import checkpoint_wrapper


def an_input_of_the_outer_region(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    """In the forward it has a history from before the outer region, in the recompute it has none."""
    inner = lambda a, b: wrap(lambda y: ((y @ a).tanh() @ b).tanh())
    return wrap(lambda a, b: (inner(a, b)(a.sin()) * b).exp())(x * 1, w * 1)


def captured_by_both_regions(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    inner = wrap(lambda y: (w.register_hook(torch.sin), ((y @ h).tanh() @ w).tanh())[1])  # one hook, in the first run
    return wrap(lambda y: (inner(y.sin()) * h).exp() @ w)(x * 1)


def made_in_the_outer_region(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    inner = lambda h: wrap(lambda y: ((y @ h).tanh() * h).exp())
    return wrap(lambda x: inner((x @ w).sin())(x.cos()))(x)


def the_result_of_another_region(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    count = torch.ones(4, dtype=x.dtype)  # which the region changes and saves
    h = wrap(lambda x: (x @ w * count.add_(1)).sin())(x)
    return wrap(lambda y: ((y[1:3] @ h).tanh() * h.t()[:2]).exp())(w)


OLDER = [an_input_of_the_outer_region, captured_by_both_regions, made_in_the_outer_region, the_result_of_another_region]


@pytest.mark.parametrize("options", [{}, {"determinism_check": "none"}, {"determinism_check": "values"}], ids=str)
@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks around"])
@pytest.mark.parametrize("program", OLDER, ids=lambda program: program.__name__)
def test_tensors_that_are_older_than_the_region(program: Callable, hooks: bool, options: dict) -> None:
    def run(wrap: Wrap) -> Any:
        x, w = rand(4, 4), rand(4, 4, seed=1)
        with saved_tensors_hooks(Tensor.clone, lambda t: t) if hooks else torch.enable_grad():
            out = program(wrap, x, w)
        return grad(out, (x, w), retain_graph=True), grad(out, (x, w))

    assert_same(run(lambda fn: remat(fn, **options)), run(plain))


def test_what_exists_without_the_region_takes_no_memory_and_no_recompute() -> None:
    """Views of inputs, captured tensors, and what an older graph made, in one region and in nested ones."""
    x, w = rand(N, N), rand(N, N, seed=1)
    h = (x @ w).sin()
    fn = lambda x: (x.t() * w[:]) * h.view(-1).view(N, N) + x[:] * x
    for region in (remat(fn), remat(remat(fn))):
        assert held_bytes(region, x) == KB  # the result
    assert count_ops(lambda: grad(remat(lambda x: x.t() * w[:])(x), x))["aten.mul"] == 1 + 1
    with pytest.warns(RematWarning, match="matched none"):  # in the backward, which reads an input only
        grad(remat(torch.sin, policy=policies.save_matmuls)(x), x)
    hidden = {constant := w.detach()}
    for held in (lambda: constant, lambda: next(iter(hidden))):  # the search finds the first one only
        for fn in (lambda x, c: (x * c).exp(), torch.mul, remat(torch.mul)):
            out = remat(lambda x, fn=fn, held=held: fn(x, held()))(x)
            constant.add_(1)
            with pytest.raises(MutationError):
                grad(out, x)


def saves_and_changes(x: Tensor) -> Tensor:
    y = x.exp()
    z = y.tanh()
    with torch.no_grad():
        y.add_(1)
    return z


@pytest.mark.parametrize("fn", [saves_and_changes, lambda x: x.exp().mul_(2).exp()])
def test_a_value_that_the_region_saves_and_then_changes_is_an_error_as_without_remat(fn: Callable) -> None:
    x = rand(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(fn(x), x)
    with pytest.raises(MutationError, match=r"float64\[3\], was saved for the backward .* `\.clone\(\)`"):
        grad(remat(fn, early_stop=False)(x), x)


def test_an_input_that_the_region_changes_and_saves_may_not_change_before_the_backward() -> None:
    x, count, fn = rand(3), torch.zeros(3, dtype=torch.float64), lambda x, count: x * count.add_(1)
    for wrap, error in ((plain, "modified by an inplace operation"), (remat, "was saved for the backward and then ch")):
        out = wrap(fn)(x, count)
        count.add_(1)
        with pytest.raises(RuntimeError, match=error):
            grad(out, x)
    inside = lambda x, count: torch.autograd.grad((count.add_(x.sum()) * x).sum(), x, create_graph=True)[0].sin()
    with pytest.raises(MutationError, match="argument count requires grad and was changed in place by the region"):
        remat(inside)(x, count)


def test_a_region_that_starts_again_has_its_old_values() -> None:
    """It does so where it calls `torch.func.grad`, but not after an error of its own."""
    x, count, calls = rand(3), torch.ones(3, dtype=torch.float64), torch.zeros(())
    fn = lambda x, count, derive: calls.add_(1) * count.add_(1) * derive(lambda x: x.sin().sum())(x)
    assert_same(grad(remat(fn)(x, count, torch.func.grad), x), (-2 * x.sin(),))
    with pytest.raises(RuntimeError, match="Boolean value"):
        remat(fn)(x, count, lambda f: bool(x) or f)
    assert count.tolist() == [3, 3, 3] and calls == 2


def test_what_is_older_may_not_change_after_a_region_that_runs_a_backward_pass() -> None:
    x, h = rand(3), rand(3, seed=1).exp()
    derive = lambda x: torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]
    out = remat(lambda x, fn=(h.mul,): fn[0](derive(x).exp()))(x)  # the search doesn't find `h`
    h.add_(1)
    with pytest.raises(MutationError, match="A captured tensor"):
        grad(out, x)


@pytest.mark.parametrize("mode", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
@pytest.mark.parametrize("training", [True, False])
def test_tensors_without_data(training: bool, mode: Any) -> None:
    """Their content can't be compared."""
    for check in ("metadata", "values"):
        with mode:
            norm, x = nn.BatchNorm1d(4).train(training), torch.randn(3, 4, requires_grad=True)
            remat(lambda x, mask: (norm(x) * mask).sin(), determinism_check=check)(x, torch.ones(3, 4)).sum().backward()
            assert x.grad is not None and x.grad.shape == (3, 4)


@pytest.mark.parametrize("made", ["outside", "inside"])
@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
@pytest.mark.parametrize("sine", [torch.sin, lambda x: torch.func.vjp(torch.cos, x)[1](-x)[0] / x], ids=["", "vjp"])
def test_inference_tensors(sine: Callable, nested: bool, made: str) -> None:
    """They have no version counter, and hooks of an outer region get them."""

    def twos() -> Tensor:
        with torch.inference_mode():
            return torch.full((3,), 2.0, dtype=torch.float64)

    def program(wrap: Wrap) -> Callable:
        inner = wrap(lambda x, c: sine(x + c) * c.shape[0])
        fn = lambda x: inner(x.exp(), given if made == "outside" else twos()).cos()
        return wrap(fn) if nested else fn

    given, x = twos(), rand(3)
    assert_same(grad(program(remat)(x), x), grad(program(plain)(x), x))


def test_inputs_are_offloaded_outside_of_other_regions_and_of_transforms(far: Copies) -> None:
    layer, h = checkpoint_wrapper(nn.Tanh(), offload_to_cpu=True), rand(3, 3) * 2
    calls = layer, remat(lambda h: layer(h) * 2), torch.func.grad(lambda h: layer(h).sum()), remat(torch.tanh)
    assert [(call(h), len(far.out))[1] for call in calls] == [1, 1, 1, 1]
