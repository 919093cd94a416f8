"""Guards: the inputs and captured tensors that a region saves for its recomputes.

A recompute starts only if these tensors still have the values of the first run, or from a copy that was made before
the region itself changed them (batch-norm statistics).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from types import MappingProxyType
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._core import host_memory, private
from .._core.facts import tensors
from .._core.host_memory import Group, Offloaded
from .._core.layout import copied
from .._core.parts import lift
from .._core.state import alias, state
from ..errors import MutationError
from .copies import DeviceComparison, can_be_asked, is_small, may_differ
from .fingerprints import checksum
from .handover import AtHand, Handed, HandedToRegion, Hooks
from .hooks import drop_gradient_hooks
from .snapshot import cut, gradients, leafness, tangents, versions

_is_leaf, _requires_grad, _is_view = attrgetter("is_leaf"), attrgetter("requires_grad"), methodcaller("_is_view")
_NOTHING: Mapping[int, Any] = MappingProxyType({})  # shared: most guards need no dict of their own

Name = Callable[[int], str]


class Guards:
    """Tensors as they were before a region's first run.

    ``name(i)`` returns the name of the i-th tensor for errors. ``changing`` is a set of names that persists from call
    to call: a tensor that the region has changed in an earlier call is copied, whatever its size.
    """

    __slots__ = (
        "_changed", "_comparison", "accumulated", "as_they_were", "changing", "copies", "duals", "first_hook",
        "grads", "leaf", "name", "packed", "requires_grad", "sums", "tensors", "versions",
    )  # fmt: skip

    def __init__(self, tensors: Sequence[torch.Tensor], name: Name, changing: set[str]) -> None:
        self.tensors: list[torch.Tensor | None] = list(tensors)
        self.name = name
        self.changing = changing
        self.versions = versions(tensors)
        # Inference tensors have no version counter, so their values are compared.
        self.sums: Mapping[int, int] = _NOTHING
        if -1 in self.versions:
            self.sums = {i: checksum(tensors[i]) for i, version in enumerate(self.versions) if version == -1}
        self.requires_grad = tuple(map(_requires_grad, tensors))
        self.leaf = tuple(map(leafness, tensors)) if any(map(_is_view, tensors)) else tuple(map(_is_leaf, tensors))
        self.packed: Mapping[int, Handed | HandedToRegion | AtHand] = _NOTHING  # saved by the hooks around the region
        self.copies: Mapping[int, torch.Tensor] = _NOTHING
        self._changed: Mapping[int, bool] = _NOTHING
        self._comparison: DeviceComparison | None = None  # of tensors with a copy: which really changed
        self.duals = tangents(tensors) if private.dual_level_active() else _NOTHING
        self.grads: list[tuple[int, int]] | None = None
        self.first_hook = RemovableHandle.next_id  # hooks that a first run registers have this id or a higher one
        self.as_they_were = False  # the first run has ended, changed none of them, and no hooks around saved them
        self.accumulated = False  # a backward pass inside the region added to the .grad of one of them
        if changing or not all(self.requires_grad):
            may_change = [i for i, tensor in enumerate(tensors) if self._may_change(i, tensor)]
            if may_change:
                self.copies = {i: copied(tensors[i].detach()) for i in may_change}
                if self.duals:
                    self.duals = {  # a change in place changes the tangent too
                        i: (primal, (tangent[0].detach().clone(), *tangent[1:]) if i in self.copies else tangent)
                        for i, (primal, tangent) in self.duals.items()
                    }

    def __len__(self) -> int:
        return len(self.versions)

    @property
    def changed(self) -> Mapping[int, bool]:
        """The indices of changed tensors -> whether the version counter missed it. May wait for a device."""
        if self._comparison is not None:
            same, self._comparison = self._comparison.same(), None
            self._changed = {i: untraced for i, untraced in self._changed.items() if i not in same}
            self.copies = {i: copy for i, copy in self.copies.items() if i not in same}
        return self._changed

    @property
    def may_have_changed(self) -> Mapping[int, bool]:
        """A superset of ``changed``, without waiting for a device."""
        return self._changed

    def watch_gradients(self) -> None:
        """Note the gradients now, so that ``close`` can set ``accumulated``."""
        self.grads = gradients(self.tensors)

    def _may_change(self, i: int, tensor: torch.Tensor) -> bool:
        if self.changing and self.name(i) in self.changing:
            return True
        if tensor.requires_grad or tensor.layout is not torch.strided:
            return False
        return is_small(tensor)

    # --- during the first run ---------------------------------------------------------------------------------------

    def hand_over(self, hooks: Hooks, uses: Iterable[int], to_region: bool = False) -> None:
        """Pass the tensors at these indices to the saved-tensor hooks around the region, once for each use.

        Autograd does so with what it saves. ``to_region``: the hooks are those of an outer region.
        """
        kind = HandedToRegion if to_region else Handed
        packed: dict[int, Handed | HandedToRegion] = {}
        for i in uses:
            if (tensor := self.tensors[i]) is not None:
                packed.setdefault(i, kind(tensor, hooks))
        self.packed = packed

    def offload(self) -> None:
        """Move activations to host memory. Device memory is freed if no other reference keeps it alive."""
        hooks = functools.partial(Offloaded, group=Group()), Offloaded.get
        self.hand_over(hooks, [i for i, tensor in enumerate(self.tensors) if _is_activation(tensor)])

    def is_as_before(self, i: int, tensor: torch.Tensor) -> bool:
        same = private.version(tensor) == self.versions[i]
        return same and (i not in self.sums or checksum(tensor) == self.sums[i])

    def find_changed(self) -> None:
        """Find changes in the middle of the first run, by the copies: a backward pass inside needs a recompute."""
        if self.copies:
            same = [now == before for now, before in zip(versions(self.tensors), self.versions)]
            copies = self.copies.items()
            self._changed = {i: same[i] for i, copy in copies if not same[i] or may_differ(self.tensors[i], copy)}

    def close(self) -> None:
        """End the first run: find the changed tensors and release what isn't needed.

        Raises:
            MutationError: the region changed a tensor in place that is not a leaf.
        """
        if self.grads is not None:
            self.accumulated = self.grads != gradients(self.tensors)
            self.grads = None
        now = versions(self.tensors)
        if now == self.versions and not self.copies and not self.packed:
            self.as_they_were = not self.sums
            return
        changed: dict[int, bool] = {}
        copies, to_compare = dict(self.copies), {}
        for i, (tensor, version) in enumerate(zip(self.tensors, now)):
            assert tensor is not None
            if version == self.versions[i]:
                if i not in copies:
                    pass
                elif tensor.device.type not in ("cpu", "meta"):
                    changed[i] = True
                    if can_be_asked(tensor):
                        to_compare[i] = tensor, copies[i]
                elif may_differ(copies[i], tensor):
                    changed[i] = True
                else:
                    del copies[i]
            elif not tensor.is_leaf:
                raise MutationError(
                    f"{self.name(i)} requires grad and was changed in place by the region, which can't be recomputed "
                    f"from the new value. Use the out-of-place operation, or give the region a copy: `.clone()`."
                )
            else:
                changed[i] = False
                self.changing.add(self.name(i))
                self.versions[i] = version
            if i in self.packed:
                if not changed.get(i):
                    self.tensors[i] = None
                if isinstance(offloaded := self.packed[i].packed, Offloaded):
                    offloaded.settle()
        self._changed, self.copies = changed, copies
        if to_compare:
            self._comparison = DeviceComparison(to_compare)
        self.as_they_were = not (changed or self.copies or self.packed or self.sums)

    def forget_histories(self) -> None:
        """Detach captured tensors: a history may lead to earlier regions, which captured tensors, and so on."""
        if not all(self.leaf):
            for i, tensor in enumerate(self.tensors):
                if tensor is not None and not self.leaf[i]:
                    self.tensors[i] = alias(tensor)

    def roll_back(self) -> None:
        """Restore values and hooks of tensors that a first run has changed, because that run is abandoned."""
        drop_gradient_hooks(self.tensors, self.first_hook)
        with torch.no_grad(), private.without_levels():
            for i, copy in self.copies.items():
                tensor = self.tensors[i]
                if tensor is not None and may_differ(tensor, copy):
                    tensor.copy_(fwAD.make_dual(copy, self.duals[i][1][0]) if i in self.duals else copy)

    # --- for a recompute --------------------------------------------------------------------------------------------

    def get(self, i: int) -> torch.Tensor:
        """Return the i-th tensor, as it was before the first run.

        Raises:
            MutationError: it has been changed since.
        """
        if self.packed and i in self.packed and i not in self.changed:
            return self.packed[i].get()
        return self.checked(i, self.tensors[i])

    def saved(self, i: int) -> torch.Tensor:
        """Return the i-th tensor as autograd saved it. Like autograd, ignore changes that versions don't show."""
        if not self.changed.get(i):
            return self.get(i)
        return self._unchanged(i, self.tensors[i])

    def checked(self, i: int, tensor: Any) -> torch.Tensor:
        """Return ``tensor``, which is or was the i-th, or a copy of the old value if the region changed it."""
        if i in self.changed:
            if i not in self.copies:
                raise MutationError(
                    f"{self.name(i)} was changed in place by the region itself, and had not been copied before. "
                    f"Run the forward again: from now on it is copied first. Or give the region a copy: `.clone()`."
                )
            with private.without_levels():
                copy = copied(self.copies[i])
            return lift(copy)
        return self._unchanged(i, tensor)

    def _unchanged(self, i: int, tensor: Any) -> torch.Tensor:
        if not self.is_as_before(i, tensor):
            raise MutationError(self.message(i))
        return tensor

    def message(self, i: int) -> str:
        advice = _OF_PARAMETERS if self.requires_grad[i] and self.leaf[i] else _OF_OTHERS
        return (
            f"{self.name(i)} was changed in place between the region's forward and its backward, which recomputes the "
            f"region and would give wrong gradients. {advice}"
        )

    def again(self, i: int) -> torch.Tensor:
        """Return the i-th tensor for a recompute: cut from its autograd graph, with its tangent."""
        tensor = self.get(i)
        if self.duals and i in self.duals:
            primal, tangent = self.duals[i]
            if i in self.changed:
                primal, tangent = (tensor, *primal[1:]), (tangent[0].clone(), *tangent[1:])
            return fwAD.make_dual(cut(*primal), cut(*tangent))
        return cut(tensor, self.requires_grad[i], self.leaf[i])

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Within, tensors that hooks around the region have saved are unpacked once, now, not at each read."""
        packed = self.packed
        self.packed = {i: each if i in self.changed else AtHand(each.get()) for i, each in packed.items()}
        try:
            yield
        finally:
            self.packed = packed

    def all_again(self) -> list[torch.Tensor]:
        """Return all tensors for a recompute."""
        if self.packed or self.duals or self.changed or self.sums or versions(self.tensors) != self.versions:
            return [self.again(i) for i in range(len(self))]
        return list(map(cut, self.tensors, self.requires_grad, self.leaf))  # type: ignore[arg-type]

    def stale(self) -> dict[int, str]:
        """Return the ids of tensors that were changed since, each with the message for a recompute that reads it."""
        return {
            id(tensor): self.message(i)
            for i, tensor in enumerate(self.tensors)
            if tensor is not None and i not in self.changed and not self.is_as_before(i, tensor)
        }

    def captured_again(self, i: int) -> torch.Tensor:
        """Return the i-th tensor, a captured one, for a recompute: itself if possible, so that no variable changes."""
        tensor = self.tensors[i]
        added_to = self.accumulated and self.requires_grad[i]
        if added_to or i in self.duals or i in self.packed or i in self.changed or tensor is None:
            return self.again(i)
        if tensor.requires_grad is not self.requires_grad[i]:  # it was frozen or detached since
            tensor = cut(tensor, self.requires_grad[i], self.leaf[i])
            if not self.leaf[i]:
                self.tensors[i] = tensor  # ``stale`` looks it up by id
        return tensor


class Stale(TorchFunctionMode):
    """Raises an error if a recompute reads a captured tensor that was changed since, with the message for its id."""

    def __init__(self, messages: Mapping[int, str]) -> None:
        super().__init__()
        self.messages = messages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if tensors(result) and not state.own_work:
            for tensor in tensors((args, kwargs)):
                if id(tensor) in self.messages:
                    raise MutationError(self.messages[id(tensor)])
        return result


def _is_activation(tensor: torch.Tensor | None) -> bool:
    return (
        tensor is not None and not (tensor.is_leaf and tensor.requires_grad) and not host_memory.in_host_memory(tensor)
    )


_OF_PARAMETERS = "The usual cause is an `optimizer.step()` between the two: call it after the backward."
_OF_OTHERS = "Change it after the backward, use the out-of-place operation, or give the region a copy: `.clone()`."
NO_GUARDS = Guards([], str, set())
