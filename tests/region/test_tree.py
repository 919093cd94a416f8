"""Pytrees: their nodes and leaves, and how errors describe them."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import threading
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree

from remat._core import trees
from remat._core.trees import describe_difference, flatten, paths, unflatten


def again(tree):
    leaves, spec = flatten(tree)
    return unflatten(spec, leaves)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = None


@dataclasses.dataclass(slots=True)
class Slots:
    a: Any
    b: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: Any
    b: Any = None


@dataclasses.dataclass
class Busy:
    """A class whose instances would not survive a second call of `__init__`."""

    a: Any
    start: dataclasses.InitVar[int]
    total: Any = dataclasses.field(init=False)
    default: int = dataclasses.field(init=False, default=7)
    made = 0

    def __post_init__(self, start):
        Busy.made += 1
        self.total = start + 1
        self.extra = torch.ones(1)

    @functools.cached_property
    def expensive(self):
        return object()


@dataclasses.dataclass
class MyModule(torch.nn.Module):
    size: int

    def __post_init__(self):
        super().__init__()


class Level(Plain, enum.Enum):
    LOW = 1, 2


@dataclasses.dataclass
class RealDict(dict):
    a: Any = None


class Output(collections.OrderedDict):
    """Built like Hugging Face's ModelOutput: a dict, a dataclass, and registered with torch."""


def _output_class(name, keys_fn=False):
    cls = dataclasses.make_dataclass(
        name,
        [("logits", Any, None), ("loss", Any, None)],
        bases=(Output,),
        namespace={
            "__post_init__": lambda s: s.update(
                {k: v for k, v in (("logits", s.logits), ("loss", s.loss)) if v is not None}
            )
        },
    )

    def put(values, keys):
        return cls(**dict(zip(keys, values, strict=True)))

    with_keys = None
    if keys_fn:

        def with_keys(o):
            return [(torch_pytree.GetAttrKey(k), v) for k, v in o.items()], list(o)

    torch_pytree.register_pytree_node(cls, lambda o: (list(o.values()), list(o)), put, flatten_with_keys_fn=with_keys)
    return cls


class TestContainers:
    @pytest.mark.parametrize(
        "tree",
        [
            1,
            None,
            (),
            {},
            (1, [2, None], {"b": 3, "a": ()}),
            collections.OrderedDict(b=1, a=2),
            collections.defaultdict(list, b=1, a=[2]),
            collections.deque([1, 2], maxlen=3),
            Point(1, Point(None, 2)),
            {1: "mixed", "keys": 2, None: 3},
        ],
        ids=repr,
    )
    def test_round_trip(self, tree):
        result = again(tree)
        assert result == tree and type(result) is type(tree)
        assert repr(result) == repr(tree)  # including the order of keys

    def test_none_is_a_leaf(self):
        assert flatten((None, {"a": None}))[0] == [None, None]

    def test_structseq(self):
        result = torch.ones(2, 3).max(dim=0)
        leaves, spec = flatten(result)
        assert len(leaves) == 2
        assert type(unflatten(spec, leaves)) is torch.return_types.max

    def test_what_is_not_a_container_stays_the_same_object(self):
        class Weird:
            __eq__ = None

        for value in (
            Weird(), Weird, Plain, len, lambda: 0, slice(1), {1}, range(3), Level.LOW,
            torch.Size([2]), torch.float32, torch.nn.Parameter(torch.ones(1)), torch.Generator(),
            torch.nn.Linear(2, 2), MyModule(2),
        ):  # fmt: skip
            leaves, spec = flatten([value])
            assert len(leaves) == 1 and leaves[0] is value
            assert unflatten(spec, leaves)[0] is value

    def test_tensor_subclass(self):
        class Sub(torch.Tensor):
            pass

        x = torch.ones(2).as_subclass(Sub)
        assert flatten(x)[0][0] is x

    def test_leaves_can_be_replaced(self):
        leaves, spec = flatten({"a": (1, 2), "b": Frozen(3)})
        assert unflatten(spec, [10 * v if v else v for v in leaves]) == {
            "a": (10, 20),
            "b": Frozen(30),
        }

    def test_optree_global_registration(self):
        class Box:
            def __init__(self, x):
                self.x = x

        box = Box(torch.ones(1))
        assert flatten(box)[0][0] is box  # not registered yet
        optree.register_pytree_node(
            Box,
            lambda b: ((b.x,), None),
            lambda _, c: Box(*c),
            namespace=optree.registry.__dict__["__GLOBAL_NAMESPACE"],
        )
        assert flatten(box)[0][0] is box.x


class TestDataclasses:
    @pytest.mark.parametrize("cls", [Plain, Frozen, Slots, FrozenSlots])
    def test_round_trip(self, cls):
        x = torch.ones(2)
        leaves, spec = flatten((cls(x, [1, cls(2)]),))
        assert leaves[0] is x and leaves[1:] == [1, 2, None]
        (result,) = unflatten(spec, leaves)
        assert type(result) is cls and result.a is x and result.b == [1, cls(2)]
        names = ["args[0].a", "args[0].b[0]", "args[0].b[1].a", "args[0].b[1].b"]
        assert paths(spec, "args") == names

    def test_init_is_not_run_and_all_attributes_remain(self):
        obj = Busy(1, start=5)
        expensive, made = obj.expensive, Busy.made
        result = again(obj)
        assert Busy.made == made and type(result) is Busy
        assert (result.a, result.total, result.default) == (1, 6, 7)
        assert result.extra is obj.extra and result.expensive is expensive

    def test_tensors_in_other_attributes_than_fields_are_leaves(self):
        obj = Busy(1, start=5)
        assert any(leaf is obj.extra for leaf in flatten(obj)[0])

    def test_field_that_was_never_set(self):
        obj = Slots(1, 2)
        del obj.b
        result = again(obj)
        assert result.a == 1 and not hasattr(result, "b")
        assert flatten(obj)[1] != flatten(Slots(1, 2))[1]

    def test_inherited_and_mangled_slots(self):
        class Base:
            __slots__ = ("__hidden", "other")

            def hidden(self, *value):
                if value:
                    self.__hidden = value[0]
                return self.__hidden

        @dataclasses.dataclass
        class Child(Base):
            a: Any

        obj = Child(1)
        obj.hidden(2)
        result = again(obj)
        assert (result.a, result.hidden()) == (1, 2) and not hasattr(result, "other")

    def test_data_descriptor_is_not_run(self):
        class Checked:
            def __get__(self, obj, cls=None):
                if obj is None:
                    raise AttributeError
                return obj.__dict__["a"]

            def __set__(self, obj, value):
                obj.__dict__["a"] = value + 1

        @dataclasses.dataclass
        class Holder:
            a: int = Checked()

        assert Holder(1).a == 2 and again(Holder(1)).a == 2

    def test_layout_of_a_builtin_is_a_leaf(self):
        obj = RealDict(1)
        assert flatten(obj)[0][0] is obj


class TestTorchNodes:
    def test_model_output(self):
        cls = _output_class("ModelOutput")
        out = cls(logits=torch.ones(2))
        leaves, spec = flatten({"o": out})
        assert len(leaves) == 1 and leaves[0] is out.logits
        result = unflatten(spec, leaves)["o"]
        assert type(result) is cls and list(result) == ["logits"]
        assert result.logits is out.logits and result.loss is None
        assert paths(spec, "out") == ["out['o']['logits']"]
        assert spec == flatten({"o": out})[1]

    def test_keys_function_gives_the_path(self):
        spec = flatten([_output_class("KeyedOutput", keys_fn=True)(1, 2)])[1]
        assert paths(spec, "out") == ["out[0].logits", "out[0].loss"]

    def test_no_keys(self):
        class Pair:
            def __init__(self, *xs):
                self.xs = xs

        pair = Pair(1, [2])
        assert flatten(pair)[0][0] is pair  # treated as a leaf until it is registered
        torch_pytree.register_pytree_node(Pair, lambda p: (list(p.xs), None), lambda c, _: Pair(*c))
        leaves, spec = flatten(pair)
        assert leaves == [1, 2] and paths(spec, "p") == ["p[0]", "p[1][0]"]
        assert again(pair).xs == (1, [2])

    def test_as_many_keys_as_children(self):
        """The context and the children are those of the function without keys, which may return any iterable."""
        cls = type("Odd", (), {})
        made = []
        torch_pytree.register_pytree_node(
            cls,
            lambda obj: (iter([1, 2]), "its own"),
            lambda children, context: made.append((children, context)),
            flatten_with_keys_fn=lambda obj: ([(torch_pytree.GetAttrKey("a"), 1)], "of the keys"),
        )
        leaves, spec = flatten([cls()])
        assert leaves == [1, 2] and paths(spec, "x") == ["x[0][0]", "x[0][1]"]
        unflatten(spec, leaves)
        assert made == [([1, 2], "its own")]


@dataclasses.dataclass
class Pair:
    ab: Any = None
    cd: Any = None
    a: Any = None
    b: Any = None


@dataclasses.dataclass
class Partly:
    """A class of which torch's registration leaves two fields out."""

    x: Any
    dropped: Any = None
    doubled: Any = dataclasses.field(init=False)
    made = 0

    def __post_init__(self):
        Partly.made += 1
        self.doubled = self.x * 2


@dataclasses.dataclass
class Wraps:
    """A class whose registered children are not its attributes."""

    holder: Any


class Holder:
    def __init__(self, x):
        self.x = x


torch_pytree.register_dataclass(Pair)
torch_pytree.register_dataclass(Partly, field_names=["x"], drop_field_names=["dropped"])
torch_pytree.register_pytree_node(
    Wraps, lambda w: ([w.holder.x], None), lambda children, _: Wraps(Holder(*children)), serialized_type_name="Wraps"
)


class TestDataclassesOfTorch:
    """Dataclasses that are registered with torch's pytree, as torch.export asks for."""

    def test_fields_of_which_some_are_none(self):
        x, y = torch.ones(2), torch.ones(3)
        for obj in (Pair(), Pair(x), Pair(x, y), Pair(None, x, y), Pair(b=y), Pair([x, {"y": y}])):
            result = again([obj])[0]
            assert type(result) is Pair and vars(result) == vars(obj)
        assert paths(flatten([Pair(x, [y])])[1], "out") == ["out[0].ab", "out[0].cd[0]"]

    def test_fields_that_the_registration_leaves_out(self):
        x, dropped, doubled = torch.ones(1), torch.ones(2), torch.ones(3)
        obj = Partly(x, dropped)
        obj.doubled, obj.later = doubled, "text"
        made = Partly.made
        leaves, spec = flatten(obj)
        result = unflatten(spec, leaves)
        assert Partly.made == made  # `__init__` is not run
        assert (result.x, result.dropped, result.doubled, result.later) == (x, dropped, doubled, "text")
        assert [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] == [x, dropped, doubled]

    def test_children_that_are_not_attributes(self):
        x = torch.ones(1)
        leaves, spec = flatten(Wraps(Holder(x)))
        assert len(leaves) == 1 and leaves[0] is x and unflatten(spec, leaves).holder.x is x
        assert paths(spec, "w") == ["w[0]"]

    def test_a_difference(self):
        before, after = (flatten(Partly(1, dropped))[1] for dropped in (2, [2, 3]))
        sentence = "output.dropped was a single value and is now a list of 2."
        assert describe_difference(before, after, "output") == sentence


def test_types_are_registered_once(monkeypatch):
    cls = dataclasses.make_dataclass("Once", ["a"])
    flatten((cls(cls({1})), torch.ones(1), None))
    monkeypatch.setattr(trees, "_learn", None)
    leaves, spec = flatten((cls(cls({1})), torch.ones(1), None))
    assert len(leaves) == 3 and len(paths(spec, "")) == 3


def test_threads_register_together():
    classes = [dataclasses.make_dataclass(f"T{i}", ["a"]) for i in range(30)]
    barrier, results = threading.Barrier(4), []

    def work():
        barrier.wait()
        results.append([flatten(cls((cls(1), 2)))[0] for cls in classes])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[[1, 2]] * 30] * 4


def test_paths():
    tree = ({"w1": Plain([1], 2)}, collections.OrderedDict(a=Point(3, 4)))
    assert paths(flatten(tree)[1], "args") == [
        "args[0]['w1'].a[0]",
        "args[0]['w1'].b",
        "args[1]['a'].x",
        "args[1]['a'].y",
    ]
    assert paths(flatten(1)[1], "x") == ["x"]


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (1, (1,), "output was a single value and is now a tuple of 1."),
        ([1, [2, 3]], [1, [2]], "output[1] was a list of 2 and is now a list of 1."),
        ((1,), [1], "output was a tuple of 1 and is now a list of 1."),
        (
            {"a": 1},
            {"a": 1, "b": 2},
            "output was a dict with ['a'] and is now a dict with ['a'], ['b'].",
        ),
        (
            [{"x": Plain(1, 2)}],
            [{"x": Plain(1, (2,))}],
            "output[0]['x'].b was a single value and is now a tuple of 1.",
        ),
        (
            [collections.OrderedDict(a=1)],
            [{"a": 1}],
            "output[0] was an OrderedDict with ['a'] and is now a dict with ['a'].",
        ),
        (
            collections.deque([1], maxlen=2),
            collections.deque([1], maxlen=3),
            "output is a deque of 1 as before, but its metadata has changed.",
        ),
        (
            Slots(1),
            Plain(1),
            "output was a Slots with .a, .b and is now a Plain with .a, .b.",
        ),
        ([1, {"a": 2}], [3, {"a": 4}], "output has not changed."),
        (
            dict.fromkeys("abcdefghij"),
            1,
            "output was a dict with ['a'], ['b'], ['c'], ['d'], ['e'], ['f'], ['g'], ['h'], and 2 "
            "more and is now a single value.",
        ),
    ],
)
def test_describe_difference(before, after, sentence):
    assert describe_difference(flatten(before)[1], flatten(after)[1], "output") == sentence


def test_describe_difference_of_torch_node():
    cls = _output_class("DescribedOutput")
    assert (
        describe_difference(flatten([cls(1)])[1], flatten([cls(1, 2)])[1], "out")
        == "out[0] was a DescribedOutput with ['logits'] and is now "
        "a DescribedOutput with ['logits'], ['loss']."
    )
