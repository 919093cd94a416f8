"""The values of a first run that a policy saves.

A value is saved if the policy allows it and the value is needed: autograd saved it, or an operation that must be
recomputed reads it. This is known only when the region ends. Until then, `held` keeps the candidates alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from .._core.host_memory import Group
from .._policy.policy import Verdict
from .._region.packed import Hooks
from .log import Log
from .residual import Residual


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
