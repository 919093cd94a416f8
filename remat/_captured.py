"""Finds, without running it, the tensors that a function reads and does not get as arguments.

Each comes with its *place*: the closure cell, dict entry, list item, ... that holds it. A place can
be read, bound to something else while the function runs, and named in a message. So can the places
on the way to it. What no place leads to (``getattr(obj, name)`` of a class or Python module,
``tensor.mul`` as a function) is left to interception.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ._classes import ClassReads, call_reads, class_reads, slots
from ._code import CACHE, is_library, reads, wrapped
from ._contents import copy_dict
from ._generators import is_generator
from ._places import (
    MISSING,
    Attribute,
    CellPlace,
    ClassAttribute,
    Descriptor,
    Fixed,
    GlobalPlace,
    NamePlace,
    PartialArgs,
    Place,
)
from ._walk import Containers, Found, Visit, own, visits

__all__ = ["NOTHING", "Found", "find"]

_BUDGET = 100_000  # objects visited per call


def find(*roots: Any) -> Found:
    """The places reached from `roots` that hold a tensor or generator, those on the way, and all closure cells."""
    if len(roots) == 1 and type(roots[0]) is FunctionType and _reads_libraries_alone(roots[0]):
        return NOTHING
    walk = _Walk()
    for root in roots:
        name = root.__name__ if type(root) is FunctionType else "self"
        walk.see(root, NamePlace(None, name, None))
    return walk.run()


def _reads_libraries_alone(fn: FunctionType) -> bool:
    """Whether there is nothing to find, as in most functions that are given all that they use."""
    names = None if fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__ else reads(fn)
    scope = fn.__globals__
    return names is not None and all(name not in scope or id(scope[name]) in _libraries for name in names.globals)


class _Walk(Containers):
    """One breadth-first search: every object is visited once, and tuples once per place."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded: set[int] = set()  # modules whose parameters are not the region's to keep

    def run(self) -> Found:
        seen, found, tensor, tuple_ = self.seen, self.places, _Walk.tensor, _Walk.tuple
        # The list grows meanwhile and never shrinks, so the ids in `seen` stay valid.
        for visit, value, place in islice(self.queue, _BUDGET):
            if visit is tensor:
                found.append((place, value))
            elif id(value) not in seen:
                if visit is not tuple_:
                    seen.add(id(value))
                visit(self, value, place)
        return self

    def function(self, fn: FunctionType, place: Place) -> None:
        names = reads(fn)
        seen, queue = self.seen, self.queue
        if fn.__closure__:
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__):
                try:
                    value = cell.cell_contents
                except ValueError:
                    continue
                visit = visits[type(value)]
                if visit in _NAMED and names is not None:
                    self.by_name(visit, value, names.attributes, CellPlace(cell, name, place))
                if id(cell) in seen:
                    continue
                seen.add(id(cell))
                if names is not None:
                    self.cells.append((cell, value))
                elif visit in _DATA:  # a library's own state; the functions that it wraps are not
                    continue
                if visit is not None:
                    queue.append((visit, value, CellPlace(cell, name, place)))
        if names is not None:
            scope = fn.__globals__
            for name in names[0]:
                value = scope.get(name)
                visit = visits[type(value)]
                if visit is None:
                    if name in scope:
                        self.plain.append((GlobalPlace(scope, name, place), value))
                elif id(value) not in _libraries:
                    self.variable(visit, value, names[1], GlobalPlace(scope, name, place))
        if fn.__defaults__:
            self.tuple(fn.__defaults__, Descriptor(fn, _DEFAULTS, place))
        if fn.__kwdefaults__:
            self.see(fn.__kwdefaults__, Descriptor(fn, _KWDEFAULTS, place))
        if fn.__dict__:
            self.dict(fn.__dict__, place, Attribute)

    def variable(self, visit: Visit, value: Any, attributes: tuple[str, ...], place: Place) -> None:
        """A variable of a Python module, and what code reads from it by name."""
        if visit in _NAMED:
            self.by_name(visit, value, attributes, place)
        key = id(place.holder), place.key
        if key not in self.seen:
            self.seen.add(key)
            self.queue.append((visit, value, place))

    def by_name(self, visit: Visit, value: Any, names: tuple[str, ...], place: Place) -> None:
        """What code reads by these names from a Python module, a class, or the class of an object."""
        cls: Any = type(value)
        if visit is not _Walk.namespace:
            if call_reads(cls) is not None:
                self.of_class(class_reads(cls, names), place)
        elif is_library(value.__module__ if isinstance(value, type) else vars(value).get("__name__")):
            if len(_libraries) >= CACHE:
                _libraries.clear()
            _libraries[id(value)] = value
        elif isinstance(value, type):
            cls = value
            self.of_class(class_reads(cls, (*names, *_WHEN_CALLED)), place)
        elif (id(value), names) not in self.seen:
            self.seen.add((id(value), names))
            scope = vars(value)
            for name in names:
                held = scope.get(name)
                if (inner := visits[type(held)]) is None:
                    if name in scope:
                        self.plain.append((Attribute(scope, name, place), held))
                elif id(held) not in _libraries:
                    self.variable(inner, held, names, Attribute(scope, name, place))

    def builtin(self, method: Any, place: Place) -> None:
        """A method of an object that is written in C: a generator's draws from it."""
        if is_generator(type(method.__self__)):
            self.see(method.__self__, Fixed(None, ".__self__", place))

    def namespace(self, value: Any, place: Place) -> None:
        """A Python module or class: only what is read from it by name counts."""

    def of_class(self, read: ClassReads | None, place: Place) -> None:
        if read is None or read in self.seen:
            return
        self.seen.add(read)
        read.update()
        for fn, (base, name, held) in read.functions.items():
            if id(fn) not in self.seen:
                own = held is fn
                spot = ClassAttribute(base, name, place) if own else Fixed(None, f".{fn.__name__}", place)
                self.queue.append((_Walk.function, fn, spot))
        for base, name in read.attributes:
            value = vars(base).get(name)
            visit = visits[type(value)]
            if (id(base), name) in self.seen:
                continue
            self.seen.add((id(base), name))
            spot = ClassAttribute(base, name, place)
            if visit is None:
                if name in vars(base):
                    self.plain.append((spot, value))
            else:
                self.queue.append((visit, value, spot))
                if visit in _NAMED:
                    self.by_name(visit, value, read.read, spot)

    def method(self, method: MethodType, place: Place) -> None:
        owner, fn = method.__self__, method.__func__
        # A bound method that the walk starts from is named by its `self`.
        up = place if type(place) is NamePlace else Fixed(None, ".__self__", place)
        self.see(owner, up)
        self.see(fn, Fixed(None, f".{getattr(fn, '__name__', '__func__')}", up))
        if isinstance(fn, FunctionType):
            names = reads(fn)
            cls: Any = owner if isinstance(owner, type) else type(owner)
            self.of_class(class_reads(cls, (fn.__name__, *(names.attributes if names else ()))), up)

    def partial(self, partial: functools.partial[Any], place: Place) -> None:
        self.see(partial.func, Fixed(None, ".func", place))
        self.tuple(partial.args, PartialArgs(partial, "args", place))
        self.dict(partial.keywords, Fixed(None, ".keywords", place))

    def wrapper(self, value: Any, place: Place) -> None:
        """What is callable, of a library, and no function: only what it wraps counts."""
        self.see(wrapped(value), Fixed(None, ".__wrapped__", place))

    def module(self, module: nn.Module, place: Place) -> None:
        state, seen, queue = module.__dict__, self.seen, self.queue
        cls: Any = type(module)
        if _is_sharded(cls):
            self.sharded.update(map(id, module.modules()))
        sharded = id(module) in self.sharded
        for held in (None if sharded else state.get("_parameters"), state.get("_buffers")):
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
                    queue.append((_Walk.module, value, Attribute(modules, name, place)))
        names = [] if cls.__module__ == _FSDP1 else list(state)
        if names[: len(_BASE_STATE)] == _BASE_STATE:  # the usual order: most are skipped at once
            del names[: len(_BASE_STATE)]
        for name in names:
            visit = visits[type(state[name])]
            if visit is not None and name not in _BASE_STATE and not (sharded and visit is _Walk.tensor):
                queue.append((visit, state[name], Attribute(state, name, place)))
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if state.get(name):
                self.see(state[name], Attribute(state, name, place))
        if not sharded:
            self.contents.append((state, state.copy(), place))
        if not sharded and (own(cls) or issubclass(cls, _CONTAINERS)):  # code may add to these
            for name in ("_parameters", "_buffers", "_modules"):
                if isinstance(held := state.get(name), dict):
                    self.contents.append((held, copy_dict(held), Attribute(state, name, place)))
        if (read := call_reads(cls)) is not None:
            self.of_class(read, place)

    def instance(self, value: Any, place: Place) -> None:
        cls: Any = type(value)
        if cls.__dictoffset__:
            self.dict(value.__dict__, place, Attribute)
        for slot in slots(cls):
            spot = Descriptor(value, slot, place)
            held = spot.get()
            if held is MISSING or visits[type(held)] is None:
                self.plain.append((spot, held))
            else:
                self.see(held, spot)
        self.of_class(call_reads(cls), place)


@functools.lru_cache(CACHE)
def _is_sharded(cls: Any) -> bool:
    """Whether FSDP says, in each run, what the modules below hold: it frees and exchanges their parameters."""
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in cls.__mro__)


_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"  # whose modules have no state but FSDP's own
_DATA = frozenset([_Walk.tensor, _Walk.dict, _Walk.list, _Walk.tuple, _Walk.set, _Walk.context])
_NAMED = frozenset([_Walk.namespace, _Walk.module, _Walk.instance])
_WHEN_CALLED = ("__init__", "__call__", "forward")  # of a class; the last one by `autograd.Function.apply`
_DEFAULTS = FunctionType.__dict__["__defaults__"]
_KWDEFAULTS = FunctionType.__dict__["__kwdefaults__"]
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList, nn.Sequential)
_BASE_STATE = list(vars(nn.Module()))  # read by name, or not by a forward


NOTHING = Found()
visits.instance = _Walk.instance
visits.wrapper = _Walk.wrapper
visits.bases = {
    Tensor: _Walk.tensor,
    torch.Generator: _Walk.tensor,
    BuiltinMethodType: _Walk.builtin,
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
    type: _Walk.namespace,
    ModuleType: _Walk.namespace,
    ContextVar: _Walk.context,
}
_libraries: dict[int, Any] = {}  # modules and classes in which nothing is looked up, by id
