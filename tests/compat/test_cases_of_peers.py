"""Programs from the tests of torch's checkpoint that the other files don't have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import PeakMemory, gc_disabled
from remat import policies, remat

pytestmark = pytest.mark.filterwarnings("ignore:The policy .* has matched none:UserWarning")
with_policies = pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin", "aten.mm")], ids=str)


def d(fn: Callable) -> Callable:
    """The derivative by autograd, which can be differentiated again."""

    def call(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

    return call


def second(x: Tensor) -> Tensor:
    return x.cos().sin().exp()


NESTED: dict[str, Callable[[Callable, Callable], Callable]] = {
    "c": lambda c, f: c(f),
    "d c c": lambda c, f: d(c(c(f))),
    "d c d": lambda c, f: d(c(d(f))),
    "c d d c": lambda c, f: c(d(d(c(f)))),
    "d c d d c": lambda c, f: d(c(d(d(c(f))))),
    "d c d c d c": lambda c, f: d(c(d(c(d(c(f)))))),
    "d d c(c c)": lambda c, f: d(d(c(lambda x: c(second)(c(f)(x))))),
    "d c(d c cos)": lambda c, f: d(c(lambda x: d(c(f))(x.cos()).cos())),
    "d c d c(c c)": lambda c, f: d(c(d(c(lambda x: c(second)(c(f)(x)))))),
}


def chain(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


def chain_after_a_backward(x: Tensor) -> Tensor:
    torch.autograd.grad(chain(x).sum(), x)
    return x.sin().cos().exp()


def nodes(tensor: Tensor) -> Iterator[Any]:
    seen, found = set(), [tensor.grad_fn]
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.extend(next_node for next_node, _ in node.next_functions)
            yield node


class Mark:
    """Lives as long as the node that it is attached to."""


@pytest.mark.parametrize("fn", [chain, chain_after_a_backward])
@pytest.mark.parametrize("nested", NESTED)
@with_policies
def test_regions_in_derivatives_in_regions_are_right_and_freed(policy: Any, nested: str, fn: Callable) -> None:
    build, x = NESTED[nested], rand(3)
    wrapped = build(lambda f: remat(f, policy=policy, early_stop=fn is chain), fn)
    assert_same(wrapped(x).detach(), build(lambda f: f, fn)(x).detach(), exact=False)
    with gc_disabled():
        out = wrapped(x)
        marks = []
        for node in nodes(out):
            node.metadata["mark"] = mark = Mark()
            marks.append(weakref.ref(mark))
        assert marks
        del out, node, mark
        assert [mark() for mark in marks if mark() is not None] == []


@pytest.mark.parametrize("retain", [False, True])
def test_values_are_freed_one_by_one_as_they_are_read(retain: bool) -> None:
    def live(wrap: Callable, memory: PeakMemory) -> list[int]:
        found: list[int] = []

        def steps(x: Tensor) -> Tensor:
            for _ in range(4):
                x = x.square()
                x.register_hook(lambda _: found.append(memory.live))
            return x.sum()

        wrap(steps)(x).backward(retain_graph=retain)
        return found

    x = rand(1000)
    x.grad = torch.zeros_like(x)
    found = []
    with gc_disabled():
        for wrap in (lambda f: f, lambda f: lambda x: checkpoint(f, x, use_reentrant=False), remat):
            with PeakMemory() as memory:
                found.append(live(wrap, memory))
    its, ours = found[1:]
    assert ours[0] == its[0] < ours[3]  # the first hook runs before the recompute
    assert ours[1] > ours[2] > ours[3]
    # A node of a retained graph may read its value again, so the value is released when another node reads its own.
    assert all(a <= b + retain * x.nbytes for a, b in zip(ours, its, strict=True))
