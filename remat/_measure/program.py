"""Runs of a program: the forward and the backward of a loss, or the transformed function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .._core import trees
from .._core.parts import is_differentiable
from .subject import Subject

Named = list[tuple[str, Any]]


class Program(NamedTuple):
    """A function with its arguments, and how it is differentiated."""

    subject: Subject
    transform: Callable | None
    loss: Callable | None

    def run(self, fn: Callable, at_end_of_forward: Callable[[], object] = lambda: None) -> Named:
        """Run the program with ``fn`` in place of its function. Returns the transform's result, or the gradients."""
        if self.transform is None:
            return self._differentiated(fn, at_end_of_forward)[1]
        transformed = self.transformed(_notifying(fn, at_end_of_forward))
        return _leaves(self.subject.call(transformed, self.subject.tensors))

    def transformed(self, fn: Callable) -> Callable:
        """The transformed function.

        Raises:
            TypeError: the transform makes no function from ``fn``.
        """
        assert self.transform is not None
        cause = None
        try:
            if callable(made := self.transform(fn)):
                return made
        except Exception as error:
            cause = error
        raise TypeError(
            "transform must be a function that makes a function from fn, such as `torch.func.grad` (not "
            "`torch.func.grad(fn)`), or `lambda fn: vmap(grad(fn))`."
        ) from cause

    def results(self, fn: Callable) -> Named:
        """Like ``run``, with the function's own result, which is then alive during the backward."""
        if self.transform is None:
            values, gradients = self._differentiated(fn, lambda: None, keep=True)
            return values + gradients
        return self.run(fn)

    def _differentiated(self, fn: Callable, at_end: Callable[[], object], keep: bool = False) -> tuple[Named, Named]:
        subject = self.subject
        captured, cut = subject.cut()
        operands = subject.operands()
        with cut, torch.enable_grad():
            result = subject.call(fn, operands)
            values = [(name, _detached(value)) for name, value in _leaves(result)] if keep else []
            value = (self.loss or default_loss)(result)
            del result
            at_end()
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return values, []
            named = [(f"argument {name}", tensor) for name, tensor in zip(subject.names, operands)]
            leaves = {id(t): (name, t) for name, t in (*named, *captured) if t.requires_grad}
            for leaf in _leaves_of_graph(value):
                shape = list(leaf.shape)
                leaves.setdefault(id(leaf), (f"a tensor of shape {shape}", leaf))
            names, tensors = zip(*leaves.values())
            gradients = torch.autograd.grad(value, tensors, allow_unused=True)
        return values, [(f"gradient of {name}", gradient) for name, gradient in zip(names, gradients)]


def default_loss(result: Any) -> Any:
    """The ``.loss`` of a result that has one, else the sum of its floating-point tensors."""
    if isinstance(loss := getattr(result, "loss", None), torch.Tensor):
        return loss
    tensors = [leaf for leaf in trees.flatten(result)[0] if isinstance(leaf, torch.Tensor) and is_differentiable(leaf)]
    parts = [(torch.view_as_real(t) if t.is_complex() else t).sum() for t in tensors]
    return functools.reduce(lambda total, part: total + part.to(total.device), parts) if parts else None


def _leaves(result: Any) -> Named:
    leaves, spec = trees.flatten(result)
    return list(zip(trees.paths(spec, "result"), leaves))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _leaves_of_graph(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves on which a backward pass would accumulate gradients."""
    seen, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
                yield leaf
            stack += [after for after, _ in node.next_functions]


def _notifying(fn: Any, at_end: Callable[[], object]) -> Any:
    """The function or module, which then calls ``at_end`` at the end of each call."""
    if isinstance(fn, nn.Module):
        fn.register_forward_hook(_Hook(at_end))  # `preserved` removes it
        return fn

    @functools.wraps(fn)
    def notifying(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        at_end()
        return result

    return notifying


class _Hook:
    """A forward hook that calls a function."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call()
