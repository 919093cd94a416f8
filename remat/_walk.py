"""The walk for captured tensors: what it finds, how it goes through containers, and by what each class is visited."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from contextvars import ContextVar
from itertools import islice
from types import CellType
from typing import Any

from ._code import CACHE, is_library
from ._contents import Snapshot, copy_dict
from ._generators import is_generator
from ._places import Attribute, ContextPlace, Element, ItemPlace, Members, Place, TupleItem

_LIMIT = 10_000  # containers with more entries are data, not state
_STATE = 1_000  # up to this length even plain ones are, and what they hold is noted down
_SAMPLE = 32  # a longer container whose first entries are plain is taken to be plain
_TUPLE_DEPTH = 32

Visit = Callable[[Any, Any, Place], object]


class Found:
    """What a walk has found. The nearest come first; a tensor that is held in two places is there with both."""

    __slots__ = ("cells", "contents", "places", "plain", "queue")

    def __init__(self) -> None:
        self.places: list[tuple[Place, Any]] = []  # that hold a tensor or generator
        self.cells: list[tuple[CellType, Any]] = []  # all closure cells, with their contents
        self.contents: list[Snapshot] = []  # what the containers and objects on the way hold
        self.plain: list[tuple[Place, Any]] = []  # variables, class attributes and slots that hold anything else
        self.queue: list[tuple[Visit, Any, Place]] = []  # what is to be visited, and stays there

    def holders(self) -> list[tuple[Place, Any]]:
        """The places on the way: of objects, containers and functions, each before what it leads to; plain ones."""
        tensor = Containers.tensor
        way = [(place, value) for visit, value, place in self.queue if visit is not tensor and place.settable]
        return way + self.plain


class Containers(Found):
    """How a walk goes through Python's own containers."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def see(self, value: Any, place: Place) -> None:
        if (visit := visits[type(value)]) is not None:
            self.queue.append((visit, value, place))

    def tensor(self, value: Any, place: Place) -> None:
        """Stands for what is looked for: `run` notes it down."""

    def dict(self, value: dict[Any, Any], place: Place, kind: type[Place] = ItemPlace) -> None:
        look = kind is Attribute or _worth_a_look(dict.values(value))
        if look or len(value) <= _STATE:
            # Not by methods that a subclass overrides, and copied: another thread may add entries.
            items = value.copy() if type(value) is dict else copy_dict(value)
            if type(value) in _PLAIN or own(type(value)):
                self.contents.append((value, items, place))
            for key, item in items.items() if look else ():
                if (visit := visits[type(item)]) is not None:
                    self.queue.append((visit, item, kind(value, key, place)))
        if type(value) not in _PLAIN:
            self.instance(value, place)

    def list(self, value: list[Any], place: Place) -> None:
        look = _worth_a_look(value)
        if look or len(value) <= _STATE:
            items = list.copy(value)
            if type(value) in _PLAIN or own(type(value)):
                self.contents.append((value, items, place))
            for i, item in enumerate(items if look else ()):
                if (visit := visits[type(item)]) is not None:
                    self.queue.append((visit, item, Element(value, i, place)))
        if type(value) not in _PLAIN:
            self.instance(value, place)

    def tuple(self, value: tuple[Any, ...], place: Place, depth: int = 0) -> bool:
        """Whether it has tensors: each place of such a tuple counts, since none can be shared."""
        if id(value) in self.seen or depth == _TUPLE_DEPTH or not _worth_a_look(value):
            return False
        found = False
        for i, item in enumerate(value):
            visit = visits[type(item)]
            if visit is None:
                continue
            spot = TupleItem(value, i, place)
            if visit is Containers.tuple:
                found |= self.tuple(item, spot, depth + 1)
            elif visit is not Containers.tensor:
                self.queue.append((visit, item, spot))
            else:
                self.places.append((spot, item))
                found = True
        if not found:
            self.seen.add(id(value))
        return found

    def set(self, value: Collection[Any], place: Place) -> None:
        members = tuple(value)
        if len(members) <= _STATE and isinstance(value, set) and (type(value) is set or own(type(value))):
            self.contents.append((value, members, place))
        if any(visits[type(item)] for item in members):
            self.see(members, Members(value, members, place))

    def context(self, variable: ContextVar[Any], place: Place) -> None:
        spot = ContextPlace(variable, [], place)
        self.see(spot.get(), spot)

    def instance(self, value: Any, place: Place) -> None:
        """For containers of a user's class, which have attributes too; the walk through objects says how."""


_PLAIN = frozenset([dict, OrderedDict, defaultdict, list])


def _worth_a_look(items: Collection[Any]) -> bool:
    if len(items) <= _SAMPLE:
        return True
    return len(items) <= _LIMIT and any(visits[type(item)] for item in islice(items, _SAMPLE))


@functools.lru_cache(CACHE)
def own(cls: Any) -> bool:
    """Whether a class is none of a library."""
    return not is_library(cls.__module__)


class Visits(dict[type, "Visit | None"]):
    """How the walk visits the values of a class; None: not at all."""

    bases: dict[type, Visit]
    instance: Visit  # of all other classes
    wrapper: Visit  # of what is callable, in libraries

    def __missing__(self, cls: type) -> Visit | None:
        if len(self) >= CACHE:
            self.clear()
        visit = self[cls] = next((v for base, v in self.bases.items() if issubclass(cls, base)), None)
        if visit is None:
            if is_generator(cls):
                visit = self[cls] = Containers.tensor
            elif not is_library(cls.__module__):
                visit = self[cls] = self.instance
            elif cls.__dictoffset__ and hasattr(cls, "__call__"):  # noqa: B004
                visit = self[cls] = self.wrapper
        return visit


visits = Visits()
