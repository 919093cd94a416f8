"""The engine under plain autograd: what it recomputes and when, what it saves, and what user code sees of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import (
    increment_version,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import OpCounter, PeakMemory, assert_freed_without_gc, count_ops, gc_disabled, held_bytes
from remat import MutationError, is_recomputing, policies, remat

N, KB = 32, 32 * 32 * 8  # a large matrix, and its bytes


def grad(out, inputs, **options):
    out = sum(t.sum() for t in out) if isinstance(out, (tuple, list)) else out.sum()
    return torch.autograd.grad(out, inputs, **options)


def mm_chain(x: Tensor, w: Tensor) -> Tensor:
    """Three products, the last of which no backward needs."""
    return ((x @ w).tanh() @ w).tanh() @ w


def counted(fn, runs: list):
    """The function, which records for each run whether it is a recompute."""

    def noting(*args):
        runs.append(is_recomputing())
        return fn(*args)

    return noting


def recomputed(step) -> Counter:
    """The ops that `step(remat)` runs in addition to those of `step` with the function itself."""
    ours, plain = count_ops(step, remat), count_ops(step, lambda fn, **_: fn)
    return Counter({op: n - plain[op] for op, n in ours.items() if op != "aten.detach" and n != plain[op]})


@pytest.fixture
def x() -> Tensor:
    return rand(4, 4)


@pytest.fixture
def w() -> Tensor:
    return rand(4, 4, seed=1)


class TestNested:
    def nest(self, fn, depth, wrap=remat):
        """`depth` nested regions; each calls the next one twice in a row."""
        if depth == 0:
            return fn
        inner = self.nest(fn, depth - 1, wrap)
        return wrap(lambda x, w: inner(inner(x, w), w))

    def around(self, fn, depth, wrap=remat):
        for _ in range(depth):
            fn = wrap(lambda x, w, fn=fn: fn(x, w))
        return fn

    @pytest.mark.parametrize("depth", [1, 2, 3, 5])
    def test_same_gradients(self, x, w, depth):
        fn = self.nest(remat(lambda x, w: (x @ w).sin()), depth)
        plain = self.nest(lambda x, w: (x @ w).sin(), depth, lambda fn: fn)
        assert_same(grad(fn(x, w), (x, w)), grad(plain(x, w), (x, w)))

    @pytest.mark.parametrize("depth", [1, 2, 3, 6])
    def test_each_nested_region_is_recomputed_once_per_level_at_most(self, x, w, depth):
        fn = self.around(mm_chain, depth)
        more = count_ops(lambda: grad(fn(x, w), (x, w)))["aten.mm"] - 3 - 6
        assert 2 <= more <= 3 * depth - 1

    @pytest.mark.parametrize("depth", [1, 2, 3, 4])
    def test_runs_of_the_innermost(self, x, w, depth):
        """A binary tree of regions with 2**depth leaves: each leaf is recomputed once per level at most."""
        runs: list = []
        fn = self.nest(remat(counted(lambda x, w: (x @ w).sin(), runs)), depth)
        grad(fn(x, w), (x, w))
        assert runs.count(False) == 2**depth
        assert 2**depth <= runs.count(True) <= 2**depth * (depth + 1)

    def test_memory_of_a_tree_is_logarithmic(self):
        x, w = rand(N, N), rand(N, N, seed=1)

        def leaf(x, w):
            return (x @ w).sin().cos().tanh()

        def step(depth, wrap):
            return grad(self.nest(wrap(leaf), depth, wrap)(x, w), (x, w))

        def peak(depth, wrap):
            with gc_disabled(), PeakMemory() as memory:
                step(depth, wrap)
            return memory.peak / KB

        steps = [peak(depth, remat) for depth in (3, 4, 5)]
        assert steps[2] - steps[1] <= 2 and steps[1] - steps[0] <= 2
        assert peak(5, lambda fn: fn) > 2**5 * 3
        assert steps[2] < 25

    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_only_the_outermost_region_saves(self, depth):
        x, w = rand(N, N), rand(N, N, seed=1)
        assert held_bytes(self.nest(remat(mm_chain), depth), x, w) == KB

    def test_a_region_beside_ops(self, x, w):
        inner = remat(mm_chain)

        def f(x, w):
            return inner(x.sin() @ w, w.cos()).exp().sum() + (inner(x, w) * x).sum()

        assert_same(grad(remat(f)(x, w), (x, w)), grad(f(x, w), (x, w)))
        assert_same(
            torch.autograd.grad(grad(remat(f)(x, w), x, create_graph=True)[0].sum(), (x, w)),
            torch.autograd.grad(grad(f(x, w), x, create_graph=True)[0].sum(), (x, w)),
        )

    def test_recursion(self, x, w):
        @remat
        def f(x, n):
            return (x @ w).tanh() if n == 0 else f((x @ w).sin(), n - 1)

        def plain(x, n):
            return (x @ w).tanh() if n == 0 else plain((x @ w).sin(), n - 1)

        assert_same(grad(f(x, 5), (x, w)), grad(plain(x, 5), (x, w)))


class TestEarlyStop:
    def test_a_deleted_output_is_not_recomputed(self, x, w):
        def two(x, w):
            return (x @ w).tanh(), ((x @ w @ w).exp() @ w).exp()

        def step(wrap):
            first = wrap(two)(x, w)[0]
            grad(first, (x, w))

        assert recomputed(step) == {"aten.mm": 1, "aten.tanh": 1}

    def test_a_live_output_is_recomputed_with_the_others(self, x, w):
        def two(x, w):
            return (x @ w).tanh(), ((x @ w @ w).exp() @ w).exp()

        out = remat(two)(x, w)
        plain = two(x, w)
        with OpCounter() as first:
            got = grad(out[0], (x, w))
        with OpCounter() as second:
            rest = grad(out[1], (x, w))
        assert_same([got, rest], [grad(plain[0], (x, w)), grad(plain[1], (x, w))])
        assert first["aten.mm"] - 2 <= 4 and second["aten.mm"] - 6 <= 4

    def test_without_early_stop(self, x, w):
        def step(wrap):
            grad(wrap(mm_chain, early_stop=False)(x, w), (x, w))

        assert recomputed(step) == {"aten.mm": 3, "aten.tanh": 2}

    def test_the_code_after_the_last_saved_tensor_does_not_run(self, x):
        ends = []

        @remat
        def f(x):
            y = x.sin().exp()
            ends.append(is_recomputing())
            return y + 1

        grad(f(x), x)
        assert ends == [False]

    def test_only_inputs_are_read_and_nothing_is_recomputed(self, x, w):
        def step(wrap):
            grad(wrap(lambda x: x * w)(x), (x, w))
            grad(wrap(lambda x, w: x @ w)(x, w), (x, w))
            grad(wrap(lambda x: x.sin())(x), x)
            grad(wrap(lambda x: (x.view(-1) * w.view(-1))[2:])(x), (x, w))

        assert not recomputed(step)

    def test_only_captured_tensors_are_read_and_nothing_is_recomputed(self, x, w):
        h = (w * 2).exp()

        def step(wrap):
            grad(wrap(lambda: h * w)(), w, retain_graph=True)
            grad(wrap(lambda x: x @ h.t() * 3)(x), (x, w), retain_graph=True)
            grad(wrap(lambda x: x[1:] * h[:3])(x), (x, w), retain_graph=True)

        assert not recomputed(step)

    def test_a_captured_tensor_without_grad_is_copied_and_nothing_is_recomputed(self, x, w):
        value = w.detach().clone()
        more = recomputed(lambda wrap: grad(wrap(lambda x: (x * value).view(2, 8))(x), x))
        assert set(more) <= {"aten.clone", "aten.equal"}

    @pytest.mark.parametrize("caught", [Exception, BaseException], ids=lambda e: e.__name__)
    def test_user_code_that_catches_exceptions(self, x, w, caught):
        swallowed, finished = [], []

        def f(x, w):
            h = (x @ w).tanh()
            try:
                h = (h @ w).tanh()
            except caught as error:
                swallowed.append(error)
                h = h * 0
            finally:
                finished.append(1)
            return h * 2

        runs: list = []
        out = remat(counted(f, runs))(x, w)
        assert_same(grad(out, (x, w)), grad(f(x, w), (x, w)))
        assert bool(swallowed) == (caught is BaseException)
        assert runs == [False, True] and len(finished) == 3

    def test_user_code_that_catches_all_exceptions_and_continues(self, x, w):
        def f(x, w):
            h = x
            for _ in range(4):
                try:
                    h = (h @ w).tanh()
                    h = h.sin()
                except:  # noqa: E722
                    h = h.cos()
            return h

        expected = grad(f(x, w), (x, w))
        inner = remat(f)
        assert_same(grad(inner(x, w), (x, w)), expected)
        assert_same(grad(remat(inner)(x, w), (x, w)), expected)
        assert_same(grad(remat(lambda x, w: inner(x, w) @ w)(x, w), (x, w)), grad(f(x, w) @ w, (x, w)))

    def test_an_inner_stop_does_not_end_the_outer_region(self, x, w):
        inner = remat(lambda x: (x @ w).tanh().exp())

        def f(x):
            h = inner(x)
            (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
            return (h * g).sin() @ w

        def plain(x):
            h = (x @ w).tanh().exp()
            (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
            return (h * g).sin() @ w

        assert_same(grad(remat(f)(x), (x, w)), grad(plain(x), (x, w)))

    def test_context_managers_are_exited(self, x, w):
        inside = []

        class Manager:
            def __enter__(self):
                inside.append(1)

            def __exit__(self, *exception):
                inside.pop()

        @remat
        def f(x):
            with Manager(), torch.autocast("cpu", enabled=False), torch.set_grad_enabled(True):
                return (x @ w).tanh()

        grad(f(x), x)
        assert inside == [] and torch.is_grad_enabled() and not is_recomputing()


class TestWithoutModes:
    """Without a dispatch mode around the region, as users run it: operations and memory are counted without a mode."""

    @pytest.mark.parametrize("last", [torch.tanh, lambda t: t * 2], ids=["saved", "not saved"])
    def test_operations_after_the_last_saved_tensor_are_not_recomputed(self, x, w, last):
        finished = []

        def f(x, w):
            out = last((x @ w).tanh())
            with torch.no_grad():
                finished.append(out @ w @ w)
            return out

        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            actual = grad(remat(f)(x, w), (x, w))
        products = sum(event.count for event in profiled.key_averages() if event.key == "aten::mm")
        assert (len(finished), products) == (1, 3 + 1 + 2)  # the forward's, the recomputed one, the backward's
        assert_same(actual, grad(f(x, w), (x, w)))

    def test_a_tensor_that_is_changed_after_it_was_saved(self, x):
        def f(x):
            y = x.exp()
            z = y.tanh()
            with torch.no_grad():
                y.add_(1)
            return z

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad(f(x), x)
        # With early stop the recompute ends before the change.
        assert_same(grad(remat(f)(x), x), grad(x.exp().tanh(), x))
        with pytest.raises(MutationError, match="changed in place"):
            grad(remat(f, early_stop=False)(x), x)

    @pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"determinism_check": "values"}], ids=str)
    def test_everything_is_freed(self, x, options):
        made = []

        def f(x):
            for fn in (torch.sin, torch.exp, torch.tanh):
                x = fn(x)
                made.append(weakref.ref(x.untyped_storage()))
            return x

        with gc_disabled():
            out = remat(f, **options)(x)
            assert sum(ref() is not None for ref in made) == 1
            grad(out, x)
            del out
            assert not any(ref() for ref in made)

    def test_a_mode_inside_sees_the_functions_own_operations(self, x, w):
        seen = []

        def f(x, w):
            with OpCounter() as counter:
                out = (x @ w).tanh().sin()
            seen.append(counter.counts)
            return out * 2

        grad(remat(f, early_stop=False)(x, w), (x, w))
        assert seen[0] == seen[1] == {"aten.mm": 1, "aten.tanh": 1, "aten.sin": 1}


class TestPartialBackward:
    def test_of_each_output(self, x, w):
        def two(x, w):
            h = (x @ w).tanh()
            return h.exp(), (h @ w).sin()

        for i in range(2):
            runs: list = []
            out = remat(counted(two, runs))(x, w)
            assert_same(grad(out[i], (x, w)), grad(two(x, w)[i], (x, w)))
            assert runs == [False, True]

    def test_of_each_input(self, x, w):
        for wanted in ((x,), (w,), (x, w)):
            out = remat(mm_chain)(x, w)
            assert_same(grad(out, wanted), grad(mm_chain(x, w), wanted))

    def test_of_outputs_one_after_the_other(self, x, w):
        def two(x, w):
            return (x @ w).tanh().exp(), (x @ w).sin().exp()

        runs: list = []
        out, plain = remat(counted(two, runs))(x, w), two(x, w)
        for i in range(2):
            assert_same(grad(out[i], (x, w)), grad(plain[i], (x, w)))
        assert runs == [False, True, True]

    def test_of_a_captured_tensor_alone(self, x, w):
        f = lambda x: ((x @ w).tanh() @ w).sin()
        assert_same(grad(remat(f)(x.detach()), w), grad(f(x.detach()), w))

    def test_a_freed_graph_raises_as_without_remat(self, x, w):
        for fn in (mm_chain, remat(mm_chain)):
            out = fn(x, w)
            grad(out, (x, w))
            with pytest.raises(RuntimeError, match="second time"):
                grad(out, (x, w))


class TestRetainedGraph:
    def test_each_pass_runs_the_region_once(self, x, w):
        runs: list = []
        out = remat(counted(mm_chain, runs))(x, w)
        expected = grad(mm_chain(x, w), (x, w))
        for i in range(4):
            assert_same(grad(out, (x, w), retain_graph=True), expected)
            assert runs == [False] + [True] * (i + 1)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_nothing_is_saved_between_passes(self, depth):
        x, w = rand(N, N), rand(N, N, seed=1)
        fn = remat(mm_chain)
        if depth == 2:
            inner = fn
            fn = remat(lambda x, w: inner(inner(x, w).sin(), w))
        with gc_disabled(), PeakMemory() as memory:
            out = fn(x, w)
            loss = out.sum()
            held = memory.live
            for _ in range(3):
                torch.autograd.grad(loss, (x, w), retain_graph=True)
                assert memory.live == held
            torch.autograd.grad(loss, (x, w))
            assert memory.live == held
            del out, loss
            assert memory.live == 0

    def test_the_peak_of_a_retained_chain_is_one_region(self):
        """The values of one region are released before the next region is recomputed."""
        x, w = rand(N, N), rand(N, N, seed=1)
        fn = remat(lambda x, w: (x @ w).tanh().sin().exp().tanh().sin())

        def peak(depth, **options):
            h = x
            for _ in range(depth):
                h = fn(h, w)
            loss = h.sum()
            with gc_disabled(), PeakMemory() as memory:
                torch.autograd.grad(loss, (x, w), **options)
            return memory.peak / KB

        assert peak(8) <= peak(4) + 1
        assert peak(8, retain_graph=True) <= peak(4, retain_graph=True) + 1 <= peak(4) + 3

    def test_a_jacobian_row_by_row(self, x, w):
        out, plain = remat(mm_chain)(x, w), mm_chain(x, w)
        for i in range(4):
            assert_same(
                torch.autograd.grad(out[0, i], (x, w), retain_graph=True),
                torch.autograd.grad(plain[0, i], (x, w), retain_graph=True),
            )

    def test_a_batched_backward_runs_the_region_once(self, x, w):
        runs: list = []
        out = remat(counted(mm_chain, runs))(x, w)
        rows = torch.eye(16, dtype=x.dtype).view(16, 4, 4)
        actual = torch.autograd.grad(out, (x, w), rows, is_grads_batched=True)
        assert runs == [False, True]
        expected = torch.autograd.grad(mm_chain(x, w), (x, w), rows, is_grads_batched=True)
        assert_same(actual, expected)

    def test_backward_accumulates(self, x, w):
        out, plain = remat(mm_chain)(x, w), mm_chain(*(other := [t.detach().requires_grad_() for t in (x, w)]))
        for _ in range(3):
            out.sum().backward(retain_graph=True)
            plain.sum().backward(retain_graph=True)
        assert_same([x.grad, w.grad], [t.grad for t in other])


class TestHigherOrder:
    def derivatives(self, fn, order, inputs):
        value, found = fn(*inputs).sin().sum(), []
        for _ in range(order):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            found.append(grads)
            value = sum(g.sin().sum() for g in grads)
        return found

    @pytest.mark.parametrize("early_stop", [True, False])
    @pytest.mark.parametrize("order", [2, 3, 4])
    def test_create_graph(self, x, w, order, early_stop):
        x, w = (t[:2, :2].detach().requires_grad_() for t in (x, w))
        fn = remat(mm_chain, early_stop=early_stop)
        assert_same(self.derivatives(fn, order, (x, w)), self.derivatives(mm_chain, order, (x, w)))

    def test_nested(self, x, w):
        inner = remat(mm_chain)
        fn = remat(lambda x, w: inner(inner(x, w).sin(), w))
        plain = lambda x, w: mm_chain(mm_chain(x, w).sin(), w)
        assert_same(self.derivatives(fn, 3, (x, w)), self.derivatives(plain, 3, (x, w)))

    def test_a_gradient_inside_another_region(self, x, w):
        def slope(x, w):
            (g,) = torch.autograd.grad(f(x, w).sum(), x, create_graph=True)
            return g.sin() @ w

        f = mm_chain
        expected = grad(slope(x, w), (x, w))
        f = remat(mm_chain)
        assert_same(grad(remat(slope)(x, w), (x, w)), expected)
        assert_same(grad(slope(x, w), (x, w)), expected)
        f = mm_chain
        assert_same(grad(remat(slope)(x, w), (x, w)), expected)

    def test_finite_differences(self):
        x, w = rand(2, 2), rand(2, 2, seed=1)
        for fn in (remat(mm_chain), remat(mm_chain, early_stop=False), remat(remat(mm_chain))):
            assert torch.autograd.gradcheck(fn, (x, w))
            assert torch.autograd.gradgradcheck(fn, (x, w))

    def test_the_graph_of_the_gradient_after_the_region_is_freed(self, x, w):
        (g,) = grad(remat(mm_chain)(x, w), x, create_graph=True)
        (expected,) = grad(mm_chain(x, w), x, create_graph=True)
        assert_same(grad(g.exp(), (x, w)), grad(expected.exp(), (x, w)))


class TestBackwardInside:
    def test_grad(self, x, w):
        def f(x):
            (g,) = torch.autograd.grad((x @ w).sin().sum(), x, create_graph=True)
            return (g * x).exp().sin()

        assert_same(grad(remat(f)(x), (x, w)), grad(f(x), (x, w)))

    def test_grad_without_a_graph(self, x, w):
        def f(x):
            (g,) = torch.autograd.grad((x @ w).sin().sum(), x)
            return (g * x).exp().sin() @ w

        assert_same(grad(remat(f)(x), (x, w)), grad(f(x), (x, w)))

    def test_backward_accumulates_on_leaves_once(self):
        def step(wrap):
            x, w = rand(3, 3), rand(3, 3, seed=1)

            def f(x):
                (x @ w).sin().sum().backward(retain_graph=True)
                return (x @ w).cos().exp()

            out = wrap(f)(x)
            before = [x.grad.clone(), w.grad.clone()]
            got = grad(out, (x, w))
            return before, got, x.grad, w.grad

        assert_same(step(remat), step(lambda fn: fn))

    def test_backward_of_an_inner_leaf(self, x, w):
        def f(x):
            z = x.detach().requires_grad_()
            (z @ w.detach()).sin().sum().backward()
            return (x * z.grad).sin().exp()

        assert_same(grad(remat(f)(x), x), grad(f(x), x))

    def test_inner_loop_of_gradient_steps(self, x, w):
        def f(x, w):
            for _ in range(3):
                loss = (x @ w).tanh().square().sum()
                (g,) = torch.autograd.grad(loss, w, create_graph=True)
                w = w - 0.1 * g
            return (x @ w).tanh()

        assert_same(grad(remat(f)(x, w), (x, w)), grad(f(x, w), (x, w)))
        inner = remat(lambda x, w: (x @ w).tanh())

        def g(x, w):
            for _ in range(2):
                (d,) = torch.autograd.grad(inner(x, w).square().sum(), w, create_graph=True)
                w = w - 0.1 * d
            return inner(x, w)

        expected = grad(g(x, w), (x, w))
        assert_same(grad(remat(g)(x, w), (x, w)), expected)


class TestHooks:
    """Hooks on tensors and nodes belong to the user: they run as often as without remat."""

    def fired(self, wrap):
        x, w = rand(3, 3), rand(3, 3, seed=1)
        log: list = []

        def note(name):
            return lambda *args: log.append(name)

        def f(x, w):
            h = (x @ w).tanh()
            if not is_recomputing():
                h.register_hook(note("inner"))
                h.grad_fn.register_hook(note("inner node"))
            return (h @ w).sin()

        x.register_hook(note("x"))
        w.register_hook(lambda g: log.append("w") or g * 2)
        w.register_post_accumulate_grad_hook(note("accumulated"))
        out = wrap(f)(x, w)
        out.register_hook(note("out"))
        out.grad_fn.register_prehook(note("before"))
        out.sum().backward()
        return log, x.grad, w.grad

    def test_all_fire_once(self):
        actual, expected = self.fired(remat), self.fired(lambda fn: fn)
        assert_same(actual, expected)
        assert Counter(actual[0]) == dict.fromkeys(["x", "w", "accumulated", "out", "before", "inner", "inner node"], 1)

    def test_a_hook_that_the_function_registers_in_each_run(self, x, w):
        def step(wrap):
            fired = []

            def f(x):
                h = (x @ w).tanh()
                h.register_hook(lambda g: fired.append(1) or g * 3)
                return h.sin()

            return grad(wrap(f)(x), (x, w)), fired

        assert_same(step(remat), step(lambda fn: fn))

    def test_retain_grad(self, x, w):
        out = remat(mm_chain)(x, w)
        out.retain_grad()
        (out * 2).sum().backward()
        assert_same(out.grad, torch.full_like(out, 2))


class ReadsTwice(torch.autograd.Function):
    """Reads its saved tensors twice in its backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        _, w = ctx.saved_tensors
        return g * w, g * x


class TestSavedTensors:
    @pytest.mark.parametrize("retain", [False, True])
    def test_a_function_reads_twice(self, x, w, retain):
        def f(x, w):
            return ReadsTwice.apply(x.sin(), (x @ w).cos()).exp()

        runs: list = []
        out, plain = remat(counted(f, runs))(x, w), f(x, w)
        for i in range(2 if retain else 1):
            keep = retain and i == 0
            assert_same(grad(out, (x, w), retain_graph=keep), grad(plain, (x, w), retain_graph=keep))
        assert runs == ([False, True, True] if retain else [False, True])

    def test_a_function_reads_twice_in_double_backward(self, x, w):
        def f(x, w):
            return ReadsTwice.apply(x.sin(), (x @ w).cos()).exp()

        def second(fn):
            (g,) = grad(fn(x, w), x, create_graph=True)
            return grad(g.sin(), (x, w))

        assert_same(second(remat(f)), second(f))

    def test_reading_outside_of_a_backward(self, x, w):
        out, plain = remat(lambda x, w: (x @ w).exp())(x, w), (x @ w).exp()
        for _ in range(2):
            assert_same(out.grad_fn._saved_result.detach(), plain.grad_fn._saved_result.detach())
        assert_same(grad(out, (x, w)), grad(plain, (x, w)))

    def test_reading_outside_of_a_backward_saves_nothing(self):
        x, w = rand(N, N), rand(N, N, seed=1)
        with gc_disabled(), PeakMemory() as memory:
            out = remat(lambda x, w: (x @ w).exp().sin())(x, w)
            held = memory.live
            value = out.grad_fn._saved_self
            assert memory.live == held + KB
            del value
            assert memory.live == held

    def test_reading_in_a_hook_of_the_backward(self, x, w):
        seen = []
        out = remat(lambda x, w: (x @ w).exp().sin())(x, w)
        node = out.grad_fn
        node.register_prehook(lambda grads: seen.append(node._saved_self.detach()))
        assert_same(grad(out, (x, w)), grad((x @ w).exp().sin(), (x, w)))
        assert_same(seen, [(x @ w).exp().detach()])

    def test_a_function_that_keeps_its_context_after_the_backward(self, x):
        """`ctx.saved_tensors` raises after the backward, as without remat."""
        for wrap in (lambda fn: fn, remat):
            out = wrap(lambda x: ReadsTwice.apply(x.sin(), x.cos()))(x)
            node = out.grad_fn
            grad(out, x)
            with pytest.raises(RuntimeError, match="after they have already been freed"):
                _ = node.saved_tensors


class TestOtherSavedTensorHooks:
    """The user's own `saved_tensors_hooks` around a region and inside one."""

    def log_hooks(self, log):
        def pack(t):
            log.append(("pack", tuple(t.shape)))
            return t

        def unpack(t):
            log.append(("unpack", tuple(t.shape)))
            return t

        return saved_tensors_hooks(pack, unpack)

    def test_around(self, x, w):
        log: list = []
        with self.log_hooks(log):
            out = remat(mm_chain)(x, w)
        assert all(kind == "pack" for kind, _ in log) and len(log) <= 2
        assert_same(grad(out, (x, w)), grad(mm_chain(x, w), (x, w)))

    def test_around_replace_the_inputs(self):
        """The hooks around the region own what it saves: the input itself can be freed."""
        x, w = rand(N, N, grad=False), rand(N, N, seed=1)
        store: list = []

        def pack(t):
            store.append(t.detach().clone())
            return len(store) - 1

        with assert_freed_without_gc() as watch:
            h = x * w
            watch(h)
            with saved_tensors_hooks(pack, lambda i: store[i]):
                out = remat(mm_chain)(h, w.detach())
            expected = grad(mm_chain(x * w, w.detach()), w)
            del h
            actual = grad(out, w)
        assert_same(actual, expected)

    def test_inside(self, x, w):
        log: list = []

        def f(x, w):
            h = (x @ w).tanh()
            with self.log_hooks(log):
                h = (h @ w).sin()
            return h.exp()

        plain = f(x, w)
        expected = grad(plain, (x, w))
        count = Counter(log)
        log.clear()
        assert_same(grad(remat(f)(x, w), (x, w)), expected)
        assert Counter(kind for kind, _ in log)["unpack"] >= Counter(kind for kind, _ in count)["unpack"] > 0

    def test_inside_that_change_values(self, x, w):
        """Hooks that compress: the backward gets what they return, with or without a region."""

        def f(x, w):
            h = (x @ w).tanh()
            with saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
                h = (h @ w).sin()
            return h.exp()

        assert_same(grad(remat(f)(x, w), (x, w)), grad(f(x, w), (x, w)))

    def test_around_that_change_values(self, x, w):
        """The region is recomputed from what the hooks return."""
        with saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()):
            out = remat(mm_chain)(x * 1, w)
        actual = grad(out, (x, w))
        for a, b in zip(actual, grad(mm_chain(x, w), (x, w))):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("where", ["around", "inside", "both"])
    def test_save_on_cpu(self, x, w, where):
        def f(x, w):
            with save_on_cpu() if where != "around" else torch.enable_grad():
                return mm_chain(x, w)

        with save_on_cpu() if where != "inside" else torch.enable_grad():
            out = remat(f)(x.clone(), w.clone())
        assert_same(grad(out, (x, w)), grad(mm_chain(x, w), (x, w)))

    def test_around_nested_regions(self, x, w):
        inner = remat(mm_chain)
        log: list = []
        with self.log_hooks(log), save_on_cpu():
            out = remat(lambda x, w: inner(inner(x, w).sin(), w))(x, w)
        expected = grad(mm_chain(mm_chain(x, w).sin(), w), (x, w))
        for keep in (True, False):
            assert_same(grad(out, (x, w), retain_graph=keep), expected)

    def test_between_nested_regions(self, x, w):
        inner = remat(mm_chain)

        def f(x, w):
            with save_on_cpu():
                h = inner((x @ w).sin(), w)
            return h.exp() @ w

        assert_same(grad(remat(f)(x, w), (x, w)), grad((mm_chain((x @ w).sin(), w)).exp() @ w, (x, w)))

    def test_disabled_hooks(self, x, w):
        """Where the user disables saved-tensor hooks, a region works or raises an error that says so."""
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            try:
                out = remat(mm_chain)(x, w)
            except RuntimeError as error:
                assert "not here" in str(error)
                return
        assert_same(grad(out, (x, w)), grad(mm_chain(x, w), (x, w)))

    def test_hooks_around_a_region_are_still_active_after_it(self, x, w):
        log: list = []
        with self.log_hooks(log):
            grad(remat(mm_chain)(x, w), (x, w))
            log.clear()
            y = x * w
            assert len(log) == 2
        y = x * w
        assert len(log) == 2
        del y


class TestThreads:
    def in_thread(self, *jobs):
        results: list = [None] * len(jobs)

        def work(i):
            try:
                results[i] = jobs[i]()
            except BaseException as error:
                results[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def test_backward_in_another_thread(self, x, w):
        out = remat(mm_chain)(x, w)
        (actual,) = self.in_thread(lambda: grad(out, (x, w)))
        assert_same(actual, grad(mm_chain(x, w), (x, w)))

    def test_forward_in_another_thread(self, x, w):
        (out,) = self.in_thread(lambda: remat(mm_chain)(x, w))
        assert_same(grad(out, (x, w)), grad(mm_chain(x, w), (x, w)))

    def test_captured_history_and_backward_in_another_thread(self, x, w):
        def step(wrap):
            h = (x @ w).sin()
            (out,) = self.in_thread(lambda: wrap(lambda w: (h @ w).exp() * h)(w))
            return grad(out, (x, w))

        assert_same(step(remat), step(lambda fn: fn))

    def test_backwards_of_two_graphs_at_once(self, x, w):
        fn = remat(mm_chain)

        def job():
            return [grad(fn(x, w), (x, w)) for _ in range(20)]

        expected = grad(mm_chain(x, w), (x, w))
        for results in self.in_thread(job, job, job):
            for result in results:
                assert_same(result, expected)

    def test_two_backwards_of_one_graph_at_once(self, x, w):
        expected = grad(mm_chain(x, w), (x, w))
        for _ in range(10):
            out = remat(mm_chain)(x, w)
            job = lambda: [grad(out, (x, w), retain_graph=True) for _ in range(5)]
            for results in self.in_thread(job, job):
                for result in results:
                    assert_same(result, expected)


class TestNothingLeaks:
    """Reference counts alone free everything, whatever happens."""

    def watched(self, watch, x, w, raises=None):
        """A region in which every tensor made in the forward is watched."""

        class Marker:
            pass

        marker = Marker()
        watch(marker)

        def f(x, w, marker):
            h = (x @ w).tanh()
            if not is_recomputing():
                watch(h)
            if raises is not None and raises == is_recomputing():
                raise KeyError("on purpose")
            return (h @ w).sin().exp()

        return remat(f), marker

    def test_after_a_backward(self, x, w):
        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w)
            out = fn(x * 1, w, marker)
            watch(out)
            grad(out, (x, w))
            del out, fn, marker

    def test_without_a_backward(self, x, w):
        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w)
            out = fn(x * 1, w, marker)
            watch(out, fn)
            del out, fn, marker

    def test_after_a_retained_backward(self, x, w):
        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w)
            out = fn(x * 1, w, marker)
            grad(out, (x, w), retain_graph=True)
            del out, fn, marker

    def test_after_a_partial_backward(self, x, w):
        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w)
            out = fn(x * 1, w, marker)
            grad(out, w)
            del out, fn, marker

    def test_after_a_double_backward(self, x, w):
        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w)
            out = fn(x * 1, w, marker)
            (g,) = grad(out, x, create_graph=True)
            watch(g)
            grad(g, w)
            del out, fn, marker, g

    def test_of_nested_regions(self, x, w):
        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w)
            outer = remat(lambda x, w, marker, fn=fn: fn(fn(x, w, marker), w, marker).sin())
            out = outer(x * 1, w, marker)
            grad(out, (x, w), retain_graph=True)
            grad(out, (x, w))
            watch(outer)
            del out, outer, fn, marker

    @pytest.mark.parametrize("again", [False, True], ids=["forward", "recompute"])
    def test_after_the_region_raised(self, x, w, again):
        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w, raises=again)
            out = None
            try:
                out = fn(x * 1, w, marker)
                grad(out, (x, w))
                failed = False
            except KeyError:
                failed = True
            assert failed and not is_recomputing() and torch.is_grad_enabled()
            del out, fn, marker
        assert_same(grad(remat(mm_chain)(x, w), (x, w)), grad(mm_chain(x, w), (x, w)))

    def test_after_the_backward_raised_elsewhere(self, x, w):
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, g):
                raise KeyError("on purpose")

        with assert_freed_without_gc() as watch:
            fn, marker = self.watched(watch, x, w)
            out = fn(Fails.apply(x), w, marker)
            try:
                grad(out, (x, w), retain_graph=True)
                failed = False
            except KeyError:
                failed = True
            assert failed
            del out, fn, marker

    def test_values_after_a_backward_that_raised(self):
        """What a backward pass recomputed before it raised is released, although the graph is alive."""
        x, w = rand(N, N), rand(N, N, seed=1)

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, g):
                raise KeyError("on purpose")

        @remat
        def fn(x, w):
            return Fails.apply((x @ w).tanh().sin()).exp().tanh().sin()

        with gc_disabled(), PeakMemory() as memory:
            out = fn(x, w)
            held = memory.live
            for _ in range(3):
                with pytest.raises(KeyError):
                    torch.autograd.grad(out, (x, w), torch.ones_like(out), retain_graph=True)
                gc.collect()  # free the exception's traceback
                assert memory.live == held
            del out
            assert memory.live == 0

    def test_the_function_does_not_outlive_its_graph(self, x, w):
        fn = remat(lambda x: (x @ w).sin())
        ref = weakref.ref(fn)
        with gc_disabled():
            out = fn(x)
            del fn
            got = grad(out, x)
            del out
            assert ref() is None
        assert_same(got, grad((x @ w).sin(), x))

    def test_inputs_are_released(self):
        """After the backward of a region its input is freed, although the graph before it is not."""
        x, w = rand(N, N), rand(N, N, seed=1)
        with gc_disabled(), PeakMemory() as memory:
            h = x + 1
            out = remat(mm_chain)(h, w)
            grad(out, (h, w))
            del h
            assert memory.live == KB  # out


class TestCapturedHistory:
    def test_a_tensor_with_a_history(self, x, w):
        h = (x @ w).sin()
        f = lambda y: ((y @ h).tanh() * h).exp()
        actual = grad(remat(f)(x), (x, w), retain_graph=True)
        assert_same(actual, grad(f(x), (x, w)))

    def test_its_graph_is_traversed_once(self, x, w):
        fired = []
        h = (x @ w).sin()
        h.register_hook(lambda g: fired.append(1))
        grad(remat(lambda y: ((y @ h).tanh() @ h).exp())(x), (x, w))
        assert fired == [1]

    def test_of_another_region(self, x, w):
        h = remat(lambda x: (x @ w).sin())(x)
        f = lambda y: ((y @ h).tanh() * h).exp()
        actual = grad(remat(f)(w), (x, w))
        h = (x @ w).sin()
        assert_same(actual, grad(f(w), (x, w)))

    def test_made_inside_the_outer_region(self, x, w):
        def f(x, wrap):
            h = (x @ w).sin()
            return wrap(lambda y: ((y @ h).tanh() * h).exp())(x.cos())

        actual = grad(remat(lambda x: f(x, remat))(x), (x, w))
        assert_same(actual, grad(f(x, lambda fn: fn), (x, w)))

    @pytest.mark.parametrize("check", ["metadata", "values", "none"])
    def test_an_input_of_the_outer_region(self, x, w, check):
        """In the forward it has a history from before the outer region, in the recompute it has none."""

        def run(wrap):
            def f(a, b):
                inner = wrap(lambda y: ((y @ a).tanh() @ b).tanh())
                return (inner(a.sin()) * b).exp()

            return grad(wrap(f)(x * 1, w * 1), (x, w))

        assert_same(run(lambda fn: remat(fn, determinism_check=check)), run(lambda fn: fn))

    def test_an_input_of_the_outer_region_with_an_output_dropped(self, x):
        """All saved tensors look alike here, so a recompute that is out of step would go unnoticed."""

        def run(wrap):
            def f(a):
                h = wrap(lambda y: y * a)(a * 2)
                for _ in range(3):
                    h = h * h
                z = h
                for _ in range(4):
                    z = z * z
                return h, z

            return grad(wrap(f)(x * 1)[0], x)

        assert_same(run(remat), run(lambda fn: fn))

    def test_captured_by_the_outer_region_too(self, x, w):
        def run(wrap):
            h = (x @ w).sin()
            inner = wrap(lambda y: ((y @ h).tanh() @ w).tanh())
            outer = wrap(lambda y: (inner(y.sin()) * h).exp() @ w)
            return grad(outer(x * 1), (x, w))

        assert_same(run(remat), run(lambda fn: fn))

    def test_a_view_of_an_input_and_of_a_captured_tensor(self, x, w):
        view = w[1:3]
        f = lambda x: ((x[:, 1:3] @ view).tanh() * x.t()[0]).exp()
        assert_same(grad(remat(f)(x), (x, w)), grad(f(x), (x, w)))

    def test_a_parameter_used_in_and_out_of_regions(self, x, w):
        def f(wrap):
            h = (x @ w).sin()
            h = wrap(lambda h: (h @ w).tanh())(h)
            return wrap(lambda h: (h @ w).tanh() @ w)(h) @ w

        assert_same(grad(f(remat), (x, w)), grad(f(lambda fn: fn), (x, w)))


class TestChangesInPlace:
    def test_change_of_the_output(self, x, w):
        def f(wrap, change):
            out = wrap(lambda x: (x @ w).tanh() @ w)(x)
            change(out)
            return grad(out.sin(), (x, w))

        for change in (Tensor.sin_, lambda t: t.mul_(2), lambda t: t[0].zero_()):
            assert_same(f(remat, change), f(lambda fn: fn, change))

    def test_change_of_a_saved_output(self, x, w):
        """An error without a region. With one the output is recomputed, so the gradient is right."""

        def f(wrap):
            out = wrap(lambda x: (x @ w).tanh())(x)
            out.mul_(2)
            return grad(out, (x, w))

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            f(lambda fn: fn)
        assert_same(f(remat), grad((x @ w).tanh().mul(2), (x, w)))

    def test_change_of_a_saved_tensor_inside_is_an_error_as_without_remat(self, x, w):
        def f(x):
            h = (x @ w).tanh()
            h.mul_(2)
            return h.exp()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad(f(x), x)
        with pytest.raises(MutationError, match="saved for the backward and then changed in place"):
            grad(remat(f)(x), x)

    @pytest.mark.parametrize("captured", [False, True])
    def test_change_of_an_input_before_the_backward_is_an_error(self, x, w, captured):
        value = w.detach().clone()
        out = remat(lambda x: (x @ value).tanh().exp())(x) if captured else remat(mm_chain)(x, value)
        value.add_(1)
        with pytest.raises(MutationError, match="value" if captured else "argument w was"):
            grad(out, x)

    def test_change_of_an_input_after_the_backward_is_fine(self, x, w):
        value = w.detach().clone()
        out, plain = remat(mm_chain)(x, value), mm_chain(x, value.clone())
        actual = grad(out, x)
        value.add_(1)
        assert_same(actual, grad(plain, x))

    def test_increment_of_the_version_alone_is_an_error(self, x, w):
        value = w.detach().clone()
        out = remat(mm_chain)(x, value)
        increment_version(value)
        with pytest.raises(MutationError):
            grad(out, x)


class TestTensorsWithoutContentToCompare:
    """For fake and nested tensors remat cannot check whether they were changed."""

    @pytest.mark.parametrize("training", [True, False])
    def test_fake_tensors(self, training: bool) -> None:
        with FakeTensorMode():
            norm, x = nn.BatchNorm1d(4).train(training), torch.randn(3, 4, requires_grad=True)
            out = remat(lambda x, mask: (norm(x) * mask).sin())(x, torch.ones(3, 4))
            out.sum().backward()
            assert x.grad is not None and x.grad.shape == (3, 4)

    def test_nested_tensors_without_grad(self) -> None:
        layer = nn.Linear(4, 4)
        nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
        grads = []
        for fn in (remat(lambda n: layer(n).relu(), determinism_check="none"), lambda n: layer(n).relu()):
            grads.append(torch.autograd.grad(fn(nested).values().sum(), layer.weight)[0])
        assert torch.equal(*grads)

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
    def test_nested_tensors_in_the_log_of_operations(self, x, layout):
        """A strided one has no sizes to log, and a jagged one that the region makes has other sizes in each run."""

        def f(x):
            nested = torch.nested.as_nested_tensor([x.detach(), x.detach() * 2], layout=layout)
            return (x.sin() * (nested * 2).values().sum()).exp()

        expected = grad(f(x), x)  # for jagged tensors torch creates a constant in the first call
        assert_same(grad(remat(f, debug=True)(x), x), expected)


class TestGradModes:
    def test_forward_under_no_grad_inside(self, x, w):
        def f(x):
            with torch.no_grad():
                scale = (x @ w).exp().sum()
            return (x @ w).tanh() * scale

        assert_same(grad(remat(f)(x), (x, w)), grad(f(x), (x, w)))

    def test_a_region_inside_no_grad_inside_a_region(self, x, w):
        inner = remat(mm_chain)

        def f(x):
            with torch.no_grad():
                scale = inner(x, w)
            return (x @ w).tanh() * scale

        def plain(x):
            with torch.no_grad():
                scale = mm_chain(x, w)
            return (x @ w).tanh() * scale

        assert_same(grad(remat(f)(x), (x, w)), grad(plain(x), (x, w)))

    def test_enable_grad_inside_a_call_under_no_grad(self, x, w):
        def f(x):
            with torch.enable_grad():
                y = (x @ w).tanh() @ w
                (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return y, g

        with torch.no_grad():
            actual, expected = remat(f)(x), f(x)
        assert_same(actual, expected)
        assert_same(grad(actual[0], (x, w)), grad(expected[0], (x, w)))

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_called_without_gradients(self, x, w, mode):
        with mode():
            runs: list = []
            out = remat(counted(mm_chain, runs))(x, w)
        assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
        assert runs == [False]

    def test_nothing_requires_grad(self, x, w):
        x, w = rand(N, N, grad=False), rand(N, N, seed=1, grad=False)
        assert held_bytes(remat(mm_chain), x, w) == KB
        assert not remat(mm_chain)(x, w).requires_grad

    def test_backward_under_no_grad_and_under_inference_mode(self, x, w):
        expected = grad(mm_chain(x, w), (x, w))
        loss = remat(mm_chain)(x, w).sum()
        with torch.no_grad():
            assert_same(torch.autograd.grad(loss, (x, w)), expected)

    def test_an_inference_tensor_as_captured(self, x):
        with torch.inference_mode():
            scale = torch.full((4, 4), 2.0, dtype=torch.float64)
        f = lambda x: (x.sin() + scale).exp()
        assert_same(grad(remat(f)(x), x), grad(f(x), x))

    def test_the_function_sets_the_mode(self, x, w):
        def f(x):
            previous = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            y = x.exp()
            torch.set_grad_enabled(previous)
            return (x @ w).sin() * y

        assert_same(grad(remat(f)(x), (x, w)), grad(f(x), (x, w)))
        assert torch.is_grad_enabled()

    def test_detach_and_requires_grad_inside(self, x, w):
        def f(x):
            leaf = (x @ w).detach().requires_grad_()
            return (leaf * x).sin(), leaf

        out, leaf = remat(f)(x)
        plain, other = f(x)
        assert_same(grad(out, (x, leaf)), grad(plain, (x, other)))


class TestErrors:
    def test_errors_in_the_forward_restore_all_state(self, x, w):
        @remat
        def f(x):
            raise KeyError("on purpose")

        with pytest.raises(KeyError, match="on purpose"):
            f(x)
        y = (x @ w).sin()
        assert torch.is_tensor(y.grad_fn._saved_self) and not is_recomputing()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def test_errors_in_the_recompute_restore_all_state(self, x, w):
        @remat
        def f(x):
            y = (x @ w).sin()
            if is_recomputing():
                raise KeyError("on purpose")
            return y.exp()

        out = f(x)
        state = torch.get_rng_state()
        with pytest.raises(KeyError, match="on purpose"):
            grad(out, x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not is_recomputing() and torch.is_grad_enabled()
        assert torch.equal(state, torch.get_rng_state())

    def test_a_second_attempt_works(self, x, w):
        broken = [True]

        @remat
        def f(x):
            y = (x @ w).sin()
            if is_recomputing() and broken[0]:
                raise KeyError("on purpose")
            return y.exp()

        out = f(x)
        with pytest.raises(KeyError):
            grad(out, (x, w), retain_graph=True)
        broken[0] = False
        assert_same(grad(out, (x, w)), grad((x @ w).sin().exp(), (x, w)))

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_interrupts_are_propagated(self, x, w, kind):
        @remat
        def f(x):
            y = (x @ w).sin()
            if is_recomputing():
                raise kind
            return y.exp()

        out = f(x)
        with pytest.raises(BaseException) as caught:
            grad(out, x)
        assert caught.type is kind or issubclass(caught.type, RuntimeError)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("made", ["outside", "inside"])
def test_an_inference_tensor_as_argument_of_a_nested_region(made: str) -> None:
    """It has no version counter, and the hooks of the outer region get it."""

    def ones() -> torch.Tensor:
        with torch.inference_mode():
            return torch.ones(3)

    given = ones()
    scale = lambda x, c: (x * 2).sin() * c.shape[0]
    fn = lambda inner: lambda x: inner(x.exp(), given if made == "outside" else ones()).cos()
    x = torch.rand(3, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(scale)(x).sum(), x)
    (found,) = torch.autograd.grad(remat(fn(remat(scale)))(x).sum(), x)
    assert torch.equal(found, expected)


def randomized(x):
    return F.rrelu(x, 0.1, 0.3, training=True)


@pytest.mark.parametrize(
    "fn",
    [
        randomized,
        lambda x: randomized(x * 2),
        lambda x: randomized(x.sin()) * 2,
        lambda x: F.rrelu_(x.sin(), 0.1, 0.3, training=True),
        lambda x: randomized(randomized(x)),
    ],
    ids=["an argument", "made inside", "not last", "in place", "twice"],
)
@pytest.mark.parametrize("transform", [torch.autograd.grad, torch.func.grad], ids=["autograd", "func"])
@pytest.mark.parametrize("policy", [None, policies.nothing_saveable, policies.save_ops("aten.sin")], ids=repr)
@pytest.mark.filterwarnings("ignore:The policy")
def test_an_operation_that_fills_a_tensor_after_saving_it(fn, transform, policy):
    """The noise is saved before it is drawn, so the recompute must not stop there."""

    def run(wrap):
        torch.manual_seed(0)
        x = torch.linspace(-2, 1, 12).requires_grad_()
        if transform is torch.autograd.grad:
            return torch.autograd.grad(wrap(fn)(x).exp().sum(), x)[0], torch.rand(1)
        return torch.func.grad(lambda x: wrap(fn)(x).exp().sum())(x.detach()), torch.rand(1)

    assert_same(run(lambda fn: remat(fn, policy=policy)), run(lambda fn: fn))


def test_dropout_before_a_product_that_is_not_needed():
    """A tensor saved without a history is filled already, so the product after it is not recomputed."""
    x, w = torch.rand(4, 4, requires_grad=True), torch.rand(4, 4, requires_grad=True)
    y = remat(lambda x: F.dropout(x @ w, 0.5) @ w)(x)
    assert count_ops(torch.autograd.grad, y.sum(), (x, w))["aten.mm"] == 1 + 4


@pytest.mark.parametrize("policy", [None, policies.save_matmuls])
@pytest.mark.parametrize("nested", [False, True])
def test_backward_under_inference_mode(policy, nested: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.sin() @ x.cos()).exp()

    x = torch.randn(3, 3, requires_grad=True)
    grads = []
    for wrap in (lambda f: f, lambda f: remat(f, policy=policy)):
        inner = wrap(fn)
        out = (wrap(lambda x: inner(x).sin())(x) if nested else inner(x)).sum()
        with torch.inference_mode():
            grads.append(torch.autograd.grad(out, x)[0])
            assert torch.is_inference_mode_enabled() and grads[-1].is_inference()
    assert torch.equal(*grads)


def test_the_end_of_a_pass_does_not_wait_for_the_recompute_of_another() -> None:
    """That recompute may itself wait for a backward pass inside, on the device thread that ends the first pass."""
    recomputes = threading.Semaphore(0)
    ended = threading.Event()
    in_time: list[bool] = []

    def f(x: Tensor) -> Tensor:
        if is_recomputing() and threading.current_thread() is second:
            recomputes.release()
            in_time.append(ended.wait(10))
        return x.sin().exp().sin().exp()

    def first_pass() -> None:
        y.backward(retain_graph=True)
        ended.set()

    def second_pass() -> None:
        torch.autograd.grad(y, x, retain_graph=True)

    first, second = threading.Thread(target=first_pass), threading.Thread(target=second_pass)

    def before_the_end(_: Tensor) -> None:
        second.start()
        recomputes.acquire(timeout=10)

    x = rand(3)
    x.register_post_accumulate_grad_hook(before_the_end)
    y = remat(f)(x).sum()
    first.start()
    first.join()
    second.join()
    assert in_time == [True]
