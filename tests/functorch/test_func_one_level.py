"""Functions that act on one level of torch.func: a region does the same, or refuses them with the remedy.

`detach_`, `.data` and `requires_grad = False` cut a tensor from the graph of the innermost level only, and a hook gets
the gradient of that level only. An autograd Function may have a rule for `vmap` whose gradient is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

from benchmarks.measure import leaked_bytes, peak_bytes
from remat import RematError, policies, remat

Fn = Callable[[Tensor], Tensor]
Wrap = Callable[[Fn], Fn]
X, Y = rand(3, 3, grad=False), rand(3, 3, seed=1, grad=False)
RAN: list[str] = []


def plain(fn: Fn) -> Fn:
    return fn


def hook(tensor: Tensor) -> None:
    """The hook reads the gradient, so its result would differ if the gradient had a visible batch dimension."""

    def changed(g: Tensor) -> Tensor:
        RAN.append("hook")
        return g * 1.5 * g.sum().cos()

    if tensor.requires_grad:
        tensor.register_hook(changed)


def hooks_made(x: Tensor) -> Tensor:
    h = x.sin()
    hook(h)
    return h.sin() * x.cos()


def hooks_argument(x: Tensor) -> Tensor:
    hook(x)
    return x.sin().cos()


def hooks_gradient(x: Tensor) -> Tensor:
    energy = (x.sin() * x).sum()
    if not energy.requires_grad:
        return x.sin()
    (g,) = torch.autograd.grad(energy, x, create_graph=True)
    hook(g)
    return g.sin() * x


def detaches(x: Tensor) -> Tensor:
    y = x.sin()
    y.detach_()
    return (y * x.exp()).sin() * x


def reads_data(x: Tensor) -> Tensor:
    return (x.sin().data * x.cos()).exp()


def freezes(x: Tensor) -> Tensor:
    x.requires_grad = False
    return x.sin() * x


class StraightThrough(torch.autograd.Function):
    """Rounds, with the gradient of the identity; the gradient of the `vmap` rule would be zero."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x * 4).round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 4

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return (x * 4).round(), dims[0]


class GeneratedRule(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context, backward = StraightThrough.forward, StraightThrough.setup_context, StraightThrough.backward


def rounds(x: Tensor) -> Tensor:
    return StraightThrough.apply(x.sin()) * x


def rounds_by_generated_rule(x: Tensor) -> Tensor:
    return GeneratedRule.apply(x.sin()) * x


ACTS = [hooks_made, hooks_argument, hooks_gradient, detaches, reads_data, freezes, rounds, rounds_by_generated_rule]
NESTS: dict[str, Callable[[Wrap, Fn], Fn]] = {
    "one": lambda wrap, fn: wrap(fn),
    "two": lambda wrap, fn: wrap(wrap(fn)),
    "of an intermediate": lambda wrap, fn: wrap(lambda x: wrap(fn)(x.cos() * 1).sin() * x),
    "twice": lambda wrap, fn: (lambda f: lambda x: f(x) * f(x.sin()))(wrap(fn)),
    "in a transform": lambda wrap, fn: wrap(lambda x: grad(lambda y: fn(y * 1).sum())(x) * x),
}


def by_grad(fn: Fn) -> Fn:
    return grad(lambda x: fn(x).sum())


def from_leaf(fn: Fn) -> Fn:
    """By plain autograd, from a new leaf."""

    def call(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(fn(x * 1).sin().sum(), x)[0]

    return call


def pulled_twice(fn: Fn) -> Fn:
    def call(x: Tensor) -> Tensor:
        out, pull = vjp(fn, x)
        return pull(out)[0] + pull(x)[0]

    return call


SINGLE: dict[str, Callable[[Fn], Fn]] = {"grad": by_grad, "jacrev": jacrev, "vjp, pulled twice": pulled_twice}
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "autograd": from_leaf,
    **SINGLE,
    "grad(grad)": lambda fn: by_grad(by_grad(fn)),
    "vmap(grad)": lambda fn: vmap(by_grad(fn)),
    "jvp(grad)": lambda fn: lambda x: sum(jvp(by_grad(fn), (x,), (x.cos(),))),
    "grad(vmap)": lambda fn: by_grad(vmap(fn)),
    "grad(vmap(grad))": lambda fn: by_grad(vmap(by_grad(fn))),
    "autograd(grad)": lambda fn: from_leaf(by_grad(fn)),
    "autograd, given from outside": lambda fn: from_leaf(lambda x: by_grad(lambda y: fn(x * y) * y)(Y)),
    "grad, not followed": lambda fn: by_grad(lambda x: by_grad(lambda y: fn(x) * y.sin())(Y)),
}
POLICIES = [None, policies.everything_saveable, policies.save_ops("aten.sin", "aten.exp")]


@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("fn", ACTS, ids=lambda fn: fn.__name__)
def test_same_as_without_remat_or_refused(fn: Fn, transform: str, nest: str) -> None:
    try:
        expected = TRANSFORMS[transform](NESTS[nest](plain, fn))(X)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch can't run it")
    for policy in POLICIES:
        region = NESTS[nest](lambda fn: remat(fn, policy=policy), fn)
        try:
            found = TRANSFORMS[transform](region)(X)
        except RematError as error:
            assert any(remedy in str(error) for remedy in ("outside of the region", "Use `.detach()`")), error
            assert may_be_refused(fn, transform), policy
        else:
            assert_same(found, expected, exact=False)


def may_be_refused(fn: Fn, transform: str) -> bool:
    if fn is rounds_by_generated_rule:
        return False
    if fn is rounds:
        return "vmap(grad" in transform
    # `hooks_gradient` asks for a gradient, so its level is restored above the graph.
    return transform not in ("autograd", *SINGLE) or fn in (hooks_argument, hooks_gradient)


@pytest.mark.parametrize("transform", ["grad(grad)", "vmap(grad)", "autograd(grad)"])
@pytest.mark.parametrize("fn", [hooks_made, hooks_argument, detaches, reads_data], ids=lambda fn: fn.__name__)
def test_refused_under_several_levels(fn: Fn, transform: str) -> None:
    with pytest.raises(RematError, match="A region under torch"):
        TRANSFORMS[transform](remat(fn))(X)


@pytest.mark.parametrize("transform", SINGLE)
def test_hooks_run_as_often_as_without_remat(transform: str) -> None:
    counts = []
    for wrap in (plain, remat):
        RAN.clear()
        SINGLE[transform](wrap(hooks_made))(X)
        counts.append(len(RAN))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("fn", [hooks_made, detaches, reads_data])
def test_memory(fn: Fn) -> None:
    """Under a single level such a region saves only its inputs, as any other."""

    def program(wrap: Wrap) -> Fn:
        def chain(x: Tensor) -> Tensor:
            for _ in range(8):
                x = wrap(lambda x: fn(fn(x).sin().exp().sin()))(x)
            return x

        return by_grad(chain)

    x = rand(64, 64, grad=False)
    assert peak_bytes(program(remat), x) < 0.5 * peak_bytes(program(plain), x)
    assert leaked_bytes(program(remat), x) == 0
