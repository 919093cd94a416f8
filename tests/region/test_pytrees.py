"""Any pytree can be an argument of a region, and any pytree a result."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remat import check, is_recomputing, remat, saved_residuals, scan
from remat.policies import save_ops


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    first: Any
    second: Any = None
    kind: str = "record"


@dataclass(frozen=True)
class Frozen:
    items: Any
    more: dict = field(default_factory=dict)


class Box:
    """Registered with optree."""

    def __init__(self, left: Any, right: Any, label: str) -> None:
        self.left, self.right, self.label = left, right, label


class Bag:
    """Registered with torch's pytree."""

    def __init__(self, content: list, label: str) -> None:
        self.content, self.label = content, label


@dataclass
class Node:
    """Registered with torch's pytree as a dataclass; torch leaves out fields that are None."""

    ab: Any = None
    cd: Any = None
    a: Any = None
    b: Any = None


@dataclass
class Partly:
    """Registered likewise, but without one of its fields."""

    x: Any
    left_out: Any = None
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.x * 2


@dataclass
class Output(OrderedDict):
    """Made and registered as Hugging Face's ``ModelOutput``."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})


optree.register_pytree_node(
    Box,
    lambda box: ((box.left, box.right), box.label, ("left", "right")),
    lambda label, children: Box(*children, label),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)
torch_pytree.register_pytree_node(
    Bag,
    lambda bag: (list(bag.content), bag.label),
    lambda children, label: Bag(list(children), label),
    serialized_type_name="tests.test_pytrees.Bag",
)


torch_pytree.register_dataclass(Node)
torch_pytree.register_dataclass(Partly, field_names=["x"], drop_field_names=["left_out"])
torch_pytree.register_pytree_node(
    Output,
    lambda out: (list(out.values()), list(out)),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
    flatten_with_keys_fn=lambda out: ([(torch_pytree.MappingKey(k), v) for k, v in out.items()], None),
    serialized_type_name="tests.test_pytrees.Output",
)

NODES = (tuple, list, deque, dict, Record, Frozen, Node, Box, Bag)


class Spec(NamedTuple):
    """A description of a tensor: tracked by autograd, or of floats, integers or booleans."""

    kind: str
    size: int


specs = st.builds(Spec, st.sampled_from(["grad", "grad", "float", "int", "bool"]), st.integers(0, 3))
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(-1, 1), st.text("ab", max_size=2),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2]), torch.sin, int, ...]),
)  # fmt: skip
keys = st.one_of(st.text("ab", min_size=1, max_size=2), st.integers(0, 3))


def nodes(children: st.SearchStrategy) -> st.SearchStrategy:
    dicts = st.dictionaries(keys, children, max_size=3)
    named = st.dictionaries(st.sampled_from(["a", "b", "c"]), children, max_size=3)
    lists = st.lists(children, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        dicts,
        dicts.map(OrderedDict),
        named.map(lambda d: defaultdict(list, d)),
        st.builds(Point, children, children),
        st.builds(Record, children, children, st.sampled_from(["a", "b"])),
        st.builds(Frozen, children, named),
        st.builds(Node, children, children),
        st.builds(Node, cd=children, b=children),
        st.builds(Box, children, children, st.sampled_from(["a", "b"])),
        st.builds(Bag, lists, st.sampled_from(["a", "b"])),
    )


trees = st.recursive(st.one_of(specs, plain), nodes, max_leaves=8)


def walk(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to each leaf, without a pytree library."""
    if isinstance(tree, Spec):
        return fn(tree)
    if isinstance(tree, Point):
        return Point(*(walk(fn, t) for t in tree))
    if isinstance(tree, torch.Size):
        return fn(tree)
    if type(tree) in (list, tuple, deque):
        return type(tree)([walk(fn, t) for t in tree])
    if type(tree) is defaultdict:
        return defaultdict(tree.default_factory, {k: walk(fn, v) for k, v in tree.items()})
    if type(tree) in (dict, OrderedDict):
        return type(tree)((k, walk(fn, v)) for k, v in tree.items())
    if isinstance(tree, Record):
        return Record(walk(fn, tree.first), walk(fn, tree.second), tree.kind)
    if isinstance(tree, Frozen):
        return Frozen(walk(fn, tree.items), walk(fn, tree.more))
    if isinstance(tree, Node):
        return Node(*(walk(fn, t) for t in vars(tree).values()))
    if isinstance(tree, Box):
        return Box(walk(fn, tree.left), walk(fn, tree.right), tree.label)
    if isinstance(tree, Bag):
        return Bag([walk(fn, t) for t in tree.content], tree.label)
    return fn(tree)


def leaves_of(tree: Any) -> list[Any]:
    found: list[Any] = []
    walk(found.append, tree)
    return found


def structure(tree: Any) -> Any:
    """A value that is equal for trees of the same structure and the same plain leaves."""

    def describe(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return ("tensor", tree.dtype, tree.shape)
        if isinstance(tree, torch.Size) or not isinstance(tree, NODES):
            return (type(tree), tree)
        if isinstance(tree, dict):
            factory = getattr(tree, "default_factory", None)
            return (type(tree), factory, [(k, describe(v)) for k, v in tree.items()])
        children = list(vars(tree).values()) if not isinstance(tree, (tuple, list, deque)) else tree
        return (type(tree), [describe(t) for t in children])

    return describe(tree)


def build(template: Any, floats: Iterator[Tensor] | None = None) -> Any:
    """The template with tensors; those of kind "grad" are taken from `floats`, if given."""

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Spec):
            return leaf
        values = torch.linspace(-1, 2, leaf.size) if leaf.size else torch.tensor(0.7)
        if leaf.kind == "grad":
            return values.requires_grad_() if floats is None else next(floats)
        return {"float": values, "int": values.long(), "bool": values > 0}[leaf.kind]

    return walk(make, template)


def followed(template: Any) -> list[Tensor]:
    return [t for t in leaves_of(build(template)) if isinstance(t, Tensor) and t.requires_grad]


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def compute(*args: Any, **kwargs: Any) -> Any:
    """Some leaves are changed, some returned as they are; all depend on all floats."""
    inputs = leaves_of([args, kwargs])
    total = sum((t.sin().exp().sum() for t in inputs if is_float(t)), torch.zeros(()))
    numbers = iter(range(1000))

    def change(leaf: Any) -> Any:
        n = next(numbers) % 4
        if is_float(leaf):
            return [(leaf * total).sin(), leaf, leaf.detach() + 1, leaf.exp() * total][n]
        if isinstance(leaf, Tensor):
            return leaf if n < 2 else ~leaf
        return leaf

    return {"args": walk(change, args), "kwargs": walk(change, kwargs), "total": total}


def loss_of(out: Any) -> Tensor:
    terms = [t.cos().sum() for t in leaves_of(out) if is_float(t) and t.requires_grad]
    return sum(terms, torch.zeros(()))


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def same_trees(actual: Any, expected: Any) -> None:
    assert structure(actual) == structure(expected)
    for a, b in zip(leaves_of(actual), leaves_of(expected), strict=True):
        if isinstance(a, Tensor):
            assert a.requires_grad == b.requires_grad
            same(a.detach(), b.detach())


many = settings(max_examples=60, deadline=None, derandomize=True)


@many
@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from(["u", "v"]), trees))
def test_plain_autograd(args: list, kwargs: dict) -> None:
    results = []
    for f in (remat(compute, early_stop=False), compute):
        given_args, given_kwargs = build(args), build(kwargs)
        inputs = [t for t in leaves_of([given_args, given_kwargs]) if is_float(t)]
        inputs = [t for t in inputs if t.requires_grad]
        out = f(*given_args, **given_kwargs)
        passed = [any(t is x for x in inputs) for t in leaves_of(out) if isinstance(t, Tensor)]
        loss, grads = loss_of(out), []
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        results.append((out, passed, grads))
    same_trees(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    same(results[0][2], results[1][2])


@many
@given(trees, st.dictionaries(st.sampled_from(["u", "v"]), trees))
def test_torch_func_grad(arg: Any, kwargs: dict) -> None:
    template = (arg, kwargs)
    floats = [t.detach() for t in followed(template)]
    if not floats:
        return
    results = []
    for f in (remat(compute), compute):
        trees_seen = []

        def loss(floats: list[Tensor]) -> Tensor:
            args, kwargs = build(template, iter(floats))
            out = f(args, **kwargs)
            trees_seen.append(structure(out))
            return sum((t.cos().sum() for t in leaves_of(out) if is_float(t)), torch.zeros(()))

        results.append((trees_seen, torch.func.grad(loss)(floats)))
    assert results[0][0] == results[1][0]
    same(results[0][1], results[1][1])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(trees)
def test_vmap_of_grad(arg: Any) -> None:
    floats = [torch.stack([t.detach(), t.detach() + 0.3]) for t in followed(arg)]
    if not floats:
        return
    results = []
    for f in (remat(compute), compute):

        def loss(floats: list[Tensor]) -> Tensor:
            out = f(build(arg, iter(floats)))
            return sum((t.cos().sum() for t in leaves_of(out) if is_float(t)), torch.zeros(()))

        results.append(torch.vmap(torch.func.grad(loss))(floats))
    torch.testing.assert_close(*results)


@many
@given(trees)
def test_identity_returns_the_same_leaves(tree: Any) -> None:
    given_tree = build(tree)
    out = remat(lambda t: t)(given_tree)
    same_trees(out, given_tree)
    assert all(
        a is b or a == b if not isinstance(a, Tensor) else a is b
        for a, b in zip(leaves_of(out), leaves_of(given_tree), strict=True)
    )


@pytest.mark.parametrize("template", [[], {}, (), None, "text", Point([], {}), Bag([], "a")])
def test_trees_without_tensors(template: Any) -> None:
    w = torch.ones(3, requires_grad=True)
    out, given_back = remat(lambda t: (w.sin().exp(), t))(template)
    assert structure(given_back) == structure(template)
    same(torch.autograd.grad(out.sum(), w), torch.autograd.grad(w.sin().exp().sum(), w))


def test_one_tensor_in_many_places() -> None:
    results = []
    for wrap in (remat, lambda f: f):
        x = torch.linspace(0, 1, 3, requires_grad=True)
        f = wrap(lambda tree: {"a": tree["a"] * tree["b"][0], "b": [tree["a"], tree["b"][0].sin()]})
        out = f({"a": x, "b": [x]})
        assert out["b"][0] is x
        loss = (out["a"] * out["b"][0] * out["b"][1]).sum()
        results.append(torch.autograd.grad(loss, x))
    same(*results)


def test_one_tensor_returned_in_many_places() -> None:
    def fn(x: Tensor) -> Any:
        y = x.sin().exp()
        return [y, {"again": y}, (y, x)]

    x = torch.ones(3, requires_grad=True)
    out = remat(fn)(x)
    assert out[0] is out[1]["again"] is out[2][0] and out[2][1] is x
    shared = []
    torch.func.grad(lambda x: (shared.append(remat(fn)(x)), shared[-1][0].sum())[1])(torch.ones(3))
    assert shared[0][0] is shared[0][1]["again"] is shared[0][2][0]


def test_a_tree_that_the_function_changes_is_complete_in_the_recompute() -> None:
    # Each run gets its own containers, so the function never changes those of another run.
    runs = []

    def fn(tree: dict) -> Tensor:
        runs.append((is_recomputing(), sorted(tree)))
        x = tree.pop("x")
        return (x.sin() * tree["scale"]).exp()

    x = torch.ones(3, requires_grad=True)
    loss = remat(fn)({"x": x, "scale": 2.0}).sum()
    same(torch.autograd.grad(loss, x), torch.autograd.grad((x.sin() * 2).exp().sum(), x))
    assert runs == [(False, ["scale", "x"]), (True, ["scale", "x"])]


# --- dataclasses that are registered with torch's pytree --------------------------------------------------------------


def use_node(n: Node) -> Tensor:
    return ((n.ab if n.ab is not None else n.a * 3) * (n.cd if n.cd is not None else n.b)).sin().cos()


def use_partly(n: Partly) -> Tensor:
    return (n.x.sin() * (1 if n.left_out is None else n.left_out.cos())).exp() * n.twice.sin()


def partly(x: Tensor, y: Tensor) -> Partly:
    """One whose attributes don't follow from those that are registered."""
    obj = Partly(x, y)
    obj.twice = x * y
    return obj


# How one is made of two tensors, and used.
DATACLASSES: dict[str, tuple[Callable, Callable]] = {
    "the first fields": (Node, use_node),
    "the last fields": (lambda x, y: Node(a=x, b=y), use_node),
    "fields that are left out": (partly, use_partly),
    "a dict too": (Output, lambda out: (out.logits * out["loss"]).sin().cos()),
    "a dict with one key": (lambda x, y: Output(loss=x * y), lambda out: (out.loss + len(out)).sin().cos()),
}
IN_REGIONS: dict[str, Callable] = {  # with what `make` and `use` are, a function of two tensors
    "argument": lambda wrap, make, use: lambda x, y: wrap(use)(make(x, y)),
    "argument by name": lambda wrap, make, use: lambda x, y: wrap(lambda *, n: use(n))(n=make(x, y)),
    "in a list": lambda wrap, make, use: lambda x, y: wrap(lambda found: use(found[1]))([x, make(x, y)]),
    "captured": lambda wrap, make, use: lambda x, y: (lambda n: wrap(lambda: use(n))())(make(x, y)),
    "result": lambda wrap, make, use: lambda x, y: use(wrap(lambda x, y: make(x.sin(), y.cos()))(x, y)),
    "both": lambda wrap, make, use: lambda x, y: use(wrap(lambda n: n)(wrap(lambda x, y: make(x.sin(), y))(x, y))),
    "nested": lambda wrap, make, use: lambda x, y: wrap(lambda n: wrap(use)(n).sin())(make(x, y)),
    "a carry": lambda wrap, make, use: (
        lambda x, y: use((lambda n: n if wrap is plainly else scan(lambda n, _: (n, None), n, length=2)[0])(make(x, y)))
    ),
}


def plainly(fn: Callable, **_: Any) -> Callable:
    return fn


def gradients(fn: Callable, *inputs: Tensor) -> tuple:
    inputs = tuple(each.detach().requires_grad_() for each in inputs)
    return torch.autograd.grad(fn(*inputs).sum(), inputs)


DERIVATIVES: dict[str, Callable] = {
    "autograd": gradients,
    "func.grad": lambda fn, *inputs: torch.func.grad(lambda *args: fn(*args).sum(), (0, 1))(*inputs),
    "jacfwd": lambda fn, *inputs: torch.func.jacfwd(fn, (0, 1))(*inputs),
    "vmap(grad)": lambda fn, *inputs: torch.vmap(torch.func.grad(lambda *args: fn(*args).sum(), (0, 1)))(*inputs),
    "hessian": lambda fn, *inputs: torch.func.hessian(lambda *args: fn(*args).sum(), (0, 1))(*inputs),
}
X, Y = torch.tensor([0.3, 0.4]), torch.tensor([1.3, 0.7])


@pytest.mark.parametrize("policy", [None, save_ops("aten.sin", "aten.mul")], ids=["none", "policy"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("place", IN_REGIONS)
@pytest.mark.parametrize("kind", DATACLASSES)
def test_a_dataclass_registered_with_torch(kind: str, place: str, derivative: str, policy: Any) -> None:
    results = []
    for wrap in (partial(remat, policy=policy), plainly):
        fn = IN_REGIONS[place](wrap, *DATACLASSES[kind])
        results.append((fn(X, Y), DERIVATIVES[derivative](fn, X, Y)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", DATACLASSES)
def test_reports_and_compiled_regions_with_a_dataclass_registered_with_torch(kind: str) -> None:
    make, use = DATACLASSES[kind]
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    assert check(use, make(x, y))
    assert {each.op for each in saved_residuals(use, make(x, y)) if each.kind != "output"} <= {"aten.sin", "aten.mul"}
    compiled = torch.compile(remat(use), backend="aot_eager")
    same(gradients(lambda x, y: compiled(make(x, y)), X, Y), gradients(lambda x, y: use(make(x, y)), X, Y))
