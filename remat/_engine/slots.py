"""What stands in autograd's graph for a tensor that a region saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._core import private
from .._core.parts import bare
from .._region.fingerprints import fingerprint, look_at
from .._region.guards import Guards
from ..errors import MutationError


class Slot:
    """Stands for one saved tensor; the value is there only while a backward pass needs it."""

    __slots__ = ("__weakref__", "fingerprint", "first", "value", "version")
    source: Any = None  # these are of regions with a policy
    residual: Any = None

    # A region makes many, so they have no ``__init__``.
    fingerprint: Any  # what a recompute is compared with
    first: tuple[weakref.ref, int] | None  # the saved tensor and its version, see ``watch``
    value: torch.Tensor | None
    version: int

    def watch(self, tensor: torch.Tensor, check: str) -> None:
        """What requires no grad may be captured, from where it was not found: then a change of it must be seen."""
        self.fingerprint = look_at(tensor, check)
        self.first = weakref.ref(tensor), private.version(tensor)

    def has_changed(self) -> bool:
        """Whether the saved tensor itself is still there and was changed in place, an error without remat too."""
        assert self.first is not None
        ref, version = self.first
        tensor = ref()
        return tensor is not None and private.version(tensor) != version


class RecordedSlot(Slot):
    """A slot of a region with a policy."""

    __slots__ = ("residual", "source")

    def __init__(self) -> None:
        self.source: Any = None  # which value it is, in the record of the first run
        self.residual: Any = None  # that value is kept


def reference(slot: Slot | None) -> Callable[[], Slot | None]:
    """A weak reference to a slot; what needs no slot is gone from the start."""
    return _gone if slot is None else weakref.ref(slot)


def _gone() -> None:
    return None


class Stop(BaseException):
    """Ends a recompute as soon as its slots are filled. Not an Exception, so that user code lets it through."""


class View:
    """A view of an input or of a captured tensor: it shares its memory, so it costs none."""

    __slots__ = ("i", "kept", "version", "view")

    def __init__(self, kept: Guards, i: int, view: torch.Tensor) -> None:
        self.kept, self.i = kept, i
        self.view, self.version = view, private.version(view)

    def __call__(self) -> torch.Tensor:
        if private.version(self.view) != self.version:
            raise MutationError(self.kept.message(self.i))
        return self.view


class Found:
    """A tensor that has a history older than the region, or none: it is there anyway."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, private.version(tensor)

    def __call__(self) -> torch.Tensor:
        if private.version(self.tensor) != self.version:
            raise MutationError(
                f"A captured tensor, {fingerprint(self.tensor, 'metadata')}, was changed in place after the region's "
                f"forward and before its backward. Change it after the backward, or give the region a copy."
            )
        return self.tensor


class Above:
    """What a level of torch.func inside of the region saves: a wrapper, which lives as long as that level's graph."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = bare(tensor)  # itself, it could make a cycle

    def __call__(self) -> torch.Tensor:
        return self.tensor
