"""Finds, without running it, the tensors that a function reads and does not get as arguments.

Each comes with its *place*: the closure cell, dict entry, list item, ... that holds it. A place can
be read, bound to something else while the function runs, and named in a message. What no place
leads to (`W` in ``module.W`` or on a class, tensors in sets, ``tensor.mul`` as a function) is left
to interception.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ._code import CACHE, class_facts, global_names, is_library, methods, wrapped
from ._places import (
    Attribute,
    CellPlace,
    Descriptor,
    Element,
    Fixed,
    GlobalPlace,
    ItemPlace,
    NamePlace,
    PartialArgs,
    Place,
    TupleItem,
)

__all__ = ["find", "find_cells", "find_places"]

_LIMIT = 10_000  # containers with more entries are data, not state
_SAMPLE = 32  # a longer container whose first entries are plain is taken to be plain
_TUPLE_DEPTH = 32
_BUDGET = 100_000  # objects visited per call


_Found = tuple[list[tuple[Place, Any]], list[tuple[CellType, Any]]]


def find(*roots: Any) -> _Found:
    """The places reached from `roots` that hold a tensor or generator, and all closure cells.

    The nearest come first. A tensor that is held in two places is there with both.
    """
    walk = _Walk()
    for root in roots:
        name = root.__name__ if type(root) is FunctionType else "self"
        walk.see(root, NamePlace(None, name, None))
    return walk.run()


def find_places(fn: Any) -> list[tuple[Place, Any]]:
    """The places of the tensors that `fn` captures, each with what it holds now."""
    return find(fn)[0]


def find_cells(fn: Any) -> list[tuple[CellType, Any]]:
    """The closure cells of `fn` and of the functions that it reaches, each with its contents."""
    return find(fn)[1]


class _Walk:
    """One breadth-first search: every object is visited once, and tuples once per place."""

    __slots__ = ("cells", "places", "seen", "todo")

    def __init__(self) -> None:
        self.places: list[tuple[Place, Any]] = []
        self.cells: list[tuple[CellType, Any]] = []
        self.todo: list[tuple[_Visit, Any, Place]] = []
        self.seen: set[Any] = set()

    def run(self) -> _Found:
        seen, found, tensor, tuple_ = self.seen, self.places, _Walk.tensor, _Walk.tuple
        # The list grows meanwhile and never shrinks, so the ids in `seen` stay valid.
        for visit, value, place in islice(self.todo, _BUDGET):
            if visit is tensor:
                found.append((place, value))
            elif id(value) not in seen:
                if visit is not tuple_:
                    seen.add(id(value))
                visit(self, value, place)
        return found, self.cells

    def see(self, value: Any, place: Place) -> None:
        if (visit := _visits[type(value)]) is not None:
            self.todo.append((visit, value, place))

    def tensor(self, value: Any, place: Place) -> None:
        """Stands for what is looked for: `run` notes it down."""

    def function(self, fn: FunctionType, place: Place) -> None:
        names = global_names(fn)
        seen, todo = self.seen, self.todo
        if fn.__closure__:
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__):
                if id(cell) in seen:
                    continue
                seen.add(id(cell))
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue
                visit = _visits[type(value)]
                if names is not None:
                    self.cells.append((cell, value))
                elif visit in _DATA:  # a library's own state; the functions that it wraps are not
                    continue
                if visit is not None:
                    todo.append((visit, value, CellPlace(cell, name, place)))
        if names:
            scope = fn.__globals__
            for name in names:
                value = scope.get(name)
                visit = _visits[type(value)]
                if visit is not None and (id(scope), name) not in seen:
                    seen.add((id(scope), name))
                    todo.append((visit, value, GlobalPlace(scope, name, place)))
        if fn.__defaults__:
            self.tuple(fn.__defaults__, Descriptor(fn, _DEFAULTS, place))
        if fn.__kwdefaults__:
            self.dict(fn.__kwdefaults__, Fixed(None, ".__kwdefaults__", place))
        if fn.__dict__:
            self.dict(fn.__dict__, place, Attribute)

    def method(self, method: MethodType, place: Place) -> None:
        owner, fn = method.__self__, method.__func__
        # A bound method that the walk starts from is named by its `self`.
        up = place if type(place) is NamePlace else Fixed(None, ".__self__", place)
        self.see(owner, up)
        self.see(fn, Fixed(None, f".{getattr(fn, '__name__', '__func__')}", up))
        if (code := getattr(fn, "__code__", None)) is not None:
            cls = owner if isinstance(owner, type) else type(owner)
            self.methods(methods(cls, code.co_names), up)

    def methods(self, functions: Iterable[FunctionType], place: Place) -> None:
        for fn in functions:
            if id(fn) not in self.seen:
                self.todo.append((_Walk.function, fn, Fixed(None, f".{fn.__name__}", place)))

    def partial(self, partial: functools.partial[Any], place: Place) -> None:
        self.see(partial.func, Fixed(None, ".func", place))
        self.tuple(partial.args, PartialArgs(partial, "args", place))
        self.dict(partial.keywords, Fixed(None, ".keywords", place))

    def wrapper(self, value: Any, place: Place) -> None:
        """What is callable, of a library, and no function: only what it wraps counts."""
        self.see(wrapped(value), Fixed(None, ".__wrapped__", place))

    def module(self, module: nn.Module, place: Place) -> None:
        state, seen, todo = module.__dict__, self.seen, self.todo
        for held in (state.get("_parameters"), state.get("_buffers")):
            # Two modules may share it; TorchScript keeps something else there.
            if held and id(held) not in seen and isinstance(held, dict):
                seen.add(id(held))
                for name, value in held.items():
                    if value is not None:
                        self.places.append((Attribute(held, name, place), value))
        modules = state.get("_modules")
        if modules and isinstance(modules, dict):
            for name, value in modules.items():
                if value is not None:
                    todo.append((_Walk.module, value, Attribute(modules, name, place)))
        names = list(state)
        if names[: len(_BASE_STATE)] == _BASE_STATE:  # the usual order: most are skipped at once
            del names[: len(_BASE_STATE)]
        for name in names:
            visit = _visits[type(state[name])]
            if visit is not None and name not in _BASE_STATE:
                todo.append((visit, state[name], Attribute(state, name, place)))
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if state.get(name):
                self.see(state[name], Attribute(state, name, place))
        cls: Any = type(module)
        if functions := class_facts(cls)[1]:
            self.methods(functions, place)

    def instance(self, value: Any, place: Place) -> None:
        cls: Any = type(value)
        if cls.__dictoffset__:
            self.dict(value.__dict__, place, Attribute)
        slots, methods = class_facts(cls)
        for slot in slots:
            spot = Descriptor(value, slot, place)
            self.see(spot.get(), spot)
        self.methods(methods, place)

    def dict(self, value: dict[Any, Any], place: Place, kind: type[Place] = ItemPlace) -> None:
        # Not by methods that a subclass overrides, and copied: another thread may add entries.
        if kind is Attribute or _worth_a_look(dict.values(value)):
            for key, item in list(dict.items(value)):
                if (visit := _visits[type(item)]) is not None:
                    self.todo.append((visit, item, kind(value, key, place)))
        if type(value) not in _PLAIN:
            self.instance(value, place)

    def list(self, value: list[Any], place: Place) -> None:
        if _worth_a_look(value):
            for i, item in enumerate(value):
                if (visit := _visits[type(item)]) is not None:
                    self.todo.append((visit, item, Element(value, i, place)))
        if type(value) not in _PLAIN:
            self.instance(value, place)

    def tuple(self, value: tuple[Any, ...], place: Place, depth: int = 0) -> bool:
        """Whether it has tensors: each place of such a tuple counts, since none can be shared."""
        if id(value) in self.seen or depth == _TUPLE_DEPTH or not _worth_a_look(value):
            return False
        found = False
        for i, item in enumerate(value):
            visit = _visits[type(item)]
            if visit is None:
                continue
            spot = TupleItem(value, i, place)
            if visit is _Walk.tuple:
                found |= self.tuple(item, spot, depth + 1)
            elif visit is not _Walk.tensor:
                self.todo.append((visit, item, spot))
            elif type(place.spot) is not Fixed:
                self.places.append((spot, item))
                found = True
        if not found:
            self.seen.add(id(value))
        return found

    def set(self, value: Collection[Any], place: Place) -> None:
        if _worth_a_look(value):
            for item in value:
                if _visits[type(item)] is not _Walk.tensor:
                    self.see(item, Fixed(None, "{...}", place))


_Visit = Callable[[_Walk, Any, Place], object]
_DATA = frozenset([_Walk.tensor, _Walk.dict, _Walk.list, _Walk.tuple, _Walk.set])
_PLAIN = frozenset([dict, OrderedDict, defaultdict, list])
_DEFAULTS = FunctionType.__dict__["__defaults__"]
_BASE_STATE = list(vars(nn.Module()))  # read by name, or not by a forward


def _worth_a_look(items: Collection[Any]) -> bool:
    if len(items) <= _SAMPLE:
        return True
    return len(items) <= _LIMIT and any(_visits[type(item)] for item in islice(items, _SAMPLE))


class _Visits(dict[type, "_Visit | None"]):
    """How the walk visits the values of a class; None: not at all."""

    def __missing__(self, cls: type) -> _Visit | None:
        if len(self) >= CACHE:
            self.clear()
        visit = self[cls] = next((v for base, v in _BASES.items() if issubclass(cls, base)), None)
        if visit is None and not issubclass(cls, (type, ModuleType)):
            if not is_library(cls.__module__):
                visit = self[cls] = _Walk.instance
            elif cls.__dictoffset__ and hasattr(cls, "__call__"):  # noqa: B004
                visit = self[cls] = _Walk.wrapper
        return visit


_BASES: dict[type, _Visit] = {
    Tensor: _Walk.tensor,
    torch.Generator: _Walk.tensor,
    FunctionType: _Walk.function,
    MethodType: _Walk.method,
    functools.partial: _Walk.partial,
    nn.Module: _Walk.module,
    dict: _Walk.dict,
    list: _Walk.list,
    tuple: _Walk.tuple,
    set: _Walk.set,
    frozenset: _Walk.set,
    SimpleNamespace: _Walk.instance,
}
_visits = _Visits()
