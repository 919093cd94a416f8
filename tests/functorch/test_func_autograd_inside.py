"""User code that differentiates inside transformed functions, and user code that transforms inside regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from benchmarks.measure import count_ops, leaked_bytes, peak_bytes
from remat import RematError, policies, remat

Wrap = Callable[[Callable], Callable]
W = rand(4, 4, grad=False)
X = rand(4, seed=1, grad=False)


def plain(fn: Callable, **options: Any) -> Callable:
    return fn


def f(x: Tensor) -> Tensor:
    return torch.tanh(x @ W).exp() @ W


def both(program: Callable[[Wrap], Any]) -> None:
    assert_same(program(remat), program(plain), exact=False)


# --- torch.autograd.grad in a transformed function --------------------------------------------------------------------


def gradient_of(energy: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The gradient as users write it for the forces of a potential."""

    def force(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(energy(x).sin().sum(), x, create_graph=True)
        return found

    return force


FORCES: dict[str, Callable[[Wrap], Callable]] = {
    "around a region": lambda wrap: gradient_of(wrap(f)),
    "inside a region": lambda wrap: wrap(gradient_of(f)),
    "around and inside": lambda wrap: wrap(gradient_of(wrap(f))),
    "of an intermediate": lambda wrap: wrap(lambda x: gradient_of(f)(x * 2) * x),
    "between regions": lambda wrap: lambda x: wrap(f)(gradient_of(wrap(f))(wrap(torch.sin)(x))),
}
ROWS = torch.stack([X, X.cos()])
THROUGH: dict[str, Callable[[Callable], Any]] = {
    "grad": lambda g: grad(lambda x: g(x).square().sum())(X),
    "vjp": lambda g: vjp(g, X)[1](X),
    "jacrev": lambda g: jacrev(g)(X),
    "hessian": lambda g: hessian(lambda x: g(x).sum())(X),
    "jacrev(jacrev)": lambda g: jacrev(jacrev(g))(X),
    "jacfwd(jacrev)": lambda g: jacfwd(jacrev(g))(X),
    "grad(grad)": lambda g: grad(lambda x: grad(lambda x: g(x).square().sum())(x).sum())(X),
    "jvp(grad)": lambda g: jvp(grad(lambda x: g(x).square().sum()), (X,), (X,)),
    "vmap(grad)": lambda g: vmap(grad(lambda x: g(x).square().sum()))(ROWS),
    "autograd": lambda g: through_autograd(g),
    "autograd, twice": lambda g: torch.autograd.functional.hessian(lambda x: g(x).sum(), X),
}


def through_autograd(g: Callable) -> Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(g(x).sin().sum(), x)[0]


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("force", FORCES)
def test_autograd_inside(force: str, through: str) -> None:
    both(lambda wrap: THROUGH[through](FORCES[force](wrap)))


@pytest.mark.parametrize("through", ["grad", "jacrev", "hessian", "vmap(grad)", "jvp(grad)"])
def test_inputs_require_grad_as_without_remat(through: str) -> None:
    """In the first run: code such as `if not x.requires_grad: x.requires_grad_()` depends on it."""

    def run(wrap: Wrap) -> bool:
        seen = []

        def g(x: Tensor) -> Tensor:
            seen.append(x.requires_grad)
            return x.sin()

        THROUGH[through](wrap(g))
        return seen[0]

    both(run)


def test_leaf_made_inside() -> None:
    def g(x: Tensor) -> Tensor:
        leaf = torch.ones(4, dtype=x.dtype, requires_grad=True)
        return torch.autograd.grad((leaf * 2).sin().sum(), leaf)[0] * x.sin()

    both(lambda wrap: through_autograd(wrap(g)))


def test_backward_of_user_code_in_forward_of_plain_autograd() -> None:
    def g(x: Tensor, w: Tensor) -> Tensor:
        (scale,) = torch.autograd.grad((x * w).sin().sum(), w, create_graph=True)
        return (x * scale).exp()

    def run(wrap: Wrap) -> tuple:
        x, w = X.clone().requires_grad_(), X.cos().requires_grad_()
        return torch.autograd.grad(wrap(g)(x, w).sum(), (x, w))

    both(run)


def test_second_order_by_autograd_inside_grad_saves_memory() -> None:
    """The result is differentiated at the same level, so the graph is recorded, but it saves only operands."""

    def program(wrap: Wrap) -> Callable:
        run = wrap(lambda x: x.sin().exp().sin().exp().sin().exp().sin())

        def energy(x: Tensor) -> Tensor:
            for _ in range(8):
                x = run(x)
            return x

        return grad(lambda x: gradient_of(energy)(x).square().sum())

    x = rand(64, grad=False)
    both(lambda wrap: program(wrap)(x))
    assert peak_bytes(program(remat), x) < 0.7 * peak_bytes(program(plain), x)
    assert leaked_bytes(program(remat), x) == 0


# --- torch.func in a region -------------------------------------------------------------------------------------------

INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda x: grad(lambda x: f(x).sin().sum())(x) * x,
    "vmap": lambda x: vmap(f)(torch.stack([x, x.cos()])).sin().sum(0),
    "jvp": lambda x: jvp(f, (x,), (x.cos(),))[1].sin(),
    "vjp": lambda x: vjp(f, x)[1](x.cos())[0].sin(),
    "jacrev": lambda x: jacrev(f)(x).sin().sum(0),
    "jacfwd": lambda x: jacfwd(f)(x).sin().sum(0),
    "hessian": lambda x: hessian(lambda x: f(x).sum())(x).sin().sum(0),
    "vmap(grad)": lambda x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, x.cos()])).sum(0),
    "grad(vmap)": lambda x: grad(lambda x: vmap(torch.sin)(x.reshape(2, 2)).exp().sum())(x),
    "grad(grad)": lambda x: grad(lambda x: grad(lambda x: f(x).sum())(x).sin().sum())(x),
}
OUTSIDE = {
    **THROUGH,
    "call": lambda g: g(X),
    "vmap": lambda g: vmap(g)(ROWS),
    "jacfwd": lambda g: jacfwd(g)(X),
    "autograd(grad)": lambda g: through_autograd(grad(lambda x: g(x).sin().sum())),
    "autograd(vmap)": lambda g: through_autograd(lambda x: vmap(g)(torch.stack([x, x.cos()]))),
}


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("inside", INSIDE)
def test_transforms_inside_a_region(inside: str, outside: str) -> None:
    g = INSIDE[inside]
    both(lambda wrap: OUTSIDE[outside](wrap(g)))
    # A second time, as a region records what its first run does; and inside another region.
    region = remat(g)
    first = OUTSIDE[outside](region)
    assert_same(OUTSIDE[outside](region), first)
    both(lambda wrap: OUTSIDE[outside](lambda x: wrap(lambda x: wrap(g)(x).sin())(x)))


def test_linearize_inside_a_region() -> None:
    both(lambda wrap: wrap(lambda x: linearize(torch.sin, x)[1](x))(X))


@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.save_matmuls, policies.save_ops("aten.mul")])
def test_linearize_inside_a_region_with_a_policy(policy: Any) -> None:
    region = remat(lambda x: linearize(f, x)[1](x).sin(), policy=policy)
    with pytest.raises(RematError, match=r"Use torch\.func\.jvp"):
        region(X.clone().requires_grad_())
    with pytest.raises(RematError, match="traces a function"):
        grad(lambda x: region(x).sum())(X)
    # The functional spelling works, as does the policy of a region inside of the traced function.
    both(lambda wrap: grad(lambda x: wrap(lambda x: jvp(f, (x,), (x,))[1].sin(), policy=policy)(x).sum())(X))
    both(lambda wrap: linearize(wrap(f, policy=policy), X)[1](X))


def test_a_saved_tangent_whose_primal_is_a_copy_in_the_recompute() -> None:
    x = X.clone().requires_grad_()

    def program(wrap: Wrap) -> Tensor:
        tangent = wrap(lambda p, q: jvp(lambda q: q.sin(), (q,), (p.cos(),))[1], policy=policies.everything_saveable)
        each = grad(lambda p, q: tangent(p, q).sin().sum(), argnums=1)
        out = vmap(each, (0, 1), chunk_size=1)(torch.stack([x, x.sin()]), torch.stack([x, x.cos()], 1))
        return torch.autograd.grad(out.sum(), x)[0]

    both(program)


def test_transform_of_a_region_inside_of_a_region() -> None:
    def build(wrap: Wrap) -> Callable:
        inner = wrap(f)
        return wrap(lambda x: grad(lambda x: inner(x).sin().sum())(x) * x)

    for outside in OUTSIDE.values():
        both(lambda wrap: outside(build(wrap)))


def test_captured_tensors_that_only_an_outer_transform_tracks() -> None:
    """The inner transform's function reads a tensor that only an outer transform tracks."""

    def build(wrap: Wrap) -> Callable:
        def call(w: Tensor, x: Tensor) -> Tensor:
            region = wrap(lambda x: grad(lambda x: torch.tanh(x @ w).sum())(x) * w[0])
            return region(x).sin().sum()

        return call

    both(lambda wrap: grad(build(wrap), argnums=(0, 1))(W, X))
    both(lambda wrap: jacfwd(build(wrap), argnums=(0, 1))(W, X))
    both(lambda wrap: vmap(grad(build(wrap)), in_dims=(None, 0))(W, ROWS))
    both(lambda wrap: hessian(lambda w: build(wrap)(w, X))(W))


def test_region_with_transforms_saves_memory() -> None:
    def program(wrap: Wrap) -> Callable:
        run = wrap(lambda x: grad(lambda x: x.sin().exp().sin().exp().sum())(x).sin())

        def call(x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            y = x
            for _ in range(8):
                y = run(y)
            return torch.autograd.grad(y.sum(), x)[0]

        return call

    x = rand(64, grad=False)
    both(lambda wrap: program(wrap)(x))
    assert peak_bytes(program(remat), x) < 0.6 * peak_bytes(program(plain), x)
    forward = count_ops(lambda x: program(plain)(x), x)["aten.sin"]
    assert count_ops(program(remat), x)["aten.sin"] <= 2 * forward


# --- a region that restarts inside a region --------------------------------------------------------------------------


def test_an_abandoned_first_run_leaves_no_record_in_the_outer_region() -> None:
    """The outer region compares the calls in its runs; in the first one, part of the inner region ran twice."""

    def program(wrap: Wrap) -> Any:
        def outer(x: Tensor) -> Tensor:
            h = x.sin()
            return vjp(wrap(lambda y: vjp(torch.sin, (h * y).sin())[1](h)[0]), h)[1](h)[0]

        x = X.clone().requires_grad_()
        out, pull = vjp(wrap(outer), x)
        return torch.autograd.grad((out * pull(out)[0]).sum(), x)

    both(program)


# --- what each level tracks -------------------------------------------------------------------------------------------


def depends(x: Tensor, y: Tensor) -> Tensor:
    """Energies are differentiated only with respect to what requires grad."""
    p, out = x * 1, ((x * y).sin() + y).sum()
    if not (p.requires_grad and out.requires_grad):
        return out * y
    (g,) = torch.autograd.grad(out, p, create_graph=True, allow_unused=True)
    return y if g is None else g.sin() * y


def is_computed(x: Tensor, y: Tensor) -> Tensor:
    h = x.sin()
    return (h * 2 if h.is_leaf else h * 3) * y


def has_a_node(x: Tensor, y: Tensor) -> Tensor:
    h = x.sin()
    return (h * 2 if h.grad_fn is None else h * 3) * y


Given = Callable[[Callable, Wrap], Callable]
# Ways to pass two tensors, one of which is not tracked by the innermost level.
GIVEN: dict[str, Given] = {
    "x from outside": lambda fn, wrap: lambda x: grad(lambda y: wrap(fn)(x, y).sum())(X.cos()),
    "y from outside": lambda fn, wrap: lambda y: grad(lambda x: wrap(fn)(x, y).sum())(X.cos()),
    "x captured": lambda fn, wrap: lambda x: grad(lambda y: wrap(lambda y: fn(x, y))(y).sum())(X.cos()),
    "both": lambda fn, wrap: lambda x: grad(lambda y: wrap(fn)(x * y, y).sum())(x.cos()),
    "mapped": lambda fn, wrap: lambda x: vmap(grad(lambda y: wrap(fn)(x, y).sum()))(ROWS).sum(0),
    "unbatched": lambda fn, wrap: lambda x: grad(lambda y: vmap(wrap(fn), (None, 0))(x, ROWS * y).sum())(X),
    "in a region": lambda fn, wrap: lambda x: grad(lambda y: wrap(lambda y: wrap(fn)(x, y).sin())(y).sum())(X.cos()),
}
ORDERS: dict[str, Callable[[Callable], Any]] = {
    "value": lambda f: f(X),
    "autograd": lambda f: through_orders(f, 1),
    "autograd, three orders": lambda f: through_orders(f, 3),
    "grad": lambda f: grad(lambda x: f(x).sin().sum())(X),
    "jvp": lambda f: jvp(f, (X,), (X.cos(),)),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sin().sum()))(ROWS),
}


def through_orders(f: Callable, orders: int) -> list[Tensor]:
    x = X.clone().requires_grad_()
    found = [f(x)]
    for _ in range(orders):
        found += torch.autograd.grad((found[-1] + x).sin().sum(), x, create_graph=True)
    return found


@pytest.mark.parametrize("fn", [depends, is_computed, has_a_node])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("order", ORDERS)
def test_levels_track_different_tensors(order: str, given: str, fn: Callable) -> None:
    """A function sees what its innermost level tracks, whatever the outer levels and autograd track."""
    expected = ORDERS[order](GIVEN[given](fn, plain))
    for _ in range(2):  # the second call uses what the first one recorded
        assert_same(ORDERS[order](GIVEN[given](fn, remat)), expected, exact=False)


def test_reading_requires_grad_adds_no_recomputes() -> None:
    def asks(x: Tensor, y: Tensor) -> Tensor:
        h = (y @ W).sin()
        return (h if (x * 1).requires_grad else h * x) @ W

    def does_not(x: Tensor, y: Tensor) -> Tensor:
        return ((y @ W).sin() * x) @ W

    def products(fn: Callable) -> int:
        region, x = remat(fn), rand(4, 4, seed=2)

        def call(y: Tensor) -> Tensor:
            return torch.autograd.grad(grad(lambda y: region(x, y).sin().sum())(y).sum(), x)[0]

        call(rand(4, 4, grad=False))
        return count_ops(call, rand(4, 4, grad=False))["aten.mm"]

    assert products(asks) == products(does_not)


@pytest.mark.parametrize("policy", [None, policies.everything_saveable], ids=str)
@pytest.mark.parametrize("transform", ["grad", "vjp", "grad of a region"])
def test_batched_gradients_of_a_region_that_draws(transform: str, policy: Any) -> None:
    """Its recompute is part of a batched backward, in which torch raises an error for random numbers."""

    def program(wrap: Wrap) -> Callable:
        def noisy(x: Tensor) -> Tensor:
            return x.sin() * torch.rand(4, dtype=x.dtype)

        inner = {
            "grad": lambda x: grad(lambda p: (noisy(p) * x).sum())(x),
            "vjp": lambda x: vjp(noisy, x)[1](x)[0],
            "grad of a region": lambda x: grad(lambda p: (wrap(noisy)(p) * x).sum())(x),
        }[transform]
        return wrap(lambda x: (inner(x) * x).sin())

    def run(wrap: Wrap) -> tuple:
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        out = program(wrap)(x)
        (rows,) = torch.autograd.grad(out, x, torch.eye(4, dtype=x.dtype), is_grads_batched=True)
        return out, rows, torch.rand(2)

    assert_same(run(lambda fn: remat(fn, policy=policy)), run(plain), exact=False)


@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.everything_saveable], ids=str)
@pytest.mark.parametrize("around", ["twice", "a region around", "once"])
def test_derivatives_that_depend_on_modes(around: str, policy: Any) -> None:
    """The derivative of ``prod`` uses other operations under a dispatch mode; both runs must use the same ones."""

    def program(wrap: Wrap) -> Any:
        inner = wrap(lambda y: y.prod(0))
        f = wrap(lambda x: grad(lambda y: inner(y).sum())(x).sin())
        x = rand(3, 3)

        def gradient(x: Tensor) -> Tensor:
            p = x * 1
            return torch.autograd.grad(f(p).sum(), p, create_graph=True)[0]

        if around == "once":
            return torch.autograd.grad(f(x).sum(), x)
        out = wrap(gradient)(x) if around == "a region around" else gradient(x)
        return out, torch.autograd.grad(out.sin().sum(), x)

    assert_same(program(lambda fn: remat(fn, policy=policy)), program(plain), exact=False)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_nested_regions_around_a_transform(depth: int) -> None:
    """All regions are of one function, so the innermost records for all of them that it calls a transform."""

    def step(w: Tensor) -> Tensor:
        return w - 0.1 * torch.func.grad(lambda w: (w * w).sin().sum())(w)

    def nested(depth: int) -> Callable[[Tensor], Tensor]:
        if depth == 0:
            return step
        inner = nested(depth - 1)
        return lambda w: remat(inner)(w)

    w = torch.ones(3)
    found = torch.func.grad(lambda w: nested(depth)(w).sum())(w)
    assert_same(found, torch.func.grad(lambda w: step(w).sum())(w), exact=False)
