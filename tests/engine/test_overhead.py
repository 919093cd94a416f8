"""The overhead of a region beyond its operations, as far as it can be counted rather than timed."""

from __future__ import annotations

import gc

import optree
import pytest
import torch

from benchmarks.measure import gc_disabled
from remat import remat
from remat._region.arguments import Positional, Tensors, take_apart


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def test_few_objects_live_for_each_region() -> None:
    """The garbage collector visits all of them repeatedly, so with many regions each would take more time."""
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    fn = remat(layer)
    fn(x, w)
    with gc_disabled():
        before = len(gc.get_objects())
        out = x
        for _ in range(100):
            out = fn(out, w)
        added = len(gc.get_objects()) - before
    assert 100 <= added <= 100 * 32
    torch.autograd.grad(out.sum(), [x, w])


def test_calls_with_as_many_tensors_share_their_structure() -> None:
    x, w = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    (given, tensors), (again, others) = take_apart((x, w), {}), take_apart((w, x), {})
    assert given is again and isinstance(given, Positional)
    assert tensors == [x, w] and others == [w, x]
    args, kwargs = given.filled([w, x, x])  # the last one is an operand beyond the arguments
    assert list(args) == [w, x] and not kwargs
    assert [given.name(i) for i in range(2)] == ["argument args[0]", "argument args[1]"]


@pytest.mark.parametrize("case", ["twice", "keyword", "number", "container"])
def test_other_calls_do_not_share_their_structure(case: str) -> None:
    x, w = torch.ones(2), torch.ones(2)
    args, kwargs = {
        "twice": ((x, w, x), {}),
        "keyword": ((x,), {"w": w}),
        "number": ((x, w, 3), {}),
        "container": (([x, w],), {}),
    }[case]
    given, tensors = take_apart(args, kwargs)
    assert not isinstance(given, Positional) and len(tensors) == 2
    new = [torch.zeros(2), torch.zeros(2)]
    filled = given.filled(new)
    assert [t for t in optree.tree_leaves(filled) if t is new[0] or t is new[1]]
    assert not any(leaf is x or leaf is w for leaf in optree.tree_leaves(filled))


def test_tensors_in_containers_go_back_where_they_were() -> None:
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    given, tensors = take_apart(({"z": a, "y": [b]},), {"w": (c,)})
    assert isinstance(given, Tensors)
    by_name = {given.name(i): tensor for i, tensor in enumerate(tensors)}
    assert by_name == {"argument args[0]['z']": a, "argument args[0]['y'][0]": b, "argument kwargs['w'][0]": c}
    args, kwargs = given.filled([*(t + 10 for t in tensors), torch.zeros(2)])  # the last one is an operand beyond them
    assert list(args[0]) == ["z", "y"] and list(kwargs) == ["w"]
    assert [t[0].item() for t in (args[0]["z"], args[0]["y"][0], kwargs["w"][0])] == [10, 11, 12]
