"""Below all levels: changes in place, comparisons of runs, errors, and first runs that are started again."""

import copy
from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from both import ALL, RECOMPUTE, Fn, V, W, Wrap, X, Y, both, pushed, rows, summed, through_autograd
from cases import SineAndCosine, assert_same, plain, rand, repeated
from surroundings import assert_as_before, surroundings
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import MutationError, RecomputeMismatchError, is_recomputing, policies, remat

# A gradient for an operand without a batch dimension, of a region whose other operand has one, must not be summed.
SHARED: dict[str, Callable[[Fn, Tensor], Any]] = {
    "vmap(grad), shared": lambda g, x: vmap(grad(lambda x, y: g(x * W[1], y).sum(), (0, 1)), (None, 0))(x, rows(x)),
    "jvp(vmap(grad)), shared": lambda g, x: jvp(vmap(grad(summed(g)), (None, 0)), (x, rows(x)), (x.cos(), rows(x))),
    "vmap(vmap(grad)), shared": lambda g, x: vmap(vmap(grad(summed(g)), (0, None)), (None, 0))(rows(x), rows(x)),
}
REPEATED = RECOMPUTE | SHARED
EVERY = ALL | SHARED


def steady(x: Tensor, y: Tensor = V) -> Tensor:
    return ((x @ W).sin() * 1.0).cos() @ W * y


def drifting(x: Tensor, y: Tensor = V) -> Tensor:
    """The same operations on other numbers."""
    return ((x @ W).sin() * (1.5 if is_recomputing() else 1.0)).cos() @ W * y


def drifting_little(x: Tensor, y: Tensor = V) -> Tensor:
    """One number differs, in its last bits."""
    h = (x @ W).sin()
    by = torch.tensor(1e-15 if is_recomputing() else 0.0, dtype=h.dtype)
    return (h + torch.zeros_like(h).index_put((torch.tensor(0),), by)).cos() @ W * y


@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.save_ops("aten.sin")], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_equal_values_raise_no_error(name: str, policy: Any) -> None:
    both(lambda wrap: EVERY[name](wrap(steady), V), policy=policy, determinism_check="values")
    nested = lambda wrap: wrap(lambda x, y=V: wrap(steady)(x.sin(), y).cos())
    both(lambda wrap: EVERY[name](nested(wrap), V), determinism_check="values")


@pytest.mark.parametrize("name", EVERY)
def test_values_that_an_outer_recompute_skips_are_not_compared(name: str) -> None:
    """Autograd saves the result of a step in a norm that the recompute of the outer region skips."""

    def nested(wrap: Wrap) -> Fn:
        inner = wrap(lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]), policy=policies.everything_saveable)
        middle = wrap(lambda x: inner(x).sin(), determinism_check="values")
        return wrap(lambda x, y=V: middle(x) * y, policy=policies.save_ops("aten.mul"))

    both(lambda wrap: EVERY[name](nested(wrap), V))


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("name", REPEATED)
def test_other_values_are_found(name: str, policy: Any) -> None:
    compared = remat(determinism_check="values", policy=policy)
    nested = compared(lambda x, y=V: compared(drifting)(x.sin(), y).cos())
    for region in (compared(drifting), compared(drifting_little), nested):
        with pytest.raises(RecomputeMismatchError, match="checksum"):
            REPEATED[name](region, V)
    REPEATED[name](remat(drifting), V)  # not compared by default


@pytest.mark.parametrize("transform", [grad, jacrev, lambda f: vmap(grad(f))])
def test_a_region_that_changes_its_argument_is_refused(transform: Callable) -> None:
    """Plain torch.func allows it where the argument is an intermediate."""
    with pytest.raises(MutationError, match=r"was changed in place by the region, .*`\.clone\(\)`"):
        transform(lambda x: remat(lambda x: x.mul_(2).sin())(x.clone()).sum())(X)
    silent = remat(lambda x: (torch.no_grad()(x.mul_)(2), x.sin())[1])
    with pytest.raises(MutationError, match=r"changes an input in place that has a tangent\. Change a copy"):
        jacfwd(transform(lambda x: silent(x.clone()).sum()))(X)


Seen = make_dataclass("Seen", ["count"])
CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "list": (list, lambda seen, x: seen.append(x)),
    "dict in a list": (lambda: [{"n": 1}], lambda seen, x: seen[0].update(n=seen[0]["n"] + 1)),
    "dataclass": (lambda: Seen(1), lambda seen, x: setattr(seen, "count", seen.count + 1)),
    "tensor in a dict": (lambda: {"h": V}, lambda seen, x: seen.update(h=seen["h"] * 2)),
}
CALLS_GRAD = grad(lambda x: x.sin().sum())


@pytest.mark.parametrize("fn", [torch.sin, CALLS_GRAD], ids=["sin", "grad"])
@pytest.mark.parametrize("name", ["grad", "vmap", "jvp", "hessian", "autograd(grad)", "autograd"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_region_that_changes_a_container_among_its_arguments_is_refused(kind: str, name: str, fn: Fn) -> None:
    """It gets a copy, except in plain autograd if its function doesn't call torch.func."""
    make, change = CONTAINERS[kind]
    step = lambda x, *, seen: (change(seen, x), fn(x))[1]
    if name == "autograd" and fn is torch.sin:
        return both(lambda wrap: (seen := make(), ALL[name](lambda x: wrap(step)(x, seen=seen), V)))
    with pytest.raises(MutationError, match=r"changes a list, .*\. Return the new values .*\nThe region is <lambda>"):
        ALL[name](lambda x: remat(step)(x, seen=make()), V)
    both(lambda wrap: ALL[name](lambda x: wrap(lambda x, seen: step(x, seen=copy.deepcopy(seen)))(x, make()), V))


@pytest.mark.parametrize("name", ["jvp", "jacfwd", "hessian", "jvp(grad)", "grad(jvp)", "grad(vmap)", "dual"])
def test_an_argument_that_is_not_followed_may_be_changed(name: str) -> None:
    """It is made inside of the transforms."""

    def program(wrap: Wrap) -> Any:
        region = wrap(lambda x, count: (count.add_(1), (x + count).sin())[1])

        def called(x: Tensor) -> Tensor:
            count = torch.zeros(4, dtype=X.dtype)
            return region(region(x, count), count) + count

        return ALL[name](called, X)

    both(program)


def test_an_argument_that_gets_a_tangent_is_refused() -> None:
    """The tensor outside would not get it, so its later use would have no derivative."""
    region = remat(lambda x, kept: (kept.copy_(x), x.sin())[1])
    for transform in (pushed, lambda f: pushed(grad(summed(f))), hessian):
        with pytest.raises(MutationError, match=r"gives it a tangent.*out-of-place|was changed in place"):
            transform(lambda x: region(x, kept := torch.zeros_like(X)) * kept)(X)


def pull_after(call: Callable, before: bool, change: Callable) -> None:
    out, pull = vjp(call, x := X.clone())
    if before:
        pull(out)
    change(x)
    pull(out)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("level", [lambda f: f, vmap, grad])
def test_an_argument_that_is_changed_before_the_pullback(level: Callable, before: bool) -> None:
    call = level(remat(lambda x: x.sin() * x if level is not grad else (x.sin() * x).sum()))
    with pytest.raises(MutationError, match=r"argument x was .*\nThe region is <lambda> called at .*test_bottom"):
        pull_after(call, before, lambda x: x.add_(1))


@pytest.mark.parametrize("sparse", [False, True])
def test_another_tensor_that_is_changed_before_the_pullback(sparse: bool) -> None:
    """A captured one, which may be sparse, or a tangent."""
    w = W.to_sparse() if sparse else W.clone()
    with pytest.raises(MutationError, match="closure variable 'w'"):
        pull_after(remat(lambda x: (w @ x).sin()), False, lambda _: w.mul_(2))
    if not sparse:
        with pytest.raises(MutationError, match="the derivative of argument"):
            pull_after(lambda x: jvp(remat(torch.sin), (x,), (w,))[1], False, lambda _: w.mul_(2))


@pytest.mark.parametrize(("name", "again"), [*((name, False) for name in EVERY), *((name, True) for name in REPEATED)])
def test_an_error_in_user_code_leaves_nothing_behind(name: str, again: bool) -> None:
    def fails(x: Tensor, y: Tensor = V) -> Tensor:
        z = x.sin() * y
        if is_recomputing() or not again:
            raise KeyError("mine")
        return z.exp()

    before = surroundings()
    with torch.autocast("cpu"), pytest.raises(KeyError, match="mine"):
        EVERY[name](remat(fails), V)
    assert_as_before(before)
    both(lambda wrap: EVERY[name](wrap(steady), V))


def test_cotangents_that_autograd_follows_below_two_transforms() -> None:
    """The tangent of the region's operand has no effect on its result's tangent, a cotangent with its number has."""

    def program(wrap: Wrap) -> Any:
        a, b, c = (t.clone().requires_grad_() for t in (X, Y, W))

        def pulled(a: Tensor) -> Tensor:
            def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
                copy = a.clone()
                return wrap(lambda unused: torch.maximum(copy, b * b))(a) * c

            return jacrev(lambda v: fn(a * v.sum(), b, c + v[0])[0])(b[1]).sum(0) + a

        return torch.autograd.grad(jvp(pulled, (a,), (a.sin(),))[1].sin().sum(), (a, b, c))

    both(program)


def test_a_graph_with_many_paths_is_searched_once() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x = repeated(lambda x: x + x, 60)(x)
        return grad(lambda x: (x * 2.0**-60).sin().sum())(x) + y.detach()

    both(lambda wrap: through_autograd(wrap(fn), X, Y), exact=True)


def test_an_autograd_function_in_an_inner_region_saves_its_results() -> None:
    """It calls the hooks under the modes of the first run, which don't see what the hooks do."""

    def program(wrap: Callable) -> Any:
        p, q = rand(4), rand(4, seed=1)
        inner = wrap(lambda q: torch.mul(*SineAndCosine.apply(q)))
        fn = wrap(lambda p, q: jvp(lambda p: inner(q) * p, (p,), (q,))[1], policy=policies.everything_saveable)
        return torch.autograd.grad(fn(p, q).sum(), (p, q), allow_unused=True)

    assert_same(program(remat), program(plain))
