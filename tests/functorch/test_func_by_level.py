"""Functions that act on one level of torch.func, or have rules of their own: each level takes its own derivative.

`detach_`, `.data` and `requires_grad = False` cut a tensor from the graph of the innermost level only. An autograd
Function has a gradient and a rule for `vmap`, but that rule may have another gradient, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import assert_same, rand
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from benchmarks.measure import assert_freed_without_gc, count_ops, leaked_bytes, peak_bytes
from remat import checkpoint_name, is_recomputing, policies, remat
from remat._core import known

Fn = Callable[[Tensor], Tensor]
Wrap = Callable[[Fn], Fn]
X = rand(3, 3, grad=False)
W = rand(3, 3, seed=1, grad=False)


def plain(fn: Fn) -> Fn:
    return fn


# --- functions --------------------------------------------------------------------------------------------------------


def detaches(x: Tensor) -> Tensor:
    y = x.sin()
    y.detach_()
    return checkpoint_name(y * x.exp(), "product").sin() * x


def detaches_function(x: Tensor) -> Tensor:
    h = x.sin()
    y = torch.detach_(h.cos())
    return (y * h).exp()


def reads_data(x: Tensor) -> Tensor:
    return (x.sin().data * x.cos()).exp()


def changes_data(x: Tensor) -> Tensor:
    y = x.sin()
    y.data.mul_(2.0)
    return y * x


def freezes_input(x: Tensor) -> Tensor:
    x.requires_grad = False
    return x.sin() * x


def product(x: Tensor) -> Tensor:
    y = x.cos()
    y.detach_()
    return (x @ W).sin() @ W * y


class SavesMore(torch.autograd.Function):
    """Saves different tensors for forward mode and for the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * y

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        _, y = ctx.saved_tensors
        return tangent * y


class StraightThrough(torch.autograd.Function):
    """Rounds, with the gradient of the identity; the gradient of the `vmap` rule would be zero."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x * 4).round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 4 * torch.ones_like(x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 4

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor) -> tuple:
        return (x * 4).round(), in_dims[0]


def saves_more(x: Tensor) -> Tensor:
    return checkpoint_name(SavesMore.apply(x.sin()), "product").cos() * x


def straight_through(x: Tensor) -> Tensor:
    return StraightThrough.apply(x.sin()).cos() * x


CUTS = [detaches, detaches_function, reads_data, changes_data, freezes_input, product]
FUNCTIONS = [saves_more, straight_through]

WRAPS: dict[str, Wrap] = {
    "no policy": remat,
    "matmuls": lambda fn: remat(fn, policy=policies.save_matmuls),
    "sin": lambda fn: remat(fn, policy=policies.save_ops("aten.sin")),
    "names": lambda fn: remat(fn, policy=policies.save_only_these_names("product")),
    "everything": lambda fn: remat(fn, policy=policies.everything_saveable),
    "values": lambda fn: remat(fn, determinism_check="values"),
    "twice": lambda fn: remat(remat(fn)),
}


# --- transforms -------------------------------------------------------------------------------------------------------


def by_grad(fn: Fn) -> Fn:
    return grad(lambda x: fn(x).sum())


def by_jvp(fn: Fn) -> Fn:
    return lambda x: sum(jvp(fn, (x,), (x.cos(),)))


def by_autograd(fn: Fn) -> Fn:
    """`torch.autograd.grad`; a `torch.func.grad` around it differentiates twice at one level."""
    return lambda x: torch.autograd.grad(fn(x).sin().sum(), x, create_graph=True)[0]


def from_leaf(fn: Fn) -> Fn:
    """By plain autograd, from a new leaf."""

    def call(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(fn(x).sin().sum(), x)[0]

    return call


def dual(fn: Fn) -> Callable[[Tensor], tuple]:
    """By `torch.autograd.forward_ad`."""

    def call(x: Tensor) -> tuple:
        with fwAD.dual_level():
            return tuple(fwAD.unpack_dual(fn(fwAD.make_dual(x, x.cos()))))

    return call


def pulled_twice(fn: Fn) -> Fn:
    def call(x: Tensor) -> Tensor:
        _, pull = vjp(fn, x)
        return vmap(lambda c: pull(c)[0])(torch.stack([x, x.sin()]))

    return call


TRANSFORMS: dict[str, Callable[[Fn], Callable]] = {
    "grad": by_grad,
    "vmap": vmap,
    "jvp": by_jvp,
    "grad(grad)": lambda fn: by_grad(by_grad(fn)),
    "grad(grad(grad))": lambda fn: by_grad(by_grad(by_grad(fn))),
    "vmap(grad)": lambda fn: vmap(by_grad(fn)),
    "vmap(vmap(grad))": lambda fn: vmap(vmap(by_grad(fn))),
    "vmap(grad(grad))": lambda fn: vmap(by_grad(by_grad(fn))),
    "grad(vmap)": lambda fn: by_grad(vmap(fn)),
    "grad(vmap(grad))": lambda fn: by_grad(vmap(by_grad(fn))),
    "jvp(grad)": lambda fn: by_jvp(by_grad(fn)),
    "grad(jvp)": lambda fn: by_grad(by_jvp(fn)),
    "grad(jvp(grad))": lambda fn: by_grad(by_jvp(by_grad(fn))),
    "jvp(jvp(grad))": lambda fn: by_jvp(by_jvp(by_grad(fn))),
    "jvp(vmap(grad))": lambda fn: by_jvp(vmap(by_grad(fn))),
    "vmap(jvp(grad))": lambda fn: vmap(by_jvp(by_grad(fn))),
    "vmap(grad(jvp))": lambda fn: vmap(by_grad(by_jvp(fn))),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "jacrev(grad)": lambda fn: jacrev(by_grad(fn)),
    "vmap(jacrev)": lambda fn: vmap(jacrev(fn)),
    "hessian": hessian,
    "vmap of a pullback": pulled_twice,
    "autograd": from_leaf,
    "autograd(grad)": lambda fn: from_leaf(by_grad(fn)),
    "autograd(grad(grad))": lambda fn: from_leaf(by_grad(by_grad(fn))),
    "autograd(vmap(grad))": lambda fn: from_leaf(vmap(by_grad(fn))),
    "autograd inside grad": lambda fn: by_grad(by_autograd(fn)),
    "autograd twice inside grad": lambda fn: by_grad(by_autograd(by_autograd(fn))),
    "autograd inside vmap(grad)": lambda fn: vmap(by_grad(by_autograd(fn))),
    "autograd inside grad(grad)": lambda fn: by_grad(by_grad(by_autograd(fn))),
    "autograd inside autograd(grad)": lambda fn: from_leaf(by_grad(by_autograd(fn))),
    "dual": dual,
    "dual(grad)": lambda fn: dual(by_grad(fn)),
    "dual(grad(grad))": lambda fn: dual(by_grad(by_grad(fn))),
    "dual(vmap(grad))": lambda fn: dual(vmap(by_grad(fn))),
}


REFUSALS = RuntimeError, AssertionError  # for example, `detach_` under a vmap level raises


def compare(name: str, program: Callable[[Wrap], Fn], wrap: Wrap = remat) -> None:
    """Twice, as the second call uses what the first one recorded. Where plain torch raises, a region does too."""
    transform, ours = TRANSFORMS[name], program(wrap)
    try:
        expected = transform(program(plain))(X.clone())
    except REFUSALS:
        with pytest.raises(REFUSALS):
            transform(ours)(X.clone())
        return
    for _ in range(2):
        assert_same(transform(ours)(X.clone()), expected, exact=False)


@pytest.mark.parametrize("fn", [detaches, reads_data, freezes_input, *FUNCTIONS])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_same_as_without_remat(name: str, fn: Fn) -> None:
    compare(name, lambda wrap: wrap(fn))


@pytest.mark.parametrize("fn", [detaches_function, changes_data])
@pytest.mark.parametrize("name", ["grad", "grad(grad)", "vmap(grad)", "grad(vmap(grad))", "autograd(grad)"])
def test_other_ways_to_cut_the_graph(name: str, fn: Fn) -> None:
    compare(name, lambda wrap: wrap(fn))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("fn", [detaches, product, saves_more])
@pytest.mark.parametrize("name", ["grad(grad)", "vmap(grad)", "grad(vmap(grad))", "jvp(vmap(grad))", "autograd(grad)"])
def test_under_every_policy(name: str, fn: Fn, wrap: str) -> None:
    compare(name, lambda wrap: wrap(fn), WRAPS[wrap])


@pytest.mark.parametrize("fn", [detaches, straight_through])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_another_region(name: str, fn: Fn) -> None:
    def program(wrap: Wrap) -> Fn:
        inner = wrap(fn)
        return wrap(lambda x: inner(x.cos() * 1).sin() * x)

    compare(name, program)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_a_region_that_runs_each_level(name: str) -> None:
    """The outer region runs each level, the inner one doesn't need to; their calls are compared nevertheless."""

    def program(wrap: Wrap) -> Fn:
        inner = wrap(straight_through)

        def outer(x: Tensor) -> Tensor:
            y = x.sin()
            y.detach_()
            return inner(x.cos()).sin() * y

        return wrap(outer)

    compare(name, program)


@pytest.mark.parametrize("fn", [detaches, *FUNCTIONS])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_a_shared_weight(fn: Fn, argnums: Any) -> None:
    def program(wrap: Wrap) -> Callable:
        inner = wrap(fn)
        outer = wrap(lambda w, x: inner((x @ w).cos()).sin() * x)
        return vmap(grad(lambda w, x: outer(w, x).sum(), argnums=argnums), in_dims=(None, 0))

    ours = program(remat)
    for _ in range(2):  # in the first call the inner region is restarted
        assert_same(ours(W, X), program(plain)(W, X), exact=False)


# --- where a level is restored ----------------------------------------------------------------------------------------


def hook(x: Tensor) -> None:
    if x.requires_grad:  # because of this read the level is restored where another level is below
        x.register_hook(lambda g: g * 2)


def hooks_made(x: Tensor) -> Tensor:
    y = x.sin()
    hook(y)
    return (y * y).cos() * x


def hooks_argument(x: Tensor) -> Tensor:
    hook(x)
    return (x * x).cos()


def hooks_function(x: Tensor) -> Tensor:
    y = StraightThrough.apply(x.sin())
    hook(y)
    return y.cos() * x


def detaches_if_asked(x: Tensor) -> Tensor:
    y = x.sin()
    if y.requires_grad:
        y.detach_()
    return y * x


def reads_data_of_argument(x: Tensor) -> Tensor:
    return (x.data * x.cos()).exp()


def drawing(fn: Fn) -> Fn:
    """It draws random numbers, so the level is restored even if it is the only one."""

    def draws(x: Tensor) -> Tensor:
        return fn(x) * torch.rand(3, 3, dtype=x.dtype)

    draws.__name__ = f"{fn.__name__}_drawing"
    return draws


ASKING = [hooks_made, hooks_argument, hooks_function, detaches_if_asked, reads_data_of_argument]
PUT_BACK = [*ASKING, *map(drawing, (*ASKING, detaches, reads_data))]

NESTS: dict[str, Callable[[Wrap, Fn], Fn]] = {
    "one": lambda wrap, fn: wrap(fn),
    "two": lambda wrap, fn: wrap(wrap(fn)),
    "three": lambda wrap, fn: wrap(wrap(wrap(fn))),
    "a loop in a region": lambda wrap, fn: wrap(lambda x: (lambda step: step(step(x).sin()))(wrap(fn))),
    "between operations": lambda wrap, fn: wrap(lambda x: wrap(fn)(x.cos() * 1).sin() * x),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("fn", PUT_BACK, ids=lambda fn: fn.__name__)
def test_restored_levels(fn: Fn, nest: str) -> None:
    def outcome(name: str, region: Fn) -> Any:
        torch.manual_seed(0)
        try:
            return TRANSFORMS[name](region)(X.clone())
        except REFUSALS:  # for random numbers under a vmap level
            return None

    names = ["grad(grad)", "grad", "jacrev", "jvp(grad)", "vmap(grad)", "autograd(grad)", "autograd inside grad"]
    expected = {name: outcome(name, NESTS[nest](plain, fn)) for name in names}
    for name in names:
        known._of_functions.clear()
        region = NESTS[nest](remat, fn)
        for _ in range(2):
            assert_same(outcome(name, region), expected[name], exact=False)
    for name in names:  # what it recorded under one transform is valid under others
        assert_same(outcome(name, region), expected[name], exact=False)


TWO_ARGUMENTS: dict[str, Callable[[Callable], Callable]] = {
    "grad(grad)": lambda loss: grad(lambda h, x: grad(loss)(h, x).sin().sum(), (0, 1)),
    "grad(grad), by the others": lambda loss: grad(lambda h, x: grad(loss, 1)(h, x).sin().sum()),
    "jvp(grad)": lambda loss: lambda h, x: jvp(grad(loss), (h, x), (h.sin(), x.cos())),
    "autograd(grad)": lambda loss: lambda h, x: from_leaf(lambda x: grad(loss)(h, x))(x),
    "vmap(grad)": lambda loss: vmap(grad(loss), in_dims=(0, None)),
}


@pytest.mark.parametrize("nest", ["once", "twice", "three times", "a loop in a region"])
@pytest.mark.parametrize("fn", ASKING)
@pytest.mark.parametrize("name", TWO_ARGUMENTS)
def test_levels_that_track_different_arguments(name: str, fn: Fn, nest: str) -> None:
    """The region runs with its levels restored, and so do regions inside it, some of them under a single level."""

    def program(wrap: Wrap) -> Callable:
        step = lambda h, x: fn(h * x.sin()) + h
        loop = lambda h, x: step(step(h, x), x).sin()
        if nest == "a loop in a region":
            step = wrap(step)
            region = wrap(loop)
        else:
            region = step
            for _ in range(["once", "twice", "three times"].index(nest) + 1):
                region = wrap(region)
        return TWO_ARGUMENTS[name](lambda h, x: region(h, x).sin().sum())

    known._of_functions.clear()
    expected, ours = program(plain)(X, W), program(remat)
    for _ in range(2):
        assert_same(ours(X, W), expected, exact=False)


@pytest.mark.parametrize("captures", [False, True])
def test_outer_regions_do_not_record_queries_of_inner_regions(captures: bool) -> None:
    """When the inner region reads `requires_grad`, this is not mistaken for a read by the function."""
    runs: list[bool] = []

    def fn(h: Tensor, x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return h * x.sin() + h.data * x

    def loss(h: Tensor, x: Tensor) -> Tensor:
        if captures:
            return remat(lambda h: remat(lambda h: fn(h, x))(h))(h).sum()
        return remat(remat(fn))(h, x).sum()

    grad(lambda h, x: grad(loss)(h, x).sin().sum(), (0, 1))(X, W)
    assert runs[:4] == [False] * 3 + [True]  # each of the two regions is restarted once


def test_the_case_that_is_differentiated_through() -> None:
    """By hand: the gradient of sin(x) * x with sin(x) a constant is sin(x)."""

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.detach_()
        return (y * x).sum()

    assert_same(vmap(grad(remat(fn)))(X), X.sin())
    assert_same(grad(lambda x: grad(remat(fn))(x).sum())(X), X.cos())


# --- runs and memory --------------------------------------------------------------------------------------------------


def test_runs() -> None:
    runs: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return detaches(x)

    per_sample = vmap(by_grad(remat(fn)))
    per_sample(X)
    assert runs == [False, False, True]  # the first run is abandoned once
    runs.clear()
    per_sample(X)
    assert runs == [False, True]


@pytest.mark.parametrize("fn", CUTS)
def test_one_level_runs_the_region_once(fn: Fn) -> None:
    """Under one `grad` there are no levels to separate: the region runs once, and its recompute ends early."""
    runs: list[bool] = []

    def counted(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return fn(x)

    region = remat(counted)
    vmap(by_grad(region))(X.clone())
    runs.clear()
    by_grad(region)(X.clone())
    assert runs == ([False] if fn is freezes_input else [False, True])  # without a derivative no recompute is needed


def test_one_level_stops_early() -> None:
    fn = lambda x: detaches(x) @ W
    region = remat(fn)
    assert count_ops(vmap(by_grad(region)), X)["aten.mm"] > count_ops(vmap(by_grad(fn)), X)["aten.mm"]
    assert count_ops(by_grad(region), X)["aten.mm"] == count_ops(by_grad(fn), X)["aten.mm"]


@pytest.mark.parametrize("fn", [lambda x: (x.sin() * W.data).exp(), lambda x: (x.sin() * x.detach()).exp()])
def test_data_and_detach_of_inputs_restart_nothing(fn: Fn) -> None:
    runs: list[bool] = []

    def counted(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return fn(x)

    assert_same(vmap(by_grad(remat(counted)))(X), vmap(by_grad(fn))(X))
    assert runs == [False, True]


def test_a_policy_saves_products() -> None:
    """This also holds where each level takes its own derivative."""
    mapped = vmap(by_grad(lambda x: product(x)))
    before = count_ops(mapped, X)["aten.mm"]
    for wrap, more in ((remat, 2), (WRAPS["matmuls"], 0)):
        ours = vmap(by_grad(wrap(product)))
        ours(X)
        assert count_ops(ours, X)["aten.mm"] == before + more


@pytest.mark.parametrize("fn", [detaches, *FUNCTIONS])
@pytest.mark.parametrize("name", ["vmap(grad)", "grad(grad)"])
def test_memory(name: str, fn: Fn) -> None:
    def program(wrap: Wrap) -> Callable:
        region = wrap(lambda x: fn(fn(fn(x).sin()).sin()).sin())

        def chain(x: Tensor) -> Tensor:
            for _ in range(8):
                x = region(x)
            return x

        return TRANSFORMS[name](chain)

    x = rand(64, 64, grad=False)
    ours = program(remat)
    ours(x)
    assert peak_bytes(ours, x) < 0.6 * peak_bytes(program(plain), x)
    assert leaked_bytes(ours, x) == 0


@pytest.mark.parametrize("fn", [detaches, straight_through])
def test_everything_is_freed(fn: Fn) -> None:
    with assert_freed_without_gc() as watch:
        x = X.clone()
        out = vmap(by_grad(remat(fn)))(x)
        watch(x, out)
        del x, out
