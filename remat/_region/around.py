"""The saved-tensor hooks around a region: they get its inputs, as they get the tensors that autograd saves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._core import private
from .._core.state import state
from .guards import Guards
from .hooks import Hooks, in_torch_checkpoint


class RegionHooks:
    """The object whose methods are the saved-tensor hooks of a region, in its first run or in a recompute.

    Both have ``count``, the number of tensors saved so far, and ``go_back(count)``, which forgets all after these.
    """

    __slots__ = ()
    around: Any = None  # the hooks of the outer region, which get what this region's policy saves

    def on_inner_backward(self) -> None:
        """Called when a backward pass runs before the first run has ended."""


def of_region(hooks: tuple | None) -> RegionHooks | None:
    """The region's hooks object that a pair of hooks belongs to, or None for other hooks."""
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, RegionHooks) else None


def positions() -> list[tuple[Any, int]]:
    """How far the outer regions have come: their logs and saved tensors, which can ``go_back`` to these numbers."""
    found: list[Any] = [*state.logs]
    region: Any = of_region(private.top_hooks(True))
    while region is not None:
        found.append(region)
        region = region.around
    return [(each, each.count) for each in found]


def hand_operands(hooks: Hooks | None, operands: Guards, uses: Iterable[tuple[int, int]] | None = None) -> None:
    """Pass a region's operands to the hooks around it. A recompute of the outer region may need nothing else.

    Hooks of a region or of torch's checkpoint get an operand once for each use of it: their recompute may find two
    tensors where this run finds one, and must pass the same number.
    """
    if hooks is not None:
        in_region = of_region(hooks) is not None
        each: Iterable[int] = range(len(operands))
        if uses is not None and (in_region or in_torch_checkpoint()):
            each = [i for _, i in uses]
        operands.hand_over(hooks, each, in_region)


def hand_captured(hooks: Hooks | None, captured_inputs: Guards) -> None:
    """Pass captured tensors to the hooks around a region, except those that stay alive."""
    if hooks is not None and len(captured_inputs):
        in_region, owner = of_region(hooks) is not None, getattr(hooks[0], "__self__", None)
        tensors, is_counted = captured_inputs.tensors, in_torch_checkpoint()
        # An outer region refers to a parameter without packing it, as it has not made it.
        stay = {i for i, t in enumerate(tensors) if t.is_leaf and (t.requires_grad or not in_region)}
        # The recompute of torch's checkpoint may find other tensors, as no region around it binds variables then.
        takes_all = is_counted or getattr(owner, "takes_all", False)
        each = [i for i in range(len(tensors)) if takes_all or i not in stay]
        captured_inputs.hand_over(hooks, each, in_region, counted=stay if is_counted else ())
