"""Programs from the tests of torch's checkpoint and of JAX that the other files don't have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import PeakMemory, gc_disabled, held_bytes
from remat import policies, remat, saved_residuals

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


@with_policies
def test_a_backward_of_a_part_in_a_hook_of_the_whole(policy: Any) -> None:
    """The hook, on a node of the forward, is called once: the recompute has its own nodes."""
    calls: list[Any] = []

    def step(wrap: Callable) -> Tensor:
        a = rand(3)
        x, out = wrap(lambda a: (a.sin().cos(), a.sin().cos().sin()))(a)
        out.grad_fn.register_hook(lambda *_: calls.append(x.backward(torch.ones_like(x), retain_graph=True)))
        out.sum().backward(retain_graph=True)
        return a.grad

    assert_same(step(lambda f: remat(f, policy=policy)), step(lambda f: f))
    assert len(calls) == 2


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


runs: list[int] = []


@torch.library.custom_op("remat_peers::sin_and_number", mutates_args=())
def sin_and_number(x: Tensor) -> tuple[Tensor, int]:
    runs.append(1)
    return x.sin(), 2


sin_and_number.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("policy", [None, policies.save_ops(sin_and_number)], ids=str)
def test_an_operator_with_a_number_among_its_results(policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        y, number = sin_and_number(x)
        return (y * number * x.sin().exp()).sin()

    x = rand(5)
    expected = torch.autograd.grad(fn(x).sum(), x)
    runs.clear()
    assert_same(torch.autograd.grad(remat(fn, policy=policy)(x).sum(), x), expected)
    assert len(runs) == (2 if policy is None else 1)


CONSTANTS: dict[str, tuple[Callable, int]] = {  # with the number of inputs that the backward reads
    "diagonal": (lambda x: torch.einsum("ii->i", x), 0),
    "zeros": (lambda x: torch.zeros_like(x) * x, 1),  # the region needs its input to make them
    "a large constant": (lambda x: x.sum() * torch.ones(100, 100, dtype=x.dtype).sin().sum(), 1),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_recomputed(name: str) -> None:
    (fn, inputs), x = CONSTANTS[name], rand(100, 100)
    found = saved_residuals(remat(fn), x, inputs=True)
    assert len(found) == inputs and all(each.source.startswith("argument") for each in found)
    assert held_bytes(remat(fn), x) == fn(x).untyped_storage().nbytes() * (name != "diagonal")
    assert_same(torch.autograd.grad(remat(fn)(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))
