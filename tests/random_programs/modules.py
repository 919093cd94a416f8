"""Modules with state, hooks, and transforms inside, of which random programs are made."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = namedtuple("Pair", "a b")


class Apply(nn.Module):
    """A module that calls a function with its argument and two other modules."""

    def __init__(self, fn: Callable[..., Tensor], *kids: nn.Module) -> None:
        super().__init__()
        self.fn, self.kids = fn, nn.ModuleList(kids)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, *self.kids)


class Counter(nn.Module):
    """Counts its calls, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.calls += 1
        return x * (1 + 0.1 * self.n)


class Average(nn.Module):
    """Updates a moving average in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean(0), 0.3)
        return x - self.mean


class Rebinding(nn.Module):
    """Replaces its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        old, self.state = self.state, self.state * 0.5 + 1
        return x * old.cos()


class Stash(nn.Module):
    """Keeps its last activation, as feature extractors do."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sin()
        return self.last * 0.9


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(4, 4, generator=self.generator, dtype=x.dtype)


class Scaled(torch.autograd.Function):
    """A square with a weight, with a rule for each transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * g * x * w, (g * x * x).sum(0)

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, tw: Tensor | None) -> Tensor:
        x, w = ctx.saved_tensors
        parts = [] if tx is None else [2 * x * tx * w]
        return sum(parts if tw is None else [*parts, x * x * tw])


class Tree(nn.Module):
    """Takes and returns trees."""

    def __init__(self, kid: nn.Module) -> None:
        super().__init__()
        self.kid = kid

    def forward(self, tree: dict[str, Any], *, scale: float = 1.0) -> Pair:
        return Pair(self.kid(tree["x"]) * scale, [F.gelu(tree["y"]), tree["more"]])


HOOKS: list[Callable[[Any], Any]] = [
    lambda m: m.register_forward_hook(lambda m, args, out: out * 0.9),
    lambda m: m.register_forward_pre_hook(lambda m, args: (args[0].sin(),)),
    lambda m: m.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 1.1 for g in gi)),
    lambda m: m.weight.register_hook(lambda g: None if g is None else g * 0.5),
]


def hooked(module: nn.Module, n: int) -> nn.Module:
    HOOKS[n % len(HOOKS)](module)
    return module
