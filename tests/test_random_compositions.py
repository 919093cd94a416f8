"""Random functions of random trees, cut into regions at random, under random transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import assert_same, rand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from remat import _tree, remat

OPTIONS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SIZE = 3
Wrap = Callable[[Callable], Callable]

# Trees of argument places: a leaf is a number of a tensor, or a plain value that only passes.
LEAVES = st.one_of(st.integers(0, 2).map(lambda i: ("t", i)), st.sampled_from([None, "text", 2.0]))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "exp": lambda t: (t * 0.1).exp(),
    "sum": lambda t: t.sum().expand(SIZE) * t,
    "sort": lambda t: t.sort().values,
    "same": lambda t: t,
    "view": lambda t: t.view(1, SIZE)[0],
    "detach": lambda t: t.detach().sin(),
    "in place": lambda t: t.sin().mul_(2).add_(1),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "outer": lambda a, b: torch.outer(a, b).tanh().sum(0),
    "where": lambda a, b: torch.where(a > 0, a, b.sin()),
}
NUMBERS = st.integers(0, 9)
STEPS = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), NUMBERS),
    st.tuples(st.sampled_from(sorted(BINARY)), NUMBERS, NUMBERS),
)
# Regions of a program, each with how deep it is nested in regions of its own.
PROGRAMS = st.lists(
    st.tuples(st.lists(STEPS, min_size=1, max_size=4), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=3,
)
TRANSFORMS = st.lists(st.sampled_from(["grad", "vjp", "jvp", "jacrev", "jacfwd", "vmap", "vmap, shared"]), max_size=2)


def is_place(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and node[0] == "t"


def fill(tree: Any, tensors: list[Tensor]) -> Any:
    """A tree with tensors in the places."""
    if is_place(tree):
        return tensors[tree[1] % len(tensors)]
    if isinstance(tree, (list, tuple)):
        return type(tree)(fill(item, tensors) for item in tree)
    if isinstance(tree, dict):
        return {key: fill(item, tensors) for key, item in tree.items()}
    return tree


def run_steps(steps: list[tuple], tree: Any, captured: Tensor) -> Any:
    """Ops on the tensors of a tree; returns another tree, with what came in among the results."""
    leaves, spec = _tree.flatten(tree)
    found = [t for t in leaves if isinstance(t, Tensor)] + [captured]
    for name, *numbers in steps:
        operands = [found[i % len(found)] for i in numbers]
        found.append((UNARY.get(name) or BINARY[name])(*operands))
    count = iter(range(len(found)))
    kept = [found[-1 - next(count)] if isinstance(t, Tensor) else t for t in leaves]
    return _tree.unflatten(spec, kept), {"last": found[-1], "n": len(found)}


def program(wrap: Wrap, parts: list, tree: Any) -> Callable[..., Tensor]:
    """A function of three tensors: regions one after the other, nested, some with a capture."""

    def call(*tensors: Tensor) -> Tensor:
        state, total = fill(tree, list(tensors)), tensors[0]
        for steps, depth, captures in parts:
            captured = total.cos() if captures else torch.ones(SIZE, dtype=total.dtype)

            def region(state: Any, steps: Any = steps, captured: Tensor = captured) -> Any:
                return run_steps(steps, state, captured)

            for _ in range(depth):
                region = wrap(nested(wrap(region)))
            state, extra = wrap(region)(state)
            total = total + extra["last"] * 0.5
        rest = [t for t in _tree.flatten(state)[0] if isinstance(t, Tensor)]
        return sum((t.sin() for t in rest), total).sin()

    return call


def nested(region: Callable) -> Callable:
    return lambda state: region(state)


def transformed(names: list[str], fn: Callable) -> Callable:
    for name in reversed(names):
        fn = TRANSFORMED[name](fn)
    return fn


def scalar(fn: Callable) -> Callable:
    return lambda *args: fn(*args).sum()


TRANSFORMED: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda fn: lambda *a: sum(grad(scalar(fn), argnums=(0, 1, 2))(*a)),
    "vjp": lambda fn: lambda *a: sum(vjp(fn, *a)[1](fn(*a).cos())),
    "jvp": lambda fn: lambda *a: sum(jvp(fn, a, tuple(t.cos() for t in a))),
    "jacrev": lambda fn: lambda *a: jacrev(fn, argnums=1)(*a).sum(0),
    "jacfwd": lambda fn: lambda *a: jacfwd(fn, argnums=2)(*a).sum(0),
    "vmap": lambda fn: lambda *a: vmap(fn)(*(torch.stack([t, t.cos()]) for t in a)).sum(0),
    "vmap, shared": lambda fn: (
        lambda a, b, c: vmap(fn, in_dims=(0, None, None))(torch.stack([a, a.cos()]), b, c).sum(0)
    ),
}


@OPTIONS
@given(tree=TREES, parts=PROGRAMS, names=TRANSFORMS)
def test_same_as_without_remat(tree: Any, parts: list, names: list[str]) -> None:
    args = [rand(SIZE, seed=i, grad=False) for i in range(3)]

    def run(wrap: Wrap) -> tuple:
        fn = transformed(names, program(wrap, parts, tree))
        leaves = [t.clone().requires_grad_() for t in args]
        out = fn(*leaves)
        grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True) if out.requires_grad else ()
        return fn(*args), out.detach(), grads

    found, wanted = run(remat), run(lambda fn: fn)
    assert_same(as_zeros(found, args), as_zeros(wanted, args), exact=False)


def as_zeros(result: tuple, args: list[Tensor]) -> tuple:
    """A gradient of None is one of zeros: plain torch gives either for what has no influence."""
    value, out, grads = result
    if not grads:
        return value, out, [torch.zeros_like(t) for t in args]
    return value, out, [torch.zeros_like(t) if g is None else g for t, g in zip(args, grads)]
