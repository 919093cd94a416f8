"""`torch.func` transforms in compiled code: values, and the peak memory of the compiled graph."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import plain
from compiled_programs import CONTEXTS, keeps_products, value_and_grads
from graphs import Allocations, count, graphs_of, handed_over, peak
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_name, compat, disable_remat, policies, remat

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NEW = torch.__version__ >= "2.12"  # older Dynamo does not pass a policy on


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
    return [torch.randn(shape) * 0.2 for shape in ((rows, width), (width, 4 * width), (4 * width, width))]


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
        out, pull = vjp(chain(wrap, 3), *args)
        return out, pull(out.sin())

    return run


def changes_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2).sin_()
    y[0] = 1
    return (y @ y.T).exp_()


def changes_a_buffer(x: Tensor, buffer: Tensor) -> Tensor:
    """A recompute reads the value before the change."""
    y = (x * (buffer + 1)).sin().exp()
    buffer.mul_(2)
    return y


class Sine(torch.autograd.Function):
    forward = staticmethod(lambda x: x.sin())
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
    backward = staticmethod(lambda ctx, cotangent: cotangent * ctx.saved_tensors[0].cos() * 2)


def summed(fn: Callable, arguments: Callable = lambda x: (x,)) -> Callable:
    """The gradient of a region of this function, which is called with these arguments."""

    def make(wrap: Callable) -> Callable:
        f = wrap(fn)
        return grad(lambda x: f(*arguments(x)).sum())

    return make


def blocks(wrap: Callable, depth: int) -> Callable:
    return grad(loss(wrap, depth), (0, 1, 2))


def of_gradients(wrap: Callable) -> Callable:
    f = blocks(wrap, 3)
    return lambda *args: sum(g.sin().sum() for g in f(*args))


def of_a_norm(wrap: Callable) -> Callable:
    f = wrap(lambda x, w: F.layer_norm(x, x.shape[1:], w))
    first = grad(lambda x, w: f(x, w).sin().sum(), (0, 1))
    return vmap(grad(lambda x, w: sum(g.square().sum() for g in first(x, w)), (0, 1)))


# The compiled function, its arguments, and the peak with regions relative to that without: None if regions are inlined.
CASES: dict[str, tuple[Callable, list, float | None]] = {
    "grad": (lambda wrap: blocks(wrap, 3), [X, W1, W2], 0.65),
    "vjp": (of_a_pullback, [X, W1, W2], 0.65),
    "grad of grad": (lambda wrap: grad(of_gradients(wrap), (0, 1, 2)), [X, W1, W2], 0.8),
    "vmap of grad": (lambda wrap: vmap(grad(loss(wrap, 3), (0, 1, 2)), (0, None, None)), [BATCH, W1, W2], 0.65),
    "grad of vmap": (
        lambda wrap: grad(lambda *args: vmap(loss(wrap, 3), (0, None, None))(*args).sum(), (0, 1, 2)),
        [BATCH, W1, W2],
        0.6,
    ),
    "vmap of grad of grad": (of_a_norm, [BATCH[:2], BATCH[:2, 0].sin()], 2),
    "jacrev": (lambda wrap: jacrev(lambda x: chain(wrap, 3)(x, W1, W2).sum(0)), [X], 1),
    "nested": (lambda wrap: grad(wrap(lambda *args: loss(wrap, 2)(*args)), (0, 1, 2)), [X, W1, W2], 2),
    "captured": (of_captured, [X, W1, torch.randn(32, 8).double()], 1.2),
    "functional_call": (of_a_module, [PARAMETERS, BUFFERS, X], 2),
    "in place": (summed(changes_in_place), [X], 2),
    "changed buffer": (summed(changes_a_buffer, lambda x: (x, torch.full_like(x, 3.0))), [X], 2),
    "own backward": (summed(lambda x: Sine.apply(x.exp()).exp()), [X], 2),
    "jacfwd": (lambda wrap: jacfwd(lambda x: chain(wrap, 2)(x, W1, W2).sum(0)), [SHORT], None),
    "hessian": (lambda wrap: hessian(lambda x: loss(wrap, 1)(x, W1, W2)), [SHORT], None),
    "grad(jvp)": (lambda wrap: grad(lambda x: jvp(lambda x: loss(wrap, 2)(x, W1, W2), (x,), (x.sin(),))[1]), [X], None),
    "changed arguments": (summed(lambda x: x.mul_(2).sin() @ x.T, lambda x: (x.clone(),)), [X], None),
    "gradient inside": (summed(lambda x: grad(lambda y: (y.sin() * x).exp().sum())(x).sin()), [X], None),
}
NAMES, MATMULS = policies.save_only_these_names("h"), policies.save_matmuls


@pytest.mark.parametrize("name", CASES)
def test_values_are_right_and_the_peak_is_lower_unless_regions_are_inlined(name: str) -> None:
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


inductor = functools.partial(pytest.param, "inductor", marks=[pytest.mark.timeout(600), pytest.mark.sampled(30)])


@pytest.mark.parametrize(
    ("backend", "name", "policy"),
    [
        *(("eager", name, None) for name in ("grad", "vmap of grad", "functional_call", "gradient inside")),
        *(("aot_eager", name, MATMULS) for name in ("grad of grad", "jacrev", "functional_call", "own backward")),
        *(("aot_eager", name, NAMES) for name in ("vmap of grad", "in place")),
        *(inductor(name, policy) for name in CASES for policy in (None, MATMULS, NAMES)),
    ],
    ids=str,
)
def test_values_with_each_backend_and_under_policies(backend: str, name: str, policy: Any) -> None:
    """With the eager backend regions run as in eager code."""
    make, args, _ = CASES[name]
    f = make(remat(policy=policy))  # not created in compiled code
    torch.testing.assert_close(torch.compile(f, backend=backend)(*args), make(plain)(*args))


def test_the_peak_of_eight_blocks() -> None:
    """The documentation has these numbers."""
    args = inputs(64, 32)
    expected = blocks(plain, 8)(*args)

    def measured(wrap: Callable) -> tuple[int, int]:
        graphs, result = graphs_of(blocks(wrap, 8), lambda f: f(*args))
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-3)
        return count(graphs.inference), peak(graphs.inference)

    assert measured(remat) == (56, 229_888)
    assert measured(remat(policy=policies.everything_saveable)) == (48, 724_992)
    for policy in (MATMULS, NAMES):
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


def test_inductor_does_not_move_the_recompute_into_the_forward() -> None:
    args = inputs(64, 32)
    before, after = (allocated(blocks(wrap, 4), args) for wrap in (plain, remat))
    assert after <= 0.65 * before


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not NEW, reason="Dynamo does not hand a policy on")
def test_the_allocations_of_inductor_for_eight_blocks() -> None:
    """The documentation has these numbers."""
    args = inputs(64, 32)
    before, after = (allocated(blocks(wrap, 8), args) for wrap in (plain, remat))
    assert (before, after) == (675_840, 188_928)
    for policy in (MATMULS, NAMES):
        assert after < allocated(blocks(remat(policy=policy), 8), args) < 0.7 * before


def test_a_gradient_of_parameters_that_require_grad_saves_inputs_of_regions() -> None:
    """Autograd differentiates the graph again: its regions are checkpointed."""
    args = [t.double() for t in inputs(32, 16)]
    expected = value_and_grads(of_gradients(plain), *args)

    def measured(wrap: Callable) -> int:
        graphs, result = graphs_of(of_gradients(wrap), value_and_grads, *args)
        torch.testing.assert_close(result, expected)
        return handed_over(graphs.backward)

    before = measured(plain)
    after = measured(remat)
    assert after <= 0.2 * before
    if NEW:
        assert after < measured(remat(policy=NAMES)) < before


@pytest.mark.skipif(not NEW, reason="Dynamo does not trace it")
def test_autograd_in_compiled_code_recomputes_as_with_torchs_checkpoint() -> None:
    def make(wrap: Callable) -> Callable:
        f = loss(wrap, 2)

        def step(*args: Tensor) -> Any:
            leaves = [t.detach().requires_grad_() for t in args]
            return torch.autograd.grad(f(*leaves), leaves)

        return step

    by_torch = lambda f: lambda *args: checkpoint(f, *args, use_reentrant=False)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        none, ours, torchs = (graphs_of(make(wrap), lambda f: f(X, W1, W2)) for wrap in (plain, remat, by_torch))
    torch.testing.assert_close(ours[1], make(plain)(X, W1, W2))
    assert count(none[0].inference) < count(ours[0].inference) == count(torchs[0].inference)


def test_a_transform_is_compiled_once_for_all_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(grad(loss(remat, 2), (0, 1, 2)), backend=counter, fullgraph=True, dynamic=True)
    for rows in (4, 7, 11):
        args = [X[:rows].contiguous(), W1, W2]
        torch.testing.assert_close(f(*args), grad(loss(plain, 2), (0, 1, 2))(*args))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("backend", "way"),
    [("eager", "grad"), ("aot_eager", "grad"), ("aot_eager", "vmap"), ("inductor", "vmap"), ("aot_eager", "autograd")],
)
def test_dropout_has_the_same_mask_in_the_recompute(backend: str, way: str) -> None:
    f = remat(lambda x: F.dropout(x.sin(), 0.25) * x)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = f(x)
        return y.sum(), y

    x = torch.linspace(1, 2, 2000)
    take = fn if way == "autograd" else grad(fn, has_aux=True)
    if way == "vmap":
        take, x = vmap(take, randomness="different"), x.expand(3, -1)
    gradient, out = torch.compile(take, backend=backend, fullgraph=True)(x.requires_grad_(way == "autograd"))
    if way == "autograd":
        (gradient,) = torch.autograd.grad(gradient, x)
    mask = out.ne(0)
    torch.testing.assert_close(gradient, torch.where(mask, (x.cos() * x + x.sin()) / 0.75, 0.0))
    assert (mask.float().mean(-1) - 0.75).abs().max() < 0.05
    assert way != "vmap" or (mask[0] != mask[1]).any()


def products(f: Callable) -> int:
    """The number of products in the gradient of two blocks, of which the plain program has 12."""
    graphs, result = graphs_of(grad(lambda *a: f(*a).square().sum(), (0, 1, 2)), lambda f: f(X, W1, W2))
    torch.testing.assert_close(result, grad(loss(plain, 2), (0, 1, 2))(X, W1, W2))
    return count(graphs.inference)


def one_after_another(first: Any, second: Any) -> Callable:
    regions = [remat(block, policy=policy) for policy in (first, second)]
    return lambda x, w1, w2: regions[1](regions[0](x, w1, w2), w1, w2)


def in_each_other(outer: Any, inner: Any) -> Callable:
    region = remat(block, policy=inner)
    return chain(lambda f: remat(lambda *args: region(*args), policy=outer), 2)


def by_checkpoint(**options: Any) -> Callable:
    return chain(lambda f: lambda *args: compat.checkpoint(f, *args, **options), 2)


PRODUCTS: dict[str, tuple[Callable, int]] = {"no policy": (chain(remat, 2), 14), "checkpoint": (by_checkpoint(), 14)}
if NEW:
    PRODUCTS |= {
        "a policy first": (one_after_another(MATMULS, None), 13),
        "a policy inside": (in_each_other(None, MATMULS), 14),
        "a policy around": (in_each_other(MATMULS, None), 12),
        "contexts": (by_checkpoint(context_fn=CONTEXTS), 12),
        "other contexts, so inlined": (by_checkpoint(context_fn=lambda: (nullcontext(), nullcontext())), 12),
        "a predicate": (by_checkpoint(policy=keeps_products), 12),
    }


@pytest.mark.parametrize(("f", "expected"), PRODUCTS.values(), ids=PRODUCTS)
def test_each_outermost_region_saves_by_its_policy(f: Callable, expected: int) -> None:
    assert products(f) == expected


def test_disable_remat_around_a_compiled_transform() -> None:
    with disable_remat():
        assert products(chain(remat, 2)) == 12


def breaks(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.exp().sin()


BROKEN: dict[str, Callable] = {
    "by a break": remat(breaks),
    "in a region created in compiled code": lambda x: remat(breaks)(x),
    "at a policy created in compiled code": lambda x: remat(torch.sin, policy=policies.save_only_these_names("h"))(x),
}


@pytest.mark.parametrize("f", BROKEN.values(), ids=BROKEN)
def test_values_if_the_graph_is_broken(f: Callable) -> None:
    take = grad(lambda x: f(x).sum())
    torch.testing.assert_close(torch.compile(take, backend="aot_eager")(X), take(X))
