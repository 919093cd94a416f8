"""What is remembered of a function applies only to functions that do the same, and keeps nothing alive."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from cases import rand
from torch import Tensor, nn

from benchmarks.measure import count_ops, gc_disabled
from remat import checkpoint_name, policies, remat


def recomputed(fn: Callable, x: Tensor) -> Counter[str]:
    out = fn(x).sum()
    return count_ops(torch.autograd.grad, out, x)


def two_sines(x: Tensor) -> Tensor:
    return checkpoint_name(checkpoint_name(x.sin(), "a").sin(), "i2")


def wrapped_sine(inner: Callable) -> Callable:
    return lambda x: inner(checkpoint_name(x.sin(), "o1")).sin()


def test_a_function_around_one_that_was_called_before() -> None:
    policy, x = policies.save_only_these_names("a"), rand(3)
    calls = [wrapped_sine(remat(two_sines, policy=policy)), remat(wrapped_sine(two_sines), policy=policy)]
    assert [recomputed(fn, x)["aten.sin"] for fn in (calls[0], calls[0], calls[1], calls[1])] == [0, 0, 2, 2]


def test_records_of_a_module_are_freed_with_it() -> None:
    def make() -> tuple[Any, Any]:
        module = nn.Linear(3, 3, dtype=torch.float64)
        other = nn.Sequential(module)  # which contains it
        recomputed(remat(functools.partial(module.forward)), rand(3))
        recomputed(remat(functools.partial(lambda first, second, x: first(x) + second(x), module, other)), rand(3))
        return weakref.ref(module), weakref.ref(other)

    with gc_disabled():
        module, other = make()
        assert module() is None and other() is None
