"""Variables that a region reads, with their values at its first run, which a recompute restores.

Of a list or dict a copy of the contents is recorded, never the container: a tensor that a region appends to it leads to
the region, which would live as long as its own results. Tensors are recorded by their ids: the region saves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch

from .._core.trees import contents, copy_dict

COPIED = (dict, OrderedDict, defaultdict, Counter, list)


class MISSING:
    """A placeholder for the value of a variable that is deleted or empty."""


class TensorId(int):
    """A placeholder for a tensor: its id at the first run."""


class Variables(ABC):
    """Variables of one holder, such as a dict or a closure cell, with their values at the first run."""

    __slots__ = ("holder", "then", "whole")  # each region has some, and no kind of them has other attributes

    def __init__(self, holder: Any, then: dict[Any, Any], whole: bool = False) -> None:
        self.holder, self.then, self.whole = holder, then, whole  # whole: these are all of them

    @abstractmethod
    def now(self) -> dict[Any, Any]:
        """Return the values now; if ``whole``, of all variables of the holder."""

    @abstractmethod
    def put(self, values: dict[Any, Any]) -> None:
        """Set the variables to other values."""


class Entries(Variables):
    """The entries of a dict, such as globals or attributes. Methods that a subclass overrides are not called."""

    def now(self) -> dict[Any, Any]:
        if self.whole:
            return copy_dict(self.holder)
        return {key: dict.get(self.holder, key, MISSING) for key in self.then}

    def put(self, values: dict[Any, Any]) -> None:
        entries = self.holder
        kind: Any = OrderedDict if isinstance(entries, OrderedDict) else dict
        if self.whole and list(map(id, kind.keys(entries))) != list(map(id, values)):  # the order counts too
            kind.clear(entries)
        for key, value in values.items():
            if value is MISSING:
                kind.pop(entries, key, None)
            elif dict.get(entries, key, MISSING) is not value:
                kind.__setitem__(entries, key, value)


class Items(Variables):
    """All items of a list."""

    def now(self) -> dict[Any, Any]:
        return dict(enumerate(list.copy(self.holder)))

    def put(self, values: dict[Any, Any]) -> None:
        list.__setitem__(self.holder, slice(None), list(values.values()))


class Empty(Variables):
    """The contents of a list of dicts, which all were empty."""

    def now(self) -> dict[Any, Any]:
        return {i: entries.copy() for i, entries in enumerate(self.holder) if entries}

    def put(self, values: dict[Any, Any]) -> None:
        for i, entries in enumerate(self.holder):
            entries.clear()
            entries.update(values.get(i, {}))


def read(slot: Any, holder: Any) -> Any:
    """The value of a slot, or of a closure cell."""
    try:
        return slot.__get__(holder)
    except (AttributeError, ValueError):
        return MISSING


class Descriptors(Variables):
    """Variables that descriptors access: slots, the contents of a closure cell, the defaults of a function."""

    def now(self) -> dict[Any, Any]:
        return {slot: read(slot, self.holder) for slot in self.then}

    def put(self, values: dict[Any, Any]) -> None:
        for slot, value in values.items():
            if value is not MISSING:
                slot.__set__(self.holder, value)
            elif read(slot, self.holder) is not MISSING:
                slot.__delete__(self.holder)


class PartialArgs(Variables):
    """The positional arguments of a partial. They can be set only with its whole pickled state."""

    def now(self) -> dict[Any, Any]:
        return {"args": self.holder.args}

    def put(self, values: dict[Any, Any]) -> None:
        base: Any = partial
        func, _, keywords, state = base.__reduce__(self.holder)[2]
        base.__setstate__(self.holder, (func, values["args"], keywords, state))


class Copy:
    """The contents of a list, dict or tuple at the first run. A container inside it is a `Copy` too."""

    def __init__(self, source: Any, items: dict[Any, Any] | None = None) -> None:
        self.address, self.kind = id(source), type(source)
        self.items: Any = items  # None for a list or dict until it is visited
        self.is_held = False  # by an object or a container. A list that isn't may be a log of the runs
        self.make: Callable[[], Any] = self.kind
        if isinstance(source, defaultdict):
            self.make = partial(defaultdict, source.default_factory)


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    """Whether a value is a tensor, or a container with tensors or with other containers that have some."""
    if issubclass(type(value), (dict, list, tuple)):
        return depth > 0 and any(_holds_tensors(item, depth - 1) for item in contents(value))
    return issubclass(type(value), torch.Tensor)


class bound:
    """Within, variables have their values of the first run; afterwards those of now again.

    Tensors among the values come from ``tensors``, by their ids at the first run. With ``keep_changes`` new values that
    are written within stay: that is for a first run, whose effects the user sees.
    """

    def __init__(self, variables: Iterable[Variables], tensors: Mapping[int, Any], keep_changes: bool = False) -> None:
        self._variables, self._tensors, self._keep_changes = variables, tensors, keep_changes
        self._undo: list[tuple[Variables, dict, dict, bool]] = []
        self._containers: dict[Copy, Any] = {}

    def put(self) -> None:
        """Set the values for good."""
        try:
            for each in self._variables:
                self._bind(each)
        except BaseException:
            self.__exit__()
            raise

    __enter__ = put

    def _bind(self, variables: Variables, copy: Copy | None = None) -> None:
        now = variables.now()
        if copy is None and not now and not variables.then:  # such as the attributes of most parameters
            return
        wanted = variables.then.copy()
        for key, old in variables.then.items():
            if type(old) is TensorId or type(old) is Copy:
                wanted[key] = self._value(old, now.get(key, MISSING))
        may_be_a_log = copy is not None and copy.kind is list and not copy.is_held
        self._undo.append((variables, now, wanted, may_be_a_log))
        if not _same(now, wanted):
            variables.put(wanted)

    def _value(self, old: Any, now: Any) -> Any:
        if type(old) is TensorId:
            return self._tensors.get(old, now)
        if type(old) is not Copy:
            return old
        if old.kind not in COPIED:
            return self._tuple(old, now)
        if old not in self._containers:
            # A new container at the address of a freed one is taken for it, and filled.
            is_same = type(now) is old.kind and id(now) == old.address
            container = self._containers[old] = now if is_same else old.make()
            if old.items is not None:
                self._bind((Items if old.kind is list else Entries)(container, old.items, True), old)
        return self._containers[old]

    def _tuple(self, old: Copy, now: Any) -> Any:
        before = list(contents(now)) if type(now) is old.kind else []
        items = [self._value(item, before[i] if i < len(before) else MISSING) for i, item in old.items.items()]
        if len(items) == len(before) and all(map(is_, items, before)):
            return now
        try:
            return tuple.__new__(old.kind, items)
        except TypeError:  # a type that is written in C, such as those of torch's results
            return old.kind(items)

    def __exit__(self, *exception: object) -> None:
        for variables, before, wanted, may_be_a_log in reversed(self._undo):
            now = variables.now()
            if self._keep_changes:
                before = {key: before.get(key, v) if v is wanted.get(key, MISSING) else v for key, v in now.items()}
            elif may_be_a_log and all(map(is_, now.values(), wanted.values())):
                added = list(now.values())[len(wanted) :]
                before = before if _holds_tensors(added) else dict(enumerate([*before.values(), *added]))
            if not _same(now, before):
                variables.put(before)


def _same(a: dict, b: dict) -> bool:
    return len(a) == len(b) and all(map(is_, a, b)) and all(map(is_, a.values(), b.values()))
