"""``remat.scan`` against the loop in Python: values, derivatives, recomputed steps and peaks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import comb
from typing import Any

import numpy
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import assert_same, gradient, rand, setting
from cases import plain_scan as loop
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import remat
from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, peak_bytes
from remat import policies
from remat._scan import depth, segments

Loop = Callable[..., Any]
Step = Callable[[Any, Any], tuple[Any, Any]]


@pytest.fixture(autouse=True)
def recursion_limit() -> Iterator[None]:
    """Python's default: inductor raises it for the whole process."""
    with setting(sys.setrecursionlimit, 1000, sys.getrecursionlimit()):
        yield


def scan_with(checkpoints: Any, **options: Any) -> Loop:
    return partial(remat.scan, checkpoints=checkpoints, **options)


def recomputed(count: int, checkpoints: int) -> int:
    """The least number of steps that the backward of a loop of ``count`` steps can recompute."""
    repeats = depth(count + 1, checkpoints)
    reach = comb(checkpoints + repeats + 1, checkpoints + 2) if repeats else 0
    return repeats * (count + 1) - reach


def recomputed_by_default(count: int, width: int = 99) -> int:
    """The number of steps that are recomputed, in blocks of so many steps after the first two."""
    spare = count.bit_length()
    width = min(width, -(-(count - 2) // spare))
    assert (count - 2) % width == 0 or width * spare >= count - 2  # else the last block is shorter
    return 3 + (count - 2 if width * spare >= count - 2 else width * recomputed((count - 2) // width, spare - 1))


def test_the_schedule_recomputes_the_fewest_steps() -> None:
    """Compared with a search through all schedules for small sizes, and with the formula for larger ones."""

    @cache
    def computed(count: int, spare: int) -> int:
        return count + sum(computed(*each) for each in segments(count, spare))

    for count in range(1, 501):
        for spare in range(0 if count < 200 else 1, 12):
            parts = segments(count + 1, spare)
            assert sum(size for size, _ in parts) == count and len(parts) <= spare + 1 and min(parts)[0] > 0
            assert sum(computed(*each) for each in parts) == recomputed(count, spare)
    best = [[count * (count + 1) // 2 if count else 0] for count in range(82)]
    for spare in range(1, 21):
        for count in range(82):
            splits = [first + best[count - first][spare - 1] + best[first][spare] for first in range(1, count)]
            best[count].append(min(splits, default=count))
    assert all(best[n + 1][k] - (n + 1) == recomputed(n, k) for n in range(1, 81) for k in range(21))


COUNT = 30
calls: list[int] = []  # a recompute may only add to a list
H, XS, W = rand(4, 8, grad=False), rand(COUNT, 4, 8, seed=1, grad=False), rand(8, 8, seed=2, grad=False) * 0.3


def total(run: Loop) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def loss(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            calls.append(1)
            h = torch.tanh(h @ w + x)
            return h, (h.sin().sum(), h * 2)

        h, (sums, twice) = run(step, h, xs)
        return h.sum() + (sums**2).sum() + twice.sin().sum()

    return loss


def by_autograd(run: Loop, again: int = 1) -> Any:
    leaves = [t.clone().requires_grad_() for t in (H, XS, W)]
    value = total(run)(*leaves)
    return value.detach(), *(torch.autograd.grad(value, leaves, retain_graph=i < again - 1) for i in range(again))


def twice_by_autograd(run: Loop) -> Any:
    h = H.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(run)(h, XS, W), h, create_graph=True)
    return gradient.detach(), torch.autograd.grad(gradient.sin().sum(), h)


def by_dual_numbers(run: Loop) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(total(run)(fwAD.make_dual(H, H.cos()), XS, W)).tangent


def third_order(run: Loop) -> Any:
    fn = lambda h: total(run)(h, XS[:6], W)
    for _ in range(3):
        fn = lambda h, fn=fn: grad(fn)(h).sin().sum()
    return fn(H)


BATCH, ROW = (torch.stack([H, H * 2]), XS, W), (0, None, None)
# How often all steps are computed in the forward, and how often the least number of the backward is recomputed.
TRANSFORMS: dict[str, tuple[Callable[[Loop], Any], tuple[int, int] | None]] = {
    "autograd": (by_autograd, (1, 1)),
    "a graph that is retained": (partial(by_autograd, again=2), (1, 2)),
    "autograd twice": (twice_by_autograd, (1, 2)),
    "dual numbers": (by_dual_numbers, (1, 0)),
    "func.grad": (lambda run: grad(total(run), (0, 1, 2))(H, XS, W), (1, 1)),
    "vjp": (lambda run: vjp(total(run), H, XS, W)[1](torch.ones((), dtype=torch.double)), (1, 1)),
    "vmap": (lambda run: vmap(total(run), ROW)(*BATCH), (1, 0)),
    "vmap(grad)": (lambda run: vmap(grad(total(run), (0, 1, 2)), ROW)(*BATCH), (1, 1)),
    "jvp": (lambda run: jvp(lambda h: total(run)(h, XS, W), (H,), (H.cos(),)), (1, 0)),
    "jacrev": (lambda run: jacrev(lambda h: total(run)(h, XS, W) * h[0])(H), (1, 1)),
    "jvp(grad)": (lambda run: jvp(grad(lambda h: total(run)(h, XS, W)), (H,), (H.cos(),)), (1, 1)),
    "hessian": (lambda run: hessian(lambda h: total(run)(h.expand(4, 8), XS, W))(H[0]), (1, 1)),
    "grad(grad(grad))": (third_order, None),
    "in a region": (lambda run: grad(remat.remat(total(run)), (0, 1, 2))(H, XS, W), (2, 1)),
    "no grad": (lambda run: torch.no_grad()(total(run))(H, XS, W), (1, 0)),
}


@pytest.mark.parametrize(
    ("name", "checkpoints"),
    [*((name, c) for name in TRANSFORMS for c in (3, None)), *(("autograd", c) for c in (0, 1, COUNT, 99))],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_recomputed_steps(name: str, checkpoints: int | None, reverse: bool) -> None:
    transform, times = TRANSFORMS[name]
    expected = transform(partial(loop, reverse=reverse))
    calls.clear()
    found = transform(scan_with(checkpoints, reverse=reverse))
    if times is not None:
        least = recomputed_by_default(COUNT) if checkpoints is None else recomputed(COUNT, min(checkpoints, COUNT))
        assert len(calls) == times[0] * COUNT + times[1] * least
    assert_same(found, expected, exact=name.startswith(("autograd", "a graph")))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 17, 40])
def test_loops_of_any_length(count: int, reverse: bool) -> None:
    """The last block may be shorter than the others."""
    step = lambda h, x: ((h * h + x).sin(), h)
    results = []
    for run in (remat.scan, loop):
        h, xs = torch.ones(3, requires_grad=True), torch.linspace(-1, 1, count, requires_grad=True)
        last, ys = run(step, h, xs, reverse=reverse)
        results.append((last, ys, torch.autograd.grad(last.sum() + (ys**2).sum(), (h, xs))))
    assert_same(*results)


@pytest.mark.parametrize(("size", "width"), [(2**12, 9), (2**15, 2), (2**17, 1), (2**18, 1)])
@pytest.mark.parametrize("differentiate", [False, True])
def test_blocks_save_at_most_1_mib(size: int, width: int, differentiate: bool) -> None:
    """A step saves three carries, but only one if the carry that it gets requires no grad."""
    a = torch.full((size,), 0.9, requires_grad=True)
    h = torch.ones(size, requires_grad=differentiate)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        calls.append(1)
        return (h.sin() * 0.5 + x).cos() * a, None

    def train(run: Loop) -> tuple:
        last, _ = run(step, h, INPUTS[:50])
        return torch.autograd.grad(last.sum(), a)

    calls.clear()
    found = train(remat.scan)
    assert len(calls) == 50 + recomputed_by_default(50, width)
    assert_same(found, train(loop))
    assert peak_bytes(train, remat.scan) <= max(2**20, 3 * h.nbytes) + (6 + 6) * h.nbytes


def test_steps_that_call_torch_func_are_recomputed_one_by_one() -> None:
    """They run without hooks, so what they save is unknown."""

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        calls.append(1)
        return h - 0.1 * grad(lambda h: (h * x).sin().sum())(h), None

    h = torch.ones(3, requires_grad=True)
    expected = torch.autograd.grad(loop(step, h, INPUTS)[0].sum(), h)
    last, _ = remat.scan(step, h, INPUTS)
    calls.clear()
    assert_same(torch.autograd.grad(last.sum(), h), expected, exact=False)
    assert len(calls) >= recomputed_by_default(64, 1)  # the first runs of inner regions start twice


@pytest.mark.parametrize("checkpoints", [2, None])
def test_without_preserve_rng_state_the_recompute_draws_other_numbers(checkpoints: int | None) -> None:
    h, gradients = torch.ones(99, requires_grad=True), []
    for run in (scan_with(checkpoints, preserve_rng_state=False), loop):
        torch.manual_seed(0)
        last, _ = run(lambda h, x: (F.dropout(h * x), None), h, INPUTS[:9] + 1)
        before = torch.get_rng_state()
        gradients += torch.autograd.grad(last.sum(), h)
        assert torch.equal(torch.get_rng_state(), before) == (run is loop)
    assert not torch.equal(*gradients)


STATE = torch.ones(4, 1024)
UNIT = STATE.nbytes
INPUTS = torch.linspace(0, 1, 64)


def small_y(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = (h * 0.9 + x).sin()
    return h, h.sum()


def large_y(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = (h * 0.9 + x).sin()
    return h, h * 2


def loss_by(run: Loop, step: Step, count: int = 64) -> Callable[[Tensor], Tensor]:
    def loss(h: Tensor) -> Tensor:
        h, ys = run(step, h, INPUTS[:count])
        return h.sum() + ys.sum()

    return loss


def trained(loss: Callable[[Tensor], Tensor]) -> Any:
    h = STATE.clone().requires_grad_()
    return torch.autograd.grad(loss(h), h)


# The peak is at most this number of carries for each checkpoint, plus a constant number.
PEAKS: dict[str, tuple[Callable[[Callable], Any], int, int]] = {
    "autograd": (trained, 1, 7),
    "a compiled step": (trained, 1, 5),
    "func.grad": (lambda loss: grad(loss)(STATE), 1, 5),
    "vmap(grad)": (lambda loss: vmap(grad(loss))(STATE), 1, 6),
    "in a region": (lambda loss: grad(remat.remat(loss))(STATE), 1, 5),
    "jacrev of two results": (lambda loss: jacrev(lambda h: torch.stack([loss(h)] * 2))(STATE), 2, 9),
    "jvp(grad)": (lambda loss: jvp(grad(loss), (STATE,), (STATE,)), 3, 84),
    "grad(grad)": (lambda loss: grad(lambda h: grad(loss)(h).sin().sum())(STATE), 2, 225),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_that_of_the_saved_carries_and_one_step(name: str) -> None:
    """At second order, nested regions keep their arguments alive: fewer checkpoints nest deeper and take more."""
    transform, each, more = PEAKS[name]
    step = torch.compile(small_y, backend="eager") if name == "a compiled step" else small_y
    plain = peak_bytes(transform, loss_by(loop, small_y))
    for k in (1, 8):
        peak = peak_bytes(transform, loss_by(scan_with(k), step))
        assert peak <= (each * k + more + 0.05) * UNIT, peak / UNIT
        assert peak < plain / 2


@pytest.mark.parametrize(
    ("checkpoints", "count", "saved"),
    [(1, 64, 1), (8, 64, 8), ("64KiB", 64, 4), ("0.1MB", 64, 6), (0.125, 64, 8), ("1B", 5, 0), (numpy.int32(2), 64, 2)],
)
def test_only_carries_are_saved_between_forward_and_backward(checkpoints: Any, count: int, saved: int) -> None:
    """A text is the memory for carries; a float is a part of the memory of all carries."""
    h = STATE.clone().requires_grad_()
    nested = lambda h, x: tuple({"a": t} for t in small_y(h["a"], x))
    held = held_bytes(lambda: remat.scan(nested, {"a": h}, INPUTS[:count], checkpoints=checkpoints))
    assert saved * UNIT <= held <= (saved + 1.05) * UNIT


def test_results_take_their_memory_twice_as_in_a_loop() -> None:
    part_of_a_larger = lambda h, x: (h, h.expand(9, *h.shape).sin()[0])
    for step, more in ((large_y, 0), (part_of_a_larger, 9)):
        peak = peak_bytes(lambda step=step: remat.scan(step, STATE, INPUTS))
        assert peak <= peak_bytes(lambda: loop(large_y, STATE, INPUTS)) + more * UNIT
    peaks = [peak_bytes(trained, loss_by(run, large_y)) for run in (scan_with(4), loop)]
    assert peaks[0] < (2 * 64 + 4 + 7) * UNIT < peaks[1]


def test_nothing_stays_alive() -> None:
    with assert_freed_without_gc() as watch:
        h = STATE.clone().requires_grad_()
        last, ys = remat.scan(large_y, h, INPUTS)
        (last.sum() + ys.sum()).backward()
        watch(h, last, ys)
        del h, last, ys


@pytest.mark.parametrize("transform", [trained, PEAKS["func.grad"][0]], ids=["autograd", "func.grad"])
def test_values_that_a_policy_saves_are_not_recomputed(transform: Callable) -> None:
    """They are saved for all steps; carries are not."""
    weight, products = torch.eye(4) * 0.9, {}

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (weight @ h + x).sin().cos()
        return h, h.sum()

    expected = transform(loss_by(loop, step, 24))
    for policy, checkpoints in ((None, 4), (policies.save_matmuls, 4), (policies.save_matmuls, None)):
        loss = loss_by(scan_with(checkpoints, policy=policy), step, 24)
        assert_same(transform(loss), expected, exact=False)
        products[policy, checkpoints] = count_ops(transform, loss)["aten.mm"]
        block = 4 if checkpoints is None else 0
        assert peak_bytes(transform, loss) <= (4 + 11 + block + (0 if policy is None else 24)) * UNIT
    assert list(products.values()) == [2 * 24 + recomputed(24, 4), 2 * 24, 2 * 24]


@dataclass
class Particle:
    place: Tensor
    speed: Tensor


class Stateful(nn.Module):
    """A step that draws random numbers, and changes buffers, an attribute and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls, self.seen = nn.BatchNorm1d(4), 0, list[Tensor]()

    def forward(self, carry: dict, x: Any) -> tuple[dict, Any]:
        self.calls += 1
        h = F.dropout(self.norm(carry["h"]), 0.5)
        self.seen.append(h)
        return {"h": remat.remat(torch.tanh)(h)}, (h.sum(0), [h > 0, h[0] if x is None else x[0] * h[:, 0]])


def modules_with_dropout_and_buffers(each: Loop) -> Any:
    torch.manual_seed(0)
    step, h, xs = Stateful(), torch.randn(3, 4, requires_grad=True), torch.randn(12, 2, 3, requires_grad=True)
    last, ys = each(step, {"h": h}, xs)
    gradients = torch.autograd.grad(last["h"].sum() + (ys[1][1] ** 2).sum(), [h, xs, *step.parameters()])
    return [last, ys, *gradients, *step.buffers(), step.calls, torch.rand(1)]


def trees(each: Loop) -> Any:
    def step(carry: Any, x: Any) -> Any:
        (particle, (bias,)), push = carry, x["push"]
        speed = particle.speed * 0.9 + push[0] - push[1] + bias
        particle = Particle(particle.place + speed, speed)
        return (particle, [bias]), {"at": particle.place, "both": (speed, x["push"][0] * 1)}

    leaves = [torch.full((3,), float(i), requires_grad=True) for i in range(3)]
    xs = {"push": [torch.ones(7, 3, requires_grad=True), rand(7, 3, grad=False).float()]}
    (particle, rest), ys = each(step, (Particle(*leaves[:2]), leaves[2:]), xs)
    value = sum((t * t).sum() for t in (particle.place, *rest, ys["at"], *ys["both"]))
    return particle, rest, ys, *torch.autograd.grad(value, [*leaves, xs["push"][0]])


def results_without_gradient_and_results_that_are_inputs(each: Loop) -> Any:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        h = h.sin() * x
        return h, (h, x, h.detach(), (h > 0.5), h.argmax())

    h = torch.ones(3, requires_grad=True)
    last, ys = each(step, h, torch.linspace(0.5, 1, 9))
    return [y.requires_grad for y in ys], ys, *torch.autograd.grad(last.sum() + (ys[0] ** 2).sum(), h)


def without_xs_and_without_y(each: Loop) -> Any:
    h = torch.ones(3, requires_grad=True)
    last, ys = each(lambda h, x: (h.sin() if x is None else h, None), h, length=numpy.int64(5))
    backwards = each(lambda h, x: (h + 1, h), torch.zeros(()), length=5, reverse=True)
    return last, ys, backwards, *torch.autograd.grad(last.sum(), h)


def results_that_are_changed_in_place(each: Loop) -> Any:
    h = torch.ones(3, requires_grad=True)
    _, ys = each(lambda h, x: (h.sin(), h * 2), h, length=4)
    ys.mul_(2)
    return torch.autograd.grad(ys.sum(), h)


PROGRAMS = [
    modules_with_dropout_and_buffers, trees, results_without_gradient_and_results_that_are_inputs,
    without_xs_and_without_y, results_that_are_changed_in_place,
]  # fmt: skip


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("checkpoints", [2, None])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program: Callable[[Loop], Any], checkpoints: int | None, debug: bool) -> None:
    with remat.override(debug=True, determinism_check="values") if debug else nullcontext():
        found = program(scan_with(checkpoints))
    assert_same(found, program(loop))


@pytest.mark.parametrize("transform", ["autograd", "func.grad"])
def test_a_backward_in_a_step_recomputes_nothing(transform: str) -> None:
    """As in MAML. A step runs at the end of a region, whose recompute would recompute all steps before it."""
    rate = torch.tensor(0.1, dtype=torch.double)

    def run(each: Loop) -> Any:
        def loss(w: Tensor, rate: Tensor) -> Tensor:
            def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                calls.append(1)
                value = ((x @ w).tanh() ** 2).sum()
                first, second = (torch.autograd.grad(value, w, create_graph=True)[0] for _ in range(2))
                (third,) = torch.autograd.grad(first.sin().sum(), w, create_graph=True)
                return w - rate * first - 0.01 * second - 0.001 * third, value

            return sum(t.sum() for t in each(step, w, XS[:12]))

        if transform == "func.grad":
            return grad(loss, (0, 1))(W, rate)
        leaves = [t.clone().requires_grad_() for t in (W, rate)]
        return torch.autograd.grad(loss(*leaves), leaves)

    expected = run(loop)
    for checkpoints in (1, 3, None):
        calls.clear()
        assert_same(run(scan_with(checkpoints)), expected, exact=False)
        least = recomputed_by_default(12) if checkpoints is None else recomputed(12, checkpoints)
        assert len(calls) == 12 + least


# The number of nested regions that the recursion limit allows, and what makes it smaller.
NESTED: dict[str, tuple[int, Loop, Callable[[Callable], Callable]]] = {
    "nothing": (80, scan_with(0), lambda fn: fn),
    "a policy": (40, scan_with(0, policy=policies.save_matmuls), lambda fn: fn),
    "a policy around": (40, scan_with(0), remat.remat(policy=policies.save_matmuls)),
    "an option that is overridden": (40, scan_with(0), lambda fn: remat.override(debug=True)(fn)),
    "a transform": (26, scan_with(0), lambda fn: lambda h: jvp(fn, (h,), (h,))[1]),
}


@pytest.mark.parametrize("name", NESTED)
def test_the_deepest_nesting(name: str) -> None:
    most, run, around = NESTED[name]
    nested = lambda length: around(lambda h: run(lambda h, x: ((h @ torch.eye(3)).sin(), None), h, length=length)[0])
    h = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(ValueError, match=f"needs {most + 1} nested regions, more than Python's recursion limit allows"):
        nested(most + 1)(h)
    nested(most)(h).sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("checkpoints", [3, None])
@pytest.mark.parametrize("around", [False, True])
def test_one_step_is_traced(around: bool, checkpoints: int | None) -> None:
    backend, h = EagerAndRecordGraphs(), torch.ones(4, requires_grad=True)
    run = lambda each, step: lambda h: loss_by(each, step, 20)(h.sin())
    fn = run(scan_with(checkpoints), torch.compile(small_y, backend=backend))
    if around:
        fn = torch.compile(fn, backend="eager")
    assert_same(gradient(fn, h), gradient(run(loop, small_y), h), exact=False)
    assert 1 <= len(backend.graphs) <= 2


ONES, scan, same = torch.ones(3), remat.scan, lambda h, x: (h, None)
STEPS: list[tuple[Any, Step, type[Exception], str]] = [  # the first carry, a step, and the error of two steps
    (ONES, lambda h, x: h, TypeError, "must return a pair, .* step 0 returned an object of type T"),
    (ONES, lambda h, x: (h, h, h), TypeError, "step 0 returned a tuple of 3"),
    ({"h": ONES}, lambda h, x: ({"h": h["h"][:2]}, 0), ValueError, r"Step 0 changes carry\['h'\] from"),
    (ONES, lambda h, x: (h[:2], None), ValueError, r"from float32\[3\] to float32\[2\]"),
    (ONES, lambda h, x: (h.double(), None), ValueError, r"float32\[3\] to float64\[3\]"),
    (ONES, lambda h, x: (h.to("meta"), None), ValueError, r"to float32\[3\] on meta"),
    (ONES, lambda h, x: (3, None), ValueError, r"from float32\[3\] to 3"),
    ([ONES, ONES], lambda h, x: ([h[0]], None), ValueError, "carry was a list of 2 and is now a list"),
    (ONES, lambda h, x: (h + 1, h[: int(h[0])]), ValueError, r"Step 1 changes y from float32\[1"),
    (ONES, lambda h, x: (h + 1, h if h[0] > 1 else None), ValueError, "1 changes y from None to float32"),
    ((ONES, 3), same, TypeError, r"carry\[1\] must be a tensor, got 3\. Convert numbers with `torch"),
]
ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"step": 3, "length": 2}, TypeError, "step must be a function of a carry and an x"),
    ({"xs": {"b": torch.ones(5)}, "length": 4}, ValueError, r"xs\['b'\] has 5 entries, but there are 4 steps"),
    ({"xs": [torch.ones(4), torch.ones(5)]}, ValueError, r"xs\[1\] has 5 entries, but there are 4"),
    ({}, ValueError, "The number of steps is unknown"),
    ({"length": 2.0}, TypeError, "length must be an integer, got 2.0"),
    ({"length": True}, TypeError, "length must be an integer, got True"),
    ({"length": -1}, ValueError, "not be negative"),
    ({"step": lambda h, x: (h.double(), None), "length": 0}, ValueError, "Step 0 changes carry"),
    ({"xs": torch.tensor(1.0)}, TypeError, "xs must be a tensor of shape .* without dimensions"),
    ({"xs": [3]}, TypeError, r"xs\[0\] must be a tensor of shape .*, got 3"),
    ({"length": 2, "checkpoints": -1}, ValueError, "checkpoints must not be negative"),
    ({"length": 2, "checkpoints": "many"}, ValueError, "as a string must be a number and a unit"),
    ({"length": 2, "checkpoints": True}, TypeError, "checkpoints must be a number of carries, a string"),
    ({"length": 2, "checkpoints": 2.0}, ValueError, "Pass a number of carries as an int"),
    ({"length": 5000, "checkpoints": 1}, ValueError, "needs 99 nested .* Use checkpoints of at least 2"),
    ({"length": 2, "reverse": 1}, TypeError, "reverse must be True or False, got 1"),
    ({"length": 2, "preserve_rng_state": 0}, TypeError, "preserve_rng_state must be True or False"),
    ({"length": 2, "policy": 3}, remat.PolicyError, "A policy is one of remat.policies"),
]
ERRORS = [({"step": step, "carry": carry, "length": 2}, *error) for carry, step, *error in STEPS] + ARGUMENTS


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS, ids=[message[:30] for *_, message in ERRORS])
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        scan(**{"step": same, "carry": ONES, **arguments})


def test_the_error_of_a_step_says_that_xs_is_a_list_of_the_steps() -> None:
    with pytest.raises(TypeError) as caught:
        scan(lambda h, x: (h + x, None), ONES, [ONES, ONES])
    assert "stack them: `torch.stack(xs)`" in caught.value.__notes__[0]


@pytest.mark.parametrize("xs", [torch.zeros(2, 2, 3), None])
def test_no_steps(xs: Any) -> None:
    """As `jax.lax.scan`: the first carry, and an empty y. The step leaves no trace."""
    _, wanted = loop(Stateful(), {"h": torch.randn(3, 4)}, xs, 2)
    step, carry = Stateful(), {"h": torch.randn(3, 4, requires_grad=True)}
    before = {name: value.clone() for name, value in step.state_dict().items()}
    generator = torch.get_rng_state()
    last, ys = scan(step, carry, None if xs is None else xs[:0], length=0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert last is carry and not any(y.requires_grad for y in tree_leaves(ys))
    assert tree_map(lambda t: (t.shape, t.dtype), ys) == tree_map(lambda t: ((0, *t.shape[1:]), t.dtype), wanted)
    assert step.calls == 0 and step.seen == [] and type(step.norm.running_mean) is Tensor
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict().items())
    assert scan(same, ONES, length=0) == (ONES, None)
    loss = lambda h, w: sum(each.sum() for each in scan(lambda h, x: (h * w, (h * w).sum()), h, length=0))
    for fn in (loss, remat.remat(loss)):
        assert torch.equal(vmap(grad(fn), (0, None))(torch.ones(2, 3), torch.ones(3)), torch.ones(2, 3))
    weight = torch.nn.Parameter(torch.ones(3))  # captured, of no transform
    step = lambda h, x: (h * weight, None)
    assert torch.equal(jvp(grad(lambda h: scan(step, h, length=0)[0].sin().sum()), (ONES,), (ONES,))[1], -ONES.sin())
    assert weight.requires_grad and weight.is_leaf and torch.equal(weight, ONES)
