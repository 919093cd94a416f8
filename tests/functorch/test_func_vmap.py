"""`torch.func.vmap` of rematerialized functions: dimensions of all kinds, chunks, randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, assert_same, cases, differentiable_leaves, rand
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import conv1d, dropout, linear

from benchmarks.measure import count_ops, leaked_bytes, peak_bytes
from remat import policies, remat
from remat._core import trees

Wrap = Callable[[Callable], Callable]
RANDOMNESS = ("same", "different")
W = rand(4, 4, grad=False)
X = rand(3, 4, seed=1, grad=False)


def plain(fn: Callable, **options: Any) -> Callable:
    return fn


def f(x: Tensor) -> Tensor:
    return torch.tanh(x @ W) @ W


def drops(x: Tensor) -> Tensor:
    return dropout(x.sin(), 0.5) * x


def both(program: Callable[[Wrap], Any]) -> None:
    """The same results, and the same final state of the generator."""
    results = []
    for wrap in (remat, plain):
        torch.manual_seed(1)
        results.append((program(wrap), torch.get_rng_state()))
    assert_same(*results, exact=False)


def stacked(case: Case) -> tuple[Any, Any]:
    """Arguments with two samples in each tensor that requires grad, and the dimensions."""
    leaves, spec = trees.flatten(case.make_args())
    follows = [isinstance(t, Tensor) and t.requires_grad for t in leaves]
    values = [torch.stack([t, t.cos()]).detach() if s else t for t, s in zip(leaves, follows)]
    return values, (spec, follows)


def mapped(case: Case, fn: Callable, grads: bool) -> Any:
    values, (spec, follows) = stacked(case)

    def call(*samples: Any) -> Any:
        out = fn(*trees.unflatten(spec, samples))
        found = [t for t in trees.flatten(out)[0] if isinstance(t, Tensor)]
        if not grads:
            return found
        return sum((t.abs() ** 2).sum() for t in found if t.is_floating_point() or t.is_complex())

    argnums = tuple(i for i, follow in enumerate(follows) if follow)
    transform = vmap(
        grad(call, argnums=argnums) if grads else call,
        in_dims=tuple(0 if s else None for s in follows),
        randomness="different",
    )
    with case.state():
        return transform(*values), torch.get_rng_state()


@pytest.mark.parametrize("grads", [False, True], ids=["vmap", "vmap(grad)"])
@cases(func=True, vmap=True)
def test_case(case: Case, grads: bool) -> None:
    assert differentiable_leaves(case.make_args())
    assert_same(mapped(case, remat(case.fn), grads), mapped(case, case.fn, grads), exact=False)


@cases(func=True, vmap=True, jvp=True, random=False)
def test_case_under_autograd(case: Case) -> None:
    """`vmap`, and then plain autograd."""

    def run(fn: Callable) -> tuple:
        values, (spec, follows) = stacked(case)
        leaves = [t.clone().requires_grad_() if s else t for t, s in zip(values, follows)]

        def call(*samples: Any) -> Tensor:
            out = fn(*trees.unflatten(spec, samples))
            found = [t for t in trees.flatten(out)[0] if isinstance(t, Tensor)]
            return sum((t.abs() ** 2).sum() for t in found if t.is_floating_point() or t.is_complex())

        in_dims = tuple(0 if s else None for s in follows)
        inputs = [t for t, s in zip(leaves, follows) if s]
        out = vmap(call, in_dims=in_dims)(*leaves)
        return out.detach(), torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True)

    assert_same(run(remat(case.fn)), run(case.fn), exact=False)


def test_dimensions() -> None:
    def g(x: Tensor, y: Tensor) -> tuple:
        return torch.tanh(x @ W) * y, y.sin()

    y = rand(4, grad=False)
    both(lambda wrap: vmap(wrap(g), in_dims=(1, None), out_dims=(1, None))(X.T, y))
    both(lambda wrap: vmap(wrap(g), in_dims=(-1, None), out_dims=(-1, None))(X.T, y))
    both(lambda wrap: vmap(wrap(g), in_dims=(None, 0))(y, X))


def test_dimensions_of_trees() -> None:
    def g(d: dict, x: Tensor, *, scale: float) -> dict:
        return {"o": d["a"] * x.sin() + d["b"][0] * scale, "n": [d["b"][0]]}

    d = {"a": X, "b": (X[0],)}
    in_dims = ({"a": 0, "b": (None,)}, 1)
    call = lambda wrap: vmap(lambda d, x: wrap(g)(d, x, scale=2.0), in_dims=in_dims)(d, X.T)
    both(call)
    both(lambda wrap: vmap(lambda x: wrap(g)(d, x, scale=2.0)["o"])(X.sin()))


def test_nested() -> None:
    def g(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x @ W) * y

    y = rand(2, 4, grad=False)
    inner = {"in_dims": (0, None)}
    both(lambda wrap: vmap(vmap(wrap(g), **inner), in_dims=(None, 0))(X, y))
    both(lambda wrap: vmap(vmap(wrap(g)), in_dims=(0, None), out_dims=1)(X.expand(2, 3, 4), X))
    nested = lambda wrap: vmap(grad(lambda x, y: vmap(wrap(g), **inner)(x, y).sum(), argnums=(0, 1)), in_dims=(None, 0))
    both(lambda wrap: nested(wrap)(X, y))
    both(lambda wrap: vmap(vmap(vmap(wrap(torch.sin))))(rand(2, 2, 2, grad=False)))


def test_regions_outside_and_inside() -> None:
    def build(wrap: Wrap) -> Callable:
        return lambda x: wrap(vmap(wrap(f)))(x).sin()

    both(lambda wrap: build(wrap)(X))
    both(lambda wrap: grad(lambda x: build(wrap)(x).sum())(X))
    both(lambda wrap: wrap(grad(lambda x: build(wrap)(x).sum()))(X))
    both(lambda wrap: vmap(grad(lambda x: build(wrap)(x).sum()))(X.expand(2, 3, 4)))
    both(lambda wrap: hessian(lambda x: build(wrap)(x).sum())(X))


def test_only_some_outputs_are_batched_or_used() -> None:
    def g(x: Tensor, y: Tensor) -> tuple:
        return x.sin() * 2, y.cos() * 3, (x * y).exp(), torch.ones_like(y), x, y

    y = rand(4, grad=False)
    dims = (0, None, 1, None, 0, None)
    out = lambda wrap: vmap(wrap(g), in_dims=(0, None), out_dims=dims)
    both(lambda wrap: out(wrap)(X, y))
    both(lambda wrap: jacrev(out(wrap), argnums=(0, 1))(X, y))
    both(lambda wrap: jvp(out(wrap), (X, y), (X, y)))
    for i in range(6):
        both(lambda wrap: grad(lambda *a: out(wrap)(*a)[i].sin().sum(), argnums=(0, 1))(X, y))
        per_sample = lambda wrap: grad(lambda *a: wrap(g)(*a)[i].sum(), argnums=(0, 1))
        both(lambda wrap: vmap(per_sample(wrap), in_dims=(0, None))(X, y))
        both(lambda wrap: vmap(per_sample(wrap), in_dims=(None, 0))(y, X))
    both(lambda wrap: vmap(lambda x, y: vjp(wrap(g), x, y)[1](g(x, y)), in_dims=(0, None))(X, y))


def test_integer_outputs() -> None:
    def g(x: Tensor) -> tuple:
        values, places = x.sort()
        return values.sin(), places, x > 0

    both(lambda wrap: vmap(wrap(g))(X))
    per_sample = lambda wrap: grad(lambda x: (wrap(g)(x)[0][0], wrap(g)(x)[1:]), has_aux=True)
    both(lambda wrap: vmap(per_sample(wrap))(X))


def test_nothing_batched_inside() -> None:
    """The region sees no batch: it runs once, and its result has no batch dimension."""
    y = rand(4, grad=False)
    call = lambda wrap: vmap(lambda x: wrap(f)(y) * x)
    both(lambda wrap: call(wrap)(X))
    assert count_ops(call(remat), X)["aten.tanh"] == 1
    both(lambda wrap: grad(lambda y: vmap(lambda x: wrap(f)(y) * x)(X).sum())(y))


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_chunks(chunk_size: int) -> None:
    both(lambda wrap: vmap(wrap(f), chunk_size=chunk_size)(X))
    both(lambda wrap: grad(lambda x: vmap(wrap(f), chunk_size=chunk_size)(x).sum())(X))
    per_sample = lambda wrap: vmap(grad(lambda x: wrap(f)(x).sum()), chunk_size=chunk_size)
    both(lambda wrap: per_sample(wrap)(X))
    assert count_ops(per_sample(remat), X)["aten.tanh"] == 2 * -(-3 // chunk_size)


def test_randomness_error() -> None:
    for transform in (lambda g: g, lambda g: grad(lambda x: g(x).sum())):
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(transform(remat(drops)))(X)
    both(lambda wrap: vmap(wrap(torch.sin))(X))


@pytest.mark.parametrize("randomness", RANDOMNESS)
def test_randomness(randomness: str) -> None:
    x = rand(3, 40, grad=False)
    run = lambda wrap: vmap(wrap(drops), randomness=randomness)
    both(lambda wrap: run(wrap)(x))
    dropped = vmap(remat(drops), randomness=randomness)(torch.ones_like(x)) == 0
    assert 0 < dropped.double().mean() < 1
    assert (dropped[0] == dropped[1]).all() == (randomness == "same")


@pytest.mark.parametrize("randomness", RANDOMNESS)
def test_the_recompute_draws_the_same_numbers(randomness: str) -> None:
    x = rand(3, 20, grad=False)
    options = {"randomness": randomness}
    over = lambda wrap: vmap(wrap(drops), **options)
    both(lambda wrap: grad(lambda x: over(wrap)(x).sum())(x))
    both(lambda wrap: vmap(grad(lambda x: wrap(drops)(x).sum()), **options)(x))
    both(lambda wrap: vmap(jacrev(wrap(drops)), **options)(x))
    both(lambda wrap: vmap(vmap(grad(wrap(drops)), **options), **options)(x))
    both(lambda wrap: jacrev(lambda x: over(wrap)(x).sum(0))(x))
    both(lambda wrap: jacfwd(lambda x: over(wrap)(x).sum(0), randomness="same")(x))
    second = lambda wrap: grad(lambda x: grad(lambda x: over(wrap)(x).sum())(x).square().sum())
    both(lambda wrap: second(wrap)(x))
    both(lambda wrap: grad(lambda x: wrap(over(wrap))(x).sum())(x))


@pytest.mark.parametrize("randomness", RANDOMNESS)
def test_random_without_a_batch(randomness: str) -> None:
    def g(x: Tensor) -> Tensor:
        return (x * torch.randn(4, dtype=x.dtype)).sin()

    ones = torch.ones(4, dtype=X.dtype)
    options = {"randomness": randomness}
    both(lambda wrap: vmap(lambda y: wrap(g)(ones) * y, **options)(X))
    both(lambda wrap: vmap(lambda y: grad(lambda x: wrap(g)(x).sum())(ones) * y, **options)(X))
    both(lambda wrap: grad(lambda w: vmap(lambda y: wrap(g)(w) * y, **options)(X).sum())(ones))


@pytest.mark.parametrize("randomness", RANDOMNESS)
def test_random_under_autograd(randomness: str) -> None:
    def run(wrap: Wrap) -> Tensor:
        x = X.clone().requires_grad_()
        out = vmap(wrap(drops), randomness=randomness)(x)
        torch.rand(3)  # the generator moves on before the recompute
        return torch.autograd.grad(out.sum(), x)[0]

    both(run)


def test_a_generator_of_the_user() -> None:
    def run(wrap: Wrap) -> tuple:
        generator = torch.Generator().manual_seed(3)
        g = wrap(lambda x, gen: (x * torch.rand(4, generator=gen, dtype=x.dtype)).sin())
        gradient = grad(lambda x: vmap(lambda x: g(x, generator), randomness="same")(x).sum())
        return gradient(X), torch.rand(2, generator=generator)

    both(run)


def test_in_place_on_a_batched_argument() -> None:
    def g(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    def run(wrap: Wrap) -> tuple:
        x = X.clone()
        return vmap(wrap(g))(x), x

    both(run)


def test_memory_and_ops() -> None:
    def program(wrap: Wrap) -> Callable:
        run = wrap(lambda x: x.sin().exp().sin().exp() @ W)

        def call(x: Tensor) -> Tensor:
            for _ in range(6):
                x = run(x).tanh()
            return x.sum()

        return grad(lambda x: vmap(call)(x).sum())

    x = rand(32, 4, grad=False)
    both(lambda wrap: program(wrap)(x))
    before, after = (count_ops(program(wrap), x) for wrap in (plain, remat))
    assert after["aten.exp"] == 2 * before["aten.exp"]
    assert after["aten.mm"] == before["aten.mm"]  # a linear op at the end is not recomputed
    assert peak_bytes(program(remat), x) < 0.6 * peak_bytes(program(plain), x)
    assert leaked_bytes(program(remat), x) == 0


def test_casts_of_a_region_without_tangents_at_a_jvp_level() -> None:
    """Under ``vmap``, autocast acts at the level: a region without tangents is affected by it too."""
    weight, x = rand(4, 1, 2, grad=False).float(), rand(2, 4, seed=1, grad=False).float()

    def program(wrap: Wrap) -> Callable:
        block = wrap(lambda x: conv1d(x[None, None], weight).sum((0, 2)))
        return vmap(lambda x: jvp(lambda z: (block(x), z.sin()), (x,), (x.cos(),))[0][0])

    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = program(remat)(x), program(lambda fn: fn)(x)
    assert found.dtype == wanted.dtype
    assert_same(found, wanted)


@pytest.mark.parametrize("randomness", RANDOMNESS)
def test_an_inner_run_that_is_abandoned_in_a_region_with_a_policy(randomness: str) -> None:
    """A region starts again when it has drawn numbers at a level where no operand is batched.

    What the policy of the region around it had handed to the outermost region is handed over again then.
    """
    x, y = rand(3, 4), rand(3, 4, seed=1)

    def program(wrap: Callable) -> Any:
        inner = wrap(lambda x: dropout(x.sin(), 0.4), policy=policies.everything_saveable)
        middle = wrap(lambda x: inner(x * 2), policy=policies.everything_saveable)

        def outer(p: Tensor) -> Tensor:
            middle(y)
            return p.relu()

        out = vmap(wrap(outer), randomness=randomness)(x)
        return torch.autograd.grad(out.sum(), x)

    both(program)


def test_an_operand_keeps_the_strides_of_dimensions_of_size_1() -> None:
    """Operations may take another path otherwise: a chunk of one row is a batch with odd strides."""
    x, y, w = rand(4, 4), rand(4, 4, seed=1), rand(4, 4, seed=2)

    def program(wrap: Wrap) -> Any:
        layer = wrap(lambda t: linear(t, w))

        def pushed(p: Tensor, q: Tensor) -> Tensor:
            def changed(p: Tensor) -> Tensor:
                t = q * 1
                t[0] = p[1]
                return layer(t)

            return jvp(changed, (p,), (p,))[1]

        out = vmap(pushed, (0, 1), chunk_size=1)(torch.stack([x, x.cos()]), torch.stack([y, y.cos()], 1))
        return torch.autograd.grad(out.sum(), (x, w))

    both(program)
