"""The programs of `tests/jax_counts.py` in PyTorch.

The program of a row is `built(row.function, *map(made, row.policies))`, differentiated with respect to all arguments.
`built(row.function)` is the same program without regions.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cases import plain, repeated, tensors
from torch import Tensor, exp, relu, sin, tanh

from remat import checkpoint_name as name
from remat import policies, remat

Fn = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """A function with regions, and its arguments."""

    build: Callable[..., Fn]  # from one wrapper for each level of regions; `wrap(fn)` makes a region of `fn`
    args: Callable[[], tuple[Tensor, ...]]  # makes new ones with the same values, all of which require grad
    in_dims: tuple[int | None, ...] | None = None  # if set, the derivative is computed inside `vmap` with these
    data: int = 0  # the position of the input among the arguments; the others are weights

    def plain_args(self) -> tuple[Tensor, ...]:
        """The arguments for `torch.func`."""
        return tuple(t.detach() for t in self.args())

    def batch(self) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The arguments with a batch of inputs, and the dimensions for `vmap`."""
        args = self.plain_args()
        if self.in_dims is not None:
            return args, self.in_dims
        batch = list(args)
        dims: list[int | None] = [None] * len(args)
        batch[self.data], dims[self.data] = torch.stack([args[self.data] - i / 7 for i in range(3)]), 0
        return tuple(batch), tuple(dims)


def layer(label: str) -> Fn:
    return lambda W, h: name(sin(W @ h), label)


def layer_pre(label: str) -> Fn:
    return lambda W, h: sin(name(W @ h, label))


def three(wrap: Fn, layer: Callable[[str], Fn] = layer, each: Fn = lambda fn: fn) -> Fn:
    """Three layers in one region, or each in one."""
    g1, g2, g3 = (each(layer(label)) for label in "abc")
    return wrap(lambda W1, W2, W3, x: g3(W3, g2(W2, g1(W1, x))))


def block(wrap: Fn) -> Fn:
    """Attention and an MLP, eight matmuls."""

    def fn(x, Wq, Wk, Wv, Wo, Wup, Wdown):
        q, k, v = name(x @ Wq, "q"), name(x @ Wk, "k"), name(x @ Wv, "v")
        e = exp(q @ k.T)
        o = name((e / e.sum(-1, keepdim=True)) @ v @ Wo, "o")
        mid = name(x + o, "mid")
        hidden = name(sin(mid @ Wup), "hidden")
        return mid + hidden @ Wdown

    return wrap(fn)


def nested(before: int, after: int) -> Callable[[Fn, Fn], Fn]:
    """A region of two sines, nested in a region with `before` sines before it and `after` sines after it."""

    def build(outer: Fn, inner: Fn) -> Fn:
        middle = inner(lambda x: sin(name(sin(x), "n")))
        return outer(lambda x: repeated(sin, after)(middle(repeated(sin, before)(x))))

    return build


def pair(wrap: Fn) -> Fn:
    return wrap(lambda a, b: (sin(a), sin(sin(b))))


def named_linear(wrap: Fn) -> Fn:
    return wrap(lambda x, W1, W2: sin(sin(name(x + x @ W1, "m")) @ W2))


def mlp(activation: Fn) -> Callable[[Fn], Fn]:
    return lambda wrap: wrap(lambda x, W1, W2, W3: tanh(name(activation(x @ W1), "h") @ W2) @ W3)


def loop(wrap: Fn, each: Fn = lambda fn: fn) -> Fn:
    """Four steps in one region, or each in one."""
    step = each(lambda W, h: name(tanh(h @ W), "h"))
    return wrap(lambda W, x: repeated(lambda h: step(W, h), 4)(x))


def mapped(*in_dims: int | None) -> Callable[[Fn], Fn]:
    """`three` under `vmap`, for a derivative outside of it."""
    return lambda wrap: torch.func.vmap(three(wrap), in_dims)


WEIGHTS, SQUARE = [(5, 5)] * 3, (6, 6)
BATCH_X, BATCH_ALL = [*WEIGHTS, (3, 5, 4)], [(3, 5, 5)] * 3 + [(3, 5, 4)]

PROGRAMS = {
    "sin_sin": Program(lambda wrap: wrap(lambda x: sin(sin(x))), tensors(())),
    "three": Program(three, tensors(*WEIGHTS, (5, 4)), data=3),
    "three_pre": Program(lambda wrap: three(wrap, layer_pre), tensors(*WEIGHTS, (5, 4)), data=3),
    "three_each": Program(lambda wrap: three(plain, each=wrap), tensors(*WEIGHTS, (5, 4)), data=3),
    "block": Program(block, tensors((6, 4), *[(4, 4)] * 4, (4, 8), (8, 4))),
    "exp_named": Program(lambda wrap: wrap(lambda a: sin(name(exp(sin(sin(a))), "n"))), tensors(())),
    **{f"nested_{before}_{3 - before}": Program(nested(before, 3 - before), tensors(())) for before in range(4)},
    "pair_first": Program(lambda wrap: lambda a, b: pair(wrap)(a, b)[0], tensors((), ())),
    "pair": Program(pair, tensors((), ())),
    "dead_linear": Program(lambda wrap: wrap(lambda x, W1: sin(sin(x)) + x @ W1), tensors((5, 6), SQUARE)),
    "named_linear": Program(named_linear, tensors((5, 6), SQUARE, SQUARE)),
    "mlp_maximum": Program(mlp(lambda z: torch.maximum(z, z.new_zeros(()))), tensors((5, 6), SQUARE, SQUARE, SQUARE)),
    "mlp_relu": Program(mlp(relu), tensors((5, 6), SQUARE, SQUARE, SQUARE)),
    "square_sin": Program(lambda wrap: wrap(lambda x: sin(x * x)), tensors(())),
    "exp_exp": Program(lambda wrap: wrap(lambda x: exp(exp(x))), tensors(())),
    "vmap_x": Program(mapped(None, None, None, 0), tensors(*BATCH_X), data=3),
    "vmap_all": Program(mapped(0, 0, 0, 0), tensors(*BATCH_ALL), data=3),
    "in_vmap_x": Program(three, tensors(*BATCH_X), in_dims=(None, None, None, 0), data=3),
    "in_vmap_all": Program(three, tensors(*BATCH_ALL), in_dims=(0, 0, 0, 0), data=3),
    "loop_each": Program(lambda wrap: loop(plain, each=wrap), tensors((5, 5), (3, 5)), data=1),
    "loop": Program(loop, tensors((5, 5), (3, 5)), data=1),
}


def made(word: str) -> Any:
    """The policy that `word` of a row names."""
    if word == "none":
        return None
    if word.startswith("only "):
        return policies.save_only_these_names(*word.removeprefix("only ").split(","))
    return getattr(policies, word)


def built(function: str, *given: Any) -> Fn:
    """A program with these policies, the outermost first; without policies, the program without regions."""
    levels = 2 if function.startswith("nested") else 1
    wrappers = [functools.partial(remat, policy=policy) for policy in given] or [plain] * levels
    return PROGRAMS[function].build(*wrappers[:levels])
