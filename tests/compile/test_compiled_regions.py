"""Regions in compiled code under plain autograd: values, recomputes, sizes, options, flags and failures."""

import functools
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from cases import plain, run_program
from compiled_programs import CONTEXTS, PROGRAMS, W, block, given, grads, keeps_products, value_and_grads
from graphs import count, graphs_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import remat
from remat import compat, disable_remat, is_disabled, is_recomputing, policies
from remat._compile import lowering

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(f: Callable, **options: Any) -> Callable:
    return torch.compile(f, backend="aot_eager", **{"fullgraph": True, **options})


@pytest.mark.parametrize(("make", "products"), PROGRAMS.values(), ids=PROGRAMS)
def test_values_are_right_and_the_backward_recomputes(make: Callable, products: int) -> None:
    graphs, result = graphs_of(make(remat.remat), grads)
    torch.testing.assert_close(result, grads(make(plain)))
    without, _ = graphs_of(make(plain), grads)
    assert count(graphs.backward) - count(without.backward) == products


@pytest.mark.parametrize("name", ["nested", "trees"])
def test_values_with_dynamic_sizes_in_eager_backend_and_without_gradients(name: str) -> None:
    make, _ = PROGRAMS[name]
    f = torch.compile(make(remat.remat), backend="eager", dynamic=True)
    for rows in (2, 5):
        with torch.no_grad():
            torch.testing.assert_close(f(given(rows), W), make(plain)(given(rows), W))
        torch.testing.assert_close(grads(f, rows), grads(make(plain), rows))


def step(f: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(f(x).square().sum(), list(model.parameters())))


def test_a_model_is_compiled_once_for_all_sizes_and_recomputes_as_in_eager_code() -> None:
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
    ours = remat.nn.apply(deepcopy(plain), lambda name, _: name.isdigit())
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(ours, backend=counter, fullgraph=True)

    def marked(rows: int) -> Tensor:
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        return x

    for rows in (16, 12, 33):
        x = marked(rows)
        torch.testing.assert_close(step(f, ours, x), step(plain, plain, x))
    assert counter.frame_count == 1
    products = [count(graphs_of(m, lambda f, m=m: step(f, m, marked(16)))[0].backward) for m in (ours, plain)]
    assert products[0] == products[1] + 3


@pytest.mark.parametrize("module", [False, True])
def test_a_region_around_a_compiled_function(module: bool) -> None:
    layer = nn.GRUCell(6, 6) if module else lambda x: block(x, W)
    f = remat.remat(torch.compile(layer, backend="aot_eager"))
    for _ in range(2):
        torch.testing.assert_close(value_and_grads(f, given()), value_and_grads(layer, given()))
    if isinstance(layer, nn.Module):
        layer.compile(backend="aot_eager")  # the region is another module
        assert remat.saved_residuals(layer, given()) and not remat.saved_residuals(remat.remat(layer), given())


def smooth(x: Tensor) -> Tensor:
    return ((x @ W).sin() @ W).exp()


def recomputed(f: Callable) -> int:
    """The number of products that the compiled backward recomputes; checks that the values are those of `smooth`."""
    graphs, result = graphs_of(f, value_and_grads, given())
    torch.testing.assert_close(result, value_and_grads(smooth, given()))
    return count(graphs.backward) - 2


class Scaled:
    factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.factor).sin().exp()


row = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
scaled = Scaled()
MADE: dict[str, Callable] = {
    "partial": lambda x: remat.remat(functools.partial(torch.mul, x))(x).sin(),
    "sequential": lambda x: remat.sequential([torch.sin, torch.exp, torch.tanh], 2)(x),
    "sequential module": lambda x: remat.sequential(row)(x),
    "module": lambda x: remat.remat(row)(x),
    "method": lambda x: remat.remat(row.forward)(x),
    "object": lambda x: remat.remat(scaled)(x),
    "builtin": lambda x: remat.remat(torch.sin)(x),
    "checkpoint_sequential": lambda x: compat.checkpoint_sequential(row, 2, x),
}


@pytest.mark.parametrize("f", MADE.values(), ids=MADE)
def test_values_of_regions_created_in_compiled_code(f: Callable) -> None:
    def gradients(f: Callable) -> list[Tensor]:
        return list(torch.autograd.grad(f(x).sum(), [x, *row.parameters()], materialize_grads=True, allow_unused=True))

    x = given()
    torch.testing.assert_close(gradients(compiled(f)), gradients(f))


@pytest.mark.parametrize("policy", [None, ["aten.mm"], keeps_products, policies.save_ops("aten.mm")])
def test_policies_of_regions_created_in_compiled_code(policy: Any) -> None:
    expected = 2 if policy is None else 0
    assert recomputed(lambda x: remat.remat(smooth, policy=policy)(x)) == expected
    assert recomputed(lambda x: compat.checkpoint(smooth, x, policy=policy)) == expected
    assert recomputed(lambda x: compat.checkpoint(smooth, x, context_fn=CONTEXTS)) == 0


@pytest.mark.parametrize(
    "make",
    [
        remat.remat,
        lambda f: lambda x: compat.checkpoint(f, x),
        lambda f: remat.remat(lambda x: remat.remat(f)(x)),
        lambda f: remat.remat(f, policy=policies.everything_saveable),
        plain,
    ],
    ids=["region", "checkpoint", "nested", "all kept", "no region"],
)
def test_is_checkpointing_as_in_eager_code(make: Callable) -> None:
    f = make(lambda x: x * 2 if compat.is_checkpointing() else x * 5)
    both = compiled(lambda x: f(x) + (3 if compat.is_checkpointing() else 7))
    torch.testing.assert_close(both(given()), f(given()) + 7)


def test_a_compiled_function_in_an_eager_region_is_compiled_again_for_the_recompute() -> None:
    told = []
    tell = lambda x: x.sin() * (2 if is_recomputing() else 2.0) * (1 if compat.is_checkpointing() else 1.0)
    inner = torch.compile(tell, backend=lambda graph, inputs: told.append(graph) or graph.forward)
    (remat.remat(lambda x: inner(x).exp().sin())(given())).sum().backward()
    assert len(told) == 2


def test_disable_remat_inside_and_around_compiled_code() -> None:
    f = remat.remat(smooth)

    def inside(x: Tensor) -> Tensor:
        assert not is_disabled()
        with disable_remat():
            assert is_disabled()
            return f(x)

    assert recomputed(inside) == 0
    with disable_remat():
        assert recomputed(f) == 0
    assert recomputed(f) == 2


def test_code_is_compiled_once_with_and_once_without_disable_remat() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(remat.remat(smooth), backend=counter, fullgraph=True)
    for _ in range(2):
        value_and_grads(f, given())
        with disable_remat():
            value_and_grads(f, given())
    assert [sum("checkpoint" in str(node.target) for node in graph.graph.nodes) for graph in counter.graphs] == [1, 0]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: remat.remat(smooth, determinism_check="sum")(x), ValueError, "determinism_check"),
        (lambda x: compat.checkpoint(smooth, x, determinism_check="sum"), ValueError, "determinism_check"),
        (lambda x: remat.remat(smooth, debug=3)(x), TypeError, "debug"),
        (lambda x: compat.checkpoint(3, x), TypeError, "takes a function"),
    ],
)
def test_options_are_checked(call: Callable, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        compiled(call, fullgraph=False)(given())


@pytest.mark.parametrize("options", [{"determinism_check": "values"}, {"debug": True}, {"early_stop": False}], ids=str)
def test_options_without_effect_cause_one_warning(options: dict) -> None:
    lowering._warn.cache_clear()
    f = remat.remat(smooth, **options)
    with pytest.warns(remat.RematWarning, match=r"no effect under torch\.compile"):
        compiled(f)(given())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no effect under.*")
        compiled(lambda x: compat.checkpoint(smooth, x, **options))(given())
        compiled(remat.remat(smooth))(given())


FAILS = """
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.func import grad, vmap
from remat import checkpoint_name, compat, is_disabled, policies, remat

def fails(graph, inputs):
    raise KeyError("on purpose")

class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()
    @staticmethod
    def backward(ctx, grad):
        raise KeyError("on purpose")

def fn(x):
    return checkpoint_name(x.sin(), "h").exp().sin()

def raises(x):
    return torch.ops.aten.mm(fn(x), x)  # one dimension each

x = torch.linspace(0, 1, 5, requires_grad=True)
expected = torch.autograd.grad(fn(x).sum(), x)[0]
run = lambda graph, inputs: graph.forward
in_forward, in_backward = (aot_autograd(fw_compiler=f, bw_compiler=b) for f, b in ((fails, run), (run, fails)))
direct, by_grad = lambda f: f, lambda f: grad(lambda x: f(x).sum())
names = policies.save_only_these_names("h")
CASES = [
    (fn, fails, direct, names), (fn, fails, by_grad, None), (fn, in_forward, vmap, names),
    (fn, in_forward, by_grad, names), (fn, in_backward, direct, names),
    (raises, "aot_eager", by_grad, names), (Op.apply, "aot_eager", direct, None),
]
for body, backend, take, policy in CASES:
    try:
        torch.autograd.grad(torch.compile(take(remat(body, policy=policy)), backend=backend)(x).sum(), x)
    except Exception:
        print("failed")
    torch._dynamo.reset()
    assert not compat.is_checkpointing() and not is_disabled()
    f = remat(fn, policy=policy)
    assert torch.equal(torch.autograd.grad(f(x).sum(), x)[0], expected)
    torch.testing.assert_close(by_grad(f)(x.detach()), expected)
    f = torch.compile(f, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], expected)
"""


def test_a_failed_compilation_leaves_later_regions_working() -> None:
    """In its own process, as torch may leave levels active after a compiled transform raises."""
    assert run_program(FAILS).count("failed") >= 5
