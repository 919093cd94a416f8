"""`checkpoint_name`: the identity, recognized by policies under any alias, in every transform."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import rand
from torch import Tensor
from torch.func import functionalize, grad, jvp, vjp, vmap

from benchmarks.measure import OpCounter, held_bytes
from remat import checkpoint_name, policies, remat


def test_is_the_identity() -> None:
    x = rand(3).sin()
    tree = {"a": x, "b": [x.cos(), 3, None], "c": "text"}
    node = x.grad_fn
    assert checkpoint_name(x, "x") is x and checkpoint_name(tree, "tree") is tree
    assert x.grad_fn is node
    assert checkpoint_name(5, "five") == 5


@pytest.mark.parametrize("name", [None, 3, b"q", ["q"]])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(TypeError, match=r"checkpoint_name\(x, name\): the name must be a string"):
        checkpoint_name(torch.ones(1), name)


def again(fn: Callable, policy: Any, *args: Tensor) -> OpCounter:
    """The ops of the backward of a region, whose gradients are checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = remat(fn, policy=policy)(*args)
    expected = torch.autograd.grad(fn(*args).sum(), args)
    with OpCounter() as counter:
        grads = torch.autograd.grad(out.sum(), args)
    assert all(map(torch.equal, grads, expected))
    return counter


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda h: checkpoint_name(h, "h"),
    "read before it was named": lambda h: (h.cos(), checkpoint_name(h, "h"))[1],
    "named as a view": lambda h: (checkpoint_name(h.view(-1), "h"), h)[1],
    "read as a view": lambda h: checkpoint_name(h, "h").view(-1).view(2, 2).t().t(),
    "in a tree": lambda h: checkpoint_name({"x": [h, 1]}, "h")["x"][0],
    "twice": lambda h: checkpoint_name(checkpoint_name(h, "other"), "h"),
    "detached": lambda h: (checkpoint_name(h.detach(), "h"), h)[1],
    "part of it": lambda h: (checkpoint_name(h[0], "h"), h)[1],
}


@pytest.mark.parametrize("alias", ALIASES)
def test_the_op_that_made_the_value_is_not_recomputed(alias: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return ALIASES[alias](torch.exp(x.sin())).sin().sin()

    assert again(fn, policies.save_only_these_names("h"), rand(2, 2))["aten.exp"] == 0
    assert again(fn, None, rand(2, 2))["aten.exp"] == 1


def test_every_output_of_an_op() -> None:
    def fn(x: Tensor) -> Tensor:
        values, _ = checkpoint_name(torch.max(x.sin(), dim=0), "max")
        return values.sin().exp()

    counter = again(fn, policies.save_only_these_names("max"), rand(3, 3))
    assert counter["aten.max"] == 0


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = checkpoint_name(torch.exp(x), "y")
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


def test_inside_a_custom_function() -> None:
    assert again(lambda x: Twice.apply(x.sin()).sin(), policies.save_only_these_names("y"), rand(3))["aten.exp"] == 0


def named(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(checkpoint_name(torch.exp(x @ w), "h")).sum()


TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda f: grad(f, argnums=(0, 1)),
    "vjp": lambda f: lambda x, w: vjp(f, x, w)[1](torch.ones((), dtype=x.dtype)),
    "vmap(grad)": lambda f: vmap(grad(f, argnums=(0, 1)), in_dims=(0, None)),
    "vmap(grad) of both": lambda f: lambda x, w: vmap(grad(f, argnums=(0, 1)))(x, w.expand(len(x), *w.shape)),
    "grad(vmap)": lambda f: grad(lambda x, w: vmap(f, in_dims=(0, None))(x, w).sum(), argnums=(0, 1)),
    "jvp": lambda f: lambda x, w: jvp(f, (x, w), (x, w)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_under_transforms(transform: str) -> None:
    args = rand(3, 4, grad=False), rand(4, 4, seed=1, grad=False)
    run = TRANSFORMS[transform]
    with OpCounter() as plain:
        expected = run(named)(*args)
    fn = remat(named, policy=policies.save_only_these_names("h"))
    run(fn)(*args)  # the first call may record something about the function
    with OpCounter() as counter:
        actual = run(fn)(*args)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert counter["aten.exp"] == plain["aten.exp"]


def test_functionalize() -> None:
    x = rand(3, grad=False)
    assert torch.equal(functionalize(lambda x: checkpoint_name(x.sin(), "h").exp())(x), x.sin().exp())


def test_unknown_names_cause_one_warning() -> None:
    def fn(x: Tensor) -> Tensor:
        return checkpoint_name(x.sin(), "hidden").exp()

    with pytest.warns(UserWarning, match=r"name 'hiden', but no value has this name.*'hidden'.*mean 'hidden'"):
        remat(fn, policy=policies.save_only_these_names("hiden", "hid*"))(rand(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # nor for a new wrapper
            remat(fn, policy=policies.save_only_these_names("hiden"))(rand(3)).sum().backward()


def test_no_names_at_all() -> None:
    with pytest.warns(UserWarning, match="There were no named values"):
        remat(lambda x: x.sin(), policy=policies.save_only_these_names("q"))(rand(3))


def test_named_inputs_need_not_be_saved() -> None:
    def fn(x: Tensor) -> Tensor:
        return checkpoint_name(x, "x").sin().sin()

    assert again(fn, policies.save_only_these_names("x"), rand(3))["aten.sin"] == 1


def first(x: Tensor) -> Tensor:
    return checkpoint_name(x.sin(), "h").sin().sin()


@pytest.mark.parametrize(
    "policy, sines",
    [
        (policies.save_any_names_but_these(), 1),
        (policies.save_any_names_but_these("h"), 2),
        (policies.save_any_names_but_these("*"), 2),
        (policies.offload(policies.save_any_names_but_these()), 1),
        (policies.save_any_names_but_these() & policies.save_ops("aten.sin"), 1),
        (policies.save_any_names_but_these() & ~policies.save_ops("aten.sin"), 2),
        (policies.save_any_names_but_these() | policies.save_ops("aten.exp"), 1),
        (~policies.save_any_names_but_these(), 1),  # everything except named values
        (~policies.save_only_these_names(), 0),
        (policies.save_only_these_names(), 2),
        (policies.save_anything_except_these_names(), 0),
        (~policies.save_anything_except_these_names(), 2),
    ],
    ids=repr,
)
def test_policies_that_judge_names_and_mention_none(policy: Any, sines: int) -> None:
    x = rand(3)
    for _ in range(2):
        out = remat(first, policy=policy)(x)
        with OpCounter() as counter:
            (gradient,) = torch.autograd.grad(out.sum(), x)
        assert counter["aten.sin"] == sines
        assert torch.equal(gradient, torch.autograd.grad(first(x).sum(), x)[0])
    with OpCounter() as counter:
        assert torch.equal(grad(lambda x: remat(first, policy=policy)(x).sum())(x), gradient)
    # Under torch.func, the recompute of a region without a record runs to its end.
    assert counter["aten.sin"] == 3 + (3 if policy.saves_nothing else sines)


def test_saved_bytes_of_policies_for_any_name() -> None:
    x = rand(64)
    held = {policy: held_bytes(remat(first, policy=policy), x) // x.nbytes for policy in (None, ANY, EVERYTHING)}
    assert held == {None: 1, ANY: 2, EVERYTHING: 3}  # including the result


ANY, EVERYTHING = policies.save_any_names_but_these(), ~policies.save_only_these_names()
