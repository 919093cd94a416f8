"""Any pytree can be an argument of a region, and any pytree a result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import assert_same
from test_trees import Bag, Box, FrozenSlots, Keyed, Node, Output, Partly, Plain, Point, child
from torch import Tensor

from remat import MutationError, is_recomputing, remat
from remat.policies import save_ops

X, Y = torch.tensor([0.3, 0.4]), torch.tensor([1.3, 0.7])


def partly(x: Any, y: Any) -> Partly:
    """One whose attributes don't follow from those that are registered."""
    obj = Partly(x, y)
    obj.doubled, obj.later = x * y, "text"  # type: ignore[attr-defined]
    return obj


# How a tree is made of two tensors, and how these are read.
TREES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Tensor]]] = {
    "containers": (lambda x, y: ({"a": [x, None]}, y, "text"), lambda tree: tree[0]["a"][0] * tree[1]),
    "named tuple": (Point, lambda tree: tree.x * tree.y),
    "dataclass": (Plain, lambda tree: tree.a * tree.b),
    "frozen dataclass with slots": (FrozenSlots, lambda tree: tree.a * tree.b),
    "dataclass with inherited slots": (child, lambda tree: tree.a * tree.hidden()),
    "optree": (Box, lambda tree: tree.left * tree.right),
    "torch": (Bag, lambda tree: tree.left * tree.right),
    "torch with keys": (Keyed, lambda tree: tree.left * tree.right),
    "last fields of a torch dataclass": (lambda x, y: Node(c=x, d=y), lambda tree: tree.c * tree.d),
    "fields that torch leaves out": (partly, lambda tree: tree.x * tree.dropped.cos() + tree.doubled),
    "model output": (Output, lambda tree: tree.logits * tree["loss"]),
    "model output with one key": (lambda x, y: Output(loss=x * y), lambda tree: tree.loss + len(tree)),
}
# With what makes and uses a tree, a function of two tensors.
IN_REGIONS: dict[str, Callable] = {
    "argument": lambda wrap, make, use: lambda x, y: wrap(use)(make(x, y)),
    "argument by name": lambda wrap, make, use: lambda x, y: wrap(lambda *, n: use(n))(n=make(x, y)),
    "in a list": lambda wrap, make, use: lambda x, y: wrap(lambda found: use(found[1]))([x, make(x, y)]),
    "captured": lambda wrap, make, use: lambda x, y: (lambda n: wrap(lambda: use(n))())(make(x, y)),
    "result": lambda wrap, make, use: lambda x, y: use(wrap(lambda x, y: make(x.sin(), y.cos()))(x, y)),
    "both": lambda wrap, make, use: lambda x, y: use(wrap(lambda n: n)(wrap(lambda x, y: make(x.sin(), y))(x, y))),
    "nested": lambda wrap, make, use: lambda x, y: wrap(lambda n: wrap(use)(n).sin())(make(x, y)),
}
DERIVATIVES: dict[str, Callable] = {
    "autograd": lambda fn, *args: torch.autograd.functional.jacobian(fn, args),
    "func.grad": lambda fn, *args: torch.func.grad(lambda *args: fn(*args).sum(), (0, 1))(*args),
    "jacfwd": lambda fn, *args: torch.func.jacfwd(fn, (0, 1))(*args),
    "vmap(grad)": lambda fn, *args: torch.vmap(torch.func.grad(lambda *args: fn(*args).sum(), (0, 1)))(*args),
    "hessian": lambda fn, *args: torch.func.hessian(lambda *args: fn(*args).sum(), (0, 1))(*args),
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("policy", [None, save_ops("aten.sin", "aten.mul")], ids=["none", "policy"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("place", IN_REGIONS)
@pytest.mark.parametrize("kind", TREES)
def test_trees_have_their_derivatives(kind: str, place: str, derivative: str, policy: Any) -> None:
    make, read = TREES[kind]
    results = []
    for wrap in (partial(remat, policy=policy), lambda fn: fn):
        fn = IN_REGIONS[place](wrap, make, lambda tree: read(tree).sin().exp())
        results.append((fn(X, Y), DERIVATIVES[derivative](fn, X, Y)))
    assert_same(*results, exact=False)


def test_a_compiled_region_takes_a_tree() -> None:
    use = lambda x: remat(lambda tree: (tree.x * tree.dropped).sin().exp())(Partly(x, Y))
    assert_same(*(torch.func.jacrev(f)(X) for f in (torch.compile(use, backend="aot_eager"), use)), exact=False)


def test_leaves_that_are_returned_are_the_same_objects() -> None:
    thing, seen = object(), list[Any]()

    @remat
    def fn(tree: dict) -> Any:
        y = tree["x"].sin().exp()
        return [y, {"again": y}, (y, tree["same"][0]), tree["thing"], tree["n"]]

    def run(x: Tensor) -> Tensor:
        tree = {"x": x, "same": [x], "thing": thing, "n": torch.arange(2)}
        out = fn(tree)
        seen.append([out[0] is out[1]["again"] is out[2][0], out[2][1] is x, out[3] is thing, out[4] is tree["n"]])
        return (out[0] * out[2][1]).sum()

    run(torch.ones(3, requires_grad=True))
    torch.func.grad(run)(torch.ones(3))
    assert seen == [[True] * 4] * 2


def test_a_tree_that_the_function_changes_is_complete_in_the_recompute() -> None:
    runs = []

    def fn(tree: dict) -> Tensor:
        runs.append((is_recomputing(), sorted(tree)))
        return (tree.pop("x").sin() * tree["scale"]).exp()

    x = torch.ones(3, requires_grad=True)
    loss = remat(fn)({"x": x, "scale": 2.0}).sum()
    assert_same(torch.autograd.grad(loss, x), torch.autograd.grad((x.sin() * 2).exp().sum(), x))
    assert runs == [(False, ["scale", "x"]), (True, ["scale", "x"])]


def test_an_argument_that_was_changed_is_named_by_its_path() -> None:
    x, w = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = remat(lambda x, *, options: x * options["ws"][1].y)(x, options={"ws": [None, Point(1, w)]}).sum()
    w.mul_(2)
    with pytest.raises(MutationError, match=r"^argument options\['ws'\]\[1\].y was changed in place between"):
        loss.backward()
