"""Captured tensors under `torch.func`: found in every place, and their gradients are right."""

from __future__ import annotations

import contextvars
import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from benchmarks.measure import count_ops, leaked_bytes, peak_bytes
from remat import CaptureError, policies, remat

Wrap = Callable[[Callable], Callable]
W, V = rand(4, 4, grad=False), rand(4, 4, seed=2, grad=False)
X = rand(3, 4, seed=1, grad=False)
BATCH = rand(2, 3, 4, seed=3, grad=False)

other = types.ModuleType("remat_test_other")  # an imported module: the search for captured tensors skips its attributes
sys.modules["remat_test_other"] = other
variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
GLOBAL: Any = None
LINEAR = nn.Linear(4, 4, bias=False)
del LINEAR.weight


def plain(fn: Callable) -> Callable:
    return fn


def both(program: Callable[[Wrap], Any]) -> None:
    assert_same(program(remat), program(plain), exact=False)


def is_refused(program: Callable[[Wrap], Any]) -> bool:
    """Whether the region raises a CaptureError. Otherwise its results are those of the plain function."""
    try:
        found = program(remat)
    except CaptureError as error:
        assert "Pass it as an argument" in str(error)
        return True
    assert_same(found, program(plain), exact=False)
    return False


def reads_global(x: Tensor) -> Tensor:
    return torch.tanh(x @ GLOBAL)


class Layer:
    def __init__(self, w: Tensor) -> None:
        self.w = w

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w)

    def method(self, x: Tensor) -> Tensor:
        return self(x)


def in_global(w: Tensor) -> Callable:
    global GLOBAL
    GLOBAL = w
    return reads_global


def in_default(w: Tensor) -> Callable:
    def fn(x: Tensor, w: Tensor = w) -> Tensor:
        return torch.tanh(x @ w)

    return fn


def in_dict(w: Tensor) -> Callable:
    table = {"a": [(w, 1)]}
    return lambda x: torch.tanh(x @ table["a"][0][0])


def in_class(w: Tensor) -> Callable:
    holder = type("Holder", (), {"w": w})
    return lambda x: torch.tanh(x @ holder.w)


def in_other_module(w: Tensor) -> Callable:
    other.w = w
    return lambda x: torch.tanh(x @ other.w)


def derived_in_other_module(w: Tensor) -> Callable:
    other.w, other.v = w.sin(), w.cos()
    return lambda x: torch.tanh(x @ other.w) @ other.v + other.w.sum()


def in_variable(w: Tensor) -> Callable:
    variable.set(w)
    return lambda x: torch.tanh(x @ variable.get())


def in_variables_object(w: Tensor) -> Callable:
    variable.set(types.SimpleNamespace(weights=[w, w.cos()]))
    return lambda x: torch.tanh(x @ variable.get().weights[0]) * variable.get().weights[1].sum()


def behind_weak_reference(w: Tensor) -> Callable:
    reference = weakref.ref(w)
    return lambda x: torch.tanh(x @ reference())


def bound_method_of_tensor(w: Tensor) -> Callable:
    product = w.t().matmul
    return lambda x: torch.tanh(product(x.reshape(-1, 4).t()).t())


def in_torch_module(w: Tensor) -> Callable:
    linear = copy.copy(LINEAR)
    linear.weight = w  # a plain attribute, as functional_call does it
    return lambda x: torch.tanh(linear(x))


def views(w: Tensor) -> Callable:
    turned, row = w.t(), w[0]
    return lambda x: torch.tanh(x @ turned.t()) * row


PLACES: dict[str, Callable[[Tensor], Callable]] = {
    "closure": lambda w: lambda x: torch.tanh(x @ w),
    "global": in_global,
    "default": in_default,
    "partial": lambda w: functools.partial(lambda w, x: torch.tanh(x @ w), w),
    "partial keyword": lambda w: functools.partial(lambda x, w: torch.tanh(x @ w), w=w),
    "self": lambda w: Layer(w).method,
    "callable": Layer,
    "dict": in_dict,
    "getter": lambda w: (lambda get: lambda x: torch.tanh(x @ get()))(lambda: w),
    "set": lambda w: (lambda some: lambda x: torch.tanh(x @ next(iter(some))))({w}),
    "views": views,
    "derived": lambda w: (lambda v: lambda x: torch.tanh(x @ v))(w.sin()),
    "torch module": in_torch_module,
    "class attribute": in_class,
    "other module": in_other_module,
    "derived, other module": derived_in_other_module,
    "variable": in_variable,
    "object of variable": in_variables_object,
    "weak reference": behind_weak_reference,
    "method of tensor": bound_method_of_tensor,
}

# Places that the search doesn't visit.
HIDDEN = {
    "set", "class attribute", "other module", "derived, other module", "variable", "object of variable",
    "weak reference", "method of tensor",
}  # fmt: skip

# Transforms that track `w` outside: each gets a loss of `w` and `x`.
OUTER: dict[str, tuple[Callable[[Callable], Callable], Any]] = {
    "grad": (lambda f: grad(f, argnums=(0, 1)), (W, X)),
    "vmap(grad), w shared": (lambda f: vmap(grad(f, argnums=(0, 1)), in_dims=(None, 0)), (W, BATCH)),
    "vmap(grad)": (lambda f: vmap(grad(f, argnums=(0, 1))), (torch.stack([W, V]), BATCH)),
    "grad(vmap)": (
        lambda f: grad(lambda w, x: vmap(f, in_dims=(None, 0))(w, x).sum(), argnums=(0, 1)),
        (W, BATCH),
    ),
    "jvp": (lambda f: lambda w, x: jvp(lambda w: f(w, x), (w,), (w,)), (W, X)),
    "vjp": (lambda f: lambda w, x: vjp(f, w, x)[1](torch.ones((), dtype=w.dtype)), (W, X)),
    "jacrev": (lambda f: jacrev(f, argnums=(0, 1)), (W, X)),
    "jacfwd": (lambda f: jacfwd(f, argnums=(0, 1)), (W, X)),
    "hessian": (lambda f: lambda w, x: hessian(lambda w: f(w, x))(w)[0], (W, X)),
    "grad by w of grad by x": (
        lambda f: grad(lambda w, x: grad(f, argnums=1)(w, x).sin().sum()),
        (W, X),
    ),
    "grad by w of jacfwd by x": (
        lambda f: grad(lambda w, x: jacfwd(f, argnums=1)(w, x).sin().sum()),
        (W, X),
    ),
    "grad by w of per-sample gradients": (
        lambda f: grad(lambda w, x: vmap(grad(lambda x: f(w, x)))(x).sin().sum()),
        (W, BATCH),
    ),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("place", PLACES)
def test_tracked_by_an_outer_transform(place: str, outer: str) -> None:
    transform, args = OUTER[outer]

    def run(wrap: Wrap) -> Any:
        return transform(lambda w, x: wrap(PLACES[place](w))(x).sin().sum())(*args)

    assert is_refused(run) == (place in HIDDEN)


@pytest.mark.parametrize("place", ["dict", "views"])
def test_the_search_does_not_depend_on_addresses(place: str) -> None:
    """Visited objects are recorded by identity, and the memory of a deleted object is reused."""
    transform, args = OUTER["grad(vmap)"]
    wanted = transform(lambda w, x: PLACES[place](w)(x).sin().sum())(*args)
    junk = []
    for i in range(25):
        junk.append([torch.ones(1) for _ in range(i % 4)])
        found = transform(lambda w, x: remat(PLACES[place](w))(x).sin().sum())(*args)
        assert_same(found, wanted, exact=False)


INNER: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda g: grad(lambda x: g(x).sum()),
    "vmap": vmap,
    "jvp": lambda g: lambda x: jvp(g, (x,), (x,)),
    "vjp": lambda g: lambda x: vjp(g, x)[1](x),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda g: hessian(lambda x: g(x).sum()),
    "vmap(grad)": lambda g: vmap(grad(lambda x: g(x).sum())),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("place", PLACES)
def test_requires_grad_with_autograd_around_the_transform(place: str, inner: str) -> None:
    def run(wrap: Wrap) -> Any:
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
        out = INNER[inner](wrap(PLACES[place](w)))(x)
        leaves, _ = torch.utils._pytree.tree_flatten(out)
        return torch.autograd.grad(sum(t.sin().sum() for t in leaves), (w, x))

    refused = is_refused(run)
    assert refused == (place in HIDDEN and inner in ("grad", "vjp", "jacrev", "hessian", "vmap(grad)"))


def test_parameters_of_a_captured_module() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    for name, transform in INNER.items():

        def run(wrap: Wrap) -> Any:
            out = transform(wrap(lambda x: net(x).sin()))(X)
            leaves, _ = torch.utils._pytree.tree_flatten(out)
            total = sum(t.cos().sum() for t in leaves)
            return torch.autograd.grad(total, list(net.parameters()), allow_unused=True)

        assert name and sum(g is not None for g in run(plain)) >= 3
        both(run)


def test_captured_in_two_nested_regions() -> None:
    def build(wrap: Wrap) -> Callable:
        def call(w: Tensor, x: Tensor) -> Tensor:
            v = w.cos()
            inner = wrap(lambda x: torch.tanh(x @ w) @ v)
            return wrap(lambda x: inner(x).sin() * w[0] + v[0])(x).sum()

        return call

    for transform, args in OUTER.values():
        both(lambda wrap: transform(build(wrap))(*args))


def test_a_wrapper_of_an_operand_that_is_read_in_an_inner_transform_is_refused() -> None:
    """Below the outer levels, the inner one has the wrapper's level number, and the operand is not a wrapper."""

    def build(wrap: Wrap) -> Callable:
        def rows(w: Tensor, x: Tensor) -> Tensor:
            return vmap(lambda row: (row * other.x.sum() * w).sin())(x)

        def call(w: Tensor, x: Tensor) -> Tensor:
            other.x = x
            return wrap(rows)(w, x).sum()

        return call

    assert is_refused(lambda wrap: grad(lambda w: vmap(build(wrap), in_dims=(None, 0))(w, W).cos().sum())(X[0]))


def test_captured_tensor_is_returned() -> None:
    def build(wrap: Wrap) -> Callable:
        def call(w: Tensor, x: Tensor) -> Tensor:
            outs = wrap(lambda x: (w, x.sin() @ w, w))(x)
            return sum((out * out).sum() for out in outs)

        return call

    for name in ("grad", "hessian", "jvp", "vmap(grad)"):
        transform, args = OUTER[name]
        both(lambda wrap: transform(build(wrap))(*args))


def test_rebound_after_the_call() -> None:
    """The recompute reads what the first run read, and then restores the current value."""
    table = {"w": W}
    out, pull = vjp(remat(lambda x: torch.tanh(x @ table["w"])), X)
    _, wanted = vjp(lambda x: torch.tanh(x @ W), X)
    table["w"] = V
    assert_same(pull(out), wanted(out))
    assert table["w"] is V


def test_gradients_of_captured_tensors_only_where_requested() -> None:
    """One product forward, one backward; none for the weight, which no level tracks."""
    counts = count_ops(grad(lambda x: remat(PLACES["closure"](W))(x).sum()), X)
    assert counts["aten.mm"] == 1 + 1 + 1


def test_memory_with_captured_weights() -> None:
    def program(wrap: Wrap) -> Callable:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            block = wrap(lambda x: (x @ w).tanh().exp().sin() @ w)
            for _ in range(6):
                x = block(x)
            return x.sum()

        return grad(loss)

    x = rand(64, 4, grad=False)
    both(lambda wrap: program(wrap)(W, x))
    assert peak_bytes(program(remat), W, x) < 0.6 * peak_bytes(program(plain), W, x)
    assert leaked_bytes(program(remat), W, x) == 0


def mapped(x: Tensor) -> Tensor:
    """No function makes the tensor that the outer ``vmap`` returns."""
    return vmap(lambda row: (row * V[0]).sin().exp())(x)


MADE_INSIDE = {
    "grad": lambda wrap: grad(wrap(lambda x: mapped(x).sum())),
    "vjp": lambda wrap: lambda x: vjp(wrap(mapped), x)[1](x)[0],
    "jacrev": lambda wrap: jacrev(wrap(lambda x: mapped(x).sum(0))),
    "returned too": lambda wrap: grad(lambda x: sum(t.sum() for t in wrap(returns_what_it_reads)(x))),
}


def returns_what_it_reads(x: Tensor) -> tuple[Tensor, Tensor]:
    y = mapped(x)
    return y, y.cos()


@pytest.mark.parametrize("policy", [None, policies.everything_saveable], ids=["no policy", "everything"])
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_tensors_made_inside_and_kept_are_not_captured(name: str, policy: Any) -> None:
    """They were operands, each with the graph of the run that had made it: the result required grad, and leaked."""
    program = MADE_INSIDE[name]
    found = remat(program(remat), policy=policy)(X)
    assert_same(found, program(plain)(X), exact=False)
    assert not found.requires_grad
    assert leaked_bytes(remat(program(remat), policy=policy), X) == 0


def test_a_result_that_is_read_is_not_captured_if_autograd_records_the_region() -> None:
    runs = []

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(None)
        y = vmap(lambda row: (row * weight[0]).sin())(x)
        return y, y.cos()

    weight = rand(4, 4)
    program = grad(lambda x: sum(t.sum() for t in remat(fn)(x)))
    assert program(X).requires_grad
    assert len(runs) == 2
    assert leaked_bytes(lambda: torch.autograd.grad(program(X).sum(), weight)) == 0


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_captured_tensor_of_a_level_that_has_ended(policy: Any) -> None:
    """A buffer that a function under `jvp` has set anew; operations see the tensor that it wraps."""

    def program(wrap: Callable) -> list[Tensor]:
        module = nn.Module()
        module.scale = torch.full((3,), 0.5)

        def refreshed(x: Tensor) -> Tensor:
            module.scale = module.scale * 0.5 + 1
            return x * module.scale.cos()

        def outer(x: Tensor) -> Tensor:
            y = jvp(refreshed, (x,), (torch.ones_like(x),))[1]
            return wrap(lambda x: (x * module.scale).sin())(x) + y

        x = torch.arange(3.0).requires_grad_()
        y = wrap(outer)(x)
        return [y.detach(), *torch.autograd.grad(y.sum(), x), module.scale + 0]

    assert_same(program(lambda f: remat(f, policy=policy)), program(lambda f: f))
