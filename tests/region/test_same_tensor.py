"""A tensor that reaches a region in two ways, as an argument and captured, or captured twice: it is one tensor.

In a recompute it must be one tensor again. Either way, inner regions must find their inputs in the same places.
"""

import types
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from cases import Wrap, assert_same, plain, rand
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from remat import CaptureError, MutationError, policies, remat

HOLDER = types.SimpleNamespace()
MODULE = types.ModuleType("remat_test_held")  # the search for captured tensors doesn't look into it


combined = lambda y, a: y @ y.cos() + a.sin()
product = lambda p, q: (p * q.cos() + 1).sin()
hidden = lambda: getattr(MODULE, "held")  # noqa: B009

# Each makes a function that captures a tensor, and its arguments. `inner` is a region of `product`.
CASES: dict[str, Callable[[Wrap, Callable, Tensor], tuple[Callable, tuple]]] = {
    "argument first": lambda wrap, inner, x: (lambda a: combined(inner(a, x), a), (x,)),
    "captured first": lambda wrap, inner, x: (lambda a: combined(inner(x, a), a), (x,)),
    "captured twice": lambda wrap, inner, x: (lambda a: combined(inner(HOLDER.held, x), a), (x * 2,)),
    "hidden": lambda wrap, inner, x: (lambda a: combined(inner(a, hidden()), a), (x,)),
    "captured and hidden": lambda wrap, inner, x: (lambda a: combined(inner(x, hidden()), a), (x * 3,)),
    "result of an inner region": lambda wrap, inner, x: (
        (lambda same: lambda a: combined(inner(a, same(a)), inner(same(a), x)))(wrap(lambda t: t)), (x,)
    ),
    "captured by the inner region": lambda wrap, inner, x: (
        (lambda inner: lambda a: combined(inner(a), a))(wrap(lambda p: (p * x.cos()).sin())), (x,)
    ),
    "views": lambda wrap, inner, x: (
        (lambda flip, same: lambda a: combined(inner(a, flip), inner(same, x)) * inner(a, same))(x.t(), x.view_as(x)),
        (x,),
    ),
    "asked if it is the same": lambda wrap, inner, x: (lambda a: (a.sin() if a is x else a.cos()).exp().sin(), (x,)),
}  # fmt: skip
HIDDEN = "hidden", "captured and hidden"
tensor = partial(rand, 3, 3, grad=False)


def of_result(run: Callable) -> Any:
    leaf = rand(3, 3)
    x = leaf * 2
    out = run(x).square().sum() + x.sum()
    return torch.autograd.grad(out, [leaf, x], retain_graph=True), torch.autograd.grad(out, [leaf, x])


def second_order(run: Callable) -> Any:
    x = rand(3, 3)
    (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    return first, torch.autograd.grad(first.square().sum(), x)


loss = lambda run: lambda x: run(x).square().sum()
TRANSFORMS: dict[str, Callable] = {
    "grad": lambda run: grad(loss(run))(tensor()),
    "jvp": lambda run: jvp(run, (tensor(),), (tensor().cos(),)),
    "vmap-grad": lambda run: vmap(grad(loss(run)))(torch.stack([tensor(), tensor() + 1])),
    "grad-grad": lambda run: grad(lambda x: grad(loss(run))(x).square().sum())(tensor()),
    "jvp-grad": lambda run: jvp(grad(loss(run)), (tensor(),), (tensor().cos(),)),
    "jacrev": lambda run: jacrev(run)(tensor()),
}
WAYS: dict[str, Callable] = {
    "result": of_result, "second order": second_order,
    "not followed": lambda run: (lambda x: grad(lambda p: (run(x) * p).square().sum())(tensor() + 2))(tensor()),
    **TRANSFORMS,
}  # fmt: skip


def runs(case: str, wrap: Wrap) -> Callable:
    def run(x: Tensor) -> Tensor:
        HOLDER.held = MODULE.held = x
        fn, args = CASES[case](wrap, wrap(product), x)
        return wrap(fn)(*args)

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_tensor_that_reaches_a_region_in_two_ways_is_one(case: str, way: str) -> None:
    expected = WAYS[way](runs(case, plain))
    if case in HIDDEN and way in TRANSFORMS:
        with pytest.raises(CaptureError, match="Pass it as an argument"):
            WAYS[way](runs(case, remat))
        return
    for policy in None, policies.save_ops("aten.cos"):
        assert_same(WAYS[way](runs(case, remat(policy=policy))), expected, exact=False)


def test_an_argument_that_is_passed_twice_is_one_object_in_all_runs() -> None:
    """`nn.MultiheadAttention` relies on this: it tests `query is key`."""
    attention, t = nn.MultiheadAttention(4, 2, batch_first=True).double(), rand(2, 3, 4)
    fn = remat(lambda q, k, v: attention(q, k, v)[0].sum() if q is k else q.sum())
    found = torch.autograd.grad(fn(t, t, t), [t, *attention.parameters()])
    assert_same(found, torch.autograd.grad(attention(t, t, t)[0].sum(), [t, *attention.parameters()]))
    assert_same(grad(lambda t: fn(t, t, t))(t.detach()), found[0], exact=False)
    out = checkpoint(lambda *args: remat(product)(*args).exp(), t, t, use_reentrant=False)  # it makes two of it
    assert_same(torch.autograd.grad(out.sum(), t), torch.autograd.grad(product(t, t).exp().sum(), t))


def test_a_captured_leaf_of_which_a_level_makes_an_argument() -> None:
    x, c = rand(3), rand(3, grad=False)
    region = lambda wrap: wrap(lambda a: (wrap(lambda: x.sin())(), (a * 2).detach() * a + c * x)[1])
    assert_same(*(torch.autograd.grad(vjp(region(wrap), x)[0].sum(), x) for wrap in (remat, plain)), exact=False)


# Each makes, for a tensor, a function that changes it, and more arguments.
IN_PLACE: dict[str, tuple[Callable[[Tensor], tuple[Callable, tuple]], bool]] = {
    "as an argument": (lambda held: (lambda x, b: b.add_(1) * (x * held).sin(), (held,)), True),
    "as captured": (lambda held: (lambda x, b: held.mul_(2) * (x * b).sin(), (held,)), True),
    "captured twice": (lambda held: ((lambda also: lambda x: also[0].add_(1) * (x * held).sin())([held]), ()), True),
    "a view of an argument": (lambda held: ((lambda row: lambda x, b: b.add_(1) * (x * row).sin())(held[0]), (held,)),
                              False),
    "two arguments": (lambda held: (lambda x, b, c: b.add_(1) * (x * c).sin(), (held, held[1])), False),
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
@pytest.mark.parametrize("policy", [None, policies.everything_saveable], ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_one_tensor_that_the_region_changes(name: str, policy: Any, nested: bool) -> None:
    """Two tensors that share memory are an error."""
    make, works = IN_PLACE[name]

    def program(wrap: Wrap) -> Any:
        held, x = tensor(), rand(3, 3)
        fn, args = make(held)
        out = wrap(fn)(x, *args)
        after = held.clone()
        return out.detach(), after, torch.autograd.grad(out.sum(), x), held

    def wrap(f: Callable) -> Callable:
        inner = remat(f, policy=policy)
        return remat(lambda *args: inner(*args)) if nested else inner

    with nullcontext() if works else pytest.raises(MutationError, match="share memory"):
        assert_same(program(wrap), program(plain))
