"""Regions in the profiler: one named range for each run, and none without a profiler."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function

import remat.nn
from benchmarks.measure import OpCounter
from remat import compat, policies
from remat import remat as transform
from remat._core import ranges as ranges_module

W = rand(8, 8, seed=1, grad=False)
POLICIES = [None, policies.save_matmuls, policies.nothing_saveable]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.sin()).exp().cos()

    def method(self, x: Tensor) -> Tensor:
        return self(x)


def layer(x: Tensor) -> Tensor:
    return (x @ W).sin().exp()


def profiled(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result of `run`, and the ranges of regions."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports on stderr when it starts and stops
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = run()
    return result, Counter(event.name for event in profiler.events() if event.name.startswith("remat "))


def once(name: str) -> Counter[str]:
    return Counter({f"remat {name} forward": 1, f"remat {name} recompute": 1})


def gradient(fn: Callable, x: Tensor) -> Tensor:
    return torch.autograd.grad(fn(x).sum(), x)[0]


class Scaled:
    def __call__(self, x: Tensor) -> Tensor:
        return layer(x) * 2

    def by(self, x: Tensor) -> Tensor:
        return self(x)


@functools.wraps(layer)
def decorated(x: Tensor) -> Tensor:
    return layer(x)


MADE: dict[str, tuple[Callable[[], Callable], str]] = {
    "function": (lambda: transform(layer), "layer"),
    "decorated": (lambda: transform(decorated), "layer"),
    "partial": (lambda: transform(functools.partial(layer)), "layer"),
    "lambda": (lambda: transform(lambda x: layer(x)), "<lambda>"),
    "builtin": (lambda: transform(torch.sigmoid), "sigmoid"),
    "callable object": (lambda: transform(Scaled()), "Scaled"),
    "method": (lambda: transform(Scaled().by), "by"),
    "method of a module": (lambda: transform(Block().method), "Block"),
    "remat(module)": (lambda: transform(Block()), "Block"),
    "nn.apply": (lambda: remat.nn.apply(nn.Sequential(Block()), Block), "Block"),
    "checkpoint_wrapper": (lambda: compat.checkpoint_wrapper(Block()), "Block"),
    "checkpoint": (lambda: functools.partial(compat.checkpoint, Block(), use_reentrant=False), "Block"),
    "sequential": (lambda: remat.sequential([layer, torch.sin, layer], 1), "segment"),
}


@pytest.mark.parametrize("made", MADE)
def test_names(made: str) -> None:
    make, name = MADE[made]
    fn, x = make(), rand(4, 8)
    expected = gradient(fn, x)
    found, ranges = profiled(lambda: gradient(fn, x))
    assert_same(found, expected)
    assert ranges == once(name)


FUNC: dict[str, Callable[[Callable, Tensor], Any]] = {
    "grad": lambda fn, x: torch.func.grad(lambda x: fn(x).sum())(x),
    "vjp": lambda fn, x: torch.func.vjp(fn, x)[1](torch.ones_like(x)),
    "vmap": lambda fn, x: torch.func.vmap(fn)(x),
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (torch.ones_like(x),)),
    "vmap(grad)": lambda fn, x: torch.func.vmap(torch.func.grad(lambda x: fn(x).sum()))(x),
    "grad(vmap)": lambda fn, x: torch.func.grad(lambda x: torch.func.vmap(fn)(x).sum())(x),
    "jacrev": lambda fn, x: torch.func.jacrev(fn)(x),
    "jvp(grad)": lambda fn, x: torch.func.jvp(torch.func.grad(lambda x: fn(x).sum()), (x,), (torch.ones_like(x),)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", FUNC)
def test_under_torch_func(how: str, policy: Any) -> None:
    fn, x = transform(layer, policy=policy), rand(4, 8, grad=False)
    expected = FUNC[how](layer, x)
    FUNC[how](fn, x)
    found, ranges = profiled(lambda: FUNC[how](fn, x))
    assert_same(found, expected)
    assert ranges == (Counter({"remat layer forward": 1}) if how in ("vmap", "jvp") else once("layer"))


@pytest.mark.parametrize("policy", POLICIES)
def test_many_runs(policy: Any) -> None:
    """Two blocks, two backward passes of one graph, and an inner region."""
    block = Block()
    inner = transform(layer)
    outer = transform(lambda x: block(inner(x)), policy=policy)

    def run() -> list[Tensor]:
        x = rand(4, 8)
        y = outer(outer(x)).sum()
        return [torch.autograd.grad(y, x, retain_graph=retain)[0] for retain in (True, False)]

    expected = run()
    found, ranges = profiled(run)
    assert_same(found, expected)
    assert ranges["remat <lambda> forward"] == 2
    assert ranges["remat <lambda> recompute"] == 4
    assert ranges["remat layer forward"] == 2 + 4


def test_a_run_that_fails_ends_its_range() -> None:
    class Fails(Exception):
        pass

    def fails(x: Tensor) -> Tensor:
        raise Fails

    def run() -> None:
        with pytest.raises(Fails):
            transform(fails)(rand(3))
        with record_function("after"):
            pass

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    after = next(event for event in profiler.events() if event.name == "after")
    assert after.cpu_parent is None


def test_nothing_is_entered_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    class Noted(record_function):
        def __enter__(self) -> Any:
            entered.append(self.name)
            return super().__enter__()

    monkeypatch.setattr(ranges_module, "record_function", Noted)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", Noted)
    block, x = transform(Block()), rand(4, 8)
    for policy in POLICIES:
        gradient(transform(layer, policy=policy), x)
        FUNC["vmap(grad)"](transform(layer, policy=policy), x.detach())
    gradient(block, x)
    assert entered == []
    profiled(lambda: gradient(block, x))
    assert entered == ["remat Block forward", "remat Block recompute"]
    with torch.no_grad(), remat.disable_remat():
        _, ranges = profiled(lambda: block(x))
    assert not ranges


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_mode_sees_the_ranges(policy: Any) -> None:
    """Neither modes of users, nor the mode of an outer region that logs operations."""
    outer = transform(lambda x: transform(layer, policy=policy)(x).cos(), policy=policy)

    def seen() -> tuple[list, Counter[str]]:
        with Calls() as calls, OpCounter() as ops:
            gradient(outer, rand(4, 8))
        return calls.calls, ops.counts

    seen()
    expected = seen()
    found, ranges = profiled(seen)
    assert found == expected
    assert ranges["remat layer forward"] == 2


@pytest.mark.parametrize("options", [{}, {"debug": True}, {"determinism_check": "values"}], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("profiled_run", ["forward", "backward"])
def test_a_profiler_of_one_run_only(profiled_run: str, policy: Any, options: dict) -> None:
    """It makes no difference between the runs, nor between the torch functions that are compared under torch.func."""
    inner = transform(layer, policy=policy)
    outer = transform(lambda x: inner(x).cos() * inner(x), policy=policy, **options)
    x = rand(4, 8)
    expected = gradient(lambda x: layer(x).cos() * layer(x), x)
    contexts = [profile(activities=[ProfilerActivity.CPU]) if profiled_run == run else nullcontext()
                for run in ("forward", "backward")]  # fmt: skip
    with contexts[0]:
        y = outer(x).sum()
    with contexts[1]:
        (found,) = torch.autograd.grad(y, x)
    assert_same(found, expected)
    value, pull = torch.func.vjp(outer, x.detach())
    weights = torch.ones(2, *value.shape, dtype=value.dtype)
    with profile(activities=[ProfilerActivity.CPU]):
        (found,) = torch.func.vmap(pull)(weights)
    assert_same(found[1], expected)
