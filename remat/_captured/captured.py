"""The search for what a function captures: tensors, generators and variables, without running the function.

It visits closures, globals that the code names, methods, partials, modules, objects, dicts, lists and tuples. Tensors
that are read in another way, from a class, a Python module or a global with a computed name, are not found.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
from argparse import Namespace
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterable
from dis import get_instructions
from itertools import islice
from operator import is_
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from .._ambient.generators import is_generator
from .._core.tensors import is_left_from_vmap
from .._core.trees import attributes, contents, copy_dict, size, slots
from .variables import COPIED, MISSING, Copy, Descriptors, Empty, Entries, Items, PartialArgs, TensorId, Variables, read


class Path:
    """The Python expression for a value."""

    def __init__(self, step: str, up: Path | None = None) -> None:
        self.step, self.up = step, up

    def __str__(self) -> str:
        return self.step if self.up is None else f"{self.up}{self.step}"

    def attribute(self, name: Any) -> Path:
        return Attribute(name, self) if type(name) is str else self.item(name)

    def item(self, key: Any) -> Path:
        # The ``__repr__`` of a user's class may be slow, or raise.
        return Path(f"[{key!r}]" if type(key) in _SHOWN else f"[a {type(key).__name__}]", self)


class Attribute(Path):
    """The path of an attribute. There are many, of which only errors show one, so ``step`` is the bare name."""

    def __str__(self) -> str:
        name = self.step
        return f"{self.up}" + (f".{name}" if name.isidentifier() else f"[{name}]" if name.isdigit() else f"[{name!r}]")


class Root(Path):
    """Where a search starts."""


_SHOWN = {type(None), bool, int, float, str, bytes}
_STDLIB = os.path.dirname(os.__file__)
# With pytest, as it rewrites the assertions of test modules into calls of its own.
_LIBRARIES = sys.stdlib_module_names | {"_pytest", "functorch", "numpy", "optree", "pluggy", "pytest", "remat", "torch"}


T = TypeVar("T")


class ByClass(dict[Any, T]):
    """What a function returns for a class.

    It is remembered for built-in classes and for those that can be imported. Others may hold tensors, as that of a
    parametrized module does.
    """

    def __init__(self, find: Callable[[Any], T]) -> None:
        self._find = find

    def __missing__(self, cls: Any) -> T:
        found = self._find(cls)
        if cls.__module__ == "builtins" or getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls:
            self[cls] = found
        return found


def is_library(module: Any) -> bool:
    """Whether a module belongs to one of these libraries."""
    package = str(module).partition(".")[0]
    return package in _LIBRARIES and not _is_shadowed(package)


@functools.cache
def _is_shadowed(package: str) -> bool:
    """Whether a user's package has the name of one of Python's own, such as ``code``."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return package in sys.stdlib_module_names and file is not None and not file.startswith(_STDLIB)


def names_of(fn: FunctionType) -> tuple[str, ...] | None:
    """The global names in the code of a function, nested functions included; None for a library's function."""
    module = str(fn.__globals__.get("__name__"))
    # Doctests run in a copy of their module's globals, and are not a library's code.
    if is_library(module) and vars(sys.modules.get(module, sys)) is fn.__globals__:
        return None
    return _names(fn.__code__)


@functools.lru_cache(4096)  # code that is made at run time must not stay alive for ever
def _names(code: CodeType) -> tuple[str, ...]:
    nested = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    own = [op.argval for op in get_instructions(code) if op.opname.endswith(("_GLOBAL", "LOAD_NAME", "STORE_NAME"))]
    return tuple(dict.fromkeys([*own, *nested]))


@ByClass
def is_sharded(cls: Any) -> bool:
    """Whether FSDP manages the modules below in each run: it frees and replaces their parameters."""
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in cls.__mro__)


def called(cls: Any, name: str) -> Any:
    """The Python method of a class, or the function that it wraps."""
    method = getattr(cls, name, None)
    return method if isinstance(method, FunctionType) else wrapped(method)


def wrapped(value: Any) -> Any:
    """The function in a wrapper that `functools.wraps` has made; or None."""
    return attributes(value).get("__wrapped__")


_SLOTS = ByClass(slots)
_BUDGET = 100_000  # objects visited per call
_LIMIT = 10_000  # containers with more entries are data, not state
_STATE = 1_000  # containers up to this length are state even if plain, and their contents are recorded
_SAMPLE = 32  # a longer container is taken to be plain if its first entries are
_TUPLE_DEPTH = 32


Visit = Callable[["Captured", Any, Path], object]


class Captured:
    """What a function and arguments lead to, the nearest first. A tensor is listed once, with its first path."""

    def __init__(self, *roots: Any) -> None:
        self.tensors: list[tuple[Path, Any]] = []  # and generators
        self.buffers: set[int] = set()  # the ids of those that are buffers of modules
        self.variables: list[Variables] = []
        self._empty: list[Any] = []  # the dicts for hooks of modules without hooks
        self._queue: list[tuple[Visit, Any, Path]] = []
        self._seen: set[Any] = set()
        self._copies: dict[int, Any] = {}  # the records of containers, by id; a tuple may be its own
        self._sharded: set[int] = set()  # ids of modules whose parameters the region must not save
        for root in roots:
            self.see(root, Root(root.__name__ if type(root) is FunctionType else "self"))
        # The list grows meanwhile and never shrinks, so the ids in `_seen` and `_copies` stay valid.
        for visit, value, path in islice(self._queue, _BUDGET):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                visit(self, value, path)
        if self._empty:
            self.variables.append(Empty(self._empty, {}))

    def see(self, value: Any, path: Path) -> None:
        if (visit := visits[type(value)]) is not None:
            self._queue.append((visit, value, path))

    def see_all(self, values: Iterable[tuple[Any, Any]], path: Callable[[Any], Path]) -> None:
        """See values by their names, or keys, of which ``path`` makes paths."""
        for name, value in values:
            if (visit := visits[type(value)]) is not None:
                self._queue.append((visit, value, path(name)))

    def modules(self) -> list[tuple[Path, nn.Module]]:
        return [(path, value) for visit, value, path in self._queue if visit is Captured.module]

    def note(self, kind: type[Variables], holder: Any, values: dict[Any, Any], whole: bool = False) -> None:
        """Record variables and their values. Objects are recorded themselves: not all references can be replaced."""
        if values or whole:
            self.variables.append(kind(holder, {key: self._frozen(value) for key, value in values.items()}, whole))

    def _frozen(self, value: Any, depth: int = 0) -> Any:
        """Return the record of a value."""
        cls = type(value)
        if issubclass(cls, Tensor):
            return value if is_left_from_vmap(value) else TensorId(id(value))  # no region saves what can't be read
        if id(value) in self._copies:
            return self._copies[id(value)]
        if cls in COPIED and (len(value) <= _STATE or _is_looked_into(value)):
            copy: Any = Copy(value)
        elif issubclass(cls, tuple) and depth < _TUPLE_DEPTH and _is_looked_into(value):
            items = [self._frozen(item, depth + 1) for item in contents(value)]
            same = all(map(is_, items, contents(value)))
            copy = value if same else Copy(value, dict(enumerate(items)))
        else:
            return value
        self._copies[id(value)] = copy
        return copy

    def tensor(self, value: Any, path: Path) -> None:
        """The visit of a tensor or generator."""
        self.tensors.append((path, value))

    def function(self, fn: FunctionType, path: Path) -> None:
        names = names_of(fn)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            value = read(_CONTENTS, cell)
            visit = visits[type(value)]
            if id(cell) in self._seen or (names is None and visit in _DATA):  # a library's own state
                continue
            self._seen.add(id(cell))
            if names is not None:
                self.note(Descriptors, cell, {_CONTENTS: value})
            if visit is Captured.tensor:  # a helper function may have a variable with the same name
                name = f"closure variable {name!r}" if type(path) is Root else f"closure variable {name!r} of {path}"
            self.see(value, Path(name))
        if names:
            scope = fn.__globals__  # it may lack a name that the run will store
            values = {
                n: v
                for n in names
                if type(v := scope.get(n, MISSING)) is not ModuleType and (v is not MISSING or n not in _BUILTINS)
            }
            self.note(Entries, scope, values)
            for name, value in values.items():
                if (visit := visits[type(value)]) is not None:
                    self.see(value, Path(f"global {name!r}" if visit is Captured.tensor else name))
        if fn.__defaults__ or fn.__kwdefaults__:
            if names is not None:
                self.note(Descriptors, fn, {_DEFAULTS: fn.__defaults__, _KWDEFAULTS: fn.__kwdefaults__})
            self.see(fn.__defaults__, path.attribute("__defaults__"))
            self.see(fn.__kwdefaults__, path.attribute("__kwdefaults__"))
        if names is not None or fn.__dict__:
            self._attributes(fn.__dict__, path)

    def method(self, method: MethodType, path: Path) -> None:
        up = path if type(path) is Root else path.attribute("__self__")  # the `self` of a root is called `self`
        self.see(method.__self__, up)
        fn = method.__func__
        self.see(fn, up.attribute(fn.__name__ if type(fn) is FunctionType else "__func__"))

    def builtin(self, method: Any, path: Path) -> None:
        """A method of an object written in C, such as a generator's method that draws from it."""
        if is_generator(type(method.__self__)):
            self.see(method.__self__, path.attribute("__self__"))

    def partial(self, partial: functools.partial[Any], path: Path) -> None:
        self.see(partial.func, path.attribute("func"))
        self.note(PartialArgs, partial, {"args": partial.args})
        self.see(partial.args, path.attribute("args"))
        self.note(Entries, partial.keywords, partial.keywords)
        self.see(partial.keywords, path.attribute("keywords"))

    def wrapper(self, value: Any, path: Path) -> None:
        """An object of a library, of which only the wrapped function is visited."""
        self.see(wrapped(value), path.attribute("__wrapped__"))

    def module(self, module: nn.Module, path: Path) -> None:
        state = module.__dict__
        cls: Any = type(module)
        if is_sharded[cls]:
            self._sharded.update(map(id, module.modules()))
        sharded = id(module) in self._sharded
        for name in ("_parameters", "_buffers", "_modules"):
            entries = state.get(name)
            # TorchScript has another object there.
            if isinstance(entries, dict) and not (sharded and name == "_parameters"):
                items = copy_dict(entries)
                if not sharded:
                    self.note(Entries, entries, items, whole=True)
                if name == "_buffers":
                    self.buffers.update(map(id, items.values()))
                if not sharded and name != "_modules":
                    for value in items.values():
                        self.note(Entries, own := attributes(value), own, whole=True)
                self.see_all(items.items(), path.attribute)
        own_state = [] if cls.__module__ == _FSDP1 else [each for each in state.items() if each[0] not in _BASE_STATE]
        hooks = [(name, state[name]) for name in HOOKS + _HOW_CALLED if state.get(name)]
        seen = [*own_state, *hooks]
        self.see_all([each for each in seen if not isinstance(each[1], Tensor)] if sharded else seen, path.attribute)
        if not sharded:
            then = state.copy()
            then.update({name: self._frozen(value) for name, value in seen})
            self.variables.append(Entries(state, then, whole=True))
            self._empty += [state[name] for name in HOOKS if not state.get(name, True)]
        self.see(called(cls, "forward"), path.attribute("forward"))

    def instance(self, value: Any, path: Path) -> None:
        cls: Any = type(value)
        self._attributes(attributes(value), path)
        values = {slot: read(slot, value) for slot in _SLOTS[cls]}
        self.note(Descriptors, value, values)
        self.see_all([(slot.__name__, each) for slot, each in values.items()], path.attribute)
        self.see(called(cls, "__call__"), path.attribute("__call__"))

    def _attributes(self, attributes: dict[str, Any], path: Path) -> None:
        items = attributes.copy()
        self.note(Entries, attributes, items, whole=True)
        self.see_all(items.items(), path.attribute)

    def container(self, value: Any, path: Path) -> None:
        """The visit of a dict or list."""
        if size(value) > _STATE and not _is_looked_into(value):
            return
        is_dict = isinstance(value, dict)
        items = copy_dict(value) if is_dict else dict(enumerate(list.copy(value)))
        if (copy := self._copies.get(id(value))) is not None:
            copy.is_held = path.up is not None
            copy.items = {key: self._frozen(item) for key, item in items.items()}
        if _is_looked_into(items):
            self.see_all(items.items(), path.item)
        if type(value) not in COPIED:
            if not is_library(type(value).__module__):
                self.note(Entries if is_dict else Items, value, items, whole=True)
            self.instance(value, path)

    def of_tuple(self, value: tuple[Any, ...], path: Path) -> None:
        if _is_looked_into(value):
            self.see_all(enumerate(contents(value)), path.item)


def _is_looked_into(container: Any) -> bool:
    length = size(container)
    if length <= _SAMPLE:
        return True
    return length <= _LIMIT and any(visits[type(item)] for item in islice(contents(container), _SAMPLE))


@ByClass
def visits(cls: Any) -> Visit | None:
    """The method that visits values of a class; None: they are not visited."""
    visit = next((visit for base, visit in _BASES.items() if issubclass(cls, base)), None)
    if visit is None and not issubclass(cls, _NEVER):
        if is_generator(cls):
            return Captured.tensor
        if not is_library(cls.__module__):
            return Captured.instance
        if cls.__dictoffset__:
            return Captured.wrapper
    return visit


_BASES: dict[type, Visit] = {
    Tensor: Captured.tensor,
    torch.Generator: Captured.tensor,
    BuiltinMethodType: Captured.builtin,
    FunctionType: Captured.function,
    MethodType: Captured.method,
    functools.partial: Captured.partial,
    nn.Module: Captured.module,
    dict: Captured.container,
    list: Captured.container,
    tuple: Captured.of_tuple,
    **dict.fromkeys((SimpleNamespace, Namespace, ChainMap, UserDict, UserList, SobolEngine), Captured.instance),
}
_NEVER = (type, ModuleType, set, frozenset)
_DATA = (Captured.tensor, Captured.container, Captured.of_tuple)
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"  # its modules have no state but FSDP's own
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_HOW_CALLED = "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"
_BASE_STATE = frozenset(vars(nn.Module()))  # visited by name, or not read by a forward
_BUILTINS = frozenset(vars(builtins))
_CONTENTS: Any = CellType.__dict__["cell_contents"]
_DEFAULTS: Any = FunctionType.__dict__["__defaults__"]
_KWDEFAULTS: Any = FunctionType.__dict__["__kwdefaults__"]
