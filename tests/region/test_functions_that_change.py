"""A region of a function that reads functions: globals, closures and defaults that change from call to call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remat import is_recomputing, remat


def double(x: Tensor) -> Tensor:
    return (x * 2).sin()


def triple(x: Tensor) -> Tensor:
    return (x * 3).sin()


helper = double


def reads_a_global(x: Tensor) -> Tensor:
    return helper(x).exp()


def reads_another(x: Tensor) -> Tensor:
    return reads_a_global(x).cos()


def gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(fn(x).sum(), x)
    return result


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 5, requires_grad=True)


def make_nested(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(torch.sin(x))


def test_another_global_from_one_call_to_the_next(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = remat(reads_another)
    for used in (double, double, triple, triple, double):
        monkeypatch.setitem(globals(), "helper", used)
        assert torch.equal(gradient(fn, x), gradient(reads_another, x))


def test_another_global_between_the_runs(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = remat(reads_another)
    for _ in range(3):
        gradient(fn, x)
    expected = gradient(reads_another, x)
    out = fn(x).sum()
    monkeypatch.setitem(globals(), "helper", triple)
    assert torch.equal(torch.autograd.grad(out, x)[0], expected)
    assert helper is triple  # as the caller has set it


def test_a_tensor_that_a_global_holds_later(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.full((5,), 2.0, requires_grad=True)
    fn = remat(reads_another)
    for _ in range(3):
        gradient(fn, x)
    monkeypatch.setitem(globals(), "helper", lambda x: (x * w).sin())
    for _ in range(2):
        out = fn(x).sum()
        with torch.no_grad():
            before = w.clone()
            w.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            torch.autograd.grad(out, x)
        with torch.no_grad():
            w.copy_(before)
        assert torch.equal(gradient(fn, x), gradient(reads_another, x))


def test_other_defaults_attributes_and_code_of_a_wrapped_function(x: Tensor) -> None:
    def scaled(x: Tensor, scale: Any = 2.0) -> Tensor:
        return (x * scale).sin()

    inner = remat(scaled)

    def fn(x: Tensor) -> Tensor:
        return inner(x).exp() * getattr(scaled, "factor", 1.0)

    def plain(x: Tensor) -> Tensor:
        return scaled(x).exp() * getattr(scaled, "factor", 1.0)

    region = remat(fn)
    for _ in range(3):
        assert torch.equal(gradient(region, x), gradient(plain, x))
    w = torch.full((5,), 4.0)
    scaled.__defaults__ = (w,)
    assert torch.equal(gradient(region, x), gradient(plain, x))
    out = region(x).sum()
    w.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        torch.autograd.grad(out, x)
    scaled.__defaults__ = (3.0,)
    scaled.factor = torch.full((5,), 0.5)  # type: ignore[attr-defined]
    assert torch.equal(gradient(region, x), gradient(plain, x))
    scaled.__code__ = (lambda x, scale=2.0: (x * scale).cos()).__code__
    assert torch.equal(gradient(region, x), gradient(plain, x))


def test_what_a_recompute_binds_is_restored(x: Tensor) -> None:
    used = double
    calls = []

    def fn(x: Tensor) -> Tensor:
        nonlocal used
        y = used(x)
        calls.append(is_recomputing())
        if is_recomputing():
            used = triple
        return y.exp() * 2

    region = remat(fn, early_stop=False)
    for _ in range(3):
        gradient(region, x)
        assert used is double
    assert calls == [False, True] * 3


def test_a_counter_in_a_closure_counts_each_call_once(x: Tensor) -> None:
    count = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return double(x) * count

    region = remat(fn)
    for i in range(1, 5):
        out = region(x).sum()
        assert count == i
        expected = torch.autograd.grad((double(x) * i).sum(), x)[0]
        count += 10  # between the runs
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
        assert count == i + 10
        count -= 10


def test_nothing_is_kept_alive(x: Tensor) -> None:
    inner = make_nested(double)
    fn = remat(make_nested(inner))
    for _ in range(3):
        gradient(fn, x)
    watched = weakref.ref(inner)
    gc.collect()
    gc.disable()
    try:
        del fn, inner
        assert watched() is None
    finally:
        gc.enable()


def test_a_closure_cell_that_is_empty(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return later(x) if x.dim() > 1 else double(x).exp()

    region = remat(fn)
    for _ in range(3):
        assert torch.equal(gradient(region, x), gradient(fn, x))

    def later(x: Tensor) -> Tensor:
        return x.sin().exp()

    row = x.detach()[None].requires_grad_()
    for _ in range(3):
        assert torch.equal(gradient(region, row), gradient(later, row))


def test_a_global_that_is_none_and_then_has_a_value(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def fn(x):\n    return (x if SCALE is None else x * SCALE).sin().exp()"
    scope: dict[str, Any] = {"__name__": "user", "SCALE": 2.0}
    exec(code, scope)
    region = remat(scope["fn"])
    for value in (2.0, None, None):
        scope["SCALE"] = value
        out, expected = region(x).sum(), gradient(scope["fn"], x)
        scope["SCALE"] = 3.0
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
        assert scope["SCALE"] == 3.0


@pytest.mark.parametrize("holds", ["array", "pullback"])
def test_the_former_value_of_a_global_is_not_kept_alive(x: Tensor, holds: str) -> None:
    scope: dict[str, Any] = {"__name__": "user"}
    exec("def fn(x):\n    return (x.sin() if HELD is None else x.cos()).exp()", scope)
    if holds == "array":
        scope["HELD"] = held = np.zeros(8)
        watched = weakref.ref(held)
    else:
        held = torch.ones(8)
        watched = weakref.ref(held.untyped_storage())
        scope["HELD"] = torch.func.vjp(torch.mul, torch.ones(8), held)[1]
    del held
    region = remat(scope["fn"])
    for _ in range(3):
        gradient(region, x)
    scope["HELD"] = None
    gc.collect()
    assert watched() is None
    assert torch.equal(gradient(region, x), gradient(scope["fn"], x))


def test_a_function_that_calls_its_own_region(x: Tensor) -> None:
    scope: dict[str, Any] = {"__name__": "user", "remat": remat}
    exec("def g(x, n=2):\n    return x.exp() if n == 0 else f(x.sin(), n - 1)\nf = remat(g)", scope)
    for _ in range(3):
        gradient(scope["f"], x)
    watched = weakref.ref(scope["f"])
    gc.collect()
    gc.disable()
    try:
        del scope["f"]
        assert watched() is None
    finally:
        gc.enable()
