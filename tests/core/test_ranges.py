"""Regions in the profiler: a named range for each run, and none without a profiler."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import pytest
import torch
from cases import assert_same, gradient, rand
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.profiler import ProfilerActivity, profile, record_function

import remat.nn
from remat import RecomputeMismatchError, is_recomputing
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


Scaled: Any = type("Scaled", (), {"__call__": lambda self, x: layer(x) * 2})


def profiler() -> profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports on stderr when it starts and stops
    return profile(activities=[ProfilerActivity.CPU])


def profiled(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result of `run`, and the ranges of regions."""
    with profiler() as found:
        result = run()
    return result, Counter(event.name[6:] for event in found.events() if event.name.startswith("remat "))


MADE: dict[str, tuple[Callable[[], Callable], str]] = {
    "function": (lambda: transform(layer), "layer"),
    "callable object": (lambda: transform(Scaled()), "Scaled"),
    "partial of a wrapper": (lambda: transform(partial(wraps(Scaled())(lambda x: layer(x)))), "Scaled"),
    "method of a module": (lambda: transform(Block().method), "Block"),
    "remat(module)": (lambda: transform(Block()), "Block"),
    "nn.apply": (lambda: remat.nn.apply(nn.Sequential(Block()), Block), "Block"),
}


@pytest.mark.parametrize("made", MADE)
def test_a_range_has_the_name_of_the_function_or_module(made: str) -> None:
    make, name = MADE[made]
    fn, x = make(), rand(4, 8)
    expected = gradient(fn, x)
    found, ranges = profiled(lambda: gradient(fn, x))
    assert_same(found, expected)
    assert ranges == {f"{name} forward": 1, f"{name} recompute": 1}


def test_each_run_of_nested_regions_has_a_range_that_also_ends_if_it_fails() -> None:
    block, inner = Block(), transform(layer)
    outer = transform(lambda x: block(inner(x)))
    x = rand(4, 8)
    with profiler() as found:
        y = outer(outer(x)).sum()
        for retain in (True, False):
            torch.autograd.grad(y, x, retain_graph=retain)
        with pytest.raises(ZeroDivisionError) as raised:  # its traceback keeps the frames alive
            transform(lambda x: x / (1 // 0))(x)
        with record_function("after"):
            pass
    ranges = Counter(event.name for event in found.events())
    assert (ranges["remat <lambda> forward"], ranges["remat <lambda> recompute"]) == (3, 4)
    assert ranges["remat layer forward"] == 2 + 4
    assert raised and next(event for event in found.events() if event.name == "after").cpu_parent is None


def test_nothing_is_entered_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(ranges_module, "record_function", lambda name: entered.append(name) or record_function(name))
    block, x = transform(Block()), rand(4, 8)
    gradient(block, x), vmap(grad(lambda x: transform(layer)(x).sum()))(x.detach())
    assert entered == []
    profiled(lambda: (gradient(block, x), vmap(grad(lambda x: transform(layer)(x).sum()))(x.detach())))
    assert entered == [f"remat {name} {run}" for name in ("Block", "layer") for run in ("forward", "recompute")]
    with torch.no_grad(), remat.disable_remat():
        assert not profiled(lambda: block(x))[1]


@pytest.mark.parametrize("name, differs", [("FSDP::pre_forward (layer)", False), ("FSDP::other", True)])
def test_operations_in_ranges_of_fsdp_are_not_compared(name: str, differs: bool) -> None:
    """A recompute may find that the parameters are gathered already."""

    def fn(x: Tensor) -> Tensor:
        with record_function(name), record_function("inside"):
            x.detach().clone() if is_recomputing() else x
        return (x.cos() if drifts and is_recomputing() else x.sin()).exp()

    for drifts in (False, True):
        with pytest.raises(RecomputeMismatchError) if differs or drifts else nullcontext():
            gradient(transform(fn, debug=True), rand(3))
