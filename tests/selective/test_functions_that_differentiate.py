"""Policies for functions that take a derivative themselves, by torch.func or by torch.autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import rand
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vjp
from torch.nn import functional as F

from benchmarks.measure import count_ops
from remat import policies, remat, scan

WEIGHT, BIAS, SQUARE = rand(4, seed=1, grad=False), rand(4, seed=2, grad=False), rand(4, 4, seed=3, grad=False)

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "native_layer_norm": lambda x: F.layer_norm(x, (4,), WEIGHT, BIAS),
    "native_group_norm": lambda x: F.group_norm(x, 2, WEIGHT, BIAS),
    "native_batch_norm": lambda x: F.instance_norm(x.reshape(1, 4, -1), weight=WEIGHT, bias=BIAS).reshape(-1, 4),
}
POLICIES: dict[str, Any] = {
    "only it": "the norm",
    "all but products": ~policies.save_matmuls,
    "predicate": lambda ctx, op, *args, **kwargs: "norm" in str(op),
    "everything": policies.everything_saveable,
}


def step(x: Tensor) -> Tensor:
    """A gradient step."""
    return x - 0.1 * grad(lambda z: z.square().sum())(x)


def step_by_autograd(x: Tensor) -> Tensor:
    with torch.enable_grad():
        z = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(z.square().sum(), z, create_graph=True)
    return x - 0.1 * slope


def derivatives(fn: Callable, x: Tensor) -> list[Any]:
    """The gradient, the gradient of the gradient, and a gradient by torch.func."""
    z = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(fn(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), z)
    return [first.detach(), second, grad(lambda z: fn(z).sum())(x.detach())]


def check_equal(fn: Callable, x: Tensor, **options: Any) -> None:
    torch.testing.assert_close(derivatives(remat(fn, **options), x), derivatives(fn, x))


@pytest.mark.parametrize("inner", [step, step_by_autograd])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("norm", NORMS)
def test_a_saved_norm_after_a_gradient_step(norm: str, policy: str, inner: Callable) -> None:
    # Autograd saves mean and variance as results of the norm, which no operation reads before the backward.
    chosen = policies.save_ops(f"aten.{norm}") if policy == "only it" else POLICIES[policy]
    x = rand(3, 4)
    check_equal(lambda x: NORMS[norm](inner(x)).sin(), x, policy=chosen)
    check_equal(lambda x: (NORMS[norm](inner(x)) @ SQUARE).sin(), x, policy=chosen)


def test_a_saved_norm_after_a_gradient_step_is_not_recomputed() -> None:
    fn, x = lambda x: NORMS["native_layer_norm"](step(x)).sin(), rand(3, 4)

    def count(policy: Any) -> int:
        result = remat(fn, policy=policy)(x).sum()
        return count_ops(torch.autograd.grad, result, x)["aten.native_layer_norm"]

    assert count(None) == 1
    assert count(policies.save_ops("aten.native_layer_norm")) == 0


@pytest.mark.parametrize("norm", NORMS)
def test_functions_of_one_code(norm: str) -> None:
    def made(inner: Callable) -> Callable:
        return lambda x: NORMS[norm](inner(x)).sin()

    x, policy = rand(3, 4), policies.save_ops(f"aten.{norm}")
    for inner in (step, torch.cos, step_by_autograd, torch.exp, lambda x: F.dropout(x, 0.0), step):
        check_equal(made(inner), x, policy=policy)


def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def by_loop(x: Tensor, generator: torch.Generator, loop: Callable) -> Tensor:
    def advance(carry: Tensor, amount: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(noisy(carry, generator) + amount), carry.sum()

    last, sums = loop(advance, x, torch.linspace(0, 1, 5, dtype=x.dtype))
    return last + sums.mean()


def python_loop(advance: Callable, carry: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    ys = []
    for x in xs:
        carry, y = advance(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


@pytest.mark.parametrize("policy", [policies.save_ops("aten.mul"), policies.everything_saveable])
def test_random_numbers_of_a_loop_in_a_region(policy: Any) -> None:
    x = rand(3, 4).detach()

    def run(loop: Callable, wrap: Callable) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        fn = wrap(lambda z: by_loop(z, generator, loop))
        return grad(lambda z: fn(z.cos()).sin().sum())(x), generator.get_state()

    expected = run(python_loop, lambda fn: fn)
    torch.testing.assert_close(run(scan, lambda fn: remat(fn, policy=policy)), expected)


@pytest.mark.parametrize("policy", [policies.save_ops("aten.mul"), policies.everything_saveable])
def test_random_numbers_before_an_inner_region_starts_again(policy: Any) -> None:
    # The inner region draws numbers, then calls torch.func, so its first run starts again and draws them again.
    def inner(z: Tensor, generator: torch.Generator) -> Tensor:
        return step(torch.tanh(noisy(z, generator)))

    def run(wrap: Callable, wrap_inner: Callable) -> tuple[list[Any], Tensor]:
        generator, known = torch.Generator().manual_seed(3), wrap_inner(inner)

        def fn(x: Tensor) -> Tensor:
            return noisy(known(noisy(known(x.cos(), generator), generator), generator), generator).sin()

        return derivatives(wrap(fn), rand(3, 4)), generator.get_state()

    expected = run(lambda fn: fn, lambda fn: fn)
    torch.testing.assert_close(run(lambda fn: remat(fn, policy=policy), remat), expected)


def product(q: Tensor) -> Tensor:
    return (q @ SQUARE).tanh()


def product_and_norm(q: Tensor) -> Tensor:
    return F.layer_norm(q @ SQUARE, (4,), WEIGHT, BIAS).sin()


@pytest.mark.parametrize(
    "policy",
    [
        policies.save_matmuls, policies.everything_saveable, policies.offload(policies.everything_saveable),
        policies.save_ops("aten.tanh"), policies.budget(100),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("fn", [product, product_and_norm])
def test_a_gradient_of_a_forward_derivative(fn: Callable, policy: Any) -> None:
    # Forward mode makes zeros that have no memory.
    def slope(x: Tensor) -> Tensor:
        z = x if x.requires_grad else x.detach().requires_grad_()
        tangent = jvp(fn, (z,), (torch.ones_like(z),))[1]
        return torch.autograd.grad(tangent.sum(), z, create_graph=True)[0]

    x = rand(3, 4)
    for option in ({}, {"determinism_check": "values"}, {"debug": True}):
        region = remat(slope, policy=policy, **option)
        torch.testing.assert_close(region(x), slope(x))
        found, expected = (torch.autograd.grad(each(x).sin().sum(), x) for each in (region, slope))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.save_ops("aten.native_layer_norm")])
@pytest.mark.parametrize("transform", [jacrev, hessian, lambda fn: lambda x: vjp(fn, x)[1](x.cos())])
def test_compared_values_do_not_include_placeholders(transform: Callable, policy: Any) -> None:
    module, x = torch.nn.LayerNorm(4, dtype=torch.float64), rand(3, 4, grad=False)
    region = remat(module, policy=policy, determinism_check="values")
    torch.testing.assert_close(transform(region)(x), transform(module)(x))


def transposed_in_place(x: Tensor) -> Tensor:
    stacked = torch.stack([x.sin(), x.cos()])
    stacked.transpose_(0, 1)
    return stacked


GRU = torch.nn.GRU(4, 4, batch_first=True, dtype=torch.float64)


def recurrent(x: Tensor) -> Tensor:
    return GRU(x.reshape(1, -1, 4))[0].reshape(x.shape)


@pytest.mark.parametrize("policy", [policies.save_matmuls, policies.everything_saveable, policies.budget(0.5), None])
@pytest.mark.parametrize("fn", [transposed_in_place, recurrent])
def test_a_gradient_step_through_a_region_that_reshapes_in_place(fn: Callable, policy: Any) -> None:
    def step_through(region: Callable) -> Callable:
        return lambda x: x - 0.1 * grad(lambda z: region(z).square().sum())(x)

    x = rand(3, 4, grad=False)
    actual = derivatives(remat(step_through(remat(fn)), policy=policy), x)
    torch.testing.assert_close(actual, derivatives(step_through(fn), x))
