"""Regions in the profiler: a named range for each run, and none without a profiler."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.profiler import ProfilerActivity, profile, record_function

import remat.nn
from remat import compat, policies
from remat import remat as transform
from remat._core import ranges as ranges_module

W = rand(8, 8, seed=1, grad=False)


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp()

    def method(self, x: Tensor) -> Tensor:
        return self(x)


def layer(x: Tensor) -> Tensor:
    return (x @ W).sin().exp()


class Scaled:
    def __call__(self, x: Tensor) -> Tensor:
        return layer(x) * 2


def profiler() -> profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports on stderr when it starts and stops
    return profile(activities=[ProfilerActivity.CPU])


def profiled(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result of `run`, and the ranges of regions."""
    with profiler() as found:
        result = run()
    return result, Counter(event.name[6:] for event in found.events() if event.name.startswith("remat "))


def gradient(fn: Callable, x: Tensor) -> Tensor:
    return torch.autograd.grad(fn(x).sum(), x)[0]


MADE: dict[str, tuple[Callable[[], Callable], str]] = {
    "function": (lambda: transform(layer), "layer"),
    "callable object": (lambda: transform(Scaled()), "Scaled"),
    "method": (lambda: transform(Scaled().__call__), "__call__"),
    "method of a module": (lambda: transform(Block().method), "Block"),
    "remat(module)": (lambda: transform(Block()), "Block"),
    "nn.apply": (lambda: remat.nn.apply(nn.Sequential(Block()), Block), "Block"),
    "checkpoint": (lambda: functools.partial(compat.checkpoint, Block(), use_reentrant=False), "Block"),
    "sequential": (lambda: remat.sequential([layer, torch.sin, layer], 1), "segment"),
}


@pytest.mark.parametrize("made", MADE)
def test_a_range_has_the_name_of_the_function_or_module(made: str) -> None:
    make, name = MADE[made]
    fn, x = make(), rand(4, 8)
    expected = gradient(fn, x)
    found, ranges = profiled(lambda: gradient(fn, x))
    assert_same(found, expected)
    assert ranges == {f"{name} forward": 1, f"{name} recompute": 1}


FUNC: dict[str, tuple[Callable[[Callable, Tensor], Any], int]] = {
    "grad": (lambda fn, x: grad(lambda x: fn(x).sum())(x), 1),
    "vmap": (lambda fn, x: vmap(fn)(x), 0),
    "jvp": (lambda fn, x: jvp(fn, (x,), (torch.ones_like(x),)), 0),
    "vmap(grad)": (lambda fn, x: vmap(grad(lambda x: fn(x).sum()))(x), 1),
}


@pytest.mark.parametrize("policy", [None, policies.save_matmuls])
@pytest.mark.parametrize("how", FUNC)
def test_each_run_under_torch_func_has_a_range(how: str, policy: Any) -> None:
    (run, recomputes), x = FUNC[how], rand(4, 8, grad=False)
    found, ranges = profiled(lambda: run(transform(layer, policy=policy), x))
    assert_same(found, run(layer, x))
    assert (ranges["layer forward"], ranges["layer recompute"]) == (1, recomputes)


def test_each_run_of_nested_regions_has_a_range_that_also_ends_if_it_fails() -> None:
    block, inner = Block(), transform(layer)
    outer = transform(lambda x: block(inner(x)))
    x = rand(4, 8)
    with profiler() as found:
        y = outer(outer(x)).sum()
        for retain in (True, False):
            torch.autograd.grad(y, x, retain_graph=retain)
        with suppress(ZeroDivisionError):
            transform(lambda x: x / (1 // 0))(x)
        with record_function("after"):
            pass
    ranges = Counter(event.name for event in found.events())
    assert (ranges["remat <lambda> forward"], ranges["remat <lambda> recompute"]) == (3, 4)
    assert ranges["remat layer forward"] == 2 + 4
    assert next(event for event in found.events() if event.name == "after").cpu_parent is None


def test_nothing_is_entered_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(ranges_module, "record_function", lambda name: entered.append(name) or record_function(name))
    block, x = transform(Block()), rand(4, 8)
    gradient(block, x), FUNC["vmap(grad)"][0](transform(layer), x.detach())
    assert entered == []
    profiled(lambda: gradient(block, x))
    assert entered == ["remat Block forward", "remat Block recompute"]
    with torch.no_grad(), remat.disable_remat():
        assert not profiled(lambda: block(x))[1]
