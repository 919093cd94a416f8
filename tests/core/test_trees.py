"""Pytrees: their nodes and leaves, and how errors describe them."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import nn

from remat._core.trees import describe_difference, flatten, paths


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Any
    b: Any = None


class Base:
    __slots__ = ("__hidden", "other")

    def hidden(self, *value: Any) -> Any:
        if value:
            self.__hidden = value[0]
        return self.__hidden


@dataclasses.dataclass
class Child(Base):
    a: Any


class Box:
    def __init__(self, left: Any, right: Any = None) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.left}, {self.right})"


Bag, Keyed = type("Bag", (Box,), {}), type("Keyed", (Box,), {})


# Torch leaves out fields that are None; here they are leaves.
Node = dataclasses.make_dataclass("Node", [(name, Any, None) for name in "abcd"], namespace={"__module__": __name__})


@dataclasses.dataclass
class Partly:
    """A class of which torch's registration leaves two fields out."""

    x: Any
    dropped: Any = None
    doubled: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.x * 2


@dataclasses.dataclass
class Output(OrderedDict):
    """Made and registered as Hugging Face's `ModelOutput`: a dict, a dataclass, and registered with torch."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


def register_with_optree(cls: type) -> None:
    namespace = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(cls, lambda b: ((b.left, b.right), None), lambda _, c: cls(*c), namespace=namespace)


def register_with_torch(cls: type) -> None:
    torch_pytree.register_pytree_node(cls, lambda b: ([b.left, b.right], None), lambda c, _: cls(*c))


register_with_optree(Box)
register_with_torch(Bag)
torch_pytree.register_pytree_node(
    Keyed,  # the context and the children are those of the function without keys, which may return any iterable
    lambda keyed: (iter([keyed.left, keyed.right]), "its own"),
    lambda children, context: Keyed(*children) if context == "its own" and type(children) is list else None,
    flatten_with_keys_fn=lambda keyed: ([(torch_pytree.GetAttrKey(n), v) for n, v in vars(keyed).items()], "of keys"),
)
torch_pytree.register_dataclass(Node)
torch_pytree.register_dataclass(Partly, field_names=["x"], drop_field_names=["dropped"])
torch_pytree.register_pytree_node(
    Output, lambda out: (list(out.values()), list(out)), lambda values, names: Output(**dict(zip(names, values)))
)


def child(x: Any, y: Any) -> Child:
    obj = Child(x)
    obj.hidden(y)
    return obj


# A tree, and the path to each of its leaves, which are 1, 2 and so on, or None.
TREES: list[tuple[Any, list[str]]] = [
    (1, [""]),
    (None, [""]),
    ((), []),
    ((1, [2, None], {"b": 3, "a": ()}), ["[0]", "[1][0]", "[1][1]", "[2]['b']"]),
    (OrderedDict(b=1, a=2), ["['b']", "['a']"]),
    (defaultdict(list, b=2, a=[1]), ["['a'][0]", "['b']"]),
    (deque([1, 2], maxlen=3), ["[0]", "[1]"]),
    ({"keys": 3, 3: 2, None: 1}, ["[None]", "[3]", "['keys']"]),
    (Point(1, Point(None, 2)), [".x", ".y.x", ".y.y"]),
    ({"w": Plain([1], 2)}, ["['w'].a[0]", "['w'].b"]),
    (FrozenSlots(1, FrozenSlots(2)), [".a", ".b.a", ".b.b"]),
    (Box(1, [2]), ["[<flat index 0>]", "[<flat index 1>][0]"]),
    (Bag(1, [2]), ["[0]", "[1][0]"]),
    (Keyed(1, [2]), ["[0]", "[1][0]"]),
    (Node(None, [1], 2), [".a", ".b[0]", ".c", ".d"]),
    (Partly(1), [".x", ".dropped", ".doubled"]),
    ([Output(1, 2)], ["[0]['logits']", "[0]['loss']"]),
    (Output(loss=1), ["['loss']"]),
    (torch.return_types.max((1, 2)), [".values", ".indices"]),
]


@pytest.mark.parametrize("tree, expected", TREES, ids=repr)
def test_a_tree_has_leaves_with_paths_and_is_rebuilt_from_them(tree: Any, expected: list[str]) -> None:
    leaves, spec = flatten(tree)
    result = spec.unflatten(leaves)
    assert type(result) is type(tree) and repr(result) == repr(tree)  # with the order of keys
    assert paths(spec, "x") == [f"x{path}" for path in expected]
    numbers = [leaf for leaf in leaves if leaf is not None]
    assert numbers == sorted(numbers) and spec == flatten(tree)[1]
    others = [object() for _ in leaves]
    assert flatten(spec.unflatten(others))[0] == others


class Level(Plain, enum.Enum):
    LOW = 1, 2


RealDict = dataclasses.make_dataclass("RealDict", [("a", Any, None)], bases=(dict,))
OfModule = dataclasses.make_dataclass(
    "OfModule", ["size"], bases=(nn.Module,), namespace={"__post_init__": lambda self: nn.Module.__init__(self)}
)


def test_what_is_no_container_is_a_leaf() -> None:
    weird, sub = type("Weird", (), {"__eq__": None})(), type("Sub", (torch.Tensor,), {})
    for value in (
        weird, Plain, len, lambda: 0, slice(1), {1}, range(3), Level.LOW, RealDict(1), torch.Size([2]), OfModule(2),
        torch.float32, nn.Parameter(torch.ones(1)), torch.ones(2).as_subclass(sub), torch.Generator(),
    ):  # fmt: skip
        leaves, spec = flatten([value])
        assert len(leaves) == 1 and leaves[0] is value and spec.unflatten(leaves)[0] is value
        assert flatten(value)[0][0] is value


@pytest.mark.parametrize("register", [register_with_optree, register_with_torch])
def test_a_class_is_a_leaf_until_it_is_registered(register: Callable) -> None:
    cls = type("Late", (Box,), {})
    late = cls(1, 2)
    assert flatten(late)[0] == [late]
    register(cls)
    assert flatten(late)[0] == [1, 2]


def test_all_attributes_of_a_dataclass_are_children_and_init_is_not_called() -> None:
    obj = Plain(1)
    obj.extra = torch.ones(1)  # type: ignore[attr-defined]
    partly = Partly(1, 2)
    partly.doubled, partly.later = 5, "text"  # type: ignore[attr-defined]
    for each in (obj, partly):
        leaves, spec = flatten([each])
        assert len(leaves) == len(vars(each)) and vars(spec.unflatten(leaves)[0]) == vars(each)


def test_threads_learn_types_together() -> None:
    classes = [dataclasses.make_dataclass(f"T{i}", ["a"]) for i in range(30)]
    barrier = threading.Barrier(4)

    def work(_: int) -> list:
        barrier.wait()
        return [flatten(cls((cls(1), 2)))[0] for cls in classes]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[[1, 2]] * 30] * 4


many = ", ".join(f"['{key}']" for key in "abcdefgh")
DIFFERENCES: list[tuple[Any, Any, str]] = [
    (1, (1,), "it was a single value and is now a tuple of 1."),
    ([1, [2, 3]], [1, [2]], "it[1] was a list of 2 and is now a list of 1."),
    ({"a": 1}, {"a": 1, "b": 2}, "it was a dict with ['a'] and is now a dict with ['a'], ['b']."),
    ([{"x": Plain(1, 2)}], [{"x": Plain(1, (2,))}], "it[0]['x'].b was a single value and is now a tuple of 1."),
    (Partly(1, 2), Partly(1, [2, 3]), "it.dropped was a single value and is now a list of 2."),
    ([OrderedDict(a=1)], [{"a": 1}], "it[0] was an OrderedDict with ['a'] and is now a dict with ['a']."),
    (deque([1], 2), deque([1], 3), "it is a deque of 1 as before, but its metadata has changed."),
    (FrozenSlots(1), Plain(1), "it was a FrozenSlots with .a, .b and is now a Plain with .a, .b."),
    (Output(1), Output(1, 2), "it was an Output with ['logits'] and is now an Output with ['logits'], ['loss']."),
    (dict.fromkeys("abcdefghij"), 1, f"it was a dict with {many}, and 2 more and is now a single value."),
]


@pytest.mark.parametrize("before, after, sentence", DIFFERENCES)
def test_a_difference_is_described_at_its_path(before: Any, after: Any, sentence: str) -> None:
    assert describe_difference(flatten(before)[1], flatten(after)[1], "it") == sentence
