"""What is remembered of a list or dict: a copy of what it held, never the container itself.

A tensor that a region appends to a list leads to the node that made it, and so to the region. A region that kept the
list would live as long as its own results do, and the garbage collector doesn't see the way through autograd's nodes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ._contents import Contents, Snapshot, is_put_back
from ._places import MISSING, Element, ItemPlace
from ._state import alias, own_work

if TYPE_CHECKING:
    from ._walk import Found

_COPIED = (dict, OrderedDict, defaultdict, list)


class Copy:
    """What a container held before the first run. A container in it is a `Copy` too, and has a place of its own."""

    __slots__ = ("address", "items", "kind", "make", "whole")

    def __init__(self, snapshot: Snapshot) -> None:
        held, self.items, _ = snapshot
        self.address = id(held)
        self.kind = type(held)
        self.make: Callable[[], Any] = self.kind
        if isinstance(held, defaultdict):
            self.make = partial(defaultdict, held.default_factory)
        self.whole = is_put_back(snapshot)

    def is_of(self, now: Any) -> bool:
        """Whether this is the container. Should another one have its address, that is put back as it was as well."""
        return type(now) is self.kind and id(now) == self.address

    def may_stay(self, now: Any) -> bool:
        """Whether a recompute may use the container, of which this is a copy, as it is: nothing that it held is gone.

        And no tensor came. What else did may be a log of the runs.
        """
        if self.whole or len(now) < len(self.items):
            return False
        if isinstance(now, dict):
            same = all(_is_same(dict.get(now, key, MISSING), item) for key, item in self.items.items())
            return same and not _tensors([item for key, item in now.items() if key not in self.items])
        return all(map(_is_same, now, self.items)) and not _tensors(now[len(self.items) :])


def _is_same(now: Any, item: Any) -> bool:
    return item.is_of(now) if type(item) is Copy else now is item


def with_containers(items: Any, container: Callable[[Copy, Any], Any], now: Any) -> Any:
    """Items in which ``container(copy, what is there now)`` takes the place of each copy."""
    copies = [(key, item) for key, item in _entries(items) if type(item) is Copy]
    if not copies:
        return items
    exchanged, held = items.copy(), dict(_entries(now))
    for key, copy in copies:
        exchanged[key] = container(copy, held.get(key, MISSING))
    return exchanged


class Staying(Contents):
    """A container that a recompute uses as it is: what that appends may stay, unless there are tensors among it."""

    __slots__ = ()

    def get(self) -> Any:
        now = super().get()
        return self.key if _tensors(now) <= _tensors(self.key) else now


def _tensors(items: Any, depth: int = 2) -> set[int]:
    """The ids of the tensors in a container, and of those in containers in it."""
    found: set[int] = set()
    for item in items.values() if isinstance(items, dict) else items:
        if isinstance(item, torch.Tensor):
            found.add(id(item))
        elif depth and isinstance(item, (dict, list, tuple)):
            found |= _tensors(item, depth - 1)
    return found


Held = Sequence[tuple[Any, Any]]


def without_containers(found: Found, contents: Iterable[Snapshot], holders: Held, cells: Held, keep: bool) -> tuple:
    """What a region keeps of a walk: contents, holders and closure cells, with copies in the place of containers.

    Unless ``keep``, it is without the histories of tensors as well: these may lead to regions that ran before, which
    captured others, and so on. They have places of their own.
    """
    places = [place for _, _, place in found.queue] + [place for place, _ in found.places + found.plain]
    placed = {id(value) for _, value, place in found.queue if place.settable}
    placed -= {id(place.holder) for place in places if type(place) not in (Element, ItemPlace)}  # some object's state
    snapshots = [s for s in found.contents if id(s[0]) in placed and type(s[0]) in _COPIED]
    copies: dict[int, Any] = {id(s[0]): Copy(s) for s in snapshots}
    if not keep:
        with own_work():
            for _, tensor in found.places:
                if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:
                    copies[id(tensor)] = alias(tensor)
    if not copies:
        return contents, holders, cells
    for _, items, _ in found.contents:
        for key, item in _entries(items):
            if id(item) in copies:
                items[key] = copies[id(item)]
    for place in places:
        place.holder = copies.get(id(place.holder), place.holder)
    held = {id(s[0]) for s in snapshots}
    return (
        [s for s in contents if id(s[0]) not in held],
        [(place, copies.get(id(value), value)) for place, value in holders],
        [(cell, copies.get(id(value), value)) for cell, value in cells],
    )


def _entries(items: Any) -> list[tuple[Any, Any]]:
    """Of a dict or list; the members of a set, a tuple here, are not copied."""
    if isinstance(items, dict):
        return list(items.items())
    return list(enumerate(items)) if isinstance(items, list) else []
