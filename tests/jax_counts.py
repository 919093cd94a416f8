"""What `jax.checkpoint` saves and recomputes, as reference figures, and the same programs in PyTorch.

The program of a row is `built(row.function, *map(made, row.policies))`, differentiated with respect to all arguments.
`built(row.function)` is the same program without regions. The figures were measured with jax 0.10.2 on the CPU, in
float64, for the same functions written with `jax.numpy`:

- `kept` is the number of lines of `jax.ad_checkpoint.print_saved_residuals` that aren't arguments: values that are
  saved from the forward to the backward. An input of a region that another region has computed is counted. For
  `in_vmap_*` it is the number for one sample.
- `again` counts the primitives in the jaxpr of `f_vjp(ct)`, without dead code, with the bodies of `remat` and `jit`,
  less those of the same function without `jax.checkpoint`, which belong to the derivative itself. A jaxpr of forward
  and backward together has the same figures. XLA is not involved.

A name is an operation of its own in JAX. The derivatives of `exp`, `tanh` and the `relu` here read the result *before*
it was named, so saving the named value doesn't spare them. `NAMED_RESULT` has the figures for derivative rules that
read the named value (written with `jax.custom_jvp`), for the rows where they differ.

Kinds: `matmul` is `dot_general` (torch: `mm`, `bmm`). `relu` is a `maximum`.
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
class Row:
    """One program under one policy.

    A policy is `none`, a name out of `jax.checkpoint_policies`, or `only a,b` for `save_only_these_names("a", "b")`.
    """

    function: str  # the key in `PROGRAMS`
    policies: tuple[str, ...]  # one for each level of regions, outermost first
    kept: int
    again: dict[str, int]  # by kind of operation


def rows(table: str) -> list[Row]:
    """The rows of a table. A line has a function, and policies with the values kept and the operations repeated."""
    found = []
    for line in table.strip().splitlines():
        function, _, entries = line.strip().partition(": ")
        for entry in entries.split(" | "):
            policies, kept, *again = entry.split()
            counts = {kind: int(count) for kind, count in zip(again[::2], again[1::2])}
            found.append(Row(function, tuple(policies.replace(":", " ").split("/")), int(kept), counts))
    return found


ROWS = rows("""
    sin_sin: none 0 sin 1 | everything_saveable 2 sin 0
    three: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0 | only:a 1 sin 1 matmul 3
    three: only:b 1 sin 1 matmul 3 | only:c 0 sin 2 matmul 3 | only:a,b 2 sin 0 matmul 3
    three: only:a,c 1 sin 1 matmul 3 | only:b,c 1 sin 1 matmul 3 | only:a,b,c 2 sin 0 matmul 3
    three_pre: none 0 sin 2 matmul 3 | only:a 1 sin 2 matmul 2 | only:b 1 sin 2 matmul 2 | only:c 1 sin 2 matmul 2
    three_pre: only:a,b 2 sin 2 matmul 1 | only:a,c 2 sin 2 matmul 1 | only:b,c 2 sin 2 matmul 1
    three_pre: only:a,b,c 3 sin 2 matmul 0
    three_each: none 2 sin 0 matmul 3 | dots_saveable 5 sin 0 matmul 0
    block: none 0 sin 1 exp 1 matmul 7 | dots_saveable 7 sin 1 exp 1 matmul 0 | only:q,k,v 3 sin 1 exp 1 matmul 4
    block: only:mid 1 sin 1 exp 1 matmul 6 | only:o 1 sin 1 exp 1 matmul 6 | only:hidden 1 sin 0 exp 1 matmul 7
    exp_named: none 0 sin 2 exp 1 | only:n 1 sin 2 exp 1
    nested_3_0: none/none 0 sin 4 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_3_0: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    nested_2_1: none/none 0 sin 5 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_2_1: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    nested_1_2: none/none 0 sin 5 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_1_2: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    nested_0_3: none/none 0 sin 5 | everything_saveable/none 5 sin 0 | none/everything_saveable 0 sin 4
    nested_0_3: only:n/none 1 sin 3 | none/only:n 0 sin 4 | only:n/only:n 1 sin 3
    pair_first: none 0 sin 0
    pair: none 0 sin 1
    dead_linear: none 0 sin 1 matmul 0 | dots_saveable 0 sin 1 matmul 0
    named_linear: none 0 sin 1 matmul 2 | only:m 1 sin 1 matmul 1
    mlp_maximum: none 0 tanh 1 maximum 1 matmul 2 | only:h 1 tanh 1 maximum 1 matmul 2
    mlp_relu: none 0 tanh 1 maximum 1 matmul 2 | only:h 1 tanh 1 maximum 1 matmul 2
    square_sin: none 0 sin 0 mul 1
    exp_exp: none 0 exp 2 | everything_saveable 2 exp 0
    vmap_x: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    vmap_x: dots_with_no_batch_dims_saveable 3 sin 2 matmul 0
    vmap_all: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    vmap_all: dots_with_no_batch_dims_saveable 0 sin 2 matmul 3
    in_vmap_x: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    in_vmap_x: dots_with_no_batch_dims_saveable 3 sin 2 matmul 0
    in_vmap_all: none 0 sin 2 matmul 3 | dots_saveable 3 sin 2 matmul 0
    in_vmap_all: dots_with_no_batch_dims_saveable 3 sin 2 matmul 0
    loop_each: none 3 tanh 4 matmul 4 | dots_saveable 7 tanh 4 matmul 0 | only:h 3 tanh 4 matmul 4
    loop: none 0 tanh 4 matmul 4 | dots_saveable 4 tanh 4 matmul 0 | only:h 3 tanh 4 matmul 4
""")
NAMED_RESULT = rows("""
    exp_named: only:n 1 sin 1 exp 0
    mlp_relu: only:h 1 tanh 1 maximum 0 matmul 1
    loop_each: only:h 4 tanh 0 matmul 0
    loop: only:h 4 tanh 0 matmul 0
""")


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
        return mid + name(sin(mid @ Wup), "hidden") @ Wdown

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
    "three_pre": Program(
        lambda wrap: three(wrap, lambda label: lambda W, h: sin(name(W @ h, label))), tensors(*WEIGHTS, (5, 4)), data=3
    ),
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
