"""Hooks on gradients that a region registers under torch.func: they act on the same gradients as without remat.

A hook on a tensor that the region gets or captures receives the gradient of all uses of that tensor, inside the region
and outside. A hook on a tensor that is made inside acts on the gradient of the innermost level only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

from benchmarks.measure import assert_freed_without_gc, leaked_bytes, peak_bytes
from remat import policies, remat

Fn = Callable[..., Tensor]
Wrap = Callable[[Fn], Fn]
X = rand(3, 3, grad=False)
Y = rand(3, 3, seed=1, grad=False)
RAN: list[str] = []


def plain(fn: Fn) -> Fn:
    return fn


def hook(tensor: Tensor, name: str = "hook") -> Any:
    """The hook reads the gradient, so its result would differ if the gradient had a visible batch dimension."""

    def changed(g: Tensor) -> Tensor:
        RAN.append(name)
        return g * 1.5 * g.sum().cos()

    return tensor.register_hook(changed) if tensor.requires_grad else None


# --- where functions register hooks -----------------------------------------------------------------------------------


def on_made(x: Tensor) -> Tensor:
    h = x.sin()
    hook(h)
    return h.sin() * x.cos()


def on_argument(x: Tensor) -> Tensor:
    hook(x)
    return x.sin().cos()


def on_both(x: Tensor) -> Tensor:
    h = x.exp()
    hook(x, "argument")
    hook(h, "made")
    return h.sin() * x


def made_by_autograd(x: Tensor) -> Tensor:
    energy = (x.sin() * x).sum()
    if not energy.requires_grad:
        return x.sin()
    (g,) = torch.autograd.grad(energy, x, create_graph=True)
    hook(g)
    return g.sin() * x


PROGRAMS: dict[str, Callable[[Wrap], Fn]] = {
    "made": lambda wrap: wrap(on_made),
    "argument": lambda wrap: wrap(on_argument),
    "both": lambda wrap: wrap(on_both),
    "a gradient": lambda wrap: wrap(made_by_autograd),
    "used outside": lambda wrap: lambda x: x.cos() * wrap(on_argument)(x) * x,
    "given twice": lambda wrap: lambda x: wrap(lambda a, b: on_argument(a) * b.sin())(x, x),
    "in two regions": lambda wrap: lambda x: wrap(on_argument)(x) * wrap(on_both)(x),
    "in one called twice": lambda wrap: (lambda f: lambda x: f(x) * f(x.sin()))(wrap(on_argument)),
    "intermediate": lambda wrap: lambda x: wrap(on_argument)(x * 2) * x,
    "captured": lambda wrap: lambda x: captures(wrap, x)(x.cos()),
    "inside a region": lambda wrap: wrap(lambda x: wrap(on_argument)(x) * x),
    "inside a region, intermediate": lambda wrap: wrap(lambda x: wrap(on_argument)(x * 2).sin()),
    "inside a region, made": lambda wrap: wrap(lambda x: wrap(on_made)(x * 2).sin()),
    "inside a region, captured": lambda wrap: wrap(lambda x: captures(wrap, x)(x.cos())),
    "by both regions": lambda wrap: wrap(lambda x: (hook(x), wrap(on_argument)(x) * x)[1]),
    "in a transform": lambda wrap: wrap(lambda x: grad(lambda y: on_both(y).sum())(x) * x),
    "in a transform, of what is around": lambda wrap: wrap(in_transform),
}


def captures(wrap: Wrap, x: Tensor) -> Fn:
    def fn(y: Tensor) -> Tensor:
        hook(x)
        return x.sin() * y

    return wrap(fn)


def in_transform(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        hook(x)
        return (y * x).sin().sum()

    return grad(inner)(x.cos()) * x


class Detaches(torch.nn.Module):
    """Its hook is on a parameter, which has a different name in each region that captures it."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(Y.clone())
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        def fn(a: Tensor) -> Tensor:
            inner = self.wrap(lambda p: a * p.detach())
            out = jvp(inner, (a,), (a.cos(),))[1] + a.sin()
            hook(self.weight)
            return out

        return sum(vjp(self.wrap(fn), x)[1](x)) * self.weight


# --- transforms -------------------------------------------------------------------------------------------------------


def by_grad(fn: Fn) -> Fn:
    return grad(lambda x: fn(x).sum())


def from_leaf(fn: Fn) -> Fn:
    """By plain autograd, from a new leaf."""

    def call(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(fn(x).sin().sum(), x)[0]

    return call


def twice(fn: Fn) -> Fn:
    def call(x: Tensor) -> Tensor:
        out, pull = vjp(fn, x)
        return pull(out)[0] + pull(x)[0]

    return call


TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "autograd": from_leaf,
    "grad": by_grad,
    "jacrev": jacrev,
    "vjp, pulled twice": twice,
    "grad(grad)": lambda fn: by_grad(by_grad(fn)),
    "vmap(grad)": lambda fn: vmap(by_grad(fn)),
    "jvp(grad)": lambda fn: lambda x: sum(jvp(by_grad(fn), (x,), (x.cos(),))),
    "grad(vmap(grad))": lambda fn: by_grad(vmap(by_grad(fn))),
    "autograd(grad)": lambda fn: from_leaf(by_grad(fn)),
    "autograd, given from outside": lambda fn: from_leaf(lambda x: by_grad(lambda y: fn(x * y) * y)(Y)),
    "grad, given from outside": lambda fn: by_grad(lambda x: by_grad(lambda y: fn(x * y) * y)(Y)),
    "autograd, not followed": lambda fn: from_leaf(lambda x: by_grad(lambda y: fn(x) * y.sin())(Y)),
    "grad, not followed": lambda fn: by_grad(lambda x: by_grad(lambda y: fn(x) * y.sin())(Y)),
    "autograd, given twice": lambda fn: from_leaf(lambda x: grad(lambda y, z: (fn(x) * fn(y) * fn(z)).sum())(x, x)),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_same_as_without_remat(name: str, program: str) -> None:
    """Twice, as the second call uses what the first one recorded."""
    transform = TRANSFORMS[name]
    expected = transform(PROGRAMS[program](plain))(X)
    region = PROGRAMS[program](remat)
    for _ in range(2):
        assert_same(transform(region)(X), expected, exact=False)


@pytest.mark.parametrize(
    "policy",
    [policies.everything_saveable, policies.save_ops("aten.sin", "aten.exp"), policies.save_matmuls],
    ids=["everything", "sin and exp", "matmuls"],
)
@pytest.mark.parametrize("name", ["grad", "grad(grad)", "vmap(grad)", "autograd(grad)"])
@pytest.mark.filterwarnings("ignore:The policy")
def test_under_a_policy(name: str, policy: Any) -> None:
    for program in PROGRAMS.values():
        expected = TRANSFORMS[name](program(plain))(X)
        found = TRANSFORMS[name](program(lambda fn: remat(fn, policy=policy)))(X)
        assert_same(found, expected, exact=False)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if not name.startswith("in a transform")])
@pytest.mark.parametrize("name", ["grad", "jacrev", "autograd"])
def test_hooks_run_as_often_as_without_remat(name: str, program: str) -> None:
    """Under one level that differentiates. (If the function itself differentiates, this is part of each run.)"""
    counts = []
    for wrap in (plain, remat):
        RAN.clear()
        TRANSFORMS[name](PROGRAMS[program](wrap))(X)
        counts.append(sorted(RAN))
    assert counts[0] == counts[1]
    assert counts[0]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_hook_that_is_removed(name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        for handle in (hook(x), hook(h)):
            if handle is not None:
                handle.remove()
        return h * x

    RAN.clear()
    region = remat(fn)
    for _ in range(2):
        assert_same(TRANSFORMS[name](region)(X), TRANSFORMS[name](lambda x: x.sin() * x)(X), exact=False)
    assert not RAN


@pytest.mark.parametrize("name", ["grad", "grad(grad)"])
def test_in_an_abandoned_first_run(name: str) -> None:
    """A region that draws random numbers, or reads a captured tensor that was not found before, restarts."""

    class Hidden:
        def __init__(self, tensor: Tensor) -> None:
            self.read = lambda: self.tensors()[0]
            self.tensors = iter([[tensor]] * 99).__next__

    def program(wrap: Wrap) -> Fn:
        def outer(x: Tensor) -> Tensor:
            hidden = Hidden(x.cos())

            def fn(x: Tensor) -> Tensor:
                hook(x)
                return torch.rand(3, dtype=x.dtype) * on_both(x) * hidden.read()

            return wrap(fn)(x) * x

        return outer

    results = []
    for wrap in (plain, remat, remat):
        torch.manual_seed(0)
        transform = TRANSFORMS[name](program(wrap))
        results.append((vmap(lambda x: transform(x), randomness="same")(X[None]), torch.rand(2)))
    assert_same(results[1], results[0], exact=False)
    assert_same(results[2], results[0], exact=False)


def test_of_a_parameter_in_regions_that_restart() -> None:
    def run(wrap: Wrap) -> tuple:
        RAN.clear()
        module, x = Detaches(wrap), X.clone().requires_grad_()
        results = [torch.autograd.grad(wrap(module.forward)(x).sum(), (x, module.weight)) for _ in range(2)]
        return results, len(RAN)

    (found, ran), (expected, times) = run(remat), run(plain)
    assert_same(found, expected, exact=False)
    assert ran == times


def test_once_accumulated() -> None:
    """`register_post_accumulate_grad_hook` on a parameter that is captured."""

    def run(wrap: Wrap) -> tuple:
        w = X.clone().requires_grad_()
        seen = []

        def fn(y: Tensor) -> Tensor:
            w.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
            return (y * w).sin() * w

        by_grad(wrap(fn))(Y).sum().backward()
        return w.grad, seen

    (grads, seen), expected = run(remat), run(plain)
    assert len(seen) == 1
    assert_same((grads, seen), expected, exact=False)


def test_memory() -> None:
    """A region with hooks saves only its inputs, also where each level takes its own derivative."""

    def program(wrap: Wrap) -> Fn:
        def chain(x: Tensor) -> Tensor:
            for _ in range(8):
                x = wrap(lambda x: on_both(on_both(x).sin().exp().sin()))(x)
            return x

        return chain

    x = rand(64, 64, grad=False)
    for name, share in (("grad", 0.5), ("vmap(grad)", 0.7)):
        ours = TRANSFORMS[name](program(remat))
        ours(x)
        assert peak_bytes(ours, x) < share * peak_bytes(TRANSFORMS[name](program(plain)), x), name
        assert leaked_bytes(ours, x) == 0


def test_everything_is_freed() -> None:
    with assert_freed_without_gc() as watch:
        x = X.clone()
        out = by_grad(remat(on_both))(x)
        watch(x, out)
        del x, out


@pytest.mark.parametrize("inner", ["grad", "vmap"])
def test_hook_registered_in_an_inner_transform(inner: str) -> None:
    """The hook is on a tensor of the region's own level."""
    w = rand(3, 3, seed=2)

    def run(wrap: Wrap) -> Any:
        def fn(x: Tensor) -> Tensor:
            h = x.sin() * w
            if inner == "grad":
                grad(lambda y: (hook(h), (y * x).sum())[1])(x)
            else:
                vmap(lambda y: (hook(h), y * 2)[1])(torch.stack([x, x]))
            return h.cos()

        value = grad(lambda x: wrap(fn)(x).sum())(X)
        return value, torch.autograd.grad(value.sum(), w)

    assert_same(run(remat), run(plain), exact=False)


def test_tensors_that_only_levels_below_differentiate() -> None:
    """The function's own level does not: as without a region, the recompute registers no hook either."""
    w = rand(3, 3, seed=2)

    def run(wrap: Wrap) -> Any:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            h = w.sin()

            def inner(y: Tensor) -> Tensor:
                if h.requires_grad:
                    hook(h)
                return y.sum()

            grad(inner)(x)
            return h

        def loss(x: Tensor) -> tuple[Tensor, Tensor]:
            out = wrap(fn)(x, w)
            return out.sum(), out

        _, out = grad(loss, has_aux=True)(X)
        return out, torch.autograd.grad(out.sum(), w)

    assert_same(run(remat), run(plain), exact=False)


def test_an_abandoned_first_run_in_a_region_leaves_no_hook() -> None:
    """Nothing is recorded for these functions yet, so the inner region restarts below its level."""

    def scaled(x: Tensor) -> Tensor:
        if x.requires_grad:  # at the level of ``grad`` it does not
            x.register_hook(lambda g: g * g.sum())
        return x * 3

    def run(wrap: Wrap) -> Tensor:
        fn = wrap(lambda x: wrap(scaled)(x * 2) * 5)
        x = X.clone().requires_grad_()
        return torch.autograd.grad(grad(lambda y: (fn(x) * y).sum())(x).sum(), x)[0]

    assert_same(run(remat), run(plain))
