"""Slots: what autograd saves in place of the tensors that a recompute has to provide."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from .._core import private
from .._core.state import unseen
from .._core.tensors import copied
from .._region.fingerprints import version_of


class Slot:
    """The placeholder of one saved tensor. It owns the value only while a backward pass needs it."""

    __slots__ = ("__weakref__", "fingerprint", "first", "residual", "source", "value", "version")

    def __init__(self, fingerprint: Any) -> None:
        self.fingerprint = fingerprint  # what a recompute is compared with
        self.first: weakref.ref | None = None  # a saved tensor that may be a captured one that the search didn't find
        self.value: torch.Tensor | None = None
        self.source: Any = None  # under a policy: which value it is, in the record of the first run
        self.residual: Any = None  # the residual, if that value is saved

    def has_changed(self) -> bool:
        """Whether the saved tensor is still alive and was changed in place. Without remat autograd raises then."""
        tensor = None if self.first is None else self.first()
        return tensor is not None and private.version(tensor) != version_of(self.fingerprint)

    def fill(self, value: torch.Tensor) -> None:
        """Set the value."""
        self.version = private.version(value)  # a node may change it
        self.value = value  # last, as another thread may be waiting for it


class InputSlot(Slot):
    """The slot of an input that the region has changed in place, and may change again: its value is a copy."""

    __slots__ = ()

    def fill(self, value: torch.Tensor) -> None:
        with unseen():
            super().fill(copied(value))


class Slots(list["weakref.ref[Slot] | None"]):
    """The slots of a frame, for each tensor that autograd saved, None where it needs none. Only its nodes own them."""

    __slots__ = ("__weakref__", "lock", "mixed", "once", "stopped")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # of the thread that fills them
        self.once = False  # the values are for one pass, which reads each of them once
        self.stopped = False  # the recompute that made the values stopped as soon as all slots were filled
        self.mixed = False  # a recompute has used other streams than the first run

    def alive(self) -> list[Slot | None]:
        """Return the slots that nodes own, None for others."""
        return [None if ref is None else ref() for ref in self]

    def empty(self) -> None:
        """Release the values that were filled in for a backward pass and not read."""
        if not self.lock.acquire(blocking=False):
            return  # another pass fills the slots, and clears them at its end; it may be waiting for this thread
        try:
            for slot in filter(None, self.alive()):
                slot.value = None
        finally:
            self.lock.release()
