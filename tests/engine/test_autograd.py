"""Each function of the table under plain autograd: the same bits, no more saved and no more recomputed than needed."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import KB, Case, N, assert_same, cases, orders_of, rand, repeated, tensor_leaves, total
from torch import Tensor

from benchmarks.measure import count_ops, held_bytes, leaked_bytes, peak_bytes
from remat import remat

pytestmark = pytest.mark.usefixtures("collector_off")


def nested(fn: Callable) -> Callable:
    inner = remat(fn)
    return remat(lambda *args: inner(*args))


WRAPS: dict[str, Callable] = {
    "no options": remat, "no early stop": remat(early_stop=False), "values": remat(determinism_check="values"),
    "no check": remat(determinism_check="none"), "nested": nested,
}  # fmt: skip


def run(case: Case, fn: Callable, order: int = 1) -> Any:
    """The result, the state after the forward and after the backward, and the gradients up to an order."""
    with case.state():
        args = case.make_args()
        out = fn(*args)
        leaves = [*tensor_leaves(args), *case.captured]
        results = tensor_leaves(out)
        seen = [t.requires_grad for t in results], [[a is b for b in (*results, *leaves)] for a in results]
        after = [t.detach().clone() for t in leaves], torch.rand(1)
        inputs, grads, tree = case.inputs(args), [], out
        for _ in range(order):
            value = total(tree)
            if not value.requires_grad:
                break
            grads.append(torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True))
            tree = torch.autograd.grad(value, inputs, create_graph=order > 1, allow_unused=True)
            grads.append(tree)
        still = [t.detach().clone() for t in leaves], torch.rand(1)
        return out, seen, after, still, grads


@pytest.mark.parametrize("wrap", WRAPS)
@cases()
def test_results_state_and_derivatives_are_those_of_the_function(case: Case, wrap: str) -> None:
    order = orders_of(lambda order: run(case, case.fn, order)) if case.double and wrap == "no options" else 1
    actual, expected = run(case, WRAPS[wrap](case.fn), order), run(case, case.fn, order)
    assert_same(actual, expected)
    assert bool(expected[-1]) == (case.name not in ("integers_only", "no_tensors_out"))


def forward(case: Case, fn: Callable, args: tuple) -> Any:
    with case.state():
        return fn(*args)


def step(case: Case, fn: Callable) -> None:
    with case.state():
        args = case.make_args()
        value = total(fn(*args))
        if value.requires_grad:
            torch.autograd.grad(value, case.inputs(args), allow_unused=True)


@cases()
def test_no_more_is_saved_than_without_a_region_and_all_is_freed(case: Case) -> None:
    """In addition only copies of small tensors that may change, and the generator's state."""
    args, fn = case.make_args(), remat(case.fn)
    forward(case, fn, args)
    copies = sum(t.nbytes for t in (*tensor_leaves(args), *case.captured) if not t.requires_grad)
    saved, without = (held_bytes(forward, case, each, args) for each in (fn, case.fn))
    assert saved <= without + copies + torch.get_rng_state().nbytes
    assert leaked_bytes(forward, case, fn, args) == 0
    step(case, fn)
    assert leaked_bytes(step, case, fn) == 0


@cases()
def test_no_operation_is_recomputed_more_than_once(case: Case) -> None:
    fn = remat(case.fn)
    step(case, fn)
    once = count_ops(lambda: forward(case, case.fn, case.make_args()))
    plain, ours = count_ops(step, case, case.fn), count_ops(step, case, fn)
    own = {"aten.detach", "aten.clone", "aten.copy_", "aten.view", "aten.alias", "aten.equal"}
    assert {op for op, n in ours.items() if op not in own and n - plain[op] > once[op]} == set()


def block(x: Tensor, w: Tensor) -> Tensor:
    """Half of an MLP, twice: plain autograd saves six tensors of it."""
    h = torch.tanh(x @ w).sin()
    return torch.tanh(h @ w).sin() @ w


def chain(fn: Callable, x: Tensor, w: Tensor, depth: int = 8) -> Tensor:
    return repeated(lambda x: fn(x, w), depth)(x)


@pytest.mark.parametrize("retain", [False, True])
def test_a_chain_saves_the_inputs_of_its_regions_and_its_peak_is_these_and_one_region(retain: bool) -> None:
    """One tensor per region; the first region's input is the caller's. A graph may be retained without its values."""
    x, w = rand(N, N), rand(N, N, seed=1) / N
    assert held_bytes(chain, remat(block), x, w) == 8 * KB
    assert held_bytes(chain, block, x, w) == 8 * 5 * KB
    step = lambda fn, depth: torch.autograd.grad(chain(fn, x, w, depth).sum(), (x, w), retain_graph=retain)
    peaks = {depth: peak_bytes(step, remat(block), depth) for depth in (8, 16)}
    assert peaks[16] - peaks[8] == 8 * KB
    assert peaks[8] <= (8 + 10) * KB and peaks[8] < peak_bytes(step, block, 8) / 2
    before = len(gc.get_objects())  # the collector visits all of them repeatedly
    out = chain(remat(lambda x, w: torch.tanh(x @ w)), x, w, 100)
    assert out.requires_grad and len(gc.get_objects()) - before < 100 * 38
