"""A loop without steps, which runs its step once on tensors without values, to find the shapes of ``y``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._captured.captured import find
from .._captured.variables import bound
from .._core.facts import facts_of, mapped
from .._core.private import DispatchMode, FakeTensorMode
from .._core.state import disable_remat, own_work, unseen
from .._region.hooks import hooks_hidden


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
            loop.call(0, carry, leaves)
    except RuntimeError as error:
        raise ValueError(
            f"A loop without steps runs its step once on tensors without values, to find the shapes of `y`, and this "
            f"step can't run so: {error} Don't call `scan` without steps."
        ) from error
    finally:
        bound(captured.variables, {id(tensor): tensor for _, tensor in captured.tensors}).put()
    return loop.y.empty(0)
