"""``remat.scan`` against the loop in Python: values, derivatives, recomputed steps and peaks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import remat
from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, peak_bytes
from remat import policies
from remat._scan.loop import depth, recomputed, segments

Loop = Callable[..., Any]


@pytest.fixture(autouse=True)
def recursion_limit() -> Iterator[None]:
    """Python's default: inductor raises it for the whole process."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def loop(step: Callable, carry: Any, xs: Any = None, length: int | None = None) -> tuple[Any, Any]:
    """The loop that ``scan`` replaces."""
    count = len(tree_leaves(xs)[0]) if length is None else length
    entries = [None] * count if xs is None else [tree_map(lambda t, i=i: t[i], xs) for i in range(count)]
    ys = []
    for x in entries:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, None if ys[0] is None else tree_map(lambda *each: torch.stack(each), *ys)


def scan_with(checkpoints: Any, **options: Any) -> Loop:
    return lambda *args, **kwargs: remat.scan(*args, checkpoints=checkpoints, **options, **kwargs)


# --- the schedule -----------------------------------------------------------------------------------------------------


@cache
def cost(count: int, spare: int) -> int:
    """The number of steps that the reversal of a region of ``count`` steps computes."""
    return count + sum(cost(*each) for each in segments(count, spare))


def test_the_schedule_is_optimal() -> None:
    """Compared with the formula for all sizes, and with a search through all schedules for small sizes."""
    for count in range(1, 1001):
        for spare in range(21):
            parts = segments(count + 1, spare)
            assert sum(size for size, _ in parts) == count and len(parts) <= spare + 1
            assert all(size > 0 for size, _ in parts)
            if spare or count < 200:
                assert sum(cost(*each) for each in parts) == formula(count, spare) == recomputed(count, spare)
    best = [[count * (count + 1) // 2 if count else 0] for count in range(82)]
    for spare in range(1, 21):
        for count in range(82):
            splits = [first + best[count - first][spare - 1] + best[first][spare] for first in range(1, count)]
            best[count].append(min(splits, default=count))
    assert all(best[n + 1][k] - (n + 1) == recomputed(n, k) for n in range(1, 81) for k in range(21))


def formula(count: int, checkpoints: int) -> int:
    """Griewank and Walther: ``r n - C(s + r, s + 1)`` for n steps, the last one the loss, and s saved carries."""
    n, s, r = count + 1, checkpoints + 1, 0
    while comb(s + r, s) < n:
        r += 1
    return r * n - comb(s + r, s + 1)


def test_the_depth_of_the_schedule() -> None:
    @cache
    def nested(count: int, spare: int) -> int:
        return max((nested(*each) + 1 for each in segments(count, spare)), default=0)

    assert all(nested(n + 1, k) == depth(n + 1, k) for n in range(1, 150) for k in range(12))


# --- values, derivatives, recomputed steps ----------------------------------------------------------------------------

COUNT = 30
calls = [0]  # a recompute would restore a plain number
torch.manual_seed(0)
H, XS = torch.randn(4, 8, dtype=torch.double), torch.randn(COUNT, 4, 8, dtype=torch.double)
W = torch.randn(8, 8, dtype=torch.double) * 0.3


def total(run: Loop) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def loss(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            calls[0] += 1
            h = torch.tanh(h @ w + x)
            return h, (h.sin().sum(), h * 2)

        h, (sums, twice) = run(step, h, xs)
        return h.sum() + (sums**2).sum() + twice.sin().sum()

    return loss


def by_autograd(run: Loop, again: int = 1) -> Any:
    leaves = [t.clone().requires_grad_() for t in (H, XS, W)]
    value = total(run)(*leaves)
    for _ in range(again - 1):
        torch.autograd.grad(value, leaves, retain_graph=True)
    return value, torch.autograd.grad(value, leaves)


def twice_by_autograd(run: Loop) -> Any:
    h = H.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(run)(h, XS, W), h, create_graph=True)
    return gradient, torch.autograd.grad(gradient.sin().sum(), h)


def per_sample(run: Loop) -> Any:
    return vmap(grad(total(run), (0, 1, 2)), (0, None, None))(torch.stack([H, H * 2]), XS, W)


def jacobian(run: Loop) -> Any:
    return jacrev(lambda h: total(run)(h, XS, W) * h[0])(H)


# How often all steps are computed in the forward, and how often the least number of the backward is recomputed.
TRANSFORMS: dict[str, tuple[Callable[[Loop], Any], int, int]] = {
    "autograd": (by_autograd, 1, 1),
    "a graph that is retained": (lambda run: by_autograd(run, again=2), 1, 2),
    "autograd twice": (twice_by_autograd, 1, 2),
    "func.grad": (lambda run: grad(total(run), (0, 1, 2))(H, XS, W), 1, 1),
    "vjp": (lambda run: vjp(total(run), H, XS, W)[1](torch.ones((), dtype=torch.double)), 1, 1),
    "vmap": (lambda run: vmap(total(run), (0, None, None))(torch.stack([H, H * 2]), XS, W), 1, 0),
    "vmap(grad)": (per_sample, 1, 1),
    "jvp": (lambda run: jvp(lambda h: total(run)(h, XS, W), (H,), (H.cos(),)), 1, 0),
    "jacrev": (jacobian, 1, 1),
    "jvp(grad)": (lambda run: jvp(grad(lambda h: total(run)(h, XS, W)), (H,), (H.cos(),)), 1, 1),
    "hessian": (lambda run: hessian(lambda h: total(run)(h.expand(4, 8), XS, W))(H[0]), 1, 1),
    "in a region": (lambda run: grad(remat.remat(total(run)), (0, 1, 2))(H, XS, W), 2, 1),
    "no grad": (lambda run: torch.no_grad()(total(run))(H, XS, W), 1, 0),
}


@pytest.mark.parametrize("checkpoints", [1, 3, None, COUNT])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_and_recomputed_steps(name: str, checkpoints: int | None) -> None:
    transform, forwards, backwards = TRANSFORMS[name]
    expected = tree_leaves(transform(loop))
    calls[0] = 0
    found = tree_leaves(transform(scan_with(checkpoints)))
    spare = COUNT.bit_length() if checkpoints is None else checkpoints
    assert calls[0] == forwards * COUNT + backwards * recomputed(COUNT, spare)
    if name.startswith(("autograd", "a graph")):
        assert all(map(torch.equal, expected, found))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [2, 3])
def test_derivatives_of_derivatives(order: int) -> None:
    def nested(run: Loop) -> Tensor:
        fn = lambda h: total(run)(h, XS[:6], W)
        for _ in range(order):
            fn = lambda h, fn=fn: grad(fn)(h).sin().sum()
        return fn(H)

    torch.testing.assert_close(nested(scan_with(2)), nested(loop), rtol=1e-12, atol=1e-12)


# --- memory -----------------------------------------------------------------------------------------------------------

SIZE = 1024
STATE = torch.ones(4, SIZE)
UNIT = 4 * 4 * SIZE
INPUTS = torch.linspace(0, 1, 64)


def small_y(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = (h * 0.9 + x).sin()
    return h, h.sum()


def large_y(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = (h * 0.9 + x).sin()
    return h, h * 2


def loss_by(run: Loop, step: Callable) -> Callable[[Tensor], Tensor]:
    def loss(h: Tensor) -> Tensor:
        h, ys = run(step, h, INPUTS)
        return h.sum() + ys.sum()

    return loss


def gradient_by(transform: str, run: Loop, step: Callable) -> Callable[[], Any]:
    loss = loss_by(run, step)
    if transform == "func.grad":
        return lambda: grad(loss)(STATE)
    if transform == "vmap(grad)":
        return lambda: vmap(grad(loss))(STATE)
    h = STATE.clone().requires_grad_()
    return lambda: torch.autograd.grad(loss(h), h)


@pytest.mark.parametrize("transform", ["autograd", "func.grad", "vmap(grad)"])
def test_the_peak_is_that_of_the_saved_carries_and_one_step(transform: str) -> None:
    plain = peak_bytes(gradient_by(transform, loop, small_y))
    peaks = {k: peak_bytes(gradient_by(transform, scan_with(k), small_y)) for k in (1, 2, 4, 8)}
    one_step = peaks[1] - UNIT
    assert one_step < 7 * UNIT and plain > 64 * UNIT
    for k, peak in peaks.items():
        assert peak <= one_step + (k + 0.05) * UNIT


# The peak is at most this number of carries for each checkpoint, plus a constant number.
OTHERS: dict[str, tuple[Callable[[Callable], Any], int, int]] = {
    "in a region": (lambda loss: grad(remat.remat(loss))(STATE), 1, 5),
    "jacrev of two results": (lambda loss: jacrev(lambda h: torch.stack([loss(h)] * 2))(STATE), 2, 9),
    "jvp(grad)": (lambda loss: jvp(grad(loss), (STATE,), (STATE,)), 3, 84),
    "grad(grad)": (lambda loss: grad(lambda h: grad(loss)(h).sin().sum())(STATE), 2, 225),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_peak_under_other_transforms(name: str) -> None:
    """Nested regions keep their arguments alive. At second order, fewer checkpoints nest deeper and take more."""
    transform, each, more = OTHERS[name]
    plain = peak_bytes(lambda: transform(loss_by(loop, small_y)))
    for k in (1, 2, 4, 8):
        peak = peak_bytes(lambda k=k: transform(loss_by(scan_with(k), small_y)))
        assert peak <= (each * k + more + 0.05) * UNIT
        assert peak < plain / 2


def test_the_peak_of_forward_mode() -> None:
    """The plain loop saves nothing; the nested regions of `scan` keep their arguments alive."""
    assert peak_bytes(lambda: jvp(loss_by(scan_with(None), small_y), (STATE,), (STATE,))) < 24 * UNIT


def test_the_peak_with_a_compiled_step() -> None:
    step = torch.compile(small_y, backend="eager")
    gradient_by("autograd", scan_with(4), step)()
    assert peak_bytes(gradient_by("autograd", scan_with(4), step)) <= (4 + 5.05) * UNIT


def test_only_carries_are_saved_between_forward_and_backward() -> None:
    h = STATE.clone().requires_grad_()
    for k in (1, 4, 8):
        assert held_bytes(lambda k=k: remat.scan(small_y, h, INPUTS, checkpoints=k)) <= (k + 1.05) * UNIT


def test_results_are_written_into_the_stack() -> None:
    """The plain loop needs memory for all results and for their stack."""
    plain = lambda: remat.scan(large_y, STATE, INPUTS)
    assert peak_bytes(lambda: loop(large_y, STATE, INPUTS)) > 128 * UNIT
    assert peak_bytes(plain) < (64 + 9) * UNIT
    trained = peak_bytes(gradient_by("autograd", scan_with(4), large_y))
    assert trained < (64 + 4 + 7) * UNIT < peak_bytes(gradient_by("autograd", loop, large_y)) / 2


def test_checkpoints_as_memory() -> None:
    """The memory determines the number of carries; a float is a part of the memory of all carries."""
    h = STATE.clone().requires_grad_()
    nested = lambda h, x: tuple({"a": t} for t in small_y(h["a"], x))
    for checkpoints, k in (("64KiB", 4), ("0.1MB", 6), (0.125, 8), ("1B", 0)):
        if k:
            held = held_bytes(lambda c=checkpoints: remat.scan(nested, {"a": h}, INPUTS, checkpoints=c))
            assert (k + 1) * UNIT <= held <= (k + 1.05) * UNIT
    few = lambda: remat.scan(nested, {"a": h}, INPUTS[:5], checkpoints="1B")
    assert held_bytes(few) <= 1.05 * UNIT


def test_nothing_stays_alive() -> None:
    with assert_freed_without_gc() as watch:
        h = STATE.clone().requires_grad_()
        last, ys = remat.scan(large_y, h, INPUTS)
        (last.sum() + ys.sum()).backward()
        watch(h, last, ys)
        del h, last, ys


# --- what a step does -------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(6, 6), nn.BatchNorm1d(6)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(F.dropout(self.norm(x), 0.3), h)
        return h, h.mean()


def test_modules_with_dropout_and_buffers() -> None:
    def run(each: Loop) -> list[Tensor]:
        torch.manual_seed(0)
        module, h = Cell(), torch.zeros(5, 6, requires_grad=True)
        xs = torch.randn(12, 5, 6, requires_grad=True)
        last, means = each(module, h, xs)
        gradients = torch.autograd.grad(last.sum() + means.prod(), [h, xs, *module.parameters()])
        return [last, means, *gradients, *module.buffers(), torch.rand(1)]

    assert all(map(torch.equal, run(loop), run(scan_with(2))))


@pytest.mark.parametrize("transform", ["autograd", "func.grad"])
def test_values_that_a_policy_saves_are_not_recomputed(transform: str) -> None:
    """They are saved for all steps; carries are not."""
    weight = torch.eye(SIZE) * 0.9

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (h @ weight + x).sin().cos()
        return h, h.sum()

    products = {}
    for policy in (None, policies.save_matmuls):
        run = scan_with(4, policy=policy)
        expected = tree_leaves(gradient_by(transform, loop, step)())
        torch.testing.assert_close(tree_leaves(gradient_by(transform, run, step)()), expected)
        products[policy] = count_ops(gradient_by(transform, run, step))["aten.mm"]
        peak = peak_bytes(gradient_by(transform, run, step))
        assert peak <= (4 + 11 + (0 if policy is None else 64)) * UNIT
    assert products == {None: 2 * 64 + recomputed(64, 4), policies.save_matmuls: 2 * 64}


def test_an_inner_training_loop() -> None:
    """Each step differentiates a loss, as in MAML; the outer gradient differentiates through all steps."""

    def run(each: Loop) -> Any:
        rate = torch.tensor(0.1, dtype=torch.double, requires_grad=True)

        def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            value = ((x @ w).tanh() ** 2).sum()
            (gradient,) = torch.autograd.grad(value, w, create_graph=True)
            return w - rate * gradient, value

        w = W.clone().requires_grad_()
        last, values = each(step, w, XS[:8])
        return values, *torch.autograd.grad(last.sum() + values.sum(), (w, rate))

    torch.testing.assert_close(run(scan_with(2)), run(loop), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", ["autograd", "func.grad"])
def test_a_backward_in_a_step_recomputes_nothing(transform: str) -> None:
    """A step runs at the end of a region, so a recompute of that region would recompute all steps before it."""
    steps = [0]

    def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        steps[0] += 1
        value = ((x @ w).tanh() ** 2).sum()
        first, second = (torch.autograd.grad(value, w, create_graph=True)[0] for _ in range(2))
        (third,) = torch.autograd.grad(first.sin().sum(), w, create_graph=True)
        return w - 0.1 * first - 0.01 * second - 0.001 * third, value

    def loss(each: Loop) -> Callable:
        return lambda w: sum(t.sum() for t in each(step, w, XS[:12]))

    def run(each: Loop) -> Tensor:
        if transform == "func.grad":
            return grad(loss(each))(W)
        w = W.clone().requires_grad_()
        return torch.autograd.grad(loss(each)(w), w)[0]

    expected = run(loop)
    for checkpoints in (1, 3):
        steps[0] = 0
        torch.testing.assert_close(run(scan_with(checkpoints)), expected, rtol=1e-12, atol=1e-12)
        assert steps[0] == 12 + recomputed(12, checkpoints)


@dataclass
class Particle:
    place: Tensor
    speed: Tensor


def test_trees() -> None:
    def step(carry: Any, x: Any) -> Any:
        (particle, (bias,)), push = carry, x["push"]
        speed = particle.speed * 0.9 + push[0] - push[1] + bias
        particle = Particle(particle.place + speed, speed)
        return (particle, [bias]), {"at": particle.place, "both": (speed, x["push"][0] * 1)}

    def run(each: Loop) -> Any:
        leaves = [torch.full((3,), float(i), requires_grad=True) for i in range(3)]
        xs = {"push": [torch.ones(7, 3, requires_grad=True), torch.rand(7, 3, generator=torch.manual_seed(0))]}
        (particle, rest), ys = each(step, (Particle(*leaves[:2]), leaves[2:]), xs)
        assert isinstance(particle, Particle) and isinstance(rest, list) and ys["at"].shape == (7, 3)
        value = sum((t * t).sum() for t in (particle.place, *rest, ys["at"], *ys["both"]))
        return value, *torch.autograd.grad(value, [*leaves, xs["push"][0]])

    assert all(map(torch.equal, run(loop), run(remat.scan)))


def test_without_xs_and_without_y() -> None:
    h = torch.ones(3, requires_grad=True)
    step = lambda h, x: (h.sin() if x is None else h, None)
    last, ys = remat.scan(step, h, length=5)
    expected = h.sin().sin().sin().sin().sin()
    assert ys is None and torch.equal(last, expected)
    assert torch.equal(*(torch.autograd.grad(each.sum(), h)[0] for each in (last, expected)))


def test_results_without_gradient_and_results_that_are_inputs() -> None:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        h = h.sin() * x
        return h, (h, x, h.detach(), (h > 0.5), h.argmax())

    def run(each: Loop) -> Any:
        h, xs = torch.ones(3, requires_grad=True), torch.linspace(0.5, 1, 9)
        last, ys = each(step, h, xs)
        assert [y.requires_grad for y in ys] == [True, False, False, False, False]
        return *ys, *torch.autograd.grad(last.sum() + (ys[0] ** 2).sum(), h)

    assert all(map(torch.equal, run(loop), run(scan_with(2))))


def test_results_may_be_changed_in_place() -> None:
    h = torch.ones(3, requires_grad=True)
    _, ys = remat.scan(lambda h, x: (h.sin(), h * 2), h, length=4)
    ys.mul_(2)
    ys.sum().backward()
    again = torch.ones(3, requires_grad=True)
    (loop(lambda h, x: (h.sin(), h * 2), again, length=4)[1] * 2).sum().backward()
    assert torch.equal(h.grad, again.grad)


def test_some_steps_without_history() -> None:
    """The first result doesn't depend on the differentiated tensor."""
    w = torch.ones(3, requires_grad=True)
    step = lambda h, x: (h * w, h * 2)
    run = lambda each: torch.autograd.grad(each(step, torch.ones(3), length=4)[1].square().sum(), w)
    assert torch.equal(run(loop)[0], run(remat.scan)[0])


def test_under_an_outer_policy() -> None:
    h = torch.ones(4, 4, requires_grad=True)
    step = lambda h, x: ((h @ W[:4, :4].float()).sin(), h.sum())

    def fn(each: Loop) -> Callable:
        return lambda h: sum(t.sum() for t in each(step, h, length=6))

    expected = torch.autograd.grad(fn(loop)(h), h)
    for policy in (None, policies.save_matmuls, policies.everything_saveable):
        found = torch.autograd.grad(remat.remat(fn(scan_with(2)), policy=policy)(h), h)
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("policy", [policies.save_matmuls, policies.everything_saveable])
def test_results_in_a_region_that_skips_steps(policy: Any) -> None:
    """The step that computes a ``y`` must not be skipped, as the ``y`` is written into the result."""

    def fn(each: Loop) -> Callable:
        step = lambda h, x: ((h @ W).sin(), h * 2)
        return lambda h: (each(step, h.sin(), length=4)[1] ** 2).sum()

    def twice(fn: Callable) -> Tensor:
        return grad(lambda h: grad(fn)(h).sin().sum())(H)

    expected = twice(fn(loop))
    torch.testing.assert_close(twice(remat.remat(fn(scan_with(2)), policy=policy)), expected)


def test_both_runs_have_the_same_operations() -> None:
    h = torch.ones(3, requires_grad=True)
    with remat.override(debug=True, determinism_check="values"):
        _, ys = remat.scan(lambda h, x: (h.sin(), h * 2), h, length=6, checkpoints=1)
    ys.sum().backward()


@pytest.mark.parametrize("debug", [False, True])
def test_the_deepest_nesting_under_a_mode(debug: bool) -> None:
    h = torch.ones(3, 3, requires_grad=True)
    run = scan_with(0, policy=None if debug else policies.save_matmuls)
    with remat.override(debug=True) if debug else nullcontext():
        with pytest.raises(ValueError, match="more than Python's recursion limit allows"):
            run(lambda h, x: (h.sin(), None), h, length=79)
        last, _ = run(lambda h, x: ((h @ torch.eye(3)).sin(), None), h, length=(sys.getrecursionlimit() - 200) // 20)
    last.sum().backward()


@pytest.mark.parametrize("xs", [(), {}, [[], ()]])
def test_inputs_without_tensors(xs: Any) -> None:
    h = torch.ones(3, requires_grad=True)
    last, ys = remat.scan(lambda h, x: (h.sin() if x == xs else h, h * 1), h, xs, 5, checkpoints=1)
    assert torch.equal(last, h.sin().sin().sin().sin().sin()) and ys.shape == (5, 3)


def test_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    last, _ = remat.scan(lambda h, x: (h + 1, None), torch.ones(3), None, numpy.int64(5), checkpoints=numpy.int32(2))
    assert torch.equal(last, torch.full((3,), 6.0))


def test_sparse_results() -> None:
    def run(each: Loop) -> Any:
        h = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
        _, ys = each(lambda h, x: (h * 2, (h * h).to_sparse()), h, length=4)
        return ys.to_dense(), *torch.autograd.grad(ys.to_dense().sin().sum(), h)

    assert all(map(torch.equal, run(loop), run(scan_with(2))))


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [False, True])
def test_one_step_is_traced(around: bool) -> None:
    traced = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * 0.9 + x)
        return h, h.sum()

    run = lambda each, step: lambda h: sum(t.sum() for t in each(step, h.sin(), torch.linspace(0, 1, 20)))
    h = torch.ones(4, requires_grad=True)
    expected = torch.autograd.grad(run(loop, step)(h), h)
    fn = run(scan_with(3), torch.compile(step, backend=backend))
    if around:
        fn = torch.compile(fn, backend="eager")
    found = torch.autograd.grad(fn(h), h)
    torch.testing.assert_close(found, expected)
    assert 1 <= len(traced) <= 2
    torch._dynamo.reset()


# --- errors -----------------------------------------------------------------------------------------------------------

ONES = torch.ones(3)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no function": (lambda: remat.scan(3, ONES, length=2), TypeError, "step must be a function of a carry and an x"),
    "no pair": (
        lambda: remat.scan(lambda h, x: h, ONES, length=2),
        TypeError,
        r"step must return a pair, the next carry and y \(None if there is none\); step 0 returned an object of type T",
    ),
    "a carry that grows": (
        lambda: remat.scan(lambda h, x: ({"h": torch.cat([h["h"], h["h"]])}, None), {"h": ONES}, length=2),
        ValueError,
        r"Step 0 changes carry\['h'\] from float32\[3\] to float32\[6\]",
    ),
    "another dtype": (
        lambda: remat.scan(lambda h, x: (h.double(), None), ONES, length=2),
        ValueError,
        r"Step 0 changes carry from float32\[3\] to float64\[3\]",
    ),
    "another tree": (
        lambda: remat.scan(lambda h, x: ([h[0]], None), [ONES, ONES], length=2),
        ValueError,
        "Step 0 changes the structure of carry: carry was a list of 2 and is now a list of 1",
    ),
    "another y": (
        lambda: remat.scan(lambda h, x: (h + 1, h[: int(h[0])]), ONES, length=3),
        ValueError,
        r"Step 1 changes y from float32\[1\] to float32\[2\]",
    ),
    "y after None": (
        lambda: remat.scan(lambda h, x: (h + 1, h if h[0] > 1 else None), ONES, length=3),
        ValueError,
        "Step 1 changes y from None to an object of type Tensor",
    ),
    "a number": (
        lambda: remat.scan(lambda h, x: (h, None), (ONES, 3), length=2),
        TypeError,
        r"carry\[1\] must be a tensor, got 3\. Convert numbers with `torch.as_tensor`",
    ),
    "other lengths": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, {"a": torch.ones(4), "b": torch.ones(5)}),
        ValueError,
        r"xs\['b'\] has 5 entries, but there are 4 steps",
    ),
    "another length": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, torch.ones(4), 5),
        ValueError,
        "xs has 4 entries, but there are 5 steps",
    ),
    "no length": (lambda: remat.scan(lambda h, x: (h, None), ONES), ValueError, "The number of steps is unknown"),
    "an invalid length": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, length=2.0),
        TypeError,
        "length must be an integer, got 2.0",
    ),
    "negative length": (lambda: remat.scan(lambda h, x: (h, None), ONES, length=-1), ValueError, "not be negative"),
    "a step that needs values": (
        lambda: remat.scan(lambda h, x: (h, h * float(h.sum())), ONES, length=0),
        ValueError,
        "runs its step once on tensors without values",
    ),
    "another carry after no steps": (
        lambda: remat.scan(lambda h, x: (h.double(), None), ONES, length=0),
        ValueError,
        "Step 0 changes carry",
    ),
    "no dimension": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, torch.tensor(1.0)),
        TypeError,
        "xs must be a tensor of shape",
    ),
    "negative": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, length=3, checkpoints=-1),
        ValueError,
        "checkpoints must not be negative",
    ),
    "a text": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, length=3, checkpoints="many"),
        ValueError,
        "checkpoints as a string must be a number and a unit",
    ),
    "too deep": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, length=5000, checkpoints=1),
        ValueError,
        r"With checkpoints=1, a loop of 5000 steps needs 99 nested regions, .* Use checkpoints of at least 2\.",
    ),
    "a policy": (
        lambda: remat.scan(lambda h, x: (h, None), ONES, length=3, policy=3),
        remat.PolicyError,
        "A policy is one of remat.policies",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


# --- no steps ---------------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """A step that draws random numbers, and changes buffers, attributes and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(4, 4), nn.BatchNorm1d(4)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.seen = 0, list[Tensor]()

    def forward(self, carry: dict, x: Any) -> tuple[dict, Any]:
        self.count += 1
        self.calls += 1
        h = F.dropout(self.norm(self.linear(self.cell(carry["h"], carry["h"]))), 0.5)
        self.seen.append(h)
        return {"h": remat.remat(torch.tanh)(h)}, (h.sum(0), [h > 0, h[0] if x is None else x[0] * h[:, 0]])


def test_no_steps() -> None:
    """As `jax.lax.scan`: the first carry, and an empty y. The step leaves no trace."""
    step, carry = Stateful(), {"h": torch.randn(3, 4, requires_grad=True)}
    before = {name: value.clone() for name, value in step.state_dict().items()}
    generator = torch.get_rng_state()
    for xs in (torch.zeros(0, 2, 3), None):
        last, ys = remat.scan(step, carry, xs, length=0)
        assert torch.equal(torch.get_rng_state(), generator)
        _, wanted = (
            loop(Stateful(), carry, torch.zeros(2, 2, 3)) if xs is not None else loop(Stateful(), carry, None, 2)
        )
        torch.set_rng_state(generator)
        assert last is carry and not any(y.requires_grad for y in tree_leaves(ys))
        assert tree_map(lambda t: (t.shape, t.dtype), ys) == tree_map(lambda t: ((0, *t.shape[1:]), t.dtype), wanted)
    assert step.calls == 0 and step.seen == [] and type(step.count) is Tensor
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict().items())
    assert remat.scan(lambda h, x: (h, None), ONES, length=0) == (ONES, None)


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_no_steps_in_transforms_and_regions(policy: Any) -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        h, ys = remat.scan(lambda h, _: ((h @ w).tanh(), (h * w[0]).sum()), x.sin(), length=0)
        assert ys.shape == (0,)
        return (h * w.sum()).sum() + ys.sum()

    plain = lambda w, x: (x.sin() * w.sum()).sum()
    w, x = torch.randn(4, 4), torch.randn(3, 4)
    for wrap in (lambda f: f, lambda f: remat.remat(f, policy=policy)):
        region = wrap(fn)
        torch.testing.assert_close(grad(region, (0, 1))(w, x), grad(plain, (0, 1))(w, x))
        torch.testing.assert_close(hessian(region)(w, x), hessian(plain)(w, x))
        batch = torch.stack([w, w.cos()])
        torch.testing.assert_close(vmap(grad(region), (0, None))(batch, x), vmap(grad(plain), (0, None))(batch, x))
        torch.testing.assert_close(jvp(region, (w, x), (w, x)), jvp(plain, (w, x), (w, x)))
        leaf = w.clone().requires_grad_()
        found = torch.autograd.grad(region(leaf, x), leaf)
        torch.testing.assert_close(found, torch.autograd.grad(plain(leaf, x), leaf))
