"""Helpers for tests that compare a drop-in with the original: both modules, and measurements of their calls."""

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.utils.checkpoint
from cases import total
from torch import Tensor

import remat.compat

# `both` runs a test with torch's module and with the drop-in.
both = pytest.mark.parametrize("module", [torch.utils.checkpoint, remat.compat], ids=["torch", "remat"])


def is_torch(module: Any) -> bool:
    """Whether the module is the original."""
    return module is torch.utils.checkpoint


def values_and_grads(fn: Callable, *args: Any, inputs: Any = None) -> tuple:
    """The result of `fn(*args)`, and its gradients with respect to `inputs`, by default to the arguments."""
    result = fn(*args)
    inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad] if inputs is None else inputs
    return result, torch.autograd.grad(total(result), inputs, allow_unused=True)


class Runs:
    """A function that counts its calls, in a place that a recompute does not restore."""

    _counts: ClassVar[WeakKeyDictionary["Runs", int]] = WeakKeyDictionary()

    def __init__(self, fn: Callable) -> None:
        self.fn = fn

    @property
    def count(self) -> int:
        return self._counts.get(self, 0)

    @count.setter
    def count(self, value: int) -> None:
        self._counts[self] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.fn(*args, **kwargs)
