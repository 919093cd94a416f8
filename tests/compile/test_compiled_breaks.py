"""Regions under `torch.compile` in which Dynamo breaks its graph, so that Python runs the whole region."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import remat
from benchmarks.measure import count_ops
from remat import MutationError, checkpoint_name, compat, disable_remat, is_recomputing, policies


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    RUNS.clear()
    INSIDE.clear()
    yield
    torch._dynamo.reset()


def compiled(f: Callable) -> Callable:
    return torch.compile(f, backend="aot_eager")


RUNS: list[bool] = []  # which runs of blocks recompute
INSIDE: list[weakref.ref] = []  # intermediate values of blocks


class Block(nn.Module):
    """A block that counts its calls in buffers, and breaks the graph."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = checkpoint_name(self.norm(self.linear(x)).sin(), "h")
        torch._dynamo.graph_break()
        RUNS.append(is_recomputing())
        h = h.exp()
        INSIDE.append(weakref.ref(h))
        return (h * self.count[0]) @ self.linear.weight


def in_place(block: Block, policy: Any) -> Callable:
    return remat.nn.apply(block, Block, policy=policy)


def inside_a_model(block: Block, policy: Any) -> Callable:
    return remat.nn.apply(nn.Sequential(nn.Tanh(), block, nn.Tanh()), Block, policy=policy)


def second_module(block: Block, policy: Any) -> Callable:
    return remat.remat(block, policy=policy)


def function(block: Block, policy: Any) -> Callable:
    return remat.remat(lambda x: block(x), policy=policy)


def made_while_traced(block: Block, policy: Any) -> Callable:
    return lambda x: remat.remat(lambda x: block(x), policy=policy)(x)


def decorated_method(block: Block, policy: Any) -> Callable:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        @remat.remat(policy=policy)
        def step(self, x: Tensor) -> Tensor:
            return self.block(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.step(x).tanh()

    return Model()


def row(block: Block, policy: Any) -> Callable:
    return remat.sequential([torch.tanh, block], 1, policy=policy)


def as_in_torch(block: Block, policy: Any) -> Callable:
    return lambda x: compat.checkpoint(block, x, use_reentrant=False, policy=policy)


FORMS = [in_place, inside_a_model, second_module, function, made_while_traced, decorated_method, row, as_in_torch]


def steps(f: Callable, block: Block, count: int = 2) -> list[Any]:
    """Gradients and buffers after some steps of training."""
    x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
    for _ in range(count):
        f(x).sum().backward()
    return [x.grad, *(p.grad for p in block.parameters()), *block.buffers()]


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected) > 3
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_state_changes_once_per_call(form: Callable) -> None:
    block = Block()
    plain = deepcopy(block)
    expected = steps(form(plain, policies.everything_saveable), plain)
    RUNS.clear()
    assert_same(steps(compiled(form(block, None)), block), expected)
    assert (block.count.item(), block.norm.num_batches_tracked.item()) == (2, 2)
    assert RUNS == [False, True] * 2
    assert all(ref() is None for ref in INSIDE)


@pytest.mark.parametrize("form", [in_place, function, as_in_torch])
@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.save_only_these_names("h")], ids=str)
def test_the_backward_is_the_same_as_in_eager_mode(form: Callable, policy: Any) -> None:
    block = Block()
    x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()

    def counts(f: Callable) -> list[int]:
        counted = count_ops(f(x).sum().backward)
        return [counted[f"aten.{op}"] for op in ("sin", "addmm", "native_batch_norm", "exp", "mul", "mm")]

    eager = counts(form(deepcopy(block), policy))
    f = compiled(form(block, policy))
    for _ in range(2):
        assert counts(f) == eager
    assert eager[0] == (0 if policy == policies.save_only_these_names("h") else 1)
    assert block.norm.num_batches_tracked.item() == 2


def test_large_buffers_that_change_are_an_error() -> None:
    block = Block(300_000)
    f = compiled(in_place(block, None))
    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(MutationError, match="was changed in place by the region itself"):
        f(x).sum().backward()


def test_random_numbers_and_attributes() -> None:
    class Noisy(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # this alone breaks the graph
            return nn.functional.dropout(x.sin(), 0.5) * x * self.calls

    module, x = Noisy(), torch.linspace(1, 2, 64, requires_grad=True)
    f = compiled(remat.nn.apply(module, Noisy))
    out = f(x)
    state = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert module.calls == 1
    assert torch.equal(torch.get_rng_state(), state)
    mask = out.ne(0)
    assert 10 < mask.sum() < 54
    assert torch.equal(grad.ne(0), mask)


def test_nested_regions() -> None:
    inner = Block()
    plain = deepcopy(inner)

    def model(wrap: Callable, block: Block) -> Callable:
        region = wrap(block)
        return wrap(lambda x: region(x.cos()).tanh() * 2)

    expected = steps(model(lambda f: f, plain), plain)
    assert_same(steps(compiled(model(remat.remat, inner)), inner), expected)
    assert (inner.count.item(), inner.norm.num_batches_tracked.item()) == (2, 2)


@pytest.mark.parametrize("form", [in_place, function, as_in_torch])
def test_breaks_in_inlined_functions(form: Callable) -> None:
    """Dynamo may be set to continue after a break inside a function that it inlines, but not in a region."""
    block = Block()
    plain = deepcopy(block)
    expected = steps(plain, plain)
    RUNS.clear()
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        assert_same(steps(compiled(form(block, None)), block), expected)
    assert RUNS == [False, True] * 2


def test_disable_remat_is_active_after_a_break() -> None:
    block = Block()
    f = compiled(in_place(block, None))
    with disable_remat():
        steps(f, block)
    assert RUNS == [False] * 2
    assert (block.count.item(), block.norm.num_batches_tracked.item()) == (2, 2)


def test_a_compiled_function_in_a_region_that_python_runs_stays_compiled() -> None:
    backend = CompileCounterWithBackend("aot_eager")
    inner = torch.compile(lambda x: x.sin().exp(), backend=backend)

    def fn(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inner(x) * x

    x = torch.linspace(0, 1, 5, requires_grad=True)
    expected = torch.autograd.grad((x.sin().exp() * x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(remat.remat(fn))(x).sum(), x)[0], expected)
    assert backend.op_count == 2


# --- without a break ------------------------------------------------------------------------------------------------


def smooth(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


WHOLE = [
    remat.remat(smooth),
    lambda x: compat.checkpoint(smooth, x, use_reentrant=False),
    remat.nn.apply(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Sequential),
]


@pytest.mark.parametrize("f", WHOLE, ids=["function", "as in torch", "module"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_region_without_a_break_is_part_of_one_graph(f: Callable, nested: bool) -> None:
    backend = CompileCounterWithBackend("aot_eager")
    x = torch.linspace(0, 1, 5, requires_grad=True)
    expected = torch.autograd.grad(f(x).sum(), x)[0]
    with torch._dynamo.config.patch(nested_graph_breaks=nested):
        c = torch.compile(f, backend=backend, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(c(x).sum(), x)[0], expected)
    assert backend.frame_count == 1
    targets = [str(node.target) for node in backend.graphs[0].graph.nodes]
    assert any("tag_activation_checkpoint" in target for target in targets), targets


def test_a_region_in_a_frame_that_dynamo_skips_is_compiled_by_itself() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

        @torch._dynamo.disable(recursive=False)
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    backend = CompileCounterWithBackend("aot_eager")
    model = remat.nn.apply(Model(), nn.Sequential)
    x = torch.ones(2, 3)
    expected = deepcopy(model)(x)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), expected)
    targets = [str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert sum("tag_activation_checkpoint" in target for target in targets) == len(backend.graphs) > 0
