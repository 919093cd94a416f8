"""Backward passes release what was recomputed for them; several in a `GraphExecGroup` share one recompute."""

import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import assert_same, grad, rand
from side_by_side import Runs, both
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from benchmarks.measure import PeakMemory, gc_disabled
from remat import RematError
from remat import remat as transform
from remat._core import private
from remat._core.passes import Pass, nearest_engine_call
from remat._core.private import engine_call, gradient_hooks


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results that have nothing in common but the input."""
    return x.sin().exp(), x.cos().exp()


def gradients(fn: Callable, x: Tensor) -> tuple[Any, ...]:
    return tuple(grad(out, x, retain_graph=True) for out in fn(x))


@both
@pytest.mark.parametrize("retain", [False, True])
def test_one_recompute_for_two_passes(module: Any, retain: bool) -> None:
    x, runs = rand(3), Runs(two)
    first, second = module.checkpoint(runs, x, use_reentrant=False)
    with module.GraphExecGroup():
        found = grad(first, x, retain_graph=True), grad(second, x, retain_graph=retain)
    assert runs.count == 2
    assert_same(found, gradients(two, x))
    first, second = transform(runs)(x)
    with torch.utils.checkpoint.GraphExecGroup():
        assert_same(first.grad_fn._saved_result, two(x)[0])  # not in a pass, so it recomputes for this read only
        found = grad(first, x, retain_graph=True), grad(second, x, retain_graph=True)
        with pytest.raises(RematError, match="need the same value"):
            grad(second, x)
    assert_same(found, gradients(two, x))
    assert runs.count == 5


@both
def test_two_passes_of_a_region_in_a_region_recompute_it_once(module: Any) -> None:
    """They read the input of the inner region, a value of the outer one."""
    x, runs = rand(3), Runs(lambda x: module.checkpoint(two, x * 2, use_reentrant=False))
    first, second = module.checkpoint(runs, x, use_reentrant=False)
    with module.GraphExecGroup():
        found = grad(first, x, retain_graph=True), grad(second, x)
    assert_same(found, gradients(lambda x: two(x * 2), x))
    assert runs.count == 2


@both
def test_a_pass_in_no_group_or_in_another_one_recomputes(module: Any) -> None:
    x, runs = rand(3), Runs(two)
    group = module.GraphExecGroup()
    for i in range(2):  # a group can be used for another graph
        first, second = module.checkpoint(runs, x, use_reentrant=False)
        grad(first, x, retain_graph=True)
        with group:
            one = grad(first, x, retain_graph=True)
        with group:  # the same one
            other = grad(second, x, retain_graph=True)
        assert runs.count == 4 * i + 3
        with module.GraphExecGroup():
            assert_same((one, other, grad(second, x)), (*gradients(two, x), other))
        assert runs.count == 4 * i + 4


@both
@pytest.mark.parametrize("retain", [False, True])
def test_passes_that_overlap_are_an_error(module: Any, retain: bool) -> None:
    x, deep = rand(3), lambda x: x.sin().exp().sin()
    out = module.checkpoint(deep, x, use_reentrant=False)
    with module.GraphExecGroup():
        grad(out, x, retain_graph=True)
        with pytest.raises(CheckpointError, match=r"[Oo]verlap"):
            grad(out, x, retain_graph=retain)
    assert_same(grad(out, x), grad(deep(x), x))


def test_the_call_of_the_engine_that_runs_a_hook() -> None:
    x, calls = rand(3), list[Any]()
    x.register_hook(lambda _: calls.append(nearest_engine_call(sys._getframe())))
    x.register_post_accumulate_grad_hook(lambda _: calls.append(nearest_engine_call(sys._getframe(), sys._getframe())))
    assert [len(hooks) for t in (x, x.detach()) for hooks in gradient_hooks(t)] == [1, 1, 0, 0]
    x.sum().backward()
    assert calls[0].f_code is engine_call.__code__ and calls[1] is nearest_engine_call(sys._getframe()) is None
    assert nearest_engine_call(None, within=sys._getframe()) is None  # the frames of a thread that has gone on


def test_a_pass_releases_what_the_reader_before_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nodes, by their numbers, and of the inner regions of each frame."""
    emptied, running = list[str](), Pass()
    frame = type("Slots", (), {"empty": lambda self: emptied.append("all slots")})()
    monkeypatch.setattr(private, "sequence_number", lambda node: node)
    steps = ((1, None, ""), (1, None, ""), (2, None, "01"), (None, "A", "01"), (None, "A", "01"), (None, "B", "0134"),
             (None, None, "01234"), (None, None, "012346"))  # fmt: skip
    slots = [SimpleNamespace(value=str(i)) for i in range(len(steps))]
    for slot, (node, reader, expected) in zip(slots, steps):
        monkeypatch.setattr(private, "current_node", lambda node=node: node)
        running.read(slot, frame, reader)
        assert "".join(str(i) for i, each in enumerate(slots) if each.value is None) == expected
    running.frames = [weakref.ref(frame), weakref.ref(type(frame)())]
    del running
    assert [each.value for each in slots] == [None] * len(steps)
    assert emptied == ["all slots"]


@both
@pytest.mark.parametrize("retain", [False, True])
def test_values_live_as_long_as_a_pass_can_need_them(module: Any, retain: bool) -> None:
    x = rand(64)
    with gc_disabled(), PeakMemory() as memory:
        live = lambda: memory.live // x.nbytes
        first, second = module.checkpoint(two, x, use_reentrant=False)
        assert live() == 2
        with module.GraphExecGroup() as group:
            grad(first, x, retain_graph=True)
            assert live() == 3  # what the second pass needs
            grad(second, x, retain_graph=retain)
            assert live() == 2
        del group
        assert live() == 2
        del first, second
        assert live() == 0
