"""Regions that Python runs under `torch.compile`, since a compiled backward would fail or be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, jacrev, jvp, vjp, vmap

import remat
from remat import MutationError, compat, is_recomputing, policies

W = torch.linspace(-1, 1, 9).view(3, 3)
REGION = "tag_activation_checkpoint"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    RUNS.clear()
    yield
    enabled = hooks_are_enabled()
    torch._C._autograd._saved_tensors_hooks_enable()
    torch._dynamo.reset()
    assert enabled


RUNS: list[bool] = []  # which runs of a region recompute, where Python executes them


def hooks_are_enabled() -> bool:
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


def regions(counter: CompileCounterWithBackend) -> int:
    """The number of regions in compiled graphs."""
    return sum(REGION in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


def value_and_grad(f: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = f(x)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


X = torch.linspace(-1, 1, 12).view(4, 3)


# --- derivatives inside ---------------------------------------------------------------------------------------------


def smooth(z: Tensor) -> Tensor:
    return (z @ W).sin()


def by_grad(x: Tensor) -> Tensor:
    return (x - 0.1 * grad(lambda z: smooth(z).sum())(x)).sin()


def by_vjp(x: Tensor) -> Tensor:
    out, pull = vjp(smooth, x)
    return pull(out)[0] * x


def by_jacrev(x: Tensor) -> Tensor:
    return jacrev(smooth)(x).sum((0, 1)) * x


def per_sample(x: Tensor) -> Tensor:
    return vmap(grad(lambda z: smooth(z).sum()))(x) * x


def in_a_module(x: Tensor) -> Tensor:
    return remat.remat(lambda z: smooth(by_grad(z)))(x).tanh()


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("fn", [by_grad, by_vjp, by_jacrev, per_sample, in_a_module])
def test_a_region_that_takes_a_derivative(fn: Callable, policy: Any) -> None:
    def region(x: Tensor) -> Tensor:
        RUNS.append(is_recomputing()) if not torch.compiler.is_compiling() else None
        return fn(x)

    expected = value_and_grad(fn, X)
    f = torch.compile(remat.remat(region, policy=policy), backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(value_and_grad(f, X), expected)
    assert RUNS.count(True) == 2  # Python recomputes it, once a step
    assert hooks_are_enabled()
    later = torch.compile(remat.remat(smooth), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(value_and_grad(later, X), value_and_grad(smooth, X))


def test_the_code_around_such_a_region_is_compiled() -> None:
    counter = CompileCounterWithBackend("inductor")
    taken, plain = compat.checkpoint(use_reentrant=False)(by_grad), remat.remat(smooth)

    def model(x: Tensor) -> Tensor:
        return plain(taken(plain(x)))

    expected = value_and_grad(lambda x: smooth(by_grad(smooth(x))), X)
    torch.testing.assert_close(value_and_grad(torch.compile(model, backend=counter), X), expected)
    assert regions(counter) == 2


@pytest.mark.parametrize(
    "fn", [lambda x: vmap(smooth)(x) * x, lambda x: jvp(smooth, (x,), (x,))[1]], ids=["vmap", "jvp"]
)
def test_regions_with_other_transforms_are_compiled(fn: Callable) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(remat.remat(fn), backend=counter, fullgraph=True)
    torch.testing.assert_close(value_and_grad(f, X), value_and_grad(fn, X))
    assert regions(counter) == 1


def test_a_branch_that_takes_a_derivative() -> None:
    """Dynamo traces no such branch in a region that Python runs. The error leaves hooks enabled."""
    with pytest.raises(RuntimeError, match="higher order operator"):
        torch.compile(remat.remat(in_a_branch), backend="aot_eager")(X.clone().requires_grad_())
    assert hooks_are_enabled()


def in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, by_grad, torch.exp, (x,)) * x


def test_fullgraph_is_an_error_with_the_reason() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"calls torch\.func\.grad or vjp"):
        torch.compile(remat.remat(by_grad), backend="aot_eager", fullgraph=True)(X.clone().requires_grad_())


def test_a_refusal_of_compiled_code_leaves_hooks_enabled() -> None:
    """Code by the backend "eager" disables saved-tensor hooks, and raises before it enables them again."""
    step = torch.compile(grad(lambda z: z.sin().sum()), backend="eager")

    def fn(x: Tensor) -> Tensor:
        return x.sin() * step(x)

    remat.saved_residuals(fn, X.clone().requires_grad_())
    assert hooks_are_enabled()
    torch._dynamo.reset()
    with suppress(Exception):  # Dynamo fails to trace the mode of the region
        remat.remat(fn)(X.clone().requires_grad_())
    assert hooks_are_enabled()


# --- changes in place -----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A model of which a part is a region: it reads and changes the buffer ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.linspace(-1, 1, 12).view(4, 3).clone())
        self.linear = nn.Linear(3, 3)
        with torch.no_grad():
            self.linear.weight.copy_(W)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.linear(x)).cos()

    def change(self, x: Tensor) -> None:
        with torch.no_grad():
            self.c.mul_(0.9).add_(0.1 * x + 0.2)


class Codebook(Model):
    copies = True

    def part(self, x: Tensor) -> Tensor:
        c = self.c.clone() if self.copies else self.c
        with torch.no_grad():
            i = torch.cdist(x, c).argmin(1)
        q = c[i]
        with torch.no_grad():
            self.c.mul_(0.9).index_add_(0, i, 0.1 * x)
        return (x + (q - x).detach()).sin() * x.cos()


class CodebookWithoutCopy(Codebook):
    copies = False


class ReadBefore(Model):
    def part(self, x: Tensor) -> Tensor:
        y = (x * self.c.clone()).sin().exp()
        self.change(x)
        return y


class ReadAfter(Model):
    def part(self, x: Tensor) -> Tensor:
        self.change(x)
        return ((x - self.c).sin() * x).exp()


class ViewsChanged(Model):
    def part(self, x: Tensor) -> Tensor:
        y = (x * self.c.t().clone().t()).sin().exp()
        self.c[1:3].copy_(x[:2].detach())
        self.c[0] = 0.5
        return y


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


def as_region(model: Model, policy: Any) -> Model:
    name = "of_two" if isinstance(model, Argument) else "part"
    setattr(model, name, remat.remat(getattr(model, name), policy=policy))
    return model


def training(f: Callable, model: nn.Module) -> list[Tensor]:
    """Results, gradients and buffers of three steps."""
    x, found = X.clone().requires_grad_(), []
    for scale in (1, 1.3, 0.7):
        out = f(x * scale)
        found += [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]
    return [*found, *(b.clone() for b in model.buffers())]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 7
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize(
    "model", [Codebook, CodebookWithoutCopy, ReadBefore, ReadAfter, ViewsChanged, Argument, SpectralNorm]
)
def test_a_region_that_depends_on_what_it_changes(model: type, policy: Any) -> None:
    plain = model()
    ours = as_region(deepcopy(plain), policy)
    f = torch.compile(ours, backend="aot_eager")
    assert_same(training(f, ours), training(plain, plain))


def test_such_a_region_with_inductor() -> None:
    plain, counter = Codebook(), CompileCounterWithBackend("inductor")
    ours = as_region(deepcopy(plain), None)
    assert_same(training(torch.compile(ours, backend=counter), ours), training(plain, plain))
    assert counter.frame_count > 0  # the code around it
    assert regions(counter) == 0


def test_a_parameter_that_a_region_changes() -> None:
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding.from_pretrained(X.clone(), freeze=False, max_norm=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(torch.arange(4)).sin() * x.exp()

    f = torch.compile(remat.remat(Renormed()), backend="aot_eager")
    with pytest.raises(MutationError, match="changed in place by the region itself"):  # as in eager code
        value_and_grad(f, X)


def test_fullgraph_is_an_error_about_the_change() -> None:
    model = as_region(Codebook(), None)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="changes a buffer, a parameter or an argument"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(X)


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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("model", [Written, Normed, Overwritten])
def test_regions_that_only_write_are_compiled(model: type, policy: Any, backend: str) -> None:
    plain, counter = model(), CompileCounterWithBackend(backend)
    ours = as_region(deepcopy(plain), policy)
    f = torch.compile(ours, backend=counter, fullgraph=True)
    assert_same(training(f, ours), training(plain, plain))
    assert regions(counter) == counter.frame_count == 1


def test_without_gradients_a_region_that_changes_buffers_is_compiled() -> None:
    plain = Codebook().requires_grad_(False)
    ours = as_region(deepcopy(plain), None)
    f = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(f(X), plain(X))
    torch.testing.assert_close(ours.c, plain.c)
