"""Reference counts alone free everything that a region made, whatever happens to it."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import KB, N, grad, rand
from torch import Tensor

from benchmarks.measure import PeakMemory, assert_freed_without_gc, gc_disabled
from remat import is_recomputing, policies, remat


class Fails(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise KeyError("on purpose")


class Marker:
    pass


USES: dict[str, Callable] = {
    "an error in the first run": lambda out, x, w: None,
    "no backward": lambda out, x, w: None,
    "a retained graph": lambda out, x, w: grad(out, (x, w), retain_graph=True),
    "two backwards": lambda out, x, w: [grad(out, (x, w), retain_graph=retain) for retain in (True, False)],
    "a part": lambda out, x, w: grad(out, w),
    "a double backward": lambda out, x, w: grad(grad(out, x, create_graph=True)[0], w),
    "a read value": lambda out, x, w: out.grad_fn._saved_result,
    "an error in the recompute": lambda out, x, w: grad(out, x),
    "an error elsewhere": lambda out, x, w: grad(out, (x, w), retain_graph=True),
}


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["one", "nested"])
@pytest.mark.parametrize("use", USES)
def test_everything_is_freed_after(use: str, nested: bool, policy: Any) -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)
    raised = False

    with assert_freed_without_gc() as watch:
        marker = Marker()

        def f(x: Tensor, w: Tensor, marker: Marker) -> Tensor:
            h = (x @ w).tanh()
            if not is_recomputing():
                watch(h)
            if use == f"an error in the {'recompute' if is_recomputing() else 'first run'}":
                raise KeyError("on purpose")
            return (h @ w).sin().exp()

        fn = remat(f, policy=policy)
        if nested:
            fn = remat(lambda x, w, marker, fn=fn: fn(fn(x, w, marker), w, marker).exp(), policy=policy)
        watch(marker, fn)
        out = None
        try:
            out = fn(Fails.apply(x) if use == "an error elsewhere" else x * 1, w, marker)
            USES[use](out, x, w)
        except KeyError:
            raised = True
        del out, fn, marker, f
    assert raised is use.startswith("an error") and not is_recomputing() and torch.is_grad_enabled()


def test_what_a_pass_recomputed_before_it_raised_is_released() -> None:
    """Although the graph is alive."""
    x, w = rand(N, N), rand(N, N, seed=1)
    with gc_disabled(), PeakMemory() as memory:
        out = remat(lambda x, w: Fails.apply((x @ w).tanh().sin()).exp().tanh().sin())(x, w)
        held = memory.live
        with pytest.raises(KeyError):
            torch.autograd.grad(out, (x, w), torch.ones_like(out), retain_graph=True)
        gc.collect()  # free the exception's traceback
        assert memory.live == held


def test_the_input_of_a_region_is_freed_by_the_backward() -> None:
    """Although the graph before the region is alive."""
    x, w = rand(N, N), rand(N, N, seed=1)
    with gc_disabled(), PeakMemory() as memory:
        h = x + 1
        out = remat(lambda x, w: ((x @ w).tanh() @ w).tanh())(h, w)
        grad(out, (h, w))
        del h
        assert memory.live == KB  # the result


def test_a_region_that_reads_its_last_activation_keeps_no_earlier_ones() -> None:
    """The graph of the last one would lead to the region before, which read the one before, and so on."""
    kept: list[Any] = [torch.zeros(3)]

    def fn(x: Tensor) -> Tensor:
        kept[0] = (x + kept[0].detach()).sin()
        return kept[0].exp()

    region, nodes = remat(fn), list[weakref.ref]()
    for _ in range(4):
        region(rand(3))
        kept[0].grad_fn.metadata["alive"] = alive = Marker()
        nodes.append(weakref.ref(alive))
        del alive
    assert [node() is not None for node in nodes] == [False, False, False, True]


def test_a_node_of_a_recompute_that_the_region_stores() -> None:
    """The node owns the hook of the recompute, which must not lead to the function, and so to the node."""

    def run() -> weakref.ref:
        nodes, scale = list[Any](), torch.ones(3)

        def fn(x: Tensor) -> Tensor:
            y = (x * scale).exp()
            nodes.append(y.grad_fn)
            return y.cos()

        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad(remat(fn)(x).sum(), x)
        return weakref.ref(scale)

    with gc_disabled():
        assert run()() is None
