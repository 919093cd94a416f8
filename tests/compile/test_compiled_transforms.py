"""`torch.func` transforms in compiled code: values, and the peak memory of the compiled graph."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Allocations, count, graphs_of, handed_over, peak
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from remat import checkpoint_name, compat, disable_remat, policies, remat

NEW = torch.__version__ >= "2.12"  # older Dynamo does not pass a policy on


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plain(f: Callable) -> Callable:
    return f


def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = checkpoint_name(F.layer_norm(x, x.shape[-1:]) @ w1, "h")
    return x + F.gelu(h) @ w2


def chain(wrap: Callable, depth: int) -> Callable:
    f = wrap(block)

    def fn(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        for _ in range(depth):
            x = f(x, w1, w2)
        return x

    return fn


def loss(wrap: Callable, depth: int = 4) -> Callable:
    f = chain(wrap, depth)
    return lambda *args: f(*args).square().sum()


def inputs(rows: int = 16, width: int = 8) -> list[Tensor]:
    shapes = (rows, width), (width, 4 * width), (4 * width, width)
    return [torch.randn(shape) * 0.2 for shape in shapes]


X, W1, W2 = (t.double() for t in inputs())
SHORT = X[:2]
BATCH = torch.randn(5, *X.shape).double() * 0.2

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8)).double()
PARAMETERS = {name: p.detach() for name, p in layers.named_parameters()}
BUFFERS = dict(layers.named_buffers())


def of_a_module(wrap: Callable) -> Callable:
    """A module with running statistics, which must change only once."""
    f = wrap(lambda p, b, x: functional_call(layers, (p, b), (x,)))

    def run(p: dict, b: dict, x: Tensor) -> Any:
        b = {name: t.clone() for name, t in b.items()}
        return grad(lambda p, b, x: (f(p, b, f(p, b, x)).square().sum(), b), has_aux=True)(p, b, x)

    return run


def of_captured(wrap: Callable) -> Callable:
    def fn(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        y = w1.sin()
        f = wrap(lambda x: (x @ y).exp().sin() @ w2)
        return f(f(x)).sum()

    return grad(fn, argnums=(0, 1, 2))


def of_a_pullback(wrap: Callable) -> Callable:
    def run(*args: Tensor) -> Any:
        out, pull = vjp(chain(wrap, 4), *args)
        return out, pull(out.sin())

    return run


def of_trees(wrap: Callable) -> Callable:
    f = wrap(lambda x, s, k=None: {"a": (x * s).sin() @ x.T, "b": [x, s, k], "c": (x * k).cos().exp()})

    def fn(x: Tensor) -> Tensor:
        out = f(x, 3, k=2.0)
        more = f(out["a"], out["b"][1], k=out["b"][2])
        return (more["a"].sum() * out["c"] * out["b"][0]).sum()

    return grad(fn)


def of_changes_in_place(wrap: Callable) -> Callable:
    def inner(x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(2).sin_()
        y[0] = 1
        return (y @ y.T).exp_()

    f = wrap(inner)
    return grad(lambda x: f(x).sum())


def of_changed_arguments(wrap: Callable) -> Callable:
    def inner(x: Tensor) -> Tensor:
        return x.mul_(2).sin() @ x.T

    f = wrap(inner)
    return grad(lambda x: f(x.clone()).sum())


def of_a_cut(wrap: Callable) -> Callable:
    f = wrap(lambda x: (x.sin() * x.detach() * x.exp().detach_()).exp())
    return grad(lambda x: grad(lambda x: f(x).sum())(x).sin().sum())


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * ctx.saved_tensors[0].cos() * 2


def of_an_own_backward(wrap: Callable) -> Callable:
    f = wrap(lambda x: Sine.apply(x.exp()).exp())
    return grad(lambda x: f(x).sum())


def of_a_gradient_inside(wrap: Callable) -> Callable:
    f = wrap(lambda x: grad(lambda y: (y.sin() * x).exp().sum())(x).sin())
    return grad(lambda x: f(x).sum())


def of_gradients(wrap: Callable) -> Callable:
    f = loss(wrap, 3)
    return grad(lambda *args: sum(g.sin().sum() for g in grad(f, (0, 1, 2))(*args)), (0, 1, 2))


def thrice(wrap: Callable) -> Callable:
    f = wrap(lambda x, w: (x @ w[:, :8]).sin().exp())

    def times(n: int, f: Callable) -> Callable:
        return f if n == 0 else times(n - 1, lambda x, w: grad(lambda x, w: f(x, w).sum())(x, w).sin())

    return times(3, f)


# The compiled function, its arguments, and the peak with regions relative to that without: None if regions are inlined.
CASES: dict[str, tuple[Callable, list, float | None]] = {
    "grad": (lambda wrap: grad(loss(wrap), (0, 1, 2)), [X, W1, W2], 0.6),
    "vjp": (of_a_pullback, [X, W1, W2], 0.6),
    "grad of grad": (of_gradients, [X, W1, W2], 0.75),
    "three times": (thrice, [X, W1], 2),
    "vmap of grad": (lambda wrap: vmap(grad(loss(wrap), (0, 1, 2)), (0, None, None)), [BATCH, W1, W2], 0.6),
    "vmap over weights": (lambda w: vmap(grad(loss(w), 1), (None, 0, None)), [X, torch.stack([W1, -W1]), W2], 0.7),
    "grad of vmap": (
        lambda wrap: grad(lambda *args: vmap(loss(wrap), (0, None, None))(*args).sum(), (0, 1, 2)),
        [BATCH, W1, W2],
        0.5,
    ),
    "jacrev": (lambda wrap: jacrev(lambda x: chain(wrap, 4)(x, W1, W2).sum(0)), [X], 1),
    "jacrev twice": (lambda wrap: jacrev(jacrev(lambda x: loss(wrap, 2)(x, W1, W2))), [SHORT], 1),
    "jacfwd": (lambda wrap: jacfwd(lambda x: chain(wrap, 2)(x, W1, W2).sum(0)), [SHORT], None),
    "hessian": (lambda wrap: hessian(lambda x: loss(wrap, 2)(x, W1, W2)), [SHORT], None),
    "jvp of grad": (lambda wrap: lambda x, t: jvp(grad(lambda x: loss(wrap, 2)(x, W1, W2)), (x,), (t,)), [X, X], None),
    "grad of jvp": (
        lambda wrap: grad(lambda x: jvp(lambda x: loss(wrap, 2)(x, W1, W2), (x,), (x.sin(),))[1]),
        [X],
        None,
    ),
    "nested": (lambda wrap: grad(wrap(lambda *args: loss(wrap)(*args)), (0, 1, 2)), [X, W1, W2], 2),
    "captured": (of_captured, [X, W1, torch.randn(32, 8).double()], 1.2),
    "functional_call": (of_a_module, [PARAMETERS, BUFFERS, X], 2),
    "trees": (of_trees, [X], 2),
    "in place": (of_changes_in_place, [X], 2),
    "changed arguments": (of_changed_arguments, [X], None),
    "cut": (of_a_cut, [X], 2),
    "own backward": (of_an_own_backward, [X], 2),
    "gradient inside": (of_a_gradient_inside, [X], None),
}
POLICIES = [None, policies.save_matmuls, policies.save_only_these_names("h")]
REGIONS = [remat, remat(policy=POLICIES[1]), remat(policy=POLICIES[2])]  # not created in compiled code


@pytest.mark.parametrize("name", CASES)
def test_values_and_peak(name: str) -> None:
    make, args, ratio = CASES[name]
    expected = make(plain)(*args)
    none, result = graphs_of(make(plain), lambda f: f(*args))
    torch.testing.assert_close(result, expected)
    ours, result = graphs_of(make(remat), lambda f: f(*args))
    torch.testing.assert_close(result, expected)
    before, after = peak(none.inference), peak(ours.inference)
    if ratio is None:
        assert count(ours.inference) == count(none.inference)
    else:
        assert after <= ratio * before, (after, before)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_values_under_policies(name: str, policy: Any) -> None:
    make, args, _ = CASES[name]
    f = make(remat(policy=policy))
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(*args), make(plain)(*args))


@pytest.mark.parametrize("name", [name for name in CASES if name != "changed arguments"])  # an error, as in eager mode
@pytest.mark.sampled(3)
def test_the_eager_backend(name: str) -> None:
    """With this backend regions run as in eager mode."""
    make, args, _ = CASES[name]
    torch.testing.assert_close(torch.compile(make(remat), backend="eager")(*args), make(plain)(*args))


# --- inductor -------------------------------------------------------------------------------------------------------

SMALL = {
    "grad": lambda wrap: grad(loss(wrap, 1), 1),
    "vmap of grad": lambda wrap: lambda x, *w: vmap(grad(loss(wrap, 1)), (0, None, None))(x[:, None], *w),
    "jacrev": lambda wrap: jacrev(lambda *args: chain(wrap, 1)(*args).sum(0)),
    "grad of grad": lambda wrap: grad(lambda *args: grad(wrap(lambda x, w, _: (x @ w).sin().sum()))(*args).exp().sum()),
    "hessian": lambda wrap: lambda x, w, _: hessian(wrap(lambda x: (x @ w[:2, :2]).sin().sum()))(x[:1, :2].clone()),
    "functional_call": lambda wrap: lambda x, *_: of_a_module(wrap)(PARAMETERS, BUFFERS, x),
}


@pytest.mark.parametrize("name", SMALL)
def test_inductor(name: str) -> None:
    make, args = SMALL[name], [X[:4, :], W1, W2]
    torch.testing.assert_close(torch.compile(make(remat))(*args), make(plain)(*args))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("region", REGIONS, ids=map(str, POLICIES))
@pytest.mark.parametrize("name", CASES)
def test_inductor_in_full(name: str, region: Callable) -> None:
    make, args, _ = CASES[name]
    torch.testing.assert_close(torch.compile(make(region))(*args), make(plain)(*args))


# --- memory ---------------------------------------------------------------------------------------------------------


def eight(wrap: Callable) -> Callable:
    return grad(loss(wrap, 8), (0, 1, 2))


def test_the_peak_of_eight_blocks() -> None:
    args = inputs(64, 32)
    expected = eight(plain)(*args)

    def measured(wrap: Callable) -> tuple[int, int]:
        graphs, result = graphs_of(eight(wrap), lambda f: f(*args))
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-3)
        return count(graphs.inference), peak(graphs.inference)

    assert measured(remat) == (56, 229_888)
    assert measured(remat(policy=policies.everything_saveable)) == (48, 708_608)
    for policy in POLICIES[1:]:
        assert measured(remat(policy=policy)) == ((48, 434_688) if NEW else (48, 708_608))


def allocated(f: Callable, args: list[Tensor]) -> int:
    torch._dynamo.reset()
    with Allocations() as counted:
        compiled = torch.compile(f, fullgraph=True)
        compiled(*args)
        assert counted.live == 0
        counted.most = 0
        compiled(*args)
    return counted.most


def test_the_allocations_of_inductor() -> None:
    """Without the dependency of the recompute on the cotangents, inductor would recompute everything in the forward."""
    args = inputs(64, 32)
    assert allocated(eight(remat), args) <= 0.3 * 675_840  # the peak of the plain function


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not NEW, reason="Dynamo does not hand a policy on")
def test_the_allocations_of_inductor_under_policies() -> None:
    args = inputs(64, 32)
    before, after = (allocated(eight(wrap), args) for wrap in (plain, remat))
    assert before == 675_840
    for policy in POLICIES[1:]:
        assert after < allocated(eight(remat(policy=policy)), args) < 0.7 * before


@pytest.mark.parametrize("arguments", [0, (0, 1, 2)])
def test_parameters_that_require_grad_above(arguments: Any) -> None:
    """Autograd differentiates the graph again: its regions are checkpointed."""

    def make(wrap: Callable) -> Callable:
        f = grad(loss(wrap, 4), arguments)
        return lambda *args: sum(g.sin().sum() for g in (lambda g: g if isinstance(g, tuple) else (g,))(f(*args)))

    def run(f: Callable, *args: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in args]
        out = f(*leaves)
        return out.detach(), torch.autograd.grad(out, leaves)

    args = [t.double() for t in inputs(32, 16)]
    expected = run(make(plain), *args)

    def measured(wrap: Callable) -> int:
        graphs, result = graphs_of(make(wrap), run, *args)
        torch.testing.assert_close(result, expected)
        return handed_over(graphs.backward)

    before = measured(plain)
    assert measured(remat) <= 0.15 * before
    if NEW:
        assert measured(remat) < measured(remat(policy=policies.save_only_these_names("h"))) < before


def test_vmap_under_autograd() -> None:
    def run(f: Callable) -> Any:
        leaves = [t.detach().requires_grad_() for t in (BATCH, W1, W2)]
        return torch.autograd.grad(f(*leaves), leaves)

    def make(wrap: Callable) -> Callable:
        f = vmap(chain(wrap, 4), (0, None, None))
        return lambda *args: f(*args).square().sum()

    none, expected = graphs_of(make(plain), run)
    ours, result = graphs_of(make(remat), run)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(result, run(make(plain)))
    assert handed_over(ours.backward) < 0.5 * handed_over(none.backward)


# --- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("mapped", [False, True])
def test_dropout(backend: str, mapped: bool) -> None:
    """The recompute has the mask of the first run, with the right share of zeros."""
    f = remat(lambda x: F.dropout(x.sin(), 0.25) * x)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = f(x)
        return y.sum(), y

    x = torch.linspace(1, 2, 2000)
    take = grad(fn, has_aux=True)
    if mapped:
        take, x = vmap(take, randomness="different"), x.expand(3, -1)
    gradient, out = torch.compile(take, backend=backend, fullgraph=True)(x)
    mask = out.ne(0)
    torch.testing.assert_close(gradient, torch.where(mask, (x.cos() * x + x.sin()) / 0.75, 0.0))
    assert (mask.float().mean(-1) - 0.75).abs().max() < 0.05
    assert not mapped or (mask[0] != mask[1]).any()


def test_random_numbers_that_are_written_in_place() -> None:
    f = remat(lambda x: torch.empty_like(x).bernoulli_(0.5) * x.sin() * torch.rand_like(x).mul_(2))

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = f(x)
        return y.sum(), y

    x = torch.linspace(1, 2, 2000)
    gradient, out = torch.compile(grad(fn, has_aux=True), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(gradient, out / x.sin() * x.cos())
    assert 800 < out.ne(0).sum() < 1200


# --- properties of regions ------------------------------------------------------------------------------------------


def products(f: Callable, args: Any = (X, W1, W2)) -> int:
    graphs, result = graphs_of(grad(lambda *a: f(*a).square().sum(), (0, 1, 2)), lambda f: f(*args))
    torch.testing.assert_close(result, grad(loss(plain, 2), (0, 1, 2))(*args))
    return count(graphs.inference)


@pytest.mark.skipif(not NEW, reason="Dynamo does not hand a policy on")
def test_each_region_has_its_own_policy() -> None:
    regions = [remat(policy=policies.save_matmuls)(block), remat(block)]

    def fn(i: int, j: int) -> Callable:
        return lambda x, w1, w2: regions[j](regions[i](x, w1, w2), w1, w2)

    assert [products(fn(*pair)) for pair in ((0, 0), (0, 1), (1, 0), (1, 1))] == [12, 13, 13, 14]


@pytest.mark.skipif(not NEW, reason="Dynamo does not hand a policy on")
def test_the_outermost_policy_decides() -> None:
    def nested(outer: Any, inner: Any) -> Callable:
        region = remat(block, policy=inner)
        return chain(lambda f: remat(lambda *args: region(*args), policy=outer), 2)

    keeps = policies.save_matmuls
    assert [products(nested(*pair)) for pair in ((None, keeps), (keeps, None), (keeps, keeps))] == [14, 12, 12]


def test_arguments_that_were_changed_in_place_before() -> None:
    f = remat(block)

    def fn(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        x = x.clone()
        return f(f(x.mul_(1), w1, w2).mul_(1), w1, w2)

    assert products(fn) == 14


def test_disable_remat_and_checkpoint() -> None:
    f = chain(remat, 2)
    assert products(f) == 14
    with disable_remat():
        assert products(f) == 12
    assert products(chain(lambda f: lambda *args: compat.checkpoint(f, *args), 2)) == 14


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.mm.default


CONTEXTS = functools.partial(create_selective_checkpoint_contexts, keeps_products)


@pytest.mark.skipif(not NEW, reason="Dynamo does not hand a policy on")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"context_fn": CONTEXTS}, 12),
        ({"context_fn": lambda: (nullcontext(), nullcontext())}, 12),  # inlined
        ({"policy": keeps_products}, 12),
        ({"policy": ["aten.mm"]}, 12),
        ({"policy": ["aten.sin"]}, 14),
    ],
)
def test_policies_of_checkpoint(options: dict, expected: int) -> None:
    assert products(chain(lambda f: lambda *args: compat.checkpoint(f, *args, **options), 2)) == expected


def test_a_policy_created_in_compiled_code_breaks_the_graph() -> None:
    def fn(x: Tensor) -> Tensor:
        return remat(lambda x: block(x, W1, W2).sum(), policy=policies.save_only_these_names("h"))(x)

    torch.testing.assert_close(torch.compile(grad(fn), backend="aot_eager")(X), grad(fn)(X))


def test_a_break_in_a_region() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.exp().sin()

    for wrapped in (remat(fn), lambda x: remat(fn)(x)):
        take = grad(lambda x: wrapped(x).sum())
        torch.testing.assert_close(torch.compile(take, backend="aot_eager")(X), grad(lambda x: fn(x).sum())(X))


FAILS = """
import torch
from remat import MutationError, remat

f = remat(lambda x: x.mul_(2).sin())
try:
    torch.compile(torch.func.grad(lambda x: f(x.clone()).sum()), backend="eager")(torch.ones(3))
except MutationError:
    print("told", torch._C._autograd._saved_tensors_hooks_is_enabled())
"""


@pytest.mark.skipif(not NEW, reason="torch fails in turn, at its levels")
def test_an_error_in_eager_mode_is_an_error_with_the_eager_backend() -> None:
    """In its own process, as torch may leave levels active after a compiled transform raises."""
    root = Path(policies.__file__).parents[1]
    command = [sys.executable, "-W", "ignore", "-c", FAILS]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=110)
    assert result.stdout.split() == ["told", "True"], result.stderr[-3000:]


@pytest.mark.skipif(not NEW, reason="Dynamo does not trace it")
def test_autograd_in_compiled_code() -> None:
    def make(wrap: Callable) -> Callable:
        f = loss(wrap, 4)

        def step(*args: Tensor) -> Any:
            leaves = [t.detach().requires_grad_() for t in args]
            return torch.autograd.grad(f(*leaves), leaves)

        return step

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        none, expected = graphs_of(make(plain), lambda f: f(X, W1, W2))
        ours, result = graphs_of(make(remat), lambda f: f(X, W1, W2))
        torchs, _ = graphs_of(make(lambda f: lambda *a: checkpoint(f, *a, use_reentrant=False)), lambda f: f(X, W1, W2))
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(result, make(plain)(X, W1, W2))
    assert count(none.inference) < count(ours.inference) == count(torchs.inference)


def test_dynamic_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(grad(loss(remat, 2), (0, 1, 2)), backend=counter, fullgraph=True, dynamic=True)
    for rows in (4, 7, 11):
        args = [X[:rows].contiguous(), W1, W2]
        torch.testing.assert_close(f(*args), grad(loss(plain, 2), (0, 1, 2))(*args))
    assert counter.frame_count == 1
