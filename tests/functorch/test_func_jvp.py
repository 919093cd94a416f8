"""`torch.func.jvp`, `linearize` and `jacfwd`: forward mode runs a region once, with its tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, assert_same, cases, flat, rand, repeated
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, linearize, vjp, vmap

from benchmarks.measure import assert_freed_without_gc, count_ops, leaked_bytes, peak_bytes
from remat import policies, remat

Wrap = Callable[[Callable], Callable]
X, Y, W = (rand(4, 4, seed=i, grad=False) for i in range(3))


def plain(fn: Callable) -> Callable:
    return fn


def f(x: Tensor) -> Tensor:
    return torch.tanh(x @ W) @ W


def chain(wrap: Wrap, regions: int) -> Callable[[Tensor], Tensor]:
    return repeated(wrap(f), regions)


def both(program: Callable[[Wrap], Any], exact: bool = False) -> None:
    assert_same(program(remat), program(plain), exact=exact)


@cases(func=True, jvp=True)
def test_value_and_tangents(case: Case) -> None:
    def run(fn: Callable) -> tuple:
        with case.state():
            call, primals = flat(case, fn)
            tangents = tuple(t.cos() for t in primals)
            return jvp(call, primals, tangents), torch.get_rng_state()

    assert_same(run(remat(case.fn)), run(case.fn))


@cases(func=True, jvp=True)
def test_only_one_argument_has_a_tangent(case: Case) -> None:
    def run(fn: Callable) -> tuple:
        with case.state():
            call, (first, *rest) = flat(case, fn)
            return jvp(lambda x: call(x, *rest), (first,), (first.cos(),))

    assert_same(run(remat(case.fn)), run(case.fn))


@cases(func=True, jvp=True, double=True)
def test_forward_over_forward(case: Case) -> None:
    def run(fn: Callable) -> tuple:
        with case.state():
            call, primals = flat(case, fn)
            inner = lambda *args: jvp(call, args, tuple(t.cos() for t in args))
            return jvp(inner, primals, tuple(t.sin() for t in primals))

    assert_same(run(remat(case.fn)), run(case.fn), exact=False)


@cases(func=True, jvp=True, jacobian=True, random=False, vmap=True)
def test_jacfwd(case: Case) -> None:
    def run(fn: Callable) -> tuple:
        with case.state():
            call, primals = flat(case, fn)
            return jacfwd(call, argnums=tuple(range(len(primals))))(*primals)

    assert_same(run(remat(case.fn)), run(case.fn), exact=False)


def test_primal_runs_once() -> None:
    for transform in (lambda g: jvp(g, (X,), (Y,)), lambda g: jacfwd(g)(X)):
        counts = [count_ops(transform, chain(wrap, 3)) for wrap in (plain, remat)]
        for op in ("aten.tanh", "aten.mm", "aten.bmm"):
            assert counts[1][op] == counts[0][op]
        assert counts[1]["aten.tanh"] == 3


def test_memory_does_not_grow_with_the_regions() -> None:
    x = rand(64, 4, grad=False)
    few, many = (peak_bytes(lambda x: jvp(chain(remat, n), (x,), (x,)), x) for n in (3, 12))
    assert few == many
    assert leaked_bytes(lambda x: jvp(chain(remat, 3), (x,), (x,)), x) == 0


def test_linearize() -> None:
    both(lambda wrap: linearize(chain(wrap, 2), X)[1](Y))
    both(lambda wrap: linearize(lambda x: wrap(f)(x).sin() * x, X)[1](Y))
    both(lambda wrap: vmap(linearize(wrap(f), X)[1])(torch.stack([X, Y])))


def test_linearized_function_runs_the_same_operations_as_without_remat() -> None:
    counts = [count_ops(linearize(chain(wrap, 2), X)[1], Y) for wrap in (plain, remat)]
    assert counts[1] == counts[0]


def test_aux_and_trees() -> None:
    def g(params: dict, x: Tensor) -> tuple:
        h = params["w"] * x.sin()
        return {"h": h, "l": [h.exp(), x]}, {"places": h.argmax(), "h": h}

    params = {"w": W, "b": [X]}
    both(lambda wrap: jvp(wrap(g), (params, X), (params, Y), has_aux=True))
    both(lambda wrap: jacfwd(wrap(g), has_aux=True)(params, X[0]))


def test_outputs_without_a_tangent() -> None:
    def g(x: Tensor, y: Tensor) -> tuple:
        values, places = x.sort()
        return values.sin(), x > 0, places, y.sin(), torch.ones_like(x), x.detach(), x, y

    args = X[0], Y[0]
    both(lambda wrap: jvp(lambda x: wrap(g)(x, Y[0]), (X[0],), (Y[0],)))
    both(lambda wrap: jvp(wrap(g), args, args))
    for i in (0, 3, 4, 5, 6, 7):
        both(lambda wrap: jacfwd(lambda *a: wrap(g)(*a)[i], argnums=(0, 1))(*args))


def test_operands_without_a_tangent_stay_without_one() -> None:
    """A tangent of zeros would have no batch dimension, so that no in-place operation could write to it."""

    def in_place(x: Tensor) -> Tensor:
        return x.clone().sin_()

    def build(wrap: Wrap) -> Callable:
        def call(x: Tensor) -> Tensor:
            still = grad(lambda p: wrap(lambda p: x.sin())(p).sum())(X[0])
            unrelated = wrap(lambda p, q: (p.sin(), q.cos()))(x, X[0])[1]
            first = jvp(in_place, (x.sin(),), (still,))[1]
            return first + jvp(in_place, (x.sin(),), (unrelated,))[1]

        return call

    both(lambda wrap: jacfwd(build(wrap))(X[0]))
    both(lambda wrap: jacfwd(lambda x: wrap(build(wrap))(x * 1).sin())(X[0]))
    both(lambda wrap: jacfwd(jacfwd(build(wrap)))(X[0]))


def test_complex_and_no_dimensions() -> None:
    z = rand(3, grad=False, dtype=torch.complex128)
    both(lambda wrap: jvp(wrap(lambda z: (z.exp() * 1j, z.abs())), (z,), (z,)))
    both(lambda wrap: jacfwd(jacfwd(jacfwd(wrap(lambda x: (x.sin() * x).exp()))))(rand(grad=False)))


def test_expanded_operand() -> None:
    x = rand(1, grad=False)
    both(lambda wrap: jvp(lambda x: wrap(torch.sin)(x.expand(4)), (x,), (x,)))


def test_forward_gradients_disabled() -> None:
    def off(wrap: Wrap) -> Callable:
        def call(x: Tensor) -> Tensor:
            with torch.autograd.forward_ad._set_fwd_grad_enabled(False):
                return wrap(torch.sin)(x) + x

        return call

    both(lambda wrap: jacfwd(off(wrap))(X[0]))


def test_autograd_through_jvp() -> None:
    def run(wrap: Wrap) -> tuple:
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        out, tangent = jvp(chain(wrap, 2), (x,), (y,))
        first = torch.autograd.grad(tangent.square().sum(), (x, y), create_graph=True)
        return first, torch.autograd.grad(first[0].sum() + out.sum(), (x, y))

    def detached(wrap: Wrap) -> list:
        return [t.detach() for group in run(wrap) for t in group]

    both(detached)


def test_reverse_over_forward_recomputes() -> None:
    """The gradient of a tangent saves the region's operands and their tangents, not its intermediates."""

    def program(wrap: Wrap) -> Callable:
        run = wrap(lambda x: x.sin().exp().sin().exp().sin())

        def call(x: Tensor) -> Tensor:
            for _ in range(6):
                x = run(x)
            return x

        return grad(lambda x: jvp(call, (x,), (x,))[1].sum())

    x = rand(64, grad=False)
    both(lambda wrap: program(wrap)(x))
    assert peak_bytes(program(remat), x) < 0.6 * peak_bytes(program(plain), x)
    assert leaked_bytes(program(remat), x) == 0


def test_forward_over_reverse() -> None:
    both(lambda wrap: jvp(lambda x: vjp(chain(wrap, 2), x)[1](x)[0], (X,), (Y,)))
    both(lambda wrap: jacfwd(grad(lambda x: chain(wrap, 2)(x).sum()))(X))


def test_freed_without_garbage_collection() -> None:
    with assert_freed_without_gc() as watch:
        x = X.clone()
        out, tangent = jvp(chain(remat, 2), (x,), (Y,))
        watch(x, out, tangent)
        del x, out, tangent


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_in_jacfwd(randomness: str) -> None:
    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(1)
        g = wrap(lambda x: torch.nn.functional.dropout(x.sin(), 0.5) * x)
        return jacfwd(g, randomness=randomness)(X[0]), torch.get_rng_state()

    both(run)


# Programs of a function of two arguments: one of them is differentiated, and captured tensors have the tangents.
INSIDE: dict[str, Callable[[Callable], Callable]] = {
    "first": lambda f: lambda x, y: grad(lambda x: f(x, y))(x),
    "second": lambda f: lambda x, y: grad(lambda y: f(x, y))(y),
    "first, twice": lambda f: lambda x, y: grad(lambda x: grad(lambda x: f(x, y))(x).sin().sum())(x),
    "first, then second": lambda f: lambda x, y: grad(lambda y: grad(lambda x: f(x, y))(x).sin().sum())(y),
    "per row": lambda f: lambda x, y: vmap(lambda x, y: grad(lambda x: f(x, y))(x))(x, y),
    "per row, shared": lambda f: lambda x, y: vmap(lambda x: grad(lambda x: f(x, y))(x))(x),
    "jacrev": lambda f: lambda x, y: jacrev(lambda x: f(x, y))(x),
}
AROUND: dict[str, Callable[[Callable], Callable]] = {
    "both": lambda g: lambda: jvp(g, (X, Y), (Y, W)),
    "second moves": lambda g: lambda: jvp(lambda y: g(X, y), (Y,), (W,)),
    "per row": lambda g: lambda: vmap(lambda x, y: jvp(g, (x, y), (y, x)))(torch.stack([X, Y]), torch.stack([Y, W])),
    "jacfwd": lambda g: lambda: jacfwd(g, argnums=1)(X[:2, :2], Y[:2, :2]),
    "grad": lambda g: lambda: grad(lambda x: jvp(lambda y: g(x, y), (Y,), (W,))[1].sin().sum())(X),
}
TWO: dict[str, Callable[[Wrap], Callable]] = {
    "unused": lambda wrap: lambda x, y: wrap(lambda x, y: x.sin())(x, y).sum(),
    "used outside": lambda wrap: lambda x, y: (wrap(lambda x, y: x.sin())(x, y) * y).sum(),
    "used": lambda wrap: lambda x, y: wrap(lambda x, y: x.sin() * y.cos())(x, y).sin().sum(),
    "captured": lambda wrap: lambda x, y: wrap(lambda x: x.sin() * y.cos())(x).sin().sum(),
    "captured, unused": lambda wrap: lambda x, y: wrap(lambda x: x.sin() if y is not None else x)(x).sin().sum(),
    "nested": lambda wrap: lambda x, y: wrap(lambda x, y: wrap(lambda x, y: x.sin())(x, y).exp())(x, y).sum(),
}


@pytest.mark.parametrize("two", TWO)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("around", AROUND)
def test_operands_of_levels_below_with_tangents(around: str, inside: str, two: str) -> None:
    both(lambda wrap: AROUND[around](INSIDE[inside](TWO[two](wrap)))())


@pytest.mark.parametrize("policy", [policies.save_ops("aten.sin"), policies.everything_saveable], ids=repr)
@pytest.mark.parametrize("two", ["unused", "used"])
@pytest.mark.parametrize("inside", INSIDE)
def test_operands_of_levels_below_under_a_policy(inside: str, two: str, policy: Any) -> None:
    def run(wrap: Wrap) -> Any:
        return AROUND["both"](INSIDE[inside](TWO[two](wrap)))()

    assert_same(run(lambda fn: remat(fn, policy=policy)), run(plain), exact=False)
