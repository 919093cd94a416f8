"""Operators that compile their branches or bodies, such as `torch.cond`, in eager regions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor
from torch._dynamo.utils import counters
from torch._higher_order_ops import scan, while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from remat import checkpoint_name, policies, remat

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

COND = torch.ops.higher_order.cond


def branches(x: Tensor, w: Tensor) -> Tensor:
    """One result, of one of two branches."""
    y = torch.cond(x.sum() > 0, lambda a, w: a.sin() @ w, lambda a, w: a.cos() @ w, (x, w))
    return checkpoint_name(y.exp(), "h") @ w


def of_what_is_made(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    y, z = torch.cond(h.sum() > 0, lambda a: (a.exp(), a * 2), lambda a: (a.cos(), a + 1), (h,))
    return checkpoint_name(y, "h").tanh() @ w * z.sin()


def random(x: Tensor, w: Tensor) -> Tensor:
    """The branch draws random numbers, and so does the code after it."""
    noise = torch.cond(x.sum() > 0, lambda a: torch.rand_like(a), lambda a: a + 1, (x.detach(),))
    return torch.nn.functional.dropout(checkpoint_name((x @ w).sin() * noise, "h").exp(), 0.5) @ w


def loop(x: Tensor, w: Tensor) -> Tensor:
    _, y = while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 1.5), (torch.tensor(0), x.detach()))
    return checkpoint_name((y * x).sin(), "h").exp() @ w


def scanned(x: Tensor, w: Tensor) -> Tensor:
    _, ys = scan(lambda carry, a: (carry + a.sin(), carry * a), torch.zeros(3), x.cos())
    return checkpoint_name(ys.tanh(), "h") @ w


def attention(x: Tensor, w: Tensor) -> Tensor:
    """Its backward runs only on devices, so it isn't differentiated here."""
    q = torch.linspace(-1, 1, 144).view(1, 1, 9, 16)
    y = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 0.5)
    return checkpoint_name((y[0, 0, :3, :3] * x).sin(), "h").exp() @ w


def grads(f: Callable, sign: float = 1.0) -> list[Any]:
    torch.manual_seed(0)
    x, w = (sign * torch.rand(3, 3)).requires_grad_(), torch.rand(3, 3, requires_grad=True)
    out = f(x, w)
    after = torch.get_rng_state()
    return [out.detach(), *torch.autograd.grad(out.sum(), (x, w)), after]


ONLY_COND, NAMES = policies.save_ops(COND), policies.save_only_these_names("h")


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (branches, {"policy": ONLY_COND}),
        (branches, {"policy": policies.save_matmuls, "debug": True}),
        (branches, {"policy": ONLY_COND, "determinism_check": "values"}),
        (of_what_is_made, {}),
        (of_what_is_made, {"policy": policies.everything_saveable}),
        (random, {}),
        (random, {"policy": ~policies.save_matmuls}),
        (lambda x, w: remat(branches, policy=policies.save_matmuls)(x.tanh(), w).sin(), {"policy": NAMES}),
        (loop, {"policy": policies.save_matmuls}),
        (scanned, {"policy": NAMES}),
        (attention, {"policy": policies.save_matmuls}),
        (lambda x, w: branches(x, w) - torch.func.grad(lambda w: (x @ w).sin().sum())(w), {}),
        (lambda x, w: scanned(x, w) - torch.func.grad(lambda w: (x @ w).sin().sum())(w), {"policy": NAMES}),
    ],
)
def test_values_gradients_and_random_numbers_are_those_of_the_plain_function(fn: Callable, options: dict) -> None:
    f = remat(fn, **options)
    for sign in (1.0, -1.0, 1.0):
        assert_same(grads(f, sign), grads(fn, sign))


@pytest.mark.parametrize("policy", [policies.save_matmuls, ONLY_COND], ids=str)
def test_operators_are_compiled_once(policy: Any) -> None:
    f = remat(branches, policy=policy)
    for _ in range(2):
        grads(f)
    compiled = counters["stats"]["unique_graphs"]
    grads(f)
    assert counters["stats"]["unique_graphs"] == compiled > 0


class Counting(TorchDispatchMode):
    """Counts how often `torch.cond` runs in eager code."""

    supports_higher_order_operators = True
    count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count += func is COND
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "runs"), [(ONLY_COND, 0), (policies.save_matmuls, 1)], ids=str)
def test_saved_results_of_an_operator_are_not_recomputed(policy: Any, runs: int) -> None:
    fn = lambda x, w: (torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x.detach(),)) * w).exp() @ w
    x, w = torch.ones(3, 3), torch.rand(3, 3, requires_grad=True)
    f = remat(fn, policy=policy)
    for _ in range(2):
        out = f(x, w).sum()
        with Counting() as counting:
            out.backward()
        assert counting.count == runs
