"""Policies in compiled code: what they save, names, and nested regions, under plain autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_programs import value_and_grads
from graphs import count, graphs_of, handed_over
from torch import Tensor

from benchmarks.measure import count_ops, held_bytes
from remat import checkpoint_name, policies, remat

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LARGE = 64 * 128 * 4  # the bytes of a value named "h"


def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = checkpoint_name(x @ w1, "h")
    return x + torch.sin(checkpoint_name(F.gelu(h) @ w2, "o"))


def twice(wrap: Callable, body: Callable = block) -> Callable:
    f = wrap(body)
    return lambda x, w1, w2: f(f(x, w1, w2), w1, w2).square().sum()


def inputs() -> list[Tensor]:
    return [(torch.randn(shape) * 0.2).requires_grad_() for shape in ((64, 32), (32, 128), (128, 32))]


def recomputed(wrap: Callable, body: Callable = block) -> tuple[int, int]:
    """The number of the 4 products that are recomputed, and the bytes passed to the backward; checks the values."""
    args = inputs()
    graphs, result = graphs_of(twice(wrap, body), value_and_grads, *args)
    torch.testing.assert_close(result, value_and_grads(twice(lambda f: f, body), *args))
    assert count(graphs.forward) == 4
    return count(graphs.backward) - 8, handed_over(graphs.backward)


def in_eager_code(wrap: Callable, body: Callable = block) -> tuple[int, int]:
    """The same in eager code."""
    args, f = inputs(), twice(wrap, body)
    out = f(*args)
    return count_ops(lambda: torch.autograd.grad(out, args))["aten.mm"] - 8, held_bytes(f, *args)


def has_wide_operand(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return args[0].shape[1] == 128


p = policies
POLICIES: list[Any] = [
    None,
    p.save_matmuls,
    ~p.save_matmuls,
    p.everything_saveable,
    p.save_only_these_names("h"),
    p.save_only_these_names("h", "o"),
    p.save_anything_except_these_names("h"),
    p.save_anything_except_these_names("another"),
    p.save_matmuls & ~p.save_only_these_names("h"),
    p.save_only_these_names("h") | p.save_ops("aten.sin"),
    p.save_if(has_wide_operand) & p.save_any_names_but_these("another"),
    p.offload(p.save_matmuls),  # nothing in torch.compile reads torch's `MUST_CPU_OFFLOAD`
    ["aten.mm"],
    has_wide_operand,
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: getattr(policy, "__name__", str(policy)))
def test_a_policy_saves_what_it_saves_in_eager_code(policy: Any) -> None:
    """The partitioner may save or recompute a few cheap values more."""
    wrap = lambda f: remat(f, policy=policy)
    (products, size), (eager_products, eager_size) = recomputed(wrap), in_eager_code(wrap)
    assert products == eager_products
    assert 0.49 * eager_size < size < 1.4 * eager_size


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(None, p.save_matmuls), (p.save_matmuls, None), (p.everything_saveable, None), (None, p.everything_saveable)],
    ids=str,
)
def test_the_outermost_policy_decides(outer: Any, inner: Any) -> None:
    def wrap(f: Callable) -> Callable:
        region = remat(f, policy=inner)
        return remat(lambda *args: region(*args), policy=outer)

    assert recomputed(wrap) == recomputed(lambda f: remat(f, policy=outer))


NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "with other strides": lambda h: checkpoint_name(h.T.contiguous().T, "h"),
    "a view": lambda h: checkpoint_name(h.view(64, 2, 64), "h").view(64, 128),
    "a part": lambda h: checkpoint_name(h.view(64, 2, 64)[:, 1], "h").repeat(1, 2),
    "named first otherwise": lambda h: checkpoint_name(checkpoint_name(h, "other"), "h"),
    "named later otherwise": lambda h: checkpoint_name(checkpoint_name(h, "h"), "other"),
    "in a container": lambda h: checkpoint_name({"a": [h, 1]}, "h")["a"][0],
    "changed later": lambda h: checkpoint_name(h * 1, "h").sin_(),
}


@pytest.mark.parametrize("name", NAMED.values(), ids=NAMED)
def test_a_value_with_a_name_is_saved(name: Callable) -> None:
    body = lambda x, w1, w2: x + torch.sin(F.gelu(name(x @ w1)) @ w2)
    products, size = recomputed(lambda f: remat(f, policy=p.save_only_these_names("h")), body)
    assert products == 2 and size >= 2 * LARGE


def test_a_name_on_an_argument_saves_nothing_more() -> None:
    body = lambda x, w1, w2: x + torch.sin(F.gelu(checkpoint_name(x, "h") @ checkpoint_name(w1.t(), "h").t()) @ w2)
    assert recomputed(lambda f: remat(f, policy=p.save_only_these_names("h")), body) == recomputed(remat, body)


def test_the_eager_backend_knows_operators_and_ignores_names() -> None:
    args, runs = inputs(), []
    for policy in (p.save_only_these_names("h"), p.save_matmuls):
        f = torch.compile(twice(lambda f, policy=policy: remat(f, policy=policy)), backend="eager")
        torch.testing.assert_close(value_and_grads(f, *args), value_and_grads(twice(lambda f: f), *args))
        out = f(*args)
        runs.append(count_ops(lambda: torch.autograd.grad(out, args))["aten.mm"] - 8)
    assert runs == [4, 0]
