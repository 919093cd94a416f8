"""Pytrees: their nodes and leaves, how errors describe them, and regions whose arguments and results they are."""

import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

from remat import MutationError, remat
from remat._core import trees
from remat._core.trees import _is_new_node, describe_difference, flatten, paths


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


@dataclasses.dataclass
class Child(Base):
    a: Any


class Box:
    def __init__(self, left: Any, right: Any = None) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.left}, {self.right})"


Bag = type("Bag", (Box,), {})


@dataclasses.dataclass
class Partly:
    """A class of which torch's registration leaves two fields out."""

    x: Any
    dropped: Any = None
    doubled: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.x * 2


def partly(x: Any, y: Any) -> Partly:
    """One whose attributes don't follow from those that are registered."""
    obj = Partly(x, y)
    obj.doubled, obj.later = x * y, 3  # type: ignore[attr-defined]
    return obj


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
torch_pytree.register_pytree_node(
    Bag,  # the context and the children are those of the function without keys, which may return any iterable
    lambda bag: (iter([bag.left, bag.right]), "its own"),
    lambda children, context: Bag(*children) if context == "its own" and type(children) is list else None,
    flatten_with_keys_fn=lambda bag: ([(torch_pytree.GetAttrKey(n), v) for n, v in vars(bag).items()], "of keys"),
)
torch_pytree.register_dataclass(Partly, field_names=["x"], drop_field_names=["dropped"])
torch_pytree.register_pytree_node(
    Output, lambda out: (list(out.values()), list(out)), lambda values, names: Output(**dict(zip(names, values)))
)


Whole = type("Whole", (dict,), {})  # a mapping whose keys are not those of its children, as a TensorDict's
torch_pytree.register_pytree_node(Whole, lambda w: ([[*w.values()]], [*w]), lambda c, keys: Whole(zip(keys, c[0])))


def child(x: Any, y: Any) -> Child:
    obj: Any = Child(x)
    obj._Base__hidden = y
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
    (partly(1, 2), [".x", ".dropped", ".doubled", ".later"]),  # its `__init__` is not called, which would be an error
    (child(1, 2), [".a", "._Base__hidden"]),
    ([Output(1, 2)], ["[0]['logits']", "[0]['loss']"]),
    (Output(loss=1), ["['loss']"]),
    (Whole(a=1, b=2), ["[0][0]", "[0][1]"]),
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
    weird, of_subclass = type("Weird", (), {"__eq__": None})(), X.as_subclass(type("Sub", (Tensor,), {}))
    for value in (weird, Plain, len, {1}, Level.LOW, RealDict(1), torch.Size([2]), OfModule(2), of_subclass):
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
    assert _is_new_node.__wrapped__(Plain, 0)  # in another thread, which has seen the class at the same time


many = ", ".join(f"['{key}']" for key in "abcdefgh")
DIFFERENCES: list[tuple[Any, Any, str]] = [
    (1, (1,), "it was a single value and is now a tuple of 1."),
    ([1, [2, 3]], [1, [2]], "it[1] was a list of 2 and is now a list of 1."),
    ({"a": 1}, {"a": 1, "b": 2}, "it was a dict with ['a'] and is now a dict with ['a'], ['b']."),
    ([{"x": Plain(1, 2)}], [{"x": Plain(1, (2,))}], "it[0]['x'].b was a single value and is now a tuple of 1."),
    (Partly(1, 2), Partly(1, [2, 3]), "it.dropped was a single value and is now a list of 2."),
    (deque([1], 2), deque([1], 3), "it is a deque of 1 as before, but its metadata has changed."),
    (FrozenSlots(1), Plain(1), "it was a FrozenSlots with .a, .b and is now a Plain with .a, .b."),
    (Output(1), Output(1, 2), "it was an Output with ['logits'] and is now an Output with ['logits'], ['loss']."),
    (dict.fromkeys("abcdefghij"), 1, f"it was a dict with {many}, and 2 more and is now a single value."),
]


@pytest.mark.parametrize("before, after, sentence", DIFFERENCES)
def test_a_difference_is_described_at_its_path(before: Any, after: Any, sentence: str) -> None:
    assert describe_difference(flatten(before)[1], flatten(after)[1], "it") == sentence


X, Y = torch.tensor([0.3, 0.4]), torch.tensor([1.3, 0.7])
# Containers whose own methods are never called.
ABSENT = dict.fromkeys(["__len__", "__iter__", "__getattribute__", "copy", "items", "values"])
DICT, ORDERED, LIST, TUPLE = (type(base.__name__, (base,), ABSENT) for base in (dict, OrderedDict, list, tuple))


def test_what_containers_hold_is_read_without_their_own_methods() -> None:
    ordered = ORDERED(a=X, b=2)
    OrderedDict.move_to_end(ordered, "a")
    for container in ({"b": 2, "a": X}, DICT(b=2, a=X), ordered, LIST([2, X]), TUPLE((2, X))):
        if issubclass(type(container), dict):
            copy = trees.copy_dict(container)
            assert type(copy) is dict and copy is not container and list(copy.items()) == [("b", 2), ("a", X)]
        found = list(trees.contents(container))
        assert trees.size(container) == len(found) == 2 and any(value is X for value in found)
        assert type(trees.attributes(container)) is dict
    assert trees.attributes(2) == {} and trees.attributes(Plain(1)) == {"a": 1, "b": None}
    assert trees.slots(complex) == [] and [slot.__name__ for slot in trees.slots(FrozenSlots)] == ["a", "b"]


def test_leaves_that_are_returned_are_the_same_objects() -> None:
    thing, n = object(), torch.arange(2)

    @remat
    def fn(tree: dict) -> Any:
        y = tree.pop("x").sin().exp()  # the recompute gets another dict, with all keys
        return [y, {"again": y}, (y, tree["same"][0]), tree["thing"], tree["n"]]

    def run(x: Tensor) -> Tensor:
        out = fn({"x": x, "same": [x], "thing": thing, "n": n})
        assert out[0] is out[1]["again"] is out[2][0] and out[2][1] is x and out[3] is thing and out[4] is n
        return (out[0] * out[2][1]).sum()

    x = torch.ones(3, requires_grad=True)
    (found,) = torch.autograd.grad(run(x), x)
    assert torch.equal(found, torch.func.grad(run)(torch.ones(3)))


def test_an_argument_that_was_changed_is_named_by_its_path() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = remat(lambda x, *, options: x * options["ws"][1].y)(x, options={"ws": [None, Point(1, w)]}).sum()
    w.mul_(2)
    with pytest.raises(MutationError, match=r"^argument options\['ws'\]\[1\].y was changed in place between"):
        loss.backward()
