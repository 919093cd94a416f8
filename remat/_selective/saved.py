"""The values of a first run that a policy saves: on their device, in host memory, or by the hooks around the region.

A value is saved if the policy allows it and the value is needed: autograd saved it, or an operation that must be
recomputed reads it. That an operation must be recomputed is known only when the region ends. Until then the values that
operations read are candidates, which are kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import nullcontext
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from .._core import host_memory, private
from .._core.facts import tensors
from .._core.host_memory import Group, Offloaded
from .._core.lines import Line
from .._core.state import alias, unseen
from .._core.tensors import as_bytes, holder
from .._policy.policy import Verdict
from .._region.hooks import Hooks, Packed
from .._region.placeholders import Placeholder
from ..errors import MutationError
from .program import Log
from .values import Form, form_of


class Residual:
    """A saved value: the contents of a storage, as an operation made them. Methods take any alias as ``tensor``."""

    __slots__ = ("__weakref__", "_far", "_near", "_watched", "line", "op")

    def __init__(self, op: Any, line: Line) -> None:
        self.op, self.line = op, line  # the operator that made it, and the line that called the operator
        self._far: Offloaded | Packed | None = None
        self._near: torch.Tensor | None = None
        # Tensors on its storage, with their versions when it was saved, unless it is a copy.
        self._watched: list[tuple[torch.Tensor, int]] = []

    def save_here(self, tensor: torch.Tensor) -> None:
        """Save the value where it is."""
        kept = alias(tensor)  # of an inference tensor it may have a version, which the tensor has not
        self._watched.append((kept, private.version(kept)))

    def watch(self, result: torch.Tensor) -> None:
        """Watch a result of the region, whose version counter may be its own: ``_unsafe_view`` doesn't share it."""
        if self._watched:
            self.save_here(result)

    @property
    def has_changed(self) -> bool:
        """Whether the value was changed in place."""
        return any(private.version(tensor) != version for tensor, version in self._watched)

    def save_elsewhere(self, tensor: torch.Tensor, form: Form | None, outer: Hooks | None, group: Group) -> None:
        """Hand the value to the hooks around the region, or copy it to host memory."""
        if outer is None and isinstance(tensor, Placeholder):  # skipped by the recompute of an enclosing region
            tensor.check()
        with unseen():
            self._near = alias(tensor)  # until the first run ends
            whole = numbers(tensor, form)
            self._far = far = Offloaded(whole, group) if outer is None else Packed(whole, outer)
            if isinstance(far, Packed) and any(holder(kept) is holder(tensor) for kept in tensors(far.contents)):
                self.save_here(tensor)  # as the hooks do

    @property
    def nbytes(self) -> int:
        """The bytes that it occupies on the device."""
        return 0 if self._far is not None else self._watched[0][0].untyped_storage().nbytes()

    def get(self) -> torch.Tensor:
        """Return a tensor whose storage contains the value. That may recompute a region around, if hooks have it."""
        if self.has_changed:
            raise MutationError(
                f"The output of {self.op} at {self.line}, which the region's policy saves for the backward, was "
                f"changed in place later. Use the out-of-place operation, or change a copy: `.clone()`."
            )
        if self._far is None:
            return self._watched[0][0]
        if self._near is not None:
            return self._near
        with private.without_levels(), unseen():
            content = self._far.get()
            return content.clone() if content.storage_offset() else content  # it is contiguous

    def before_writing(self) -> None:
        """Have the stream wait for the copy to host memory, as the storage is about to be overwritten."""
        if isinstance(self._far, Offloaded):
            self._far.settle()

    def settle(self) -> None:
        """Release the value on the device. A shared storage, as of a result, may be overwritten next."""
        if self._near is not None and private.is_shared(self._near):
            self.before_writing()
        self._near = None


def with_form(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """Return a new tensor of a form, on the storage of a tensor."""
    if form_of(tensor) == form:
        return alias(tensor)
    with private.without_levels() if private.transforms_active() else nullcontext():
        return form.on(tensor.untyped_storage())


def numbers(tensor: torch.Tensor, form: Form | None) -> torch.Tensor:
    """Return the whole storage of a tensor in the value's dtype: in its shape if that covers the storage, else flat."""
    storage = tensor.untyped_storage()
    made = tensor if form is None else form.on(storage)
    dtype, covers = made.dtype, form is not None and made.is_contiguous() and made.nbytes == storage.nbytes()
    size, stride = (made.shape, made.stride()) if covers else ((storage.nbytes() // dtype.itemsize,), (1,))
    with private.without_dispatch():
        if dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg()):
            return alias(tensor).as_strided(size, stride, 0)  # shares the version counter, which hooks may read
        return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, size, stride)


class Source(NamedTuple):
    """The origin of a tensor that autograd saved: its values, its form if a policy may save it, the steps so far."""

    values: tuple[int, ...]
    form: Form | None
    after: int


class Saves:
    """The tensors that autograd has saved in a first run so far."""

    def __init__(self) -> None:
        self.above: list[int] = []  # the values that autograd saved at torch.func levels above, which have no slots
        self._slots: list[tuple[weakref.ref, Source]] = []

    def add(self, slot: Any, source: Source) -> None:
        """Add a slot, and the origin of the tensor that it replaces."""
        slot.source = source
        self._slots.append((weakref.ref(slot), source))

    def slots(self, outer: Hooks | None = None) -> Iterator[tuple[Any, Source]]:
        """Iterate over the living slots and their origins; with hooks around the region also over freed ones, as None.

        What is handed to hooks must not depend on which slots are alive.
        """
        found = ((ref(), source) for ref, source in self._slots)
        return ((slot, source) for slot, source in found if slot is not None or outer is not None)

    def roots(self, end: int, outer: Hooks | None) -> dict[int, int]:
        """Return the values that a backward pass needs, each with the number of steps when autograd last saved it."""
        found = dict.fromkeys(self.above, end)
        for _, source in self.slots(outer):
            found.update((value, max(source.after, found.get(value, 0))) for value in source.values)
        return found

    def has(self, value: int, since: int) -> bool:
        """Whether autograd has saved a value that step ``since`` has made."""
        later = takewhile(lambda source: source.after > since, (source for _, source in reversed(self._slots)))
        return value in self.above or any(value in source.values for source in later)


class SavedValues:
    """The values of a first run that may be saved. A residual lives as long as a slot or this object owns it."""

    def __init__(self, log: Log, saves: Saves) -> None:
        self.log, self.saves = log, saves
        self.hooks: Hooks | None = None  # saved-tensor hooks around the region, which save its residuals
        self.allowed: dict[int, Verdict] = {}  # by the policy
        self.candidates: dict[int, torch.Tensor] = {}
        self._owned: dict[int, Residual] = {}
        self._residuals: dict[int, weakref.ref[Residual]] = {}  # all of them
        self._group: Group | None = None

    def decide(self, value: int, verdict: Verdict) -> None:
        """Allow a value to be saved, or don't allow it after all, and release what is saved of it.

        One that is in an input isn't saved: it may be overwritten as soon as the region has ended.
        """
        if verdict is Verdict.RECOMPUTE:
            self.revoke([value])
        elif value not in self.log.in_inputs:
            self.allowed[value] = verdict

    def revoke(self, values: Iterable[int]) -> None:
        """Don't allow values to be saved after all, and release what is saved of them."""
        gone = self.allowed.keys() & values
        for value in gone:
            del self.allowed[value]
            self.candidates.pop(value, None)
            self.forget(value)
        for slot, source in self.saves.slots() if gone else ():
            if not gone.isdisjoint(source.values):
                slot.residual = None

    def hold(self, value: int, tensor: torch.Tensor) -> None:
        """Make a value a candidate, if the policy allows it to be saved."""
        if value in self.allowed and value not in self.log.overwritten:
            self.candidates.setdefault(value, tensor)

    def copy_before_writing(self, value: int, tensor: torch.Tensor, reads_it: bool) -> None:
        """Prepare for an operation that is about to overwrite a value: copy it if it may have to be saved."""
        if value in self._owned:
            self._owned[value].before_writing()
        if value in self.candidates or (reads_it and value in self.allowed):
            if isinstance(tensor, Placeholder):  # skipped by the recompute of an enclosing region
                tensor.check()
            with unseen():
                self.candidates[value] = as_bytes(tensor).clone()

    def forget(self, value: int, stays: bool = False) -> None:
        """Release the residual of a value that isn't saved any more, or was overwritten. What slots read may stay."""
        if (residual := self.residual(value)) is not None and not stays:
            residual.settle()
        self._owned.pop(value, None)
        self._residuals.pop(value, None)

    def save(self, value: int, tensor: torch.Tensor) -> Residual:
        """Save a value, as long as the returned residual lives. ``tensor`` is on its storage."""
        residual = self.residual(value)
        if residual is None:
            log = self.log
            residual = Residual(log.maker(value).facts.func, log.lines[log.made[value]])
            if self.hooks is None and (self.allowed[value] is Verdict.SAVE or host_memory.stays(tensor)):
                residual.save_here(tensor)
            else:
                self._group = self._group or Group()
                residual.save_elsewhere(tensor, log.form(value), self.hooks, self._group)
            self._owned[value], self._residuals[value] = residual, weakref.ref(residual)
        return residual

    def residual(self, value: int) -> Residual | None:
        """Return the residual of a value, or None if the value is not saved or its residual was freed."""
        ref = self._residuals.get(value)
        return None if ref is None else ref()

    def of_slot(self, source: Source) -> Residual | None:
        """Return the residual of a tensor that autograd saved, when the first run has ended."""
        if source.form is None:
            return None
        value = source.values[0]
        if value in self.candidates:
            self.save(value, self.candidates[value])  # autograd saved it before it got its name
        return self._owned.get(value)

    def available(self) -> set[int]:
        """Return the candidates, and the values whose residuals are alive and unchanged."""
        residuals = [(value, ref()) for value, ref in [*self._residuals.items()]]
        return {value for value, each in residuals if each is not None and not each.has_changed}.union(self.candidates)

    def close(self, needed: Collection[int], results: Collection[tuple[int | None, torch.Tensor]]) -> None:
        """Own the residuals that a recompute needs, and release all others, when the first run has ended."""
        owned = {value: self.residual(value) or self.save(value, self.candidates[value]) for value in sorted(needed)}
        for value, tensor in results:
            if value is not None and (residual := self.residual(value)) is not None:
                residual.watch(tensor)
        self.candidates.clear()  # first: values that nothing else refers to are released without waiting
        for residual in self._owned.values():
            residual.settle()
        self._owned = owned
        del self.log, self.saves  # only the first run needs them

    def residuals(self) -> list[Residual]:
        """Return those that a recompute needs or a slot owns."""
        return [residual for ref in self._residuals.values() if (residual := ref()) is not None]

    def release(self, value: int) -> None:
        """Release the residual of a value, such as one that the last recompute has restored, unless a slot owns it."""
        self._owned.pop(value, None)

    @property
    def nbytes(self) -> int:
        """The bytes on the device of the residuals that a recompute needs."""
        return sum(each.nbytes for each in [*self._owned.values()])
