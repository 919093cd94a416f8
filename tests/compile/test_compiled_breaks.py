"""Regions that Python runs under `torch.compile`: Dynamo breaks the graph, or a compiled backward would be wrong."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from compiled_programs import value_and_grads
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jvp, vjp, vmap

import remat
from benchmarks.measure import count_ops
from remat import MutationError, checkpoint_name, compat, disable_remat, is_recomputing, policies

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

W = torch.linspace(-1, 1, 9).view(3, 3)
X = torch.linspace(-1, 1, 12).view(4, 3)
RUNS: list[bool] = []  # which runs of a region recompute, where Python executes them
INSIDE: list[weakref.ref] = []  # values inside regions
MATMULS, NAMES = policies.save_matmuls, policies.save_only_these_names("h")
compiled = lambda f: torch.compile(f, backend="aot_eager")


def regions(counter: CompileCounterWithBackend) -> int:
    """The number of regions in compiled graphs."""
    return sum("tag_activation_checkpoint" in str(n.target) for graph in counter.graphs for n in graph.graph.nodes)


def training(f: Callable, model: nn.Module) -> list[Tensor]:
    """Results, gradients and buffers of three steps."""
    x, found = X.clone().requires_grad_(), []
    for i, scale in enumerate((1, 1.3, 0.7)):
        torch.manual_seed(i)
        out = f(x * scale)
        found += [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]
    return [*found, *(b.clone() for b in model.buffers())]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 7
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    """A block that draws random numbers, counts its calls in a buffer and in an attribute, and breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(3, 3), nn.BatchNorm1d(3), 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls += 1
        h = checkpoint_name(self.norm(self.linear(x)).sin(), "h")
        torch._dynamo.graph_break()
        RUNS.append(is_recomputing())
        h = nn.functional.dropout(h.exp(), 0.3)
        INSIDE.append(weakref.ref(h))
        return (h * self.count[0]) @ self.linear.weight


# A form of a region with this block, and the function to compile.
FORMS: dict[str, Callable[[Block, Any], Callable]] = {
    "inside a model": lambda block, policy: remat.nn.apply(
        nn.Sequential(nn.Tanh(), block, nn.Tanh()), Block, policy=policy
    ),
    "module": lambda block, policy: remat.remat(block, policy=policy),
    "function": lambda block, policy: remat.remat(lambda x: block(x), policy=policy),
    "made while traced": lambda block, policy: lambda x: remat.remat(lambda x: block(x), policy=policy)(x),
    "row": lambda block, policy: remat.sequential([torch.tanh, block], 1, policy=policy),
    "as in torch": lambda block, policy: lambda x: compat.checkpoint(block, x, use_reentrant=False, policy=policy),
    "nested": lambda block, policy: nested(remat.remat(block, policy=policy), policy),
}


def nested(region: Callable, policy: Any) -> Callable:
    return remat.remat(lambda x: region(x.cos()).tanh() * 2, policy=policy)


@pytest.mark.parametrize(
    ("form", "nested_breaks"), [*((form, False) for form in FORMS), ("inside a model", True), ("function", True)]
)
def test_state_changes_and_random_numbers_are_drawn_once_per_call(form: str, nested_breaks: bool) -> None:
    """A region is not cut where Dynamo may break inlined functions."""
    block = Block()
    plain = deepcopy(block)
    with disable_remat():
        expected = training(FORMS[form](plain, None), plain)
    RUNS.clear()
    with torch._dynamo.config.patch(nested_graph_breaks=nested_breaks):
        assert_same(training(compiled(FORMS[form](block, None)), block), expected)
    assert (block.count.item(), block.norm.num_batches_tracked.item(), block.calls) == (3, 3, 3)
    assert ([False, True, True] if form == "nested" else [False, True]) * 3 == RUNS
    assert all(ref() is None for ref in INSIDE)


@pytest.mark.parametrize(("form", "policy"), [("inside a model", NAMES), ("function", MATMULS), ("as in torch", None)])
def test_the_backward_is_the_same_as_in_eager_mode(form: str, policy: Any) -> None:
    block = Block()
    x = X.clone().requires_grad_()

    def counts(f: Callable) -> list[int]:
        counted = count_ops(f(x).sum().backward)
        return [counted[f"aten.{op}"] for op in ("sin", "addmm", "native_batch_norm", "exp", "mul", "mm")]

    eager = counts(FORMS[form](deepcopy(block), policy))
    f = compiled(FORMS[form](block, policy))
    for _ in range(2):
        assert counts(f) == eager
    assert eager[0] == (policy is not NAMES)


def test_disable_remat_is_active_after_a_break() -> None:
    block = Block()
    f = compiled(FORMS["inside a model"](block, None))
    RUNS.clear()
    with disable_remat():
        training(f, block)
    assert RUNS == [False] * 3


def smooth(z: Tensor) -> Tensor:
    return (z @ W).sin()


def by_grad(x: Tensor) -> Tensor:
    return (x - 0.1 * grad(lambda z: smooth(z).sum())(x)).sin()


DERIVING: list[tuple[Callable, Any]] = [
    (by_grad, MATMULS),
    (lambda x: (lambda out, pull: pull(out)[0] * x)(*vjp(smooth, x)), None),
    (lambda x: remat.remat(lambda z: smooth(by_grad(z)))(x).tanh(), None),
]


@pytest.mark.parametrize(("fn", "policy"), DERIVING)
def test_python_runs_a_region_that_takes_a_derivative(fn: Callable, policy: Any) -> None:
    def region(x: Tensor) -> Tensor:
        RUNS.append(is_recomputing()) if not torch.compiler.is_compiling() else None
        return fn(x)

    expected = value_and_grads(fn, X)
    f = compiled(remat.remat(region, policy=policy))
    RUNS.clear()
    for _ in range(2):
        torch.testing.assert_close(value_and_grads(f, X), expected)
    assert RUNS.count(True) == 2  # Python recomputes it, once a step
    later = torch.compile(remat.remat(smooth), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(value_and_grads(later, X), value_and_grads(smooth, X))


def test_the_code_around_such_a_region_is_compiled() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    taken, plain = compat.checkpoint(use_reentrant=False)(by_grad), remat.remat(smooth)
    model = torch.compile(lambda x: plain(taken(plain(x))), backend=counter)
    torch.testing.assert_close(value_and_grads(model, X), value_and_grads(lambda x: smooth(by_grad(smooth(x))), X))
    assert regions(counter) == 2


@pytest.mark.parametrize("fn", [lambda x: vmap(smooth)(x) * x, lambda x: jvp(smooth, (x,), (x,))[1]])
def test_a_region_that_calls_another_transform_is_compiled(fn: Callable) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(remat.remat(fn), backend=counter, fullgraph=True)
    torch.testing.assert_close(value_and_grads(f, X), value_and_grads(fn, X))
    assert regions(counter) == 1


class Model(nn.Module):
    """A model of which a part is a region: it reads and changes the buffer ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", X.clone())
        self.linear = nn.Linear(3, 3)
        with torch.no_grad():
            self.linear.weight.copy_(W)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.linear(x)).cos()

    def change(self, x: Tensor) -> None:
        with torch.no_grad():
            self.c.mul_(0.9).add_(0.1 * x + 0.2)


class ReadAfter(Model):
    def part(self, x: Tensor) -> Tensor:
        self.change(x)
        return ((x - self.c).sin() * x).exp()


class Argument(Model):
    def part(self, x: Tensor) -> Tensor:
        return self.of_two(x, self.c)

    def of_two(self, x: Tensor, c: Tensor) -> Tensor:
        y = (x * c.clone()).sin().exp()
        with torch.no_grad():
            c.mul_(0.5).add_(x * 0.1)
        return y


class SpectralNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    def part(self, x: Tensor) -> Tensor:
        return self.norm(x.sin()).exp()


def with_region(model: Model, policy: Any = None) -> Model:
    name = "of_two" if isinstance(model, Argument) else "part"
    setattr(model, name, remat.remat(getattr(model, name), policy=policy))
    return model


def test_a_parameter_that_a_region_changes_is_an_error_as_in_eager_code() -> None:
    table = nn.Embedding.from_pretrained(X.clone(), freeze=False, max_norm=0.5)
    f = compiled(remat.remat(lambda x: table(torch.arange(4)).sin() * x.exp()))
    with pytest.raises(MutationError, match="changed in place by the region itself"):
        value_and_grads(f, X)


@pytest.mark.parametrize(
    ("region", "reason"),
    [(remat.remat(by_grad), r"calls torch\.func\.grad or vjp"), (None, "changes a buffer, a parameter or an argument")],
    ids=["derivative", "change"],
)
def test_with_fullgraph_such_a_region_is_an_error_that_tells_the_reason(region: Callable | None, reason: str) -> None:
    f = region or with_region(ReadAfter())
    with pytest.raises(Unsupported, match=reason):
        torch.compile(f, backend="aot_eager", fullgraph=True)(X.clone().requires_grad_())


class Written(Model):
    def part(self, x: Tensor) -> Tensor:
        self.change(x)
        return (x.sin() * x).exp()


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def part(self, x: Tensor) -> Tensor:
        return self.instance(self.batch(x.sin()).exp()[None])[0].exp()


class Overwritten(Model):
    """It changes a value of the graph, which is no input."""

    def part(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x, inplace=True).exp().sin()


DEPENDENT = [ReadAfter, Argument, SpectralNorm]
CHANGING: list[tuple[type[Model], Any, str]] = [
    *((kind, None, "aot_eager") for kind in (*DEPENDENT, Normed, Overwritten)),
    *((kind, MATMULS, "aot_eager") for kind in (SpectralNorm, Written)),
    (Normed, MATMULS, "inductor"),
]


@pytest.mark.parametrize(("kind", "policy", "backend"), CHANGING)
def test_a_region_is_compiled_unless_it_depends_on_what_it_changes(kind: type, policy: Any, backend: str) -> None:
    """Then Python runs it, and the code around it is compiled."""
    plain, counter, whole = kind(), CompileCounterWithBackend(backend), kind not in DEPENDENT
    ours = with_region(deepcopy(plain), policy)
    assert_same(training(torch.compile(ours, backend=counter, fullgraph=whole), ours), training(plain, plain))
    assert regions(counter) == whole and counter.frame_count > 0
    assert counter.frame_count == 1 or not whole


def test_without_gradients_a_region_that_changes_buffers_is_compiled() -> None:
    plain = ReadAfter().requires_grad_(False)
    ours = with_region(deepcopy(plain))
    f = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(f(X), plain(X))
    torch.testing.assert_close(ours.c, plain.c)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions treat such graphs otherwise")
@pytest.mark.parametrize("whole", [False, True])
def test_a_frozen_region_that_draws_is_an_error_of_torch_if_it_is_compiled_alone(whole: bool) -> None:
    frozen = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).requires_grad_(False)
    region, head = remat.remat(frozen), nn.Linear(3, 3)
    if whole:
        assert compiled(lambda x: head(region(x)))(X).requires_grad
    else:
        with pytest.raises(RuntimeError, match="does not support RNG ops in recompute regions"):
            compiled(region)(X)
