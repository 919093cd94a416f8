"""The values of a first run that a policy saves: on their device, in host memory, or by the hooks around the region.

A value is saved if the policy allows it and the value is needed: autograd saved it, or an operation that must be
recomputed reads it. This is known only when the region ends. Until then, `held` keeps the candidates alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from .._core import host_memory, private
from .._core.facts import tensors
from .._core.host_memory import Group, Offloaded
from .._core.lines import Line
from .._core.state import alias, unseen
from .._core.tensors import holder
from .._policy.policy import Verdict
from .._region.hooks import Hooks, Packed
from .._region.placeholders import Placeholder
from ..errors import MutationError
from .program import Log
from .values import Layout, form_of


class Residual:
    """A saved value: the contents of a storage, as an operation made them. Methods take any alias as ``tensor``."""

    __slots__ = ("__weakref__", "_bring", "_form", "_guard", "_near", "_offloaded", "_versions", "line", "op")

    def __init__(self, op: Any, line: Line | None) -> None:
        self.op, self.line = op, line  # the operator that made it, and the line that called the operator
        self._bring: Callable[[], torch.Tensor] | None = None
        self._near: torch.Tensor | None = None
        self._offloaded: Offloaded | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []  # of tensors on its storage, unless it is a copy

    def save_here(self, tensor: torch.Tensor, form: tuple | None) -> None:
        """Save the value where it is."""
        self._guard, self._form = alias(tensor), form or form_of(tensor)
        self._versions = [(self._guard, private.version(tensor))]

    def watch(self, result: torch.Tensor) -> None:
        """Watch a result of the region, whose version counter may be its own: ``_unsafe_view`` doesn't share it."""
        if self._versions:
            self._versions.append((alias(result), private.version(result)))

    @property
    def has_changed(self) -> bool:
        """Whether the value was changed in place."""
        return any(private.version(tensor) != version for tensor, version in self._versions)

    def save_elsewhere(
        self, tensor: torch.Tensor, form: tuple | None, layout: Layout | None, outer: Hooks | None, group: Group | None
    ) -> None:
        """Hand the value to the hooks around the region, or copy it to host memory."""
        if outer is None and host_memory.in_host_memory(tensor):
            self.save_here(tensor, form)
            return
        if outer is None and isinstance(tensor, Placeholder):  # skipped by the recompute of an enclosing region
            tensor.check()
        with unseen():
            self._near = alias(tensor)  # until the first run ends
            numbers = _numbers(tensor, layout)
            if outer is None:
                self._offloaded = Offloaded(numbers, group)
                self._bring = self._offloaded.get
            else:
                handed = Packed(numbers, outer)
                self._bring = handed.get
                if any(holder(kept) is holder(tensor) for kept in tensors(handed.contents)):
                    self._versions = [(alias(tensor), private.version(tensor))]

    @property
    def nbytes(self) -> int:
        """The bytes that it occupies on the device."""
        return 0 if self.is_elsewhere else self._guard.untyped_storage().nbytes()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the value must be fetched. That may recompute an enclosing region, so not within an operation."""
        return self._bring is not None

    def on(self, layout: Layout) -> torch.Tensor:
        """Return a new tensor of a layout, whose storage contains the value.

        Raises:
            MutationError: the value was changed in place.
        """
        tensor = self.get()
        if self._bring is None and self._form == layout.form:
            return alias(tensor)
        if not private.transforms_active():
            return layout.of(tensor)
        with private.without_levels():
            return layout.of(tensor)

    def get(self) -> torch.Tensor:
        """Return a tensor whose storage contains the value.

        Raises:
            MutationError: the value was changed in place.
        """
        if self.has_changed:
            op, line = self.op or "an operation", self.line or "an unknown line"
            raise MutationError(
                f"The output of {op} at {line}, which the region's policy saves for the backward, was "
                f"changed in place later. Use the out-of-place operation, or change a copy: `.clone()`."
            )
        if self._bring is not None:
            if self._near is not None:
                return self._near
            with private.without_levels(), unseen():
                content = self._bring()
                whole = content.storage_offset() == 0 and content.is_contiguous()
                return content if whole else content.clone(memory_format=torch.contiguous_format)
        return self._guard

    def before_writing(self) -> None:
        """Have the stream wait for the copy to host memory, as the storage is about to be overwritten."""
        if self._offloaded is not None:
            self._offloaded.settle()

    def settle(self) -> None:
        """Release the value on the device. A shared storage, as of a result, may be overwritten next."""
        if self._near is not None and private.is_shared(self._near):
            self.before_writing()
        self._near = None


def tensor_of(content: Residual | torch.Tensor) -> torch.Tensor:
    """Return a residual's tensor, or a tensor itself."""
    return content.get() if isinstance(content, Residual) else content


def _numbers(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """Return the whole storage of a tensor in the value's dtype: in its shape if that covers the storage, else flat."""
    storage, dtype = tensor.untyped_storage(), tensor.dtype if layout is None else layout.dtype
    size: tuple[int, ...] = (storage.nbytes() // dtype.itemsize,)
    stride: tuple[int, ...] = (1,)
    if layout is not None and layout.fills(tensor):
        _, size, stride, *_ = layout.form
    with private.without_dispatch():
        if dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg()):
            return alias(tensor).as_strided(size, stride, 0)  # shares the version counter, which hooks may read
        return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, size, stride)


class Source(NamedTuple):
    """The origin of a tensor that autograd saved: its values, its layout if a policy may save it, the steps so far."""

    values: tuple[int, ...]
    layout: Layout | None
    after: int

    @property
    def value(self) -> int | None:
        """The value that the policy may save, or None."""
        return None if self.layout is None else self.values[0]


class Saves:
    """The tensors that autograd has saved so far."""

    def __init__(self) -> None:
        self.above: list[int] = []  # the values that autograd saved at torch.func levels above, which have no slots
        self._slots: list[tuple[weakref.ref, Source]] = []

    def add(self, slot: Any, source: Source) -> None:
        """Add a slot, and the origin of the tensor that it replaces."""
        slot.source = source
        self._slots.append((weakref.ref(slot), source))

    def slots(self) -> Iterator[tuple[Any, Source]]:
        """Iterate over the slots, None for freed ones, and their origins."""
        return ((ref(), source) for ref, source in self._slots)

    def roots(self, end: int, all_count: bool) -> dict[int, int]:
        """Return the values that a backward pass needs, each with the number of steps when autograd last saved it."""
        found = dict.fromkeys(self.above, end)
        for slot, source in self.slots():
            if slot is not None or all_count:
                found.update((value, max(source.after, found.get(value, 0))) for value in source.values)
        return found

    def has(self, value: int, since: int) -> bool:
        """Whether autograd has saved a value that step ``since`` has made."""
        later = takewhile(lambda slot: slot[1].after > since, reversed(self._slots))
        return value in self.above or any(value in source.values for _, source in later)

    def on_overwrite(self, number: int, written: dict[int, int]) -> None:
        """Replace values that were just overwritten: autograd may save an argument before it is filled (``rrelu``)."""
        self.above = [written.get(value, value) for value in self.above]
        for i in range(len(self._slots) - 1, -1, -1):
            ref, source = self._slots[i]
            slot = ref()
            if source.after < number:
                break
            if slot is not None and len(source.values) == 1 and source.values[0] in written:
                slot.source = Source((written[source.values[0]],), source.layout, number + 1)
                self._slots[i] = ref, slot.source


class SavedValues:
    """The values of a log that are saved, and the candidates that may have to be saved."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.hooks: Hooks | None = None  # saved-tensor hooks around the region, which save its residuals
        self.held: dict[int, torch.Tensor] = {}  # the candidates
        self.enough = 12  # the number of candidates at which the recording checks which of them are needed
        # Residuals are owned by slots, and by `_owned`: all residuals in the first run, later those that steps read.
        self._residuals: weakref.WeakValueDictionary[int, Residual] = weakref.WeakValueDictionary()
        self._owned: dict[int, Residual] = {}
        self._group: Group | None = None

    def hold(self, value: int, tensor: torch.Tensor) -> None:
        """Make a value a candidate, if the policy allows it to be saved."""
        if value not in self.log.saveable:
            self.held.pop(value, None)
        elif value not in self.log.overwritten and value not in self.held:
            self.held[value] = tensor

    def residual(self, value: int) -> Residual | None:
        """Return the residual of a value, or None if the value is not saved or its residual was freed."""
        return self._residuals.get(value)

    def save(self, value: int, tensor: torch.Tensor, form: tuple | None = None) -> Residual:
        """Save a value, as long as the returned residual lives. ``tensor`` is on its storage, in this form."""
        residual = self._residuals.get(value)
        if residual is None:
            log = self.log
            residual = Residual(log.maker(value).key[0], log.lines.get(log.made[value]))
            if self.hooks is None and log.saveable[value] is Verdict.SAVE:
                residual.save_here(tensor, form)
            else:
                if self.hooks is None and self._group is None:
                    self._group = Group()
                residual.save_elsewhere(tensor, form, log.layout(value), self.hooks, self._group)
            self._residuals[value] = self._owned[value] = residual
        return residual

    def of_slot(self, value: int | None) -> Residual | None:
        """Return the residual of a value that autograd saved, when the first run has ended."""
        if value is None:
            return None
        if value in self.held and value not in self._owned:
            self.save(value, self.held[value])  # autograd saved it before it got its name
        return self._owned.get(value)

    def before_writing(self, value: int) -> None:
        """Prepare the residual of a value whose storage is about to be overwritten."""
        if value in self._owned:
            self._owned[value].before_writing()

    def on_overwrite(self, value: int) -> None:
        """Remove the residual of a value whose storage was overwritten."""
        residual = self._residuals.pop(value, None)
        if residual is not None:
            residual.settle()

    def drop(self, values: Collection[int]) -> None:
        """Drop all candidates except these values. A dropped value becomes a candidate again when it is read."""
        for value in [value for value in self.held if value not in values]:
            del self.held[value]

    def there(self) -> set[int]:
        """Return the candidates and the values whose residuals are alive and unchanged."""
        return {*self.held, *(value for value, residual in self._residuals.items() if not residual.has_changed)}

    def close(self, needed: Collection[int], results: Collection[tuple[int | None, torch.Tensor]]) -> None:
        """Own the residuals that a recompute needs, and release all others, when the first run has ended."""
        owned = {value: self.residual(value) or self.save(value, self.held[value]) for value in sorted(needed)}
        for value, tensor in results:
            if value is not None and (residual := self.residual(value)) is not None:
                residual.watch(tensor)
        self.release_all()
        self._owned = owned
        del self.log  # only the first run needs it

    def release_all(self) -> None:
        """Drop the candidates, whose autograd history may lead back to this object, and all owned residuals."""
        self.held.clear()
        for residual in self._owned.values():
            residual.settle()
        self._owned.clear()

    def forget(self, value: int) -> None:
        """Drop a value that is not to be saved after all."""
        for each in (self.held, self._owned, self._residuals):
            each.pop(value, None)

    @property
    def count(self) -> int:
        """The number of residuals so far."""
        return len(self._owned)

    def go_back(self, count: int) -> None:
        """Forget all residuals after the first ``count``, in a first run."""
        for value in list(self._owned)[count:]:
            self._owned.pop(value).settle()
            self._residuals.pop(value, None)

    def release(self, value: int) -> None:
        """Drop the residual of a value that the last recompute has restored."""
        self._owned.pop(value, None)

    @property
    def nbytes(self) -> int:
        """The bytes on the device of the residuals that a recompute needs."""
        return sum(residual.nbytes for residual in self._owned.values())

    def own(self, values: Collection[int]) -> None:
        """Own the residuals of these values, which only slots own so far, before the slots are freed."""
        self._owned.update((value, residual) for value in values if (residual := self.residual(value)) is not None)
