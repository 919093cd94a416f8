"""Finds, without running it, the tensors that a function reads and does not get as arguments.

Each comes with its *place*: the closure cell, dict entry, list item, ... that holds it. A place can
be read, bound to something else while the function runs, and named in a message. What no place
leads to (`W` in ``module.W`` or on a class, tensors in sets, ``tensor.mul`` as a function) is left
to interception.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from inspect import ismemberdescriptor
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MISSING", "Place", "find", "find_cells", "find_places", "rebound"]

_LIBRARIES = sys.stdlib_module_names | {"functorch", "numpy", "optree", "remat", "torch"}
_LIMIT = 10_000  # containers with more entries are data, not state
_SAMPLE = 32  # a longer container whose first entries are plain is taken to be plain
_TUPLE_DEPTH = 32
_BUDGET = 100_000  # objects visited per call
_CACHE = 4096  # entries per cache: a class or code made on the fly does not stay for ever


class MISSING:
    """What stands for the value of a place that is gone or empty."""


class Place:
    """Where one value is held; `up` is the place of the object that it belongs to."""

    __slots__ = ("holder", "key", "up")

    def __init__(self, holder: Any, key: Any, up: Any) -> None:
        self.holder = holder
        self.key = key
        self.up = up

    def get(self) -> Any:
        """What is there now, or `MISSING`."""
        raise NotImplementedError

    def set(self, value: Any) -> None:
        """Puts `value` there; `MISSING` empties the place."""
        raise NotImplementedError

    @property
    def spot(self) -> Place:
        """The place that `set` writes to: this one, but for what is inside a tuple."""
        return self

    @property
    def path(self) -> str:
        """``self.layers[0].weight``, ``closure variable 'w'``, ``global 'W'``."""
        return _expression(self)

    def _step(self) -> str:
        return f"[{self.key!r}]"

    def __repr__(self) -> str:
        return f"<Place {self.path}>"


def _expression(place: Place) -> str:
    """The place as Python spells it."""
    steps: list[str] = []
    while not isinstance(place, _Name):
        steps.append(place._step())
        place = place.up
    return str(place.key) + "".join(reversed(steps))


class _Item(Place):
    __slots__ = ()

    def get(self) -> Any:
        return self.holder.get(self.key, MISSING)

    def set(self, value: Any) -> None:
        if value is MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


class _Attribute(_Item):
    """An entry of an instance's ``__dict__``, or of a module's parameters, buffers, or modules."""

    __slots__ = ()

    def _step(self) -> str:
        if self.key.isidentifier():
            return f".{self.key}"
        return f"[{self.key}]" if self.key.isdigit() else f"[{self.key!r}]"


class _Element(Place):
    """An item of a list; a list that has become too short is cut at the same length again."""

    __slots__ = ()

    def get(self) -> Any:
        return self.holder[self.key] if self.key < len(self.holder) else MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            del self.holder[self.key :]
        else:
            self.holder[self.key : self.key + 1] = [value]


class _Descriptor(Place):
    """What a descriptor of the holder's class gives access to: slots, a function's defaults."""

    __slots__ = ()

    def get(self) -> Any:
        try:
            return self.key.__get__(self.holder)
        except AttributeError:
            return MISSING

    def set(self, value: Any) -> None:
        if value is not MISSING:
            self.key.__set__(self.holder, value)
        elif self.get() is not MISSING:
            self.key.__delete__(self.holder)

    def _step(self) -> str:
        return f".{self.key.__name__}"


class _PartialArgs(Place):
    __slots__ = ()

    def get(self) -> Any:
        return self.holder.args

    def set(self, value: Any) -> None:
        # `args` is read-only, but a partial takes its whole pickled state at any time.
        func, _, keywords, attributes = self.holder.__reduce__()[2]
        self.holder.__setstate__((func, value, keywords, attributes))

    def _step(self) -> str:
        return ".args"


class _Fixed(Place):
    """A step that can't be written to, such as ``method.__self__``: it only leads further."""

    __slots__ = ()

    def _step(self) -> str:
        return f"{self.key}"


class _TupleItem(Place):
    """An item of the tuple at `up`, which is replaced as a whole; `holder` is the tuple found."""

    __slots__ = ()

    def get(self) -> Any:
        whole = self.up.get()
        return whole[self.key] if self._fits(whole) else MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            return
        whole = self.up.get()
        items = list(whole if self._fits(whole) else self.holder)
        items[self.key] = value
        cls = type(self.holder)
        self.up.set(getattr(cls, "_make", cls)(items))

    def _fits(self, whole: Any) -> bool:
        return type(whole) is type(self.holder) and len(whole) == len(self.holder)

    @property
    def spot(self) -> Place:
        return self.up.spot


class _Name(Place):
    """Where a path begins: a variable, or what the walk started from."""

    __slots__ = ()


class _Cell(_Name):
    __slots__ = ()

    def get(self) -> Any:
        try:
            return self.holder.cell_contents
        except ValueError:
            return MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            del self.holder.cell_contents
        else:
            self.holder.cell_contents = value

    @property
    def path(self) -> str:
        # In a helper function there may be another variable of that name.
        owner = "" if type(self.up) is _Name else f" of {_expression(self.up)}"
        return f"closure variable {self.key!r}{owner}"


class _Global(_Item, _Name):
    __slots__ = ()

    @property
    def path(self) -> str:
        return f"global {self.key!r}"


class rebound:
    """Binds places, and closure cells before them, to values; puts all back at exit.

    With `keep_changes`, what was written to a place meanwhile stays: for a first run, which counts.
    """

    __slots__ = ("_cells", "_keep", "_places", "_undo")

    def __init__(
        self,
        places: Iterable[tuple[Place, Any]],
        cells: Iterable[tuple[CellType, Any]] = (),
        *,
        keep_changes: bool = False,
    ) -> None:
        self._places = places
        self._cells = cells
        self._keep = keep_changes
        self._undo: list[tuple[Place, Any, Any]] = []

    def __enter__(self) -> None:
        try:
            for cell, value in self._cells:
                self._bind(_Cell(cell, "", None), value)
            for place, value in self._places:
                self._bind(place, value)
        except BaseException:
            self.__exit__()
            raise

    def _bind(self, place: Place, value: Any) -> None:
        spot = place.spot
        before = bound = spot.get()
        if (before if spot is place else place.get()) is not value:
            place.set(value)
            bound = spot.get()
        self._undo.append((spot, before, bound))

    def __exit__(self, *exception: object) -> None:
        # Backwards: a tuple is rebuilt once per item, and the first one kept is the original.
        for spot, before, bound in reversed(self._undo):
            now = spot.get()
            if now is not before and (now is bound or not self._keep):
                spot.set(before)
        self._undo.clear()


_Found = tuple[list[tuple[Place, Any]], list[tuple[CellType, Any]]]


def find(*roots: Any) -> _Found:
    """The places reached from `roots` that hold a tensor or generator, and all closure cells.

    The nearest come first. A tensor that is held in two places is there with both.
    """
    walk = _Walk()
    for root in roots:
        name = root.__name__ if type(root) is FunctionType else "self"
        walk.see(root, _Name(None, name, None))
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
        names = _global_names(fn)
        seen, todo = self.seen, self.todo
        if fn.__closure__:
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__):  # noqa: B905
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
                    todo.append((visit, value, _Cell(cell, name, place)))
        if names:
            scope = fn.__globals__
            for name in names:
                value = scope.get(name)
                visit = _visits[type(value)]
                if visit is not None and (id(scope), name) not in seen:
                    seen.add((id(scope), name))
                    todo.append((visit, value, _Global(scope, name, place)))
        if fn.__defaults__:
            self.tuple(fn.__defaults__, _Descriptor(fn, _DEFAULTS, place))
        if fn.__kwdefaults__:
            self.dict(fn.__kwdefaults__, _Fixed(None, ".__kwdefaults__", place))
        if fn.__dict__:
            self.dict(fn.__dict__, place, _Attribute)

    def method(self, method: MethodType, place: Place) -> None:
        owner, fn = method.__self__, method.__func__
        # A bound method that the walk starts from is named by its `self`.
        up = place if type(place) is _Name else _Fixed(None, ".__self__", place)
        self.see(owner, up)
        self.see(fn, _Fixed(None, f".{getattr(fn, '__name__', '__func__')}", up))
        if (code := getattr(fn, "__code__", None)) is not None:
            cls = owner if isinstance(owner, type) else type(owner)
            self.methods(_methods(cls, code.co_names), up)

    def methods(self, functions: Iterable[FunctionType], place: Place) -> None:
        for fn in functions:
            if id(fn) not in self.seen:
                self.todo.append((_Walk.function, fn, _Fixed(None, f".{fn.__name__}", place)))

    def partial(self, partial: functools.partial[Any], place: Place) -> None:
        self.see(partial.func, _Fixed(None, ".func", place))
        self.tuple(partial.args, _PartialArgs(partial, "args", place))
        self.dict(partial.keywords, _Fixed(None, ".keywords", place))

    def wrapper(self, value: Any, place: Place) -> None:
        """What is callable, of a library, and no function: only what it wraps counts."""
        self.see(_wrapped(value), _Fixed(None, ".__wrapped__", place))

    def module(self, module: nn.Module, place: Place) -> None:
        state, seen, todo = module.__dict__, self.seen, self.todo
        for held in (state.get("_parameters"), state.get("_buffers")):
            # Two modules may share it; TorchScript keeps something else there.
            if held and id(held) not in seen and isinstance(held, dict):
                seen.add(id(held))
                for name, value in held.items():
                    if value is not None:
                        self.places.append((_Attribute(held, name, place), value))
        modules = state.get("_modules")
        if modules and isinstance(modules, dict):
            for name, value in modules.items():
                if value is not None:
                    todo.append((_Walk.module, value, _Attribute(modules, name, place)))
        names = list(state)
        if names[: len(_BASE_STATE)] == _BASE_STATE:  # the usual order: most are skipped at once
            del names[: len(_BASE_STATE)]
        for name in names:
            visit = _visits[type(state[name])]
            if visit is not None and name not in _BASE_STATE:
                todo.append((visit, state[name], _Attribute(state, name, place)))
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            if state.get(name):
                self.see(state[name], _Attribute(state, name, place))
        cls: Any = type(module)
        if functions := _class_facts(cls)[1]:
            self.methods(functions, place)

    def instance(self, value: Any, place: Place) -> None:
        cls: Any = type(value)
        if cls.__dictoffset__:
            self.dict(value.__dict__, place, _Attribute)
        slots, methods = _class_facts(cls)
        for slot in slots:
            spot = _Descriptor(value, slot, place)
            self.see(spot.get(), spot)
        self.methods(methods, place)

    def dict(self, value: dict[Any, Any], place: Place, kind: type[Place] = _Item) -> None:
        # Not by methods that a subclass overrides, and copied: another thread may add entries.
        if kind is _Attribute or _worth_a_look(dict.values(value)):
            for key, item in list(dict.items(value)):
                if (visit := _visits[type(item)]) is not None:
                    self.todo.append((visit, item, kind(value, key, place)))
        if type(value) not in _PLAIN:
            self.instance(value, place)

    def list(self, value: list[Any], place: Place) -> None:
        if _worth_a_look(value):
            for i, item in enumerate(value):
                if (visit := _visits[type(item)]) is not None:
                    self.todo.append((visit, item, _Element(value, i, place)))
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
            spot = _TupleItem(value, i, place)
            if visit is _Walk.tuple:
                found |= self.tuple(item, spot, depth + 1)
            elif visit is not _Walk.tensor:
                self.todo.append((visit, item, spot))
            elif type(place.spot) is not _Fixed:
                self.places.append((spot, item))
                found = True
        if not found:
            self.seen.add(id(value))
        return found

    def set(self, value: Collection[Any], place: Place) -> None:
        if _worth_a_look(value):
            for item in value:
                if _visits[type(item)] is not _Walk.tensor:
                    self.see(item, _Fixed(None, "{...}", place))


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
        if len(self) >= _CACHE:
            self.clear()
        visit = self[cls] = next((v for base, v in _BASES.items() if issubclass(cls, base)), None)
        if visit is None and not issubclass(cls, (type, ModuleType)):
            if not _is_library(cls.__module__):
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


def _is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _wrapped(value: Any) -> Any:
    """What a static or class method, or the work of `functools.wraps`, stands for; or None."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__dict__", {}).get("__wrapped__")


# Keyed by id, for code is hashed by its contents, which is slow; the entry keeps the id valid.
_codes: dict[int, tuple[CodeType, tuple[str, ...] | None]] = {}


def _global_names(fn: FunctionType) -> tuple[str, ...] | None:
    """The globals that the code of `fn` reads, nested functions included; None in a library."""
    code = fn.__code__
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    if len(_codes) >= _CACHE:
        _codes.clear()
    module = str(fn.__globals__.get("__name__"))
    # Doctests run in a copy of their module's globals, and are no library.
    library = _is_library(module) and vars(sys.modules.get(module, sys)) is fn.__globals__
    steps = (step for part in _nested(code) for step in dis.get_instructions(part))
    read = dict.fromkeys(step.argval for step in steps if step.opname == "LOAD_GLOBAL")
    names = None if library else tuple(read)
    _codes[id(code)] = code, names
    return names


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)


@functools.lru_cache(_CACHE)
def _class_facts(cls: Any) -> tuple[list[Any], tuple[FunctionType, ...]]:
    """The slots of the instances, and the functions that run when one is called."""
    slots = [
        slot
        for base in cls.__mro__
        if not _is_library(base.__module__)
        for slot in vars(base).values()
        if ismemberdescriptor(slot)
    ]
    return slots, _methods(cls, ("forward" if issubclass(cls, nn.Module) else "__call__",))


@functools.lru_cache(_CACHE)
def _methods(cls: Any, names: tuple[str, ...]) -> tuple[FunctionType, ...]:
    """The functions of `cls` named by `names`, by the code of these, and so on."""
    bases = [vars(base) for base in cls.__mro__ if not _is_library(base.__module__)]
    found: dict[FunctionType, None] = {}
    todo = list(names)
    for name in todo:
        for base in bases:
            fn = base.get(name)
            while fn is not None:
                if isinstance(fn, FunctionType):
                    if fn in found:
                        break
                    found[fn] = None
                    todo += (name for code in _nested(fn.__code__) for name in code.co_names)
                fn = _wrapped(fn)
    return tuple(found)
