"""`jacrev`, `jacfwd` and `hessian` of rematerialized functions, and all four combinations of `jacrev` and `jacfwd`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, assert_same, cases, flat, rand, repeated, scalar
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

from benchmarks.measure import count_ops, leaked_bytes, peak_bytes
from remat import remat

Wrap = Callable[[Callable], Callable]
REGIONS = 4
W = rand(5, 5, grad=False) / 3
X = rand(5, seed=1, grad=False)
ROWS = rand(3, 5, seed=2, grad=False)
ORDERS = {f"{a.__name__}({b.__name__})": (a, b) for a, b in itertools.product((jacfwd, jacrev), repeat=2)}


def plain(fn: Callable) -> Callable:
    return fn


def f(x: Tensor) -> Tensor:
    return torch.tanh(W @ x).exp() @ W


def chain(wrap: Wrap, regions: int = REGIONS) -> Callable[[Tensor], Tensor]:
    return repeated(wrap(f), regions)


def both(program: Callable[[Wrap], Any]) -> None:
    assert_same(program(remat), program(plain), exact=False)


def run_case(case: Case, fn: Callable, make: Callable, transform: Callable) -> Any:
    with case.state():
        call, primals = make(case, fn)
        return transform(call, argnums=tuple(range(len(primals))))(*primals), torch.get_rng_state()


@cases(func=True, jacobian=True, vmap=True)
def test_jacrev(case: Case) -> None:
    found, wanted = (run_case(case, fn, flat, jacrev) for fn in (remat(case.fn), case.fn))
    assert_same(found, wanted, exact=False)


@pytest.mark.parametrize("order", ORDERS)
@cases(func=True, jacobian=True, vmap=True, jvp=True, double=True, random=False)
def test_second_derivatives(case: Case, order: str) -> None:
    outer, inner = ORDERS[order]

    def transform(call: Callable, argnums: tuple) -> Callable:
        return outer(inner(call, argnums=argnums), argnums=argnums)

    with torch.no_grad():
        size = sum(t.numel() for t in flat(case)[1])
    if size > 40:
        transform = last_argument_only(outer, inner)
    found, wanted = (run_case(case, fn, scalar, transform) for fn in (remat(case.fn), case.fn))
    assert_same(found, wanted, exact=False)


def last_argument_only(outer: Callable, inner: Callable) -> Callable:
    return lambda call, argnums: outer(inner(call, argnums=argnums[-1]), argnums=argnums[-1])


def test_jacrev_recomputes_each_region_once() -> None:
    counts = [count_ops(jacrev(chain(wrap)), X) for wrap in (plain, remat)]
    assert counts[0]["aten.tanh"] == REGIONS
    assert counts[1]["aten.tanh"] == 2 * REGIONS
    # Per row there is only the pullback itself.
    assert counts[1]["aten.tanh_backward"] == counts[0]["aten.tanh_backward"]


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_jacrev_in_chunks(chunk_size: int) -> None:
    """Each chunk is a backward pass of its own: one recompute per chunk."""
    both(lambda wrap: jacrev(chain(wrap), chunk_size=chunk_size)(X))
    counts = count_ops(jacrev(chain(remat), chunk_size=chunk_size), X)
    chunks = -(-len(X) // chunk_size)
    assert counts["aten.tanh"] <= (1 + chunks) * REGIONS


def test_jacfwd_runs_each_region_once() -> None:
    assert count_ops(jacfwd(chain(remat)), X)["aten.tanh"] == REGIONS
    both(lambda wrap: jacfwd(chain(wrap))(X))


def test_hessian_recomputes_each_region_once() -> None:
    """Forward over reverse, over a batch of tangents: the region's `jvp` is recomputed."""
    counts = count_ops(hessian(lambda x: chain(remat)(x).sum()), X)
    assert counts["aten.tanh"] == 2 * REGIONS


@pytest.mark.parametrize("order", ORDERS)
def test_memory_of_second_derivatives(order: str) -> None:
    """An additional region costs a fraction of what it costs without remat."""
    outer, inner = ORDERS[order]
    if order == "jacfwd(jacfwd)":  # nothing is saved without remat either
        run = [peak_bytes(outer(inner(tall(remat, n))), X) for n in (4, 12)]
        assert run[0] == run[1]
        return
    cost = {}
    for wrap in (plain, remat):
        few, many = (peak_bytes(outer(inner(tall(wrap, n))), X) for n in (4, 12))
        cost[wrap] = many - few
    assert cost[remat] < 0.5 * cost[plain]
    assert leaked_bytes(outer(inner(tall(remat, 4))), X) == 0


def tall(wrap: Wrap, regions: int) -> Callable[[Tensor], Tensor]:
    run = wrap(lambda x: x.sin().exp().sin().exp().sin().exp().sin())

    def call(x: Tensor) -> Tensor:
        for _ in range(regions):
            x = run(x)
        return x.sum()

    return call


def test_memory_of_jacrev() -> None:
    cost = {}
    for wrap in (plain, remat):
        few, many = (peak_bytes(jacrev(lambda x: tall(wrap, n)(x).expand(3)), X) for n in (4, 12))
        cost[wrap] = many - few
    assert cost[remat] < 0.4 * cost[plain]


def test_arguments_and_results_are_trees() -> None:
    def g(params: dict, x: Tensor) -> dict:
        h = (params["w"] @ x).tanh()
        return {"h": h, "l": [h.exp() * params["b"][0], x], "same": h}

    params = {"w": W, "b": [X]}
    for jacobian in (jacrev, jacfwd):
        both(lambda wrap: jacobian(wrap(g), argnums=(0, 1))(params, X))
        both(lambda wrap: jacobian(lambda p: wrap(g)(p, x=X))(params))
    both(lambda wrap: hessian(lambda p: wrap(g)(p, X)["l"])(params))


def test_aux() -> None:
    def g(x: Tensor) -> tuple:
        h = f(x)
        return h, {"places": h.argsort(), "h": h}

    for jacobian in (jacrev, jacfwd):
        both(lambda wrap: jacobian(wrap(g), has_aux=True)(X))


def test_outputs_of_all_kinds() -> None:
    def g(x: Tensor, y: Tensor) -> tuple:
        return x, x[1:], y.sin(), (x * y).exp(), x.reshape(1, -1), torch.ones_like(x), y.detach() * 2

    for jacobian in (jacrev, jacfwd, lambda f, **k: jacrev(jacrev(f, **k), **k)):
        both(lambda wrap: jacobian(wrap(g), argnums=(0, 1))(X, X.cos()))


def test_per_sample() -> None:
    def build(wrap: Wrap, jacobian: Callable) -> Callable:
        return vmap(jacobian(lambda x: chain(wrap, 2)(x)))

    for jacobian in (jacrev, jacfwd):
        both(lambda wrap: build(wrap, jacobian)(ROWS))
        both(lambda wrap: vmap(jacobian(jacobian(lambda x: chain(wrap, 2)(x).sum())))(ROWS))
        both(lambda wrap: jacobian(vmap(chain(wrap, 2)))(ROWS))
    assert count_ops(build(remat, jacrev), ROWS)["aten.tanh"] == 2 * 2


def test_gradient_of_a_jacobian() -> None:
    for jacobian in (jacrev, jacfwd):
        both(lambda wrap: grad(lambda x: jacobian(chain(wrap, 2))(x).square().sum())(X))


def test_autograd_through_jacobians() -> None:
    def run(wrap: Wrap, jacobian: Callable) -> Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(jacobian(chain(wrap, 2))(x).square().sum(), x)[0]

    for jacobian in (jacrev, jacfwd, lambda f: hessian(lambda x: f(x).sum())):
        both(lambda wrap: run(wrap, jacobian))


@pytest.mark.parametrize("order", ORDERS)
def test_dropout_draws_the_same_numbers_in_the_recompute(order: str) -> None:
    outer, inner = ORDERS[order]

    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(1)
        g = wrap(lambda x: (torch.nn.functional.dropout(x.sin(), 0.5) * x).sum())
        first = inner(g, randomness="same") if inner is jacfwd else inner(g)
        second = outer(first, randomness="same") if outer is jacfwd else outer(first)
        return second(X), torch.get_rng_state()

    both(run)
