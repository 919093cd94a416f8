"""Policies under `torch.compile`: names, nested regions, and the values passed to the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import count, graphs_of, handed_over
from torch import Tensor

from remat import checkpoint_name, policies, remat


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = checkpoint_name(x @ w1, "h")
    return x + torch.sin(checkpoint_name(F.gelu(h) @ w2, "o"))


def blocks(wrap: Callable, body: Callable = block) -> Callable:
    f = wrap(body)

    def fn(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        for _ in range(4):
            x = f(x, w1, w2)
        return x.square().sum()

    return fn


def inputs() -> list[Tensor]:
    return [(torch.randn(shape) * 0.2).requires_grad_() for shape in ((64, 32), (32, 128), (128, 32))]


def value_and_grads(f: Callable, args: list[Tensor]) -> tuple[Tensor, ...]:
    out = f(*args)
    return out.detach(), *torch.autograd.grad(out, args)


def recomputed(wrap: Callable, body: Callable = block) -> tuple[int, int]:
    """The number of the 8 products that are recomputed, and the bytes passed to the backward; checks the values."""
    args = inputs()
    graphs, result = graphs_of(blocks(wrap, body), value_and_grads, args)
    torch.testing.assert_close(result, value_and_grads(blocks(lambda f: f, body), args))
    assert count(graphs.forward) == 8
    return count(graphs.backward) - 16, handed_over(graphs.backward)


p = policies
NAMED = [
    (None, 8, 24_576),
    (p.save_only_these_names("h"), 4, 180_224),
    (p.save_only_these_names("o"), 4, 73_728),
    (p.save_only_these_names("h", "o"), 0, 229_376),
    (p.save_any_names_but_these("h"), 4, 73_728),
    (p.save_anything_except_these_names("h"), 4, 212_992),
    (p.save_anything_except_these_names("zz"), 0, 368_640),
    (p.save_matmuls, 0, 229_376),
    (p.save_matmuls & ~p.save_only_these_names("h"), 4, 73_728),
    (p.save_only_these_names("h") | p.save_ops("aten.sin"), 4, 188_416),
    (p.save_if(lambda ctx, op, *args, **kwargs: args[0].shape[1] == 128) & p.save_any_names_but_these("z"), 4, 73_728),
]


@pytest.mark.parametrize(("policy", "products", "size"), NAMED, ids=lambda value: str(value)[:60])
def test_names(policy: Any, products: int, size: int) -> None:
    assert recomputed(lambda f: remat(f, policy=policy)) == (products, size)


NESTED = [
    (None, p.save_matmuls, 8, 24_576),
    (p.save_matmuls, None, 0, 229_376),
    (p.everything_saveable, None, 0, 368_640),
    (None, p.everything_saveable, 8, 24_576),
    (p.save_only_these_names("h"), p.save_only_these_names("o"), 4, 180_224),
]


@pytest.mark.parametrize(("outer", "inner", "products", "size"), NESTED, ids=lambda value: str(value)[:30])
def test_the_outermost_policy_decides(outer: Any, inner: Any, products: int, size: int) -> None:
    def wrap(f: Callable) -> Callable:
        region = remat(f, policy=inner)
        return remat(lambda *args: region(*args), policy=outer)

    assert recomputed(wrap) == (products, size)


@pytest.mark.parametrize(
    "name",
    [
        lambda h: checkpoint_name(h.T.contiguous().T, "h"),
        lambda h: checkpoint_name(h.view(64, 2, 64), "h").view(64, 128),
        lambda h: checkpoint_name(checkpoint_name(h, "other"), "h"),
        lambda h: checkpoint_name(checkpoint_name(h, "h"), "other"),
        lambda h: checkpoint_name({"a": [h, 1]}, "h")["a"][0],
        lambda h: checkpoint_name(h * 1, "h").sin_(),
        lambda h: checkpoint_name(h.view(64, 2, 64)[:, 1], "h").repeat(1, 2),
    ],
)
def test_names_on_values_of_all_kinds(name: Callable) -> None:
    def body(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return x + torch.sin(F.gelu(name(x @ w1)) @ w2)

    products, size = recomputed(lambda f: remat(f, policy=p.save_only_these_names("h")), body)
    assert products == 4 and size >= 4 * 64 * 128 * 4


def test_a_name_on_one_result_of_several() -> None:
    def body(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = checkpoint_name(F.layer_norm(x @ w1, (128,)), "h")
        return x + torch.sin(h @ w2)

    assert recomputed(remat, body)[0] == 8
    _, size = recomputed(lambda f: remat(f, policy=p.save_only_these_names("h")), body)
    assert size >= 4 * 64 * 128 * 4


def test_a_name_on_an_argument_has_no_effect() -> None:
    def body(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return x + torch.sin(checkpoint_name(x, "h") @ w1 @ w2)

    assert recomputed(lambda f: remat(f, policy=p.save_only_these_names("h")), body)[0] == recomputed(remat, body)[0]


def test_a_name_outside_of_a_region_is_the_tensor_itself() -> None:
    same = []

    def fn(x: Tensor) -> Tensor:
        named = checkpoint_name(x, "h")
        same.append(named is x)
        return named.sin()

    torch.compile(fn, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert same == [True]


def test_the_eager_backend_ignores_names() -> None:
    args = inputs()
    f = blocks(lambda f: remat(f, policy=p.save_only_these_names("h")))
    result = value_and_grads(torch.compile(f, backend="eager"), args)
    torch.testing.assert_close(result, value_and_grads(blocks(lambda f: f), args))
