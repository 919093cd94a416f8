"""The ``y`` of all steps: each is written to its place in the result, and only its gradient passes through the regions.

Regions return *tokens* in place of values: tensors of the same shape without memory, with the autograd history of the
values. They return the values themselves under transforms, which have other tensors at each level, in a region with a
policy, and if a ``y`` is sparse. A loop without steps runs its step once on tensors without values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._captured.captured import find
from .._captured.variables import bound
from .._core import private, trees
from .._core.facts import facts_of, mapped
from .._core.private import DispatchMode, FakeTensorMode
from .._core.state import disable_remat, own_work, state, unseen
from .._region.hooks import hooks_hidden
from .checks import Trees


class Results:
    """The result of a loop while it runs."""

    __slots__ = ("_buffers", "_count", "_is_none", "_is_open", "_kinds", "_writes")

    def __init__(self, count: int) -> None:
        self._count = count
        # An outer region with a policy must see where the result comes from, or its recompute would skip the steps.
        self._writes = not (private.transforms_active() or private.dual_level_active() or state.policies)
        self._is_open = True  # recomputes don't write
        self._is_none = False  # steps return None for `y`
        self._kinds: Trees | None = None
        self._buffers: list[torch.Tensor] = []

    def add(self, number: int, y: Any) -> list[Any]:
        """Add the ``y`` of a step. Return the token or value of each leaf, which the outer regions return."""
        if y is None and self._kinds is None:
            self._is_none = True
            return []
        if self._is_none:
            raise ValueError(
                f"Step {number} changes y from None to an object of type {type(y).__name__}. It must not change."
            )
        if self._kinds is None:
            self._kinds = Trees(y, "y")
            self._writes &= all(leaf.layout is torch.strided for leaf in trees.flatten(y)[0])
        leaves = self._kinds.checked(y, number)
        if not self._writes:
            return leaves
        if self._is_open:
            with torch.no_grad(), unseen():
                self._buffers = self._buffers or [leaf.new_empty((self._count, *leaf.shape)) for leaf in leaves]
                for buffer, leaf in zip(self._buffers, leaves):
                    buffer[number].copy_(leaf)
        return [_Token.apply(leaf) if torch.is_grad_enabled() and leaf.requires_grad else None for leaf in leaves]

    def close(self, tokens: list[list[Any]]) -> Any:
        """Return the result, after all steps have run."""
        self._is_open = False
        if self._kinds is None:
            return None
        columns = list(zip(*tokens))
        if not self._writes:
            return trees.unflatten(self._kinds.spec, [torch.stack(column) for column in columns])
        buffers, self._buffers = self._buffers, []
        return trees.unflatten(self._kinds.spec, [_joined(*each) for each in zip(buffers, columns)])


def _joined(buffer: torch.Tensor, column: tuple) -> torch.Tensor:
    numbers = [i for i, token in enumerate(column) if token is not None]
    return _Joined.apply([buffer], numbers, *(column[i] for i in numbers)) if numbers else buffer


class _Token(torch.autograd.Function):
    """Return a tensor with the history and shape of another one, but without values."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        with unseen():
            return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Joined(torch.autograd.Function):
    """Return the result with the history of the tokens of these steps."""

    @staticmethod
    def forward(ctx: Any, buffer: list[torch.Tensor], numbers: list[int], *tokens: torch.Tensor) -> torch.Tensor:
        ctx.numbers = numbers
        return buffer[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        entries = gradient.unbind()
        return None, None, *(entries[i] for i in ctx.numbers)


class _NoWrites(DispatchMode):
    """Lets operations that write do so on tensors without values, in place of those that exist outside of the run."""

    def __init__(self, fakes: Any) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if facts_of(func).writes:
            args, kwargs = mapped(self._fakes.from_tensor, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def empty_results(loop: Any, xs: Sequence[torch.Tensor]) -> Any:
    """Return the ``y`` of no steps, with tensors of shape ``[0, ...]``. Variables that the step changes are restored.

    Raises:
        ValueError: the step can't run without values, or changes the carry's structure or metadata.
    """
    captured = find(loop.step)
    with (fakes := FakeTensorMode(allow_non_fake_inputs=True)):
        carry = loop.carry.empty()
        leaves = [torch.empty(leaf.shape[1:], dtype=leaf.dtype, device=leaf.device) for leaf in xs]
    try:
        # Regions around must not see this run.
        with own_work(), unseen(), hooks_hidden(), disable_remat(), fakes, _NoWrites(fakes):
            _, y = loop.call(0, carry, leaves)
    except RuntimeError as error:
        raise ValueError(
            f"A loop without steps runs its step once on tensors without values, to find the shapes of `y`, and this "
            f"step can't run so: {error} Don't call `scan` without steps."
        ) from error
    finally:
        bound(captured.variables, {id(tensor): tensor for _, tensor in captured.tensors}).put()
    return None if y is None else Trees(y, "y").empty(0)
