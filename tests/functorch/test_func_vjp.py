"""`torch.func.vjp` of rematerialized functions: the pullback is called several times, late, and transformed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, assert_same, cases, flat, rand
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, leaked_bytes
from remat import MutationError, remat

Wrap = Callable[[Callable], Callable]
# Sums in another order, or a formula that torch picks where the backward's graph is recorded.
ROUNDED = {"same_argument_twice", "group_norm", "transformer", "lstm", "reductions", "linear_algebra"}
X, Y = rand(4, 4, grad=False), rand(4, 4, seed=1, grad=False)
W = rand(4, 4, seed=2, grad=False)


def plain(fn: Callable) -> Callable:
    return fn


def f(x: Tensor) -> Tensor:
    return torch.tanh(x @ W) @ W


def both(program: Callable[[Wrap], Any]) -> None:
    assert_same(program(remat), program(plain), exact=False)


@cases(func=True)
def test_value_and_pullback(case: Case) -> None:
    def run(fn: Callable) -> tuple:
        with case.state():
            call, primals = flat(case, fn)
            out, pull = vjp(call, *primals)
            return out, pull(out), torch.get_rng_state()

    assert_same(run(remat(case.fn)), run(case.fn), exact=case.name not in ROUNDED)


@cases(func=True, double=True)
def test_pullback_of_pullback(case: Case) -> None:
    def run(fn: Callable) -> tuple:
        with case.state():
            call, primals = flat(case, fn)
            out, pull = vjp(call, *primals)
            grads, second = vjp(lambda *primals: vjp(call, *primals)[1](out), *primals)
            return grads, second(grads), vjp(pull, out)[1](grads)

    assert_same(run(remat(case.fn)), run(case.fn), exact=False)


def test_called_many_times_with_one_recompute_each() -> None:
    _, pull = vjp(remat(f), X)
    _, wanted = vjp(f, X)
    for scale in (1, 2, 3):
        counts = count_ops(lambda: assert_same(pull(Y * scale), wanted(Y * scale)))
        assert counts["aten.tanh"] == 1
        assert counts["aten.mm"] == 1 + 2 + 2  # one recomputed, and the pullbacks of both


def test_one_recompute_for_a_mapped_pullback() -> None:
    _, pull = vjp(remat(f), X)
    _, wanted = vjp(f, X)
    cotangents = torch.stack([X, Y, X * Y])
    assert_same(vmap(pull)(cotangents), vmap(wanted)(cotangents), exact=False)
    assert count_ops(vmap(pull), cotangents)["aten.tanh"] == 1


def test_pullback_is_transformed_after_its_level_ended() -> None:
    def run(wrap: Wrap) -> tuple:
        _, pull = vjp(wrap(f), X)
        return (
            grad(lambda t: pull(t)[0].sin().sum())(Y),
            jacrev(lambda t: pull(t)[0])(Y),
            jacfwd(lambda t: pull(t)[0])(Y),
            hessian(lambda t: pull(t)[0].exp().sum())(Y),
            jvp(lambda t: pull(t)[0], (Y,), (X,)),
            vjp(lambda t: pull(t)[0], Y)[1](X),
        )

    both(run)


def test_mapped_pullback_is_differentiated_by_cotangents() -> None:
    def run(wrap: Wrap) -> tuple:
        _, pull = vjp(wrap(f), X)
        both_rows = torch.stack([X, Y])
        return (
            vmap(grad(lambda t: pull(t)[0].sin().sum()))(both_rows),
            grad(lambda rows: vmap(lambda t: pull(t)[0].sin())(rows).sum())(both_rows),
            vmap(jacfwd(lambda t: pull(t)[0]))(both_rows),
            jvp(vmap(lambda t: pull(t)[0].sin()), (both_rows,), (both_rows,)),
        )

    both(run)


def test_autograd_through_a_mapped_pullback() -> None:
    def run(wrap: Wrap) -> tuple:
        x, rows = X.clone().requires_grad_(), torch.stack([X, Y]).requires_grad_()
        _, pull = vjp(wrap(f), x)
        return torch.autograd.grad(vmap(pull)(rows)[0].sin().sum(), (x, rows))

    both(run)


def test_levels_below_differentiate_the_result() -> None:
    """Their backward runs after the level of the `vjp` has ended, so its backward must have been recorded."""

    def build(wrap: Wrap) -> Callable:
        return lambda x: vjp(wrap(f), x)[1](x.sin())[0]

    both(lambda wrap: grad(lambda x: build(wrap)(x).sin().sum())(X))
    both(lambda wrap: jacfwd(build(wrap))(X))
    both(lambda wrap: jacrev(build(wrap))(X))
    both(lambda wrap: hessian(lambda x: build(wrap)(x).sin().sum())(X))
    both(lambda wrap: vmap(grad(lambda x: build(wrap)(x).sin().sum()))(torch.stack([X, Y])))
    both(lambda wrap: vjp(build(wrap), X)[1](Y))


def test_autograd_through_the_pullback() -> None:
    def run(wrap: Wrap) -> tuple:
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        out, pull = vjp(wrap(f), x)
        pulled = pull(y)[0]
        value = torch.autograd.grad(out.sum(), x, retain_graph=True)
        first = torch.autograd.grad(pulled.cos().sum(), (x, y), retain_graph=True)
        second = torch.autograd.grad(pulled.sin().sum(), (x, y), create_graph=True)
        third = torch.autograd.grad(second[0].square().sum(), (x, y))
        return value, first, third

    both(run)


def test_options_of_the_pullback() -> None:
    def run(wrap: Wrap) -> tuple:
        _, pull = vjp(wrap(f), X)
        first = pull(Y, create_graph=False)
        return first, pull(Y, retain_graph=True), pull(Y, retain_graph=False, create_graph=False)

    both(run)


def test_aux_and_trees() -> None:
    def g(params: dict, x: Tensor) -> tuple:
        h = params["w"] * x.sin()
        return {"h": h, "l": [h.exp(), x]}, {"places": h.argmax(), "h": h}

    def run(wrap: Wrap) -> tuple:
        out, pull, aux = vjp(wrap(g), {"w": W}, X, has_aux=True)
        return out, pull(out), aux

    both(run)


def test_only_operands_are_saved() -> None:
    def many(wrap: Wrap) -> Callable:
        run = wrap(lambda x: x.sin().exp().sin().exp().sin())
        return lambda x: vjp(lambda x: run(run(run(x))), x)

    size = X.numel() * X.element_size()
    assert held_bytes(many(remat), X) <= 4 * size < 9 * size <= held_bytes(many(plain), X)
    assert leaked_bytes(many(remat), X) == 0


def test_freed_with_the_pullback() -> None:
    with assert_freed_without_gc() as watch:
        x = X.clone()
        out, pull = vjp(lambda x: remat(f)(x * 2), x)
        watch(x, out, *pull(out))
        del x, out, pull


def closure_over(w: Tensor) -> Callable:
    return lambda x: (x * w).sin() * w


def change_of_argument(call: Callable) -> None:
    x = X.clone()
    out, pull = vjp(call, x)
    x.add_(1)
    pull(out)


def change_after_a_first_call(call: Callable) -> None:
    x = X.clone()
    out, pull = vjp(call, x)
    pull(out)
    x.add_(1)
    pull(out)


@pytest.mark.parametrize("level", ["none", "vmap"])
@pytest.mark.parametrize("change", [change_of_argument, change_after_a_first_call])
def test_argument_changed_before_the_pullback(change: Callable, level: str) -> None:
    call = remat(lambda x: x.sin() * x)
    with pytest.raises(MutationError, match=r"argument x was .*\nThe region is <lambda> called at .*test_func_vjp"):
        change(vmap(call) if level == "vmap" else call)


def test_captured_tensor_changed_before_the_pullback() -> None:
    w = W.clone()
    out, pull = vjp(remat(closure_over(w)), X)
    w.add_(1)
    with pytest.raises(MutationError, match="closure variable 'w'"):
        pull(out)


def test_captured_tensor_changed_before_plain_autograd() -> None:
    """The region calls torch.func, and captures a tensor that its addition would not save without a region."""
    x = X.clone().requires_grad_()
    w = x * 2
    out = remat(lambda x: grad(lambda y: y.sin().sum())(x) + w)(x)
    w.add_(1)
    with pytest.raises(MutationError, match="closure variable 'w'"):
        out.sum().backward()


@pytest.mark.parametrize(
    "transform", [grad, lambda f: vmap(grad(f)), jacrev, hessian, lambda f: lambda x: jvp(grad(f), (x,), (x,))]
)
def test_intermediate_changed_before_the_backward(transform: Callable) -> None:
    def changes(x: Tensor) -> Tensor:
        h = x * 2
        y = remat(lambda h: h.sin() * h)(h)
        h.add_(1)
        return y.sum()

    with pytest.raises(MutationError):
        transform(changes)(X)
