"""Programs with regions that are compiled or traced. `wrap` makes a region of a function."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

W = torch.eye(6) * 0.5 + 0.1


def given(rows: int = 2) -> Tensor:
    return torch.linspace(0.1, 1, rows * 6).view(rows, 6).requires_grad_()


def block(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().exp() @ w


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.mm.default


CONTEXTS = functools.partial(create_selective_checkpoint_contexts, keeps_products)


def two(wrap: Callable) -> Callable:
    f = wrap(block)
    return lambda x, w: f(f(x, w).tanh(), w)


def nested(wrap: Callable) -> Callable:
    inner = wrap(block)
    return wrap(lambda x, w: inner(x.cos(), w).tanh())


def of_trees(wrap: Callable) -> Callable:
    f = wrap(lambda tree, flag, *, scale=1.0: {"y": block(tree["x"], tree["w"]) * scale, "flag": flag})

    def fn(x: Tensor, w: Tensor) -> Tensor:
        out = f({"x": x, "w": w}, flag=True, scale=2.0)
        return out["y"] if out["flag"] else x

    return fn


def captured(wrap: Callable) -> Callable:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = w.sin()
        return wrap(lambda x: (x @ y).exp().sin() @ w)(x)

    return fn


# Each with the number of products that the backward recomputes.
PROGRAMS: dict[str, tuple[Callable, int]] = {
    "one": (lambda wrap: wrap(block), 1), "two": (two, 2), "nested": (nested, 2), "trees": (of_trees, 1),
    "captured": (captured, 1),
}  # fmt: skip


def value_and_grads(f: Callable, *args: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in args]
    out = f(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


def grads(f: Callable, rows: int = 2) -> tuple[Tensor, ...]:
    return value_and_grads(f, given(rows), W)
