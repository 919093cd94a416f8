"""What captured containers and objects hold: lists, dicts, sets and the ``__dict__`` of objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch

from ._places import CellPlace, GlobalPlace, Place

Snapshot = tuple[Any, Any, Place]  # a container, a copy of it, and where it is


def copy_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    """A plain copy, not by methods that a subclass overrides."""
    return dict(OrderedDict.items(value)) if isinstance(value, OrderedDict) else dict.copy(value)


class Contents(Place):
    """All that a container holds: `key`, a copy of it, as long as the very same objects are in it."""

    __slots__ = ()

    def get(self) -> Any:
        held, key = self.holder, self.key
        if isinstance(held, dict):
            items = copy_dict(held)
            same = len(items) == len(key) and all(map(is_, items, key)) and all(map(is_, items.values(), key.values()))
            return key if same else items
        if isinstance(held, list):
            now = list.copy(held)
            return key if len(now) == len(key) and all(map(is_, now, key)) else now
        members = tuple(held)
        return key if {*map(id, members)} == {*map(id, key)} else members

    def set(self, value: Any) -> None:
        held = self.holder
        if isinstance(held, dict):
            _fill(held, value)
        elif isinstance(held, list):
            list.__setitem__(held, slice(None), value)
        else:
            set.clear(held)
            set.update(held, value)

    def _step(self) -> str:
        return ""


def _fill(held: dict[Any, Any], items: dict[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    now = copy_dict(held)
    if len(now) != len(items) or not all(map(is_, now, items)):  # the order counts too
        kind.clear(held)
        now = {}
    for key, item in items.items():
        if key not in now or now[key] is not item:
            kind.__setitem__(held, key, item)


def is_put_back(snapshot: Snapshot) -> bool:
    """Whether a run again sees what it held: the state of a module, and a dict with tensors, such as a cache.

    Its tensors are put back, so its keys must be. Another list or dict that a closure holds may be there to log runs.
    """
    held, copy, place = snapshot
    if isinstance(held, dict) and any(isinstance(value, torch.Tensor) for value in copy.values()):
        return True
    up: Place | None = place
    while up is not None:
        if isinstance(held, dict) and "_modules" in held and "_parameters" in held:
            return True
        if isinstance(up, (CellPlace, GlobalPlace)):  # a function's, such as a hook's
            return False
        held, up = up.holder, up.up
    return False


def snapshots(contents: Iterable[Snapshot]) -> Iterator[tuple[Place, Any]]:
    """The contents as places, each with what was there."""
    return ((Contents(held, copy, place), copy) for held, copy, place in contents)
