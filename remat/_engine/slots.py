"""Placeholders in autograd's graph for the tensors that a region's operations save."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._core import private
from .._region.fingerprints import look_at


class Slot:
    """The placeholder of one saved tensor. It owns the value only while a backward pass needs it."""

    __slots__ = ("__weakref__", "fingerprint", "first", "value", "version")
    source: Any = None  # set only in regions with a policy, like ``residual``
    residual: Any = None

    # No ``__init__``, as a region makes many slots.
    fingerprint: Any  # what a recompute is compared with
    first: tuple[weakref.ref, int] | None  # the saved tensor and its version, see ``watch``
    value: torch.Tensor | None
    version: int

    def watch(self, tensor: torch.Tensor, check: str) -> None:
        """Watch a tensor that requires no grad for changes: it may be a captured tensor that the search didn't find."""
        self.fingerprint = look_at(tensor, check)
        self.first = weakref.ref(tensor), private.version(tensor)

    def has_changed(self) -> bool:
        """Whether the saved tensor is still alive and was changed in place. Without remat autograd raises then."""
        assert self.first is not None
        ref, version = self.first
        tensor = ref()
        return tensor is not None and private.version(tensor) != version


class RecordedSlot(Slot):
    """A slot of a region with a policy."""

    __slots__ = ("residual", "source")

    def __init__(self) -> None:
        self.source: Any = None  # which value it is, in the record of the first run
        self.residual: Any = None  # the residual, if that value is saved


def reference(slot: Slot | None) -> Callable[[], Slot | None]:
    """A weak reference to a slot; a dead one if there is no slot."""
    return _dead if slot is None else weakref.ref(slot)


def _dead() -> None:
    return None


class Stop(BaseException):
    """Ends a recompute as soon as its slots are filled. Not an Exception, so that user code lets it through."""
