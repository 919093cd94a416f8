"""What is kept of a first run under a policy.

A value may be kept if the policy says so, and is if it is needed: because autograd saved it, or because an operation
that has to be recomputed reads it. Until the region ends that isn't known, so what may turn out to be needed is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from .._core.host_memory import Group
from .._policy.policy import Verdict
from .._region.handover import Hooks
from .log import Log
from .residual import Residual


class Keep:
    """The values of a log that are held, and those that are kept."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.hooks: Hooks | None = None  # those around the region, which keep what it keeps
        self.held: dict[int, torch.Tensor] = {}
        self.enough = 12  # held values, before the next look which of them are needed
        # What is kept, as long as somebody owns it: slots; and this, in the first run all of it, then what is needed.
        self._residuals: weakref.WeakValueDictionary[int, Residual] = weakref.WeakValueDictionary()
        self._owned: dict[int, Residual] = {}
        self._group: Group | None = None

    def hold(self, value: int, tensor: torch.Tensor) -> None:
        """It may have to be kept, if the policy says so."""
        if value not in self.log.saveable:
            self.held.pop(value, None)
        elif value not in self.log.overwritten and value not in self.held:
            self.held[value] = tensor

    def kept(self, value: int) -> Residual | None:
        """What is kept of a value, if it still is."""
        return self._residuals.get(value)

    def keep(self, value: int, tensor: torch.Tensor, form: tuple | None = None) -> Residual:
        """Keep a value, for whoever owns what this returns: ``tensor`` is on its storage, in this form."""
        residual = self._residuals.get(value)
        if residual is None:
            log = self.log
            residual = Residual(log.maker(value).key[0], log.lines.get(log.made[value]))
            if self.hooks is None and log.saveable[value] is Verdict.SAVE:
                residual.stay(tensor, form)
            else:
                if self.hooks is None and self._group is None:
                    self._group = Group()
                residual.go(tensor, form, log.layout(value), self.hooks, self._group)
            self._residuals[value] = self._owned[value] = residual
        return residual

    def of_slot(self, value: int | None) -> Residual | None:
        """What is kept of a value that autograd saved, once the first run has ended."""
        if value is None:
            return None
        if value in self.held and value not in self._owned:
            self.keep(value, self.held[value])  # it was saved before it got its name
        return self._owned.get(value)

    def before_writing(self, value: int) -> None:
        """Its storage is about to get another value."""
        if value in self._owned:
            self._owned[value].before_writing()

    def is_overwritten(self, value: int) -> None:
        """Its storage has got another value."""
        residual = self._residuals.pop(value, None)
        if residual is not None:
            residual.settle()

    def drop(self, values: Collection[int]) -> None:
        """Of the held values these alone are needed. Another one is held again when it is read."""
        for value in [value for value in self.held if value not in values]:
            del self.held[value]

    def there(self) -> set[int]:
        """What is held, or kept as long as somebody owns it."""
        return {*self.held, *self._residuals.keys()}

    def close(self, needed: Collection[int]) -> None:
        """The first run has ended: own what more than slots need, and let go of the rest."""
        owned = {value: self.kept(value) or self.keep(value, self.held[value]) for value in sorted(needed)}
        self.let_go()
        self._owned = owned
        del self.log  # of the first run alone

    def let_go(self) -> None:
        """Drop what is only held: it has a history, which may lead to here."""
        self.held.clear()
        for residual in self._owned.values():
            residual.settle()
        self._owned.clear()

    def forget(self, value: int) -> None:
        """It is not kept after all."""
        for each in (self.held, self._owned, self._residuals):
            each.pop(value, None)

    def release(self, value: int) -> None:
        """The last recompute has it."""
        self._owned.pop(value, None)

    @property
    def nbytes(self) -> int:
        """What it takes here, of what more than slots need."""
        return sum(residual.nbytes for residual in self._owned.values())

    def own(self, values: Collection[int]) -> None:
        """The slots will be gone: keep what they own."""
        self._owned.update((value, residual) for value in values if (residual := self.kept(value)) is not None)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """What hooks around the region keep is asked for once, now."""
        far = [residual for residual in self._residuals.values() if residual.is_elsewhere]
        for residual in far:
            residual.come()
        try:
            yield
        finally:
            for residual in far:
                residual.leave()
