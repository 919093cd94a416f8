"""A loop without steps: its step runs once on tensors without values, which shows what ``y`` would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._ambient.ambient import Ambient
from .._captured.captured import find
from .._captured.variables import bound
from .._core import trees
from .._core.facts import facts_of, mapped
from .._core.private import DispatchMode, FakeTensorMode
from .._core.state import disable_remat, own_work, unseen
from .._region.hooks import hooks_hidden
from .checks import Trees, checked_pair


class _NoWrites(DispatchMode):
    """Lets operations that write do so on tensors without values, in place of those that exist outside of the run."""

    def __init__(self, fakes: Any) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if facts_of(func).writes:
            args, kwargs = mapped(self._fakes.from_tensor, args), mapped(self._fakes.from_tensor, kwargs or {})
        return func(*args, **(kwargs or {}))


def empty_results(step: Callable, carry: Trees, xs: Any) -> Any:
    """Return the ``y`` of no steps, with tensors of shape ``[0, ...]``. What the step changes is changed back.

    Raises:
        ValueError: the step can't run without values, or changes the carry's structure or metadata.
    """
    leaves, spec = ([], None) if xs is None else trees.flatten(xs)
    with (fakes := FakeTensorMode(allow_non_fake_inputs=True)):
        inputs = [torch.empty(kind.shape, dtype=kind.dtype, device=kind.device) for kind in carry.kinds]
        entries = [torch.empty(leaf.shape[1:], dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
    x = None if spec is None else trees.unflatten(spec, entries)
    captured, generators = find(step), Ambient.capture((), [], True)
    tensors = {id(tensor): tensor for _, tensor in captured.tensors}
    try:
        # Regions around must not see this run.
        with own_work(), unseen(), hooks_hidden(), disable_remat(), fakes, _NoWrites(fakes):
            after, y = checked_pair(step(trees.unflatten(carry.spec, inputs), x), 0)
    except RuntimeError as error:
        raise ValueError(
            f"A loop without steps runs its step once on tensors without values, to find the shapes of `y`, and this "
            f"step can't run so: {error} Don't call `scan` without steps."
        ) from error
    finally:
        generators.rewind()
        bound(captured.variables, tensors).put()
    carry.checked(after, 0)
    if y is None:
        return None
    kinds = Trees(y, "y")
    return trees.unflatten(
        kinds.spec, [torch.empty((0, *kind.shape), dtype=kind.dtype, device=kind.device) for kind in kinds.kinds]
    )
