"""Pytrees: everything that goes into and comes out of a region, as a flat list of leaves.

Built on optree in a namespace of its own. Dataclasses and the types that are registered with
torch's pytree join it the first time one is met, so no user has to register anything.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optree
import torch
from optree import PyTreeSpec as TreeSpec

from ._torch import TORCH_NODES, MappingKey, SequenceKey

__all__ = ["TreeSpec", "describe_difference", "flatten", "paths", "unflatten"]

_NAMESPACE = "remat"
# torch.Size is a node to torch; as a plain value it passes whole.
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device} | {
    type(None), bool, int, float, complex, str, bytes, type, types.FunctionType
}  # fmt: skip
_NEVER_NODES = (torch.Tensor, torch.nn.Module, enum.Enum)

_lock = threading.Lock()
_leaf_types: set[type] = set(_PLAIN)
_node_types: set[type] = set()
_torch_nodes_seen = len(TORCH_NODES)


def flatten(tree: Any, /) -> tuple[list[Any], TreeSpec]:
    """Takes a tree apart. ``None`` and every value that is no container is a leaf.

    >>> leaves, spec = flatten({"x": (1, None)})
    >>> leaves, unflatten(spec, leaves)
    ([1, None], {'x': (1, None)})
    """
    if type(tree) in _PLAIN:
        return [tree], _spec_of_one()
    while True:
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
        if (_leaf_types.issuperset(map(type, leaves)) and len(TORCH_NODES) == _torch_nodes_seen) or not _learn(leaves):
            return leaves, spec


@functools.cache
def _spec_of_one() -> TreeSpec:
    leaf: Any = None
    return optree.tree_flatten(leaf, none_is_leaf=True, namespace=_NAMESPACE)[1]


def unflatten(spec: TreeSpec, leaves: Iterable[Any], /) -> Any:
    """Puts a tree together again; what is not a tensor is the very object that was there."""
    return spec.unflatten(leaves)


def paths(spec: TreeSpec, root: str, /) -> list[str]:
    """For each leaf the expression that reaches it from `root`, as in ``args[0]['w1'].bias``.

    >>> paths(flatten(({"a": 1}, [2]))[1], "args")
    ["args[0]['a']", 'args[1][0]']
    """
    return [accessor.codify(root) for accessor in spec.accessors()]


def describe_difference(before: TreeSpec, after: TreeSpec, root: str, /) -> str:
    """One sentence that says where two structures first differ.

    >>> describe_difference(flatten([{"a": 1}])[1], flatten([(1, 2)])[1], "output")
    "output[0] was a dict with ['a'] and is now a tuple of 2."
    """
    if before.type is after.type and before.entries() == after.entries():
        children = zip(_accessors(before), before.children(), after.children(), strict=True)
        for accessor, old, new in children:
            if old != new:
                return describe_difference(old, new, accessor.codify(root))
        if before == after:
            return f"{root} has not changed."
        return f"{root} is {_kind(before)} as before, but its metadata has changed."
    return f"{root} was {_kind(before)} and is now {_kind(after)}."


def _kind(spec: TreeSpec) -> str:
    if spec.type is None:
        return "a single value"
    article = "an" if spec.type.__name__[0] in "aeiouAEIOU" else "a"
    entries = spec.entries()
    if entries == list(range(len(entries))):
        return f"{article} {spec.type.__name__} of {len(entries)}"
    names = [accessor.codify("") for accessor in _accessors(spec)]
    return f"{article} {spec.type.__name__} with " + _shortened(names)


def _accessors(spec: TreeSpec) -> list[optree.PyTreeAccessor]:
    """The steps to the children."""
    top = spec.one_level()
    return [] if top is None else top.accessors()


def _shortened(names: list[str], most: int = 8) -> str:
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most] + more)


def _learn(leaves: list[Any]) -> bool:
    """Sorts the types of leaves into leaves and nodes; true if there are new nodes among them."""
    global _torch_nodes_seen
    with _lock:
        if len(TORCH_NODES) != _torch_nodes_seen:  # a type held to be a leaf may be a node now
            _torch_nodes_seen = len(TORCH_NODES)
            _leaf_types.intersection_update(_PLAIN)
        unseen = set(map(type, leaves)) - _leaf_types
        for cls in unseen - _node_types:
            if not issubclass(cls, _NEVER_NODES) and (_add_torch_node(cls) or _add_dataclass(cls)):
                _node_types.add(cls)
            else:
                _leaf_types.add(cls)
        return not _node_types.isdisjoint(unseen)  # or another thread was faster


class _TorchEntry(optree.PyTreeEntry):
    """A step of a path in torch's words, which prints itself."""

    def codify(self, node: str = "") -> str:
        return f"{node}{self.entry}"


def _add_torch_node(cls: type) -> bool:
    node = TORCH_NODES.get(cls)
    if node is None:
        return False

    def take(obj: Any) -> tuple[Iterable[Any], Any, Iterable[Any]]:
        if node.flatten_with_keys_fn is not None:
            pairs, context = node.flatten_with_keys_fn(obj)
            return [value for _, value in pairs], context, [key for key, _ in pairs]
        children, context = node.flatten_fn(obj)
        if isinstance(obj, Mapping) and len(obj) == len(children):
            return children, context, [MappingKey(key) for key in obj]
        return children, context, [SequenceKey(index) for index in range(len(children))]

    def put(context: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), context)

    _register(cls, take, put, _TorchEntry)
    return True


def _add_dataclass(cls: type) -> bool:
    if not dataclasses.is_dataclass(cls):
        return False
    try:
        object.__new__(cls)
    except TypeError:  # the layout is that of a built-in type, whose contents are not fields
        return False
    # Descriptors, since setattr does not work on frozen classes and may run the user's code.
    slots = {
        name: member
        for base in reversed(cls.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }

    def take(obj: Any) -> tuple[Iterable[Any], tuple[str, ...], tuple[str, ...]]:
        state = dict(getattr(obj, "__dict__", ()))
        for name, slot in slots.items():
            try:
                value = slot.__get__(obj)
            except AttributeError:  # never set
                continue
            state[name] = value
        names = tuple(state)
        return state.values(), names, names

    def put(names: tuple[str, ...], values: Iterable[Any]) -> Any:
        obj = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            if name in slots:
                slots[name].__set__(obj, value)
            else:
                obj.__dict__[name] = value
        return obj

    _register(cls, take, put, optree.GetAttrEntry)
    return True


def _register(cls: type, take: Callable, put: Callable, entry: type[optree.PyTreeEntry]) -> None:
    optree.register_pytree_node(cls, take, put, path_entry_type=entry, namespace=_NAMESPACE)
