"""Pytrees: the arguments and results of a region as flat lists of leaves; and what containers of any class hold.

Built on optree in a namespace of its own. Dataclasses and the types that are registered with
torch's pytree are added to it when one is first seen, so users need not register anything.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from inspect import ismemberdescriptor
from typing import Any

import optree
import torch
from optree import PyTreeSpec as TreeSpec

from .private import TORCH_NODES


def attributes(value: Any) -> Any:
    """The ``__dict__`` of an object, or an empty one."""
    return object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {}


def slots(cls: Any) -> list[Any]:
    """The slots of the instances of a class, without those of classes written in C, which may be read-only."""
    declaring = [vars(base) for base in reversed(cls.__mro__) if "__slots__" in vars(base)]
    return [slot for names in declaring for slot in names.values() if ismemberdescriptor(slot)]


def size(container: Any) -> int:
    """The number of values in a dict, list or tuple."""
    return int(_base(container).__len__(container))


def contents(container: Any) -> Iterable[Any]:
    """The values in a dict, list or tuple."""
    base = _base(container)
    found: Iterable[Any] = dict.values(container) if base is dict else base.__iter__(container)
    return found


def copy_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    """A plain copy of a dict."""
    if type(value) is dict:
        return value.copy()
    cls: Any = OrderedDict if issubclass(type(value), OrderedDict) else dict
    return dict(cls.items(value))


def _base(container: Any) -> Any:
    cls = type(container)
    return dict if issubclass(cls, dict) else list if issubclass(cls, list) else tuple


Node = tuple[Callable, Callable, type[optree.PyTreeEntry]]  # functions that flatten and unflatten it, type of its paths
_NAMESPACE = "remat"
# None is a node in optree, and torch.Size in torch's pytree; here they are leaves.
_NEVER_NODES = (torch.Tensor, torch.nn.Module, enum.Enum, torch.Size, type(None))


def flatten(tree: Any, /) -> tuple[list[Any], TreeSpec]:
    """Flatten a tree. ``None`` and every value that is not a container is a leaf."""
    while True:
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
        if not any(_is_new_node(cls, len(TORCH_NODES)) for cls in set(map(type, leaves))):
            return leaves, spec


def paths(spec: TreeSpec, root: str, /) -> list[str]:
    """The expression that reaches each leaf from `root`, as in ``args[0]['w1'].bias``."""
    return [accessor.codify(root) for accessor in spec.accessors()]


def describe_difference(before: TreeSpec, after: TreeSpec, root: str, /) -> str:
    """Where two structures first differ: "output[0] was a dict with ['a'] and is now a tuple of 2."."""
    if before.type is not after.type or before.entries() != after.entries():
        return f"{root} was {_kind(before)} and is now {_kind(after)}."
    for step, old, new in zip(_steps(before), before.children(), after.children(), strict=True):
        if old != new:
            return describe_difference(old, new, f"{root}{step}")
    return f"{root} is {_kind(before)} as before, but its metadata has changed."


def _kind(spec: TreeSpec) -> str:
    if spec.type is None:
        return "a single value"
    article = "an" if spec.type.__name__[0] in "aeiouAEIOU" else "a"
    count, steps = spec.num_children, _steps(spec)
    if spec.entries() == list(range(count)):
        return f"{article} {spec.type.__name__} of {count}"
    more = [f"and {count - 8} more"] if count > 8 else []
    return f"{article} {spec.type.__name__} with {', '.join(steps[:8] + more)}"


def _steps(spec: TreeSpec) -> list[str]:
    """The paths to the children."""
    top = spec.one_level()
    return [] if top is None else paths(top, "")


@functools.cache
def _is_new_node(cls: Any, torch_nodes: int) -> bool:
    """Whether a type whose values were leaves is a container, which this registers.

    The answer may change with the number of types in torch's pytree.
    """
    if issubclass(cls, _NEVER_NODES):
        return False
    # All attributes of a dataclass count: torch's `register_dataclass` may leave out some that the first run sees.
    if (node := _dataclass(cls) or _torch_node(cls)) is None:
        return False
    take, put, entry = node
    with suppress(ValueError):  # another thread was faster
        optree.register_pytree_node(cls, take, put, path_entry_type=entry, namespace=_NAMESPACE)
    return True


def _torch_node(cls: type) -> Node | None:
    if (node := TORCH_NODES.get(cls)) is None:
        return None

    def take(obj: Any) -> tuple[list[Any], Any, list[Any] | None]:
        found, context = node.flatten_fn(obj)
        children = list(found)
        return children, context, list(obj) if isinstance(obj, Mapping) and len(obj) == len(children) else None

    def put(context: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), context)

    return take, put, optree.MappingEntry


def _dataclass(cls: type) -> Node | None:
    if not dataclasses.is_dataclass(cls):
        return None
    try:
        object.__new__(cls)
    except TypeError:  # it subclasses a built-in type, whose contents are not fields
        return None
    # Descriptors, since setattr does not work on frozen classes and may run the user's code.
    by_name = {slot.__name__: slot for slot in slots(cls)}

    def take(obj: Any) -> tuple[Iterable[Any], tuple[str, ...], tuple[str, ...]]:
        state = dict(attributes(obj))
        for name, slot in by_name.items():
            with suppress(AttributeError):  # never set
                state[name] = slot.__get__(obj)
        names = tuple(state)
        return state.values(), names, names

    def put(names: tuple[str, ...], values: Iterable[Any]) -> Any:
        obj = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            if name in by_name:
                by_name[name].__set__(obj, value)
            else:
                obj.__dict__[name] = value
        return obj

    return take, put, optree.GetAttrEntry
