"""What stands in autograd's graph for a tensor that a region saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from . import _torch
from ._determinism import fingerprint
from ._errors import MutationError
from ._kept import Kept


class Slot:
    """Stands for one saved tensor; the value is there only while a backward pass needs it."""

    __slots__ = ("__weakref__", "index", "value", "version")

    def __init__(self, index: int) -> None:
        self.index = index
        self.value: torch.Tensor | None = None
        self.version = 0


class Stop(BaseException):
    """Ends a run again as soon as its slots are filled. Not an Exception, so that user code lets it through."""


class Input:
    """An input or a captured tensor of the region."""

    __slots__ = ("i", "kept")

    def __init__(self, kept: Kept, i: int) -> None:
        self.kept, self.i = kept, i

    def __call__(self) -> torch.Tensor:
        return self.kept.get(self.i)


class View(Input):
    """A view of such a tensor: it shares its memory, so it costs none."""

    __slots__ = ("version", "view")

    def __init__(self, kept: Kept, i: int, view: torch.Tensor) -> None:
        super().__init__(kept, i)
        self.view, self.version = view, _torch.version(view)

    def __call__(self) -> torch.Tensor:
        if _torch.version(self.view) != self.version:
            raise MutationError(self.kept.message(self.i))
        return self.view


class Found:
    """A tensor that has a history older than the region, or none: it is there anyway."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, _torch.version(tensor)

    def __call__(self) -> torch.Tensor:
        if _torch.version(self.tensor) != self.version:
            raise MutationError(
                f"A captured tensor, {fingerprint(self.tensor, 'metadata')}, was changed in place after the region's "
                f"forward and before its backward. Change it after the backward, or give the region a copy."
            )
        return self.tensor


class HandedOver:
    """Such a tensor, kept by the hooks around the region."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self.unpack, self.packed = unpack, packed

    def __call__(self) -> torch.Tensor:
        return self.unpack(self.packed)


class Reading(threading.local):
    """The slots that the running node has read, in a graph that is kept.

    A node may read twice what it saved, so a value stays until another node reads: nodes of a kept graph don't let go
    of their slots by themselves.
    """

    def __init__(self) -> None:
        self.node: int | None = None
        self.slots: list[Slot] = []

    def read(self, slot: Slot) -> None:
        current = _torch.current_node()
        node = None if current is None else _torch.sequence_number(current)
        if node != self.node or node is None:
            self.clear()
            self.node = node
        self.slots.append(slot)

    def clear(self) -> None:
        for slot in self.slots:
            slot.value = None
        self.slots.clear()
        self.node = None


reading = Reading()
