"""The rules that policies promise, by counting: what is kept, what is run again, and that nothing else changes."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # its import, which the first dispatch mode starts, would hold on to the frames that it runs in
from cases import assert_same, cases, copied, rand, scalar, tensor_leaves, tensors, total
from jax_counts import NAMED_RESULT, ROWS, Row
from remat_functions import PROGRAMS, Program
from torch import Tensor, exp, sin
from torch.autograd.graph import get_gradient_edge
from torch.func import grad, jvp, vjp, vmap

from benchmarks.measure import (
    OpCounter,
    PeakMemory,
    assert_freed_without_gc,
    count_ops,
    held_bytes,
    leaked_bytes,
)
from remat import checkpoint_name, policies, remat

Fn = Callable[..., Any]
only = policies.save_only_these_names
aten = torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """What is there already is not looked at by the garbage collector, which runs often here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def made(word: str) -> Any:
    """The policy that a row of `jax_counts` means."""
    if word == "none":
        return None
    return only(*word.removeprefix("only ").split(",")) if word.startswith("only ") else getattr(policies, word)


def program_of(row: Row, plain: bool = False) -> Fn:
    """The row's function."""
    wrappers = [functools.partial(remat, policy=made(word)) for word in row.policies]
    return PROGRAMS[row.function].build(*([lambda fn: fn] * len(wrappers) if plain else wrappers))


# --- how it is counted ------------------------------------------------------------------------------------------------

KINDS = {"matmul": ("mm", "bmm"), "maximum": ("maximum", "relu")}


def kinds(ops: Counter[str]) -> Counter[str]:
    """Operations by the words of `jax_counts`."""
    return Counter({k: sum(ops[f"aten.{op}"] for op in KINDS.get(k, (k,))) for k in "sin exp tanh mul matmul maximum".split()})


class Alive(PeakMemory):
    """Counts storages instead of bytes."""

    @property
    def live(self) -> int:
        return sum(ref() is not None for ref in self._storages.valuerefs())


class Run(NamedTuple):
    """Values alive between forward and backward beyond arguments and results, operations run, and the derivative."""

    kept: int | None
    ops: Counter[str]
    result: Any


def by_autograd(program: Program, fn: Fn) -> Run:
    args = program.args()
    with Alive() as alive:
        outs = tensor_leaves(fn(*args))
        edges, cts = [get_gradient_edge(t) for t in outs], [copied(t).cos() for t in outs]
        del outs
        kept = alive.live - len(cts)
    with OpCounter() as counter:
        grads = torch.autograd.grad(edges, args, cts, allow_unused=True)
    return Run(kept, counter.counts, (cts, grads))


def by_vjp(program: Program, fn: Fn) -> Run:
    return _by_vjp(fn, *(t.detach() for t in program.args()))


def _by_vjp(fn: Fn, *args: Tensor) -> Run:
    with Alive() as alive:
        out, pull = vjp(fn, *args)
        kept = alive.live - len(tensor_leaves(out))  # `pull` holds them
    with OpCounter() as counter:
        grads = pull(torch.utils._pytree.tree_map(torch.cos, out))
    return Run(kept, counter.counts - Counter({"aten.cos": len(tensor_leaves(out))}), (out, grads))


def batch(program: Program) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Arguments with a batch of inputs, and the dimensions for `vmap`."""
    args = [t.detach() for t in program.args()]
    if program.in_dims is not None:
        return args, program.in_dims
    args[program.data] = torch.stack([args[program.data] - i / 7 for i in range(3)])
    return args, tuple(0 if i == program.data else None for i in range(len(args)))


def by_vmap_vjp(program: Program, fn: Fn) -> Run:
    args, in_dims = batch(program)
    runs = []

    def call(*args: Tensor) -> Any:
        runs.append(_by_vjp(fn, *args))
        return tuple(t for t in tensor_leaves(runs[-1].result))

    result = vmap(call, in_dims)(*args)
    return runs[-1]._replace(result=result)


def whole(transformed: Fn, *args: Tensor) -> Run:
    """Where the backward can't be told from the forward."""
    with OpCounter() as counter:
        result = transformed(*args)
    return Run(None, counter.counts, result)


def by_grad(program: Program, fn: Fn) -> Run:
    args = [t.detach() for t in program.args()]
    return whole(grad(lambda *args: total(fn(*args)), tuple(range(len(args)))), *args)


def by_vmap_grad(wanted: Fn, program: Program, fn: Fn) -> Run:
    args, in_dims = batch(program)
    argnums = tuple(i for i in range(len(args)) if wanted(i == program.data))
    return whole(vmap(grad(lambda *args: total(fn(*args)), argnums), in_dims), *args)


def by_grad_vmap(program: Program, fn: Fn) -> Run:
    args, in_dims = batch(program)
    return whole(grad(lambda *args: total(vmap(fn, in_dims)(*args)), tuple(range(len(args)))), *args)


TRANSFORMS: dict[str, Callable[[Program, Fn], Run]] = {
    "autograd": by_autograd,
    "vjp": by_vjp,
    "grad": by_grad,
    "vmap(vjp)": by_vmap_vjp,
    "vmap(grad), input": functools.partial(by_vmap_grad, lambda is_input: is_input),
    "vmap(grad), weights": functools.partial(by_vmap_grad, lambda is_input: not is_input),
    "grad(vmap)": by_grad_vmap,
}
EXACT = ("autograd", "vjp", "grad", "vmap(vjp)", "grad(vmap)")  # where all gradients are taken


@functools.cache
def plain(function: str, levels: int, transform: str) -> Run:
    row = Row(function, ("none",) * levels, 0, {})
    return TRANSFORMS[transform](PROGRAMS[function], program_of(row, plain=True))


def counted(row: Row, transform: str) -> tuple[int | None, dict[str, int]]:
    """What is kept, and how often the operations that the row tells of are run again."""
    run, expected = TRANSFORMS[transform](PROGRAMS[row.function], program_of(row)), plain(row.function, len(row.policies), transform)
    assert_same(run.result, expected.result)
    now, before = kinds(run.ops), kinds(expected.ops)
    return run.kept, {kind: now[kind] - before[kind] for kind in row.again}
