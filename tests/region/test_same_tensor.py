"""A tensor that reaches a region in two ways, as an argument and captured, or captured twice: it is one tensor.

In a recompute it must be one tensor again. Either way, inner regions must find their inputs in the same places.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import count_ops, held_bytes
from remat import CaptureError, MutationError, policies, remat
from remat import nn as remat_nn

Wrap = Callable[[Callable], Callable]
HOLDER = types.SimpleNamespace()
MODULE = types.ModuleType("remat_test_held")
NAME = "held"  # a name that the search for captured tensors doesn't find
HELD: Any = None


def plain(fn: Callable) -> Callable:
    return fn


def combined(y: Tensor, a: Tensor) -> Tensor:
    return y @ y.cos() + a.sin()


def product(wrap: Wrap) -> Callable:
    return wrap(lambda p, q: p * q.cos())


# Each returns, for a tensor, the function that captures it, and its arguments.


def returned_as_it_is(wrap: Wrap, x: Tensor) -> Any:
    inner = wrap(lambda p, q: p)
    return wrap(lambda a: combined(inner(a, x), a)), (x,)


def argument_first(wrap: Wrap, x: Tensor) -> Any:
    inner = product(wrap)
    return wrap(lambda a: combined(inner(a, x), a)), (x,)


def captured_first(wrap: Wrap, x: Tensor) -> Any:
    inner = product(wrap)
    return wrap(lambda a: combined(inner(x, a), a)), (x,)


def captured_twice(wrap: Wrap, x: Tensor) -> Any:
    HOLDER.held = x
    inner = product(wrap)
    return wrap(lambda a: combined(inner(HOLDER.held, x), a)), (x * 2,)


def global_and_attributes(wrap: Wrap, x: Tensor) -> Any:
    global HELD
    HELD = HOLDER.held = HOLDER.other = x
    inner = wrap(lambda p, q, r, s: (p * q.cos() + r * s).sin())
    return wrap(lambda a: combined(inner(HELD, HOLDER.held, HOLDER.other, a), a)), (x,)


def in_containers(wrap: Wrap, x: Tensor) -> Any:
    held = (x, [x], {"k": x})
    inner = wrap(lambda p, q, r, s: (p * q.cos() + r * s).sin())
    return wrap(lambda a: combined(inner(a, held[0], held[1][0], held[2]["k"]), a)), (x,)


def default(wrap: Wrap, x: Tensor) -> Any:
    inner = product(wrap)

    def f(a: Tensor, b: Tensor = x) -> Tensor:
        return combined(inner(a, b), a)

    return wrap(f), (x,)


def by_a_computed_name(wrap: Wrap, x: Tensor) -> Any:
    MODULE.held = x
    inner = product(wrap)
    return wrap(lambda a: combined(inner(a, getattr(MODULE, NAME)), a)), (x,)


def captured_and_by_a_computed_name(wrap: Wrap, x: Tensor) -> Any:
    MODULE.held = x
    inner = product(wrap)
    return wrap(lambda a: combined(inner(x, getattr(MODULE, NAME)), a)), (x * 3,)


def in_a_frozenset(wrap: Wrap, x: Tensor) -> Any:
    held = frozenset([x])
    inner = product(wrap)
    return wrap(lambda a: combined(inner(a, next(iter(held))), a)), (x,)


def result_of_an_inner_region(wrap: Wrap, x: Tensor) -> Any:
    inner, same = product(wrap), wrap(lambda t: t)

    def f(a: Tensor) -> Tensor:
        b = same(a)
        return combined(inner(a, b), inner(b, x))

    return wrap(f), (x,)


def captured_by_the_inner_region(wrap: Wrap, x: Tensor) -> Any:
    inner = wrap(lambda p: (p * x.cos()).sin())
    return wrap(lambda a: combined(inner(a), a)), (x,)


def captured_by_a_hidden_inner_region(wrap: Wrap, x: Tensor) -> Any:
    MODULE.held = wrap(lambda p: (p * x.cos()).sin())
    return wrap(lambda a: combined(getattr(MODULE, NAME)(a), a)), (x,)


def views(wrap: Wrap, x: Tensor) -> Any:
    turned, alike, inner = x.t(), x.view_as(x), product(wrap)
    return wrap(lambda a: combined(inner(a, turned), inner(alike, x)) * inner(a, alike)), (x,)


def keyword(wrap: Wrap, x: Tensor) -> Any:
    inner = wrap(lambda p, q=None: p * q.cos())
    f = wrap(lambda a, *, b: combined(inner(a, q=b), x))
    return lambda a: f(a, b=x), (x,)


def asked_whether_it_is_the_same(wrap: Wrap, x: Tensor) -> Any:
    return wrap(lambda a: (a.sin() if a is x else a.cos()).exp().sin()), (x,)


def three_deep(wrap: Wrap, x: Tensor) -> Any:
    inner = product(wrap)
    middle = wrap(lambda a, b: inner(a, x) * inner(b, x))
    return wrap(lambda a: combined(middle(a, x), a)), (x,)


def three_uses(wrap: Wrap, x: Tensor) -> Any:
    y, inner = x * 2, wrap(lambda p, q, r: (p * q.cos() + r).sin())
    return wrap(lambda a, b: combined(inner(a, x, b), inner(b, a, y))), (x, y)


def argument_twice(wrap: Wrap, x: Tensor) -> Any:
    inner = product(wrap)
    return wrap(lambda a, b: combined(inner(a, b), a)), (x, x)


CASES = [
    returned_as_it_is, argument_first, captured_first, captured_twice, global_and_attributes, in_containers, default,
    by_a_computed_name, captured_and_by_a_computed_name, in_a_frozenset, result_of_an_inner_region,
    captured_by_the_inner_region, captured_by_a_hidden_inner_region, views, keyword, asked_whether_it_is_the_same,
    three_deep, three_uses, argument_twice,
]  # fmt: skip

POLICIES = {
    "nothing": None,
    "matmuls": policies.save_matmuls,
    "everything": policies.everything_saveable,
    "cosines": policies.save_ops("aten.cos"),
}


def tensor() -> Tensor:
    return torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def batch() -> Tensor:
    return torch.stack([tensor(), tensor() + 1])


def of_leaf(run: Callable) -> Any:
    x = tensor().requires_grad_()
    out = run(x)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)


def of_result(run: Callable) -> Any:
    leaf = tensor().requires_grad_()
    x = leaf * 2
    out = run(x)
    return out.detach(), torch.autograd.grad(out.square().sum() + x.sum(), [leaf, x])


def twice(run: Callable) -> Any:
    x = tensor().requires_grad_()
    out = run(x).square().sum()
    return torch.autograd.grad(out, x, retain_graph=True), torch.autograd.grad(out, x)


def second_order(run: Callable) -> Any:
    x = tensor().requires_grad_()
    (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def pulled_back(run: Callable) -> Any:
    out, pull = vjp(run, tensor())
    return out, pull(out)


def with_the_other_followed(run: Callable) -> Any:
    x = tensor()
    return grad(lambda p: (run(x) * p).square().sum())(tensor() + 2)


def loss(run: Callable) -> Callable:
    return lambda x: run(x).square().sum()


def of_mapped(run: Callable) -> Any:
    x = batch().requires_grad_()
    return torch.autograd.grad(vmap(run)(x).square().sum(), x)


tangent = tensor().cos()
WAYS: dict[str, Callable] = {
    "leaf": of_leaf,
    "result": of_result,
    "twice": twice,
    "second order": second_order,
    "grad": lambda run: grad(loss(run))(tensor()),
    "vjp": pulled_back,
    "jvp": lambda run: jvp(run, (tensor(),), (tangent,)),
    "vmap": lambda run: vmap(run)(batch()),
    "vmap-grad": lambda run: vmap(grad(loss(run)))(batch()),
    "grad-vmap": lambda run: grad(loss(vmap(run)))(batch()),
    "grad-grad": lambda run: grad(lambda x: grad(loss(run))(x).square().sum())(tensor()),
    "jvp-grad": lambda run: jvp(grad(loss(run)), (tensor(),), (tangent,)),
    "grad-jvp": lambda run: grad(lambda x: jvp(run, (x,), (tangent,))[1].square().sum())(tensor()),
    "jacrev": lambda run: jacrev(run)(tensor()),
    "jacfwd": lambda run: jacfwd(run)(tensor()),
    "vmap, backward": of_mapped,
    "not followed": with_the_other_followed,
}
TRANSFORMS = WAYS.keys() - {"leaf", "result", "twice", "second order", "not followed"}
HIDDEN = [by_a_computed_name, captured_and_by_a_computed_name, in_a_frozenset, captured_by_a_hidden_inner_region]
SECOND = {"grad-grad", "jvp-grad", "grad-jvp"}  # where torch.func sums in another order


def runs(case: Callable, wrap: Wrap) -> Callable:
    def run(x: Tensor) -> Tensor:
        f, args = case(wrap, x)
        return f(*args)

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_argument_and_captured(case: Callable, way: str) -> None:
    expected = WAYS[way](runs(case, plain))
    if case in HIDDEN and way in TRANSFORMS:
        with pytest.raises(CaptureError, match="Pass it as an argument"):
            WAYS[way](runs(case, remat))
        return
    tolerance = 1e-12 if way in SECOND else 0
    for policy in None, policies.save_ops("aten.cos"):
        actual = WAYS[way](runs(case, remat(policy=policy)))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", [argument_first, captured_twice, by_a_computed_name], ids=lambda case: case.__name__)
def test_sharing_costs_nothing(case: Callable) -> None:
    """Bytes and recomputed operations are the same as for the same function with different tensors."""

    def other(wrap: Wrap, x: Tensor) -> Any:
        y, inner = x.detach().clone().requires_grad_(), product(wrap)
        return wrap(lambda a: combined(inner(a, y), a)), (x,)

    def step(case: Callable) -> Any:
        x = tensor().requires_grad_()
        f, args = case(remat, x)
        return held_bytes(lambda: f(*args)), count_ops(lambda: torch.autograd.grad(f(*args).sum(), x))["aten.cos"]

    assert step(case) == step(other)


# --- changed in place -----------------------------------------------------------------------------------------------


def counter() -> Any:
    n = torch.zeros((), dtype=torch.float64)

    def f(x: Tensor, k: Tensor) -> Tensor:
        k += 1
        return (x * n.clone()).sin() * n

    return f, (n,), n


def changed_as_argument() -> Any:
    held = tensor()

    def f(x: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        return (x * held).sin() * b

    return f, (held,), held


def changed_as_captured() -> Any:
    held = tensor()

    def f(x: Tensor, b: Tensor) -> Tensor:
        held.mul_(2)
        return (x * b).sin() * held

    return f, (held,), held


def held_twice() -> Any:
    held = tensor()
    also = {"k": held}

    def f(x: Tensor) -> Tensor:
        also["k"].add_(1)
        return (x * held).sin()

    return f, (), held


def view_of_the_argument() -> Any:
    held = tensor()
    row = held[0]

    def f(x: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        return (x * row).sin() * b

    return f, (held,), held


def changed_by_the_view() -> Any:
    held = tensor()
    row = held[1]

    def f(x: Tensor, b: Tensor) -> Tensor:
        row.add_(1)
        return (x * b).sin()

    return f, (held,), held


def turned_view() -> Any:
    held = tensor()
    turned = held.t()

    def f(x: Tensor) -> Tensor:
        turned.add_(1)
        return (x * held).sin() * turned

    return f, (), held


def two_arguments() -> Any:
    held = tensor()

    def f(x: Tensor, b: Tensor, c: Tensor) -> Tensor:
        b.add_(1)
        return (x * c).sin() * b

    return f, (held, held[1]), held


def overlapping() -> Any:
    base = torch.arange(9, dtype=torch.float64)
    a, b = base[:6], base[3:]

    def f(x: Tensor) -> Tensor:
        a.add_(1)
        return (x.reshape(9)[:6] * b).sin() * a

    return f, (), base


def buffers_on_one_storage() -> Any:
    module = nn.Module()
    module.register_buffer("a", tensor())
    module.register_buffer("b", module.a.view(9))
    module.register_buffer("c", torch.ones(9))  # in its own storage

    def f(x: Tensor) -> Tensor:
        module.a.add_(1)
        module.c.add_(1)
        return (x.view(9) * module.b * module.c).sin()

    return f, (), module.a


IN_PLACE = [
    counter, changed_as_argument, changed_as_captured, held_twice, view_of_the_argument, changed_by_the_view,
    turned_view, two_arguments, overlapping, buffers_on_one_storage,
]  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("make", IN_PLACE, ids=lambda make: make.__name__)
def test_changed_by_the_region(make: Callable, policy: Any, nested: bool) -> None:
    def program(wrap: Wrap) -> Any:
        f, args, state = make()
        x = tensor().requires_grad_()
        out = wrap(f)(x, *args)
        after = state.clone()
        return out.detach(), after, torch.autograd.grad(out.sum(), x), state.clone()

    def wrap(f: Callable) -> Callable:
        inner = remat(f, policy=policy)
        return remat(lambda *args: inner(*args)) if nested else inner

    if make in (counter, changed_as_argument, changed_as_captured, held_twice):
        torch.testing.assert_close(program(wrap), program(plain), rtol=0, atol=0)
    else:
        with pytest.raises(MutationError, match="share memory"):
            program(wrap)


def test_captured_and_below_its_levels_an_argument() -> None:
    """The inner region captures what it returns, and the argument `p` is that tensor, below the level of `p`."""
    w, x = torch.linspace(-1, 1, 3, dtype=torch.double, requires_grad=True), torch.arange(3.0).double()

    def program(wrap: Wrap) -> Any:
        def fn(a: Tensor, b: Tensor) -> Tensor:
            def inside(p: Tensor) -> Tensor:
                inner = wrap(lambda q: {"sum": w + p * 0.5, "captured": b})
                return grad(lambda q: inner(q)["sum"].cos().sum())(w).sum()

            return b + grad(inside)(b)

        out = grad(lambda a: wrap(fn)(a, x).sin().sum())(x)
        value, aux = grad(lambda a: (lambda r: (r.cos().sum(), r))(wrap(fn)(a, x)), has_aux=True)(x)
        return out, value, aux, torch.autograd.grad((aux + w).sum(), w)

    torch.testing.assert_close(program(remat), program(plain), rtol=0, atol=0)


def test_returned_and_below_its_levels_an_argument() -> None:
    """In each run the result is the captured tensor."""
    x, constant = torch.linspace(-1, 1, 3, dtype=torch.double, requires_grad=True), torch.arange(3.0).double()

    def program(wrap: Wrap) -> Any:
        fn = wrap(lambda a, b: (b.sin(), constant))
        return [grad(lambda p, q: fn(p, q)[0].sum())(p, constant) for p in (x, x.cos())]

    torch.testing.assert_close(program(remat), program(plain), rtol=0, atol=0)


# --- tied weights ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Uses the weight of its own embedding for the output, as models with tied weights do."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.e = nn.Embedding(7, 4)
        self.l = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = wrap(lambda h, w, own: F.linear(h, w) + own.sum())
        self.mix = wrap(lambda w, own: own * w.tanh())

    def forward(self, i: Tensor, w: Tensor) -> Tensor:
        assert w is self.e.weight and isinstance(w, nn.Parameter)
        h = self.norm(self.l(self.e(i)).tanh())
        return self.head(h, w, self.e.weight) * self.mix(self.e.weight, w).sum()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("way", ["remat", "apply", "frozen", "wrapped twice"])
def test_tied_weights(way: str, policy: Any) -> None:
    i = torch.tensor([1, 5, 2, 1])

    def program(wrap: Wrap, outer: Wrap) -> Any:
        torch.manual_seed(0)
        model = Tied(wrap).double()
        model.l.weight.requires_grad_(way != "frozen")
        call = outer(model)
        out = call(i, model.e.weight)
        out.sin().sum().backward()
        return out.detach(), [p.grad for p in model.parameters()], dict(model.named_buffers())

    outers: dict[str, Wrap] = {
        "remat": remat(policy=policy),
        "apply": lambda model: remat_nn.apply(model, Tied, policy=policy),
        "frozen": remat(policy=policy),
        "wrapped twice": lambda model: remat(lambda *args: remat(model, policy=policy)(*args)),
    }
    torch.testing.assert_close(program(remat, outers[way]), program(plain, plain), rtol=0, atol=0)


def test_tied_weights_as_with_torch_checkpoint() -> None:
    """As many bytes are saved as by torch's checkpoint."""
    torch.manual_seed(0)
    model, i = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh()), torch.arange(8)

    def f(i: Tensor, w: Tensor) -> Tensor:
        return F.linear(model(i), w).sin()

    ours = held_bytes(lambda: remat(f)(i, model[0].weight))
    assert ours <= held_bytes(lambda: checkpoint(f, i, model[0].weight, use_reentrant=False))
