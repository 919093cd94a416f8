"""Under plain autograd a rematerialized function gives the same bits, and saves and recomputes what it should."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import (
    Case,
    assert_same,
    cases,
    differentiable_leaves,
    flat,
    orders_of,
    rand,
    scalar,
    tensor_leaves,
    total,
)
from torch import Tensor, nn

from benchmarks.measure import PeakMemory, count_ops, gc_disabled, held_bytes, peak_bytes
from remat import remat


def run(case: Case, fn, order: int = 1, seeded: bool = True):
    """The result, the arguments and captured tensors after the call, and the gradients up to an order."""
    with case.state():
        args = case.make_args()
        out = fn(*args)
        after = [t.detach().clone() for t in (*tensor_leaves(args), *case.captured)]
        drawn = torch.rand(1)
        inputs, results, tree = case.inputs(args), [], out
        for i in range(order):
            value = total(tree)
            if not value.requires_grad:
                break
            tree = torch.autograd.grad(value, inputs, create_graph=i + 1 < order, allow_unused=True)
            results.append(tree)
        still = [t.detach().clone() for t in (*tensor_leaves(args), *case.captured)]
        return out, after, still, drawn, torch.rand(1), results


class TestSameBits:
    @cases()
    def test_value_state_and_gradients(self, case):
        actual, expected = run(case, remat(case.fn)), run(case, case.fn)
        assert_same(actual, expected)
        assert [t.requires_grad for t in tensor_leaves(actual[0])] == [
            t.requires_grad for t in tensor_leaves(expected[0])
        ]
        assert bool(expected[-1]) == (case.name not in ("integers_only", "no_tensors_out"))

    @cases(double=True)
    def test_second_and_third_order(self, case):
        orders = orders_of(lambda orders: run(case, case.fn, orders))
        actual, expected = run(case, remat(case.fn), orders), run(case, case.fn, orders)
        assert_same(actual, expected)
        assert len(expected[-1]) >= 1

    @cases()
    @pytest.mark.parametrize(
        "options",
        [{"early_stop": False}, {"determinism_check": "values"}, {"determinism_check": "none"}],
        ids=str,
    )
    def test_options(self, case, options):
        assert_same(run(case, remat(case.fn, **options)), run(case, case.fn))

    @cases()
    def test_nested(self, case):
        inner = remat(case.fn)
        assert_same(run(case, remat(lambda *args: inner(*args))), run(case, case.fn))

    @cases(random=False, stateful=False)
    def test_backward_twice(self, case):
        def twice(fn):
            args = case.make_args()
            value = total(fn(*args))
            if not value.requires_grad:
                return None
            inputs = case.inputs(args)
            first = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
            return first, torch.autograd.grad(value, inputs, allow_unused=True)

        assert_same(twice(remat(case.fn)), twice(case.fn))

    @cases(func=True, double=True, random=False, stateful=False)
    def test_finite_differences(self, case):
        if case.name in ("empty", "embedding", "detached_part"):
            return  # nothing to differentiate, or the gradient differs from the derivative on purpose
        call, primals = scalar(case, remat(case.fn))
        inputs = tuple(t.requires_grad_() for t in primals)
        assert torch.autograd.gradcheck(call, inputs)
        if sum(t.numel() for t in inputs) <= 20:
            assert torch.autograd.gradgradcheck(call, inputs, atol=1e-4)

    @cases()
    def test_without_gradients(self, case):
        """Called under `no_grad` or in inference mode, it behaves like the function itself."""
        for mode in (torch.no_grad, torch.inference_mode):
            results = []
            for fn in (remat(case.fn), case.fn):
                with case.state():
                    args = case.make_args()
                    with mode():
                        results.append(fn(*args))
            assert_same(results[0], results[1])
            assert not differentiable_leaves(results[0]) or case.name.startswith("returns")

    @cases()
    def test_identity_of_what_passes_through(self, case):
        """A result that is an argument is that argument, and a result that is returned twice is one tensor."""

        def identities(fn):
            with case.state():
                args = case.make_args()
                out = tensor_leaves(fn(*args))
            return [[a is b for b in (*out, *tensor_leaves(args))] for a in out]

        assert identities(remat(case.fn)) == identities(case.fn)


class TestFlagsOfTheTable:
    """The flags in `cases.py` describe plain torch correctly, so that no test is skipped by mistake."""

    @cases()
    @pytest.mark.parametrize("flag", ["func", "jvp", "vmap", "double", "jacobian"])
    def test_flag(self, case, flag):
        if flag == "jacobian" and not (case.func and case.jvp):
            return
        call, primals = flat(case)
        ones = tuple(torch.ones_like(t) for t in primals)

        def func():
            torch.func.grad(scalar(case)[0], tuple(range(len(primals))))(*primals)

        def jvp():
            torch.func.jvp(call, primals, ones)
            with fwAD.dual_level():
                call(*map(fwAD.make_dual, primals, ones))

        def vmap():
            torch.func.vmap(call, randomness="different")(*(torch.stack([t, t]) for t in primals))

        def double():
            args = case.make_args()
            grads = torch.autograd.grad(total(case.fn(*args)), case.inputs(args), create_graph=True, allow_unused=True)
            second = total(differentiable_leaves(grads))
            if second.requires_grad:
                torch.autograd.grad(second, case.inputs(args), allow_unused=True)

        def jacobian():
            torch.func.jacrev(call)(*primals)
            torch.func.jacfwd(call, randomness="same")(*primals)
            torch.func.hessian(scalar(case)[0])(*primals) if not case.random else None

        works = True
        try:
            with case.state(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if flag in ("func", "jvp", "vmap"):
                    assert primals and call(*primals)
                {"func": func, "jvp": jvp, "vmap": vmap, "double": double, "jacobian": jacobian}[flag]()
        except Exception:
            works = False
        assert works == getattr(case, flag)


N, KB = 32, 32 * 32 * 8


def block(x: Tensor, w: Tensor) -> Tensor:
    """Half of an MLP, twice: plain autograd saves six tensors of it."""
    h = torch.tanh(x @ w).sin()
    return torch.tanh(h @ w).sin() @ w


def chain(fn, x: Tensor, w: Tensor, depth: int = 8) -> Tensor:
    for _ in range(depth):
        x = fn(x, w)
    return x


class TestMemory:
    def test_a_chain_saves_only_its_inputs(self):
        """One tensor per region; the first region's input is the caller's."""
        x, w = rand(N, N), rand(N, N, seed=1) / N
        assert held_bytes(chain, remat(block), x, w) == 8 * KB
        assert held_bytes(chain, block, x, w) == 8 * 5 * KB

    def test_the_peak_of_a_chain_is_its_inputs_and_one_region(self):
        x, w = rand(N, N), rand(N, N, seed=1)

        def step(fn, depth):
            return torch.autograd.grad(chain(fn, x, w, depth).sum(), (x, w))

        peaks = {depth: peak_bytes(step, remat(block), depth) for depth in (8, 16, 24)}
        assert peaks[24] - peaks[16] == peaks[16] - peaks[8] == 8 * KB
        assert peaks[8] <= (8 + 10) * KB
        assert peaks[8] < peak_bytes(step, block, 8) / 2

    def test_the_second_order_saves_no_more_than_plain_autograd(self):
        x, w = rand(N, N), rand(N, N, seed=1)

        def step(fn):
            (g,) = torch.autograd.grad(chain(fn, x, w).sum(), x, create_graph=True)
            return torch.autograd.grad(g.sin().sum(), x)

        assert peak_bytes(step, remat(block)) <= peak_bytes(step, block)


@pytest.fixture(scope="class")
def without_gc():
    """Reference counts alone free memory in all tests of a class."""
    with gc_disabled():
        yield


@pytest.mark.usefixtures("without_gc")
class TestLiveBytes:
    """The bytes that are alive after the forward and after the backward of each case."""

    def forward(self, case, fn, args=None):
        with case.state():
            return fn(*(case.make_args() if args is None else args))

    def backward(self, case, fn):
        with case.state():
            args = case.make_args()
            value = total(fn(*args))
            if value.requires_grad:
                torch.autograd.grad(value, case.inputs(args), allow_unused=True)

    def live(self, call, *args):
        """The live bytes while the result of a call is alive, and after it is deleted."""
        with PeakMemory() as memory:
            out = call(*args)
            during = memory.live
            del out
            return during, memory.live

    @cases()
    def test_everything_is_freed(self, case):
        fn = remat(case.fn)
        self.backward(case, fn)
        assert self.live(self.backward, case, fn) == self.live(self.backward, case, case.fn) == (0, 0)

    @cases()
    def test_everything_is_freed_without_a_backward(self, case):
        fn = remat(case.fn)
        self.forward(case, fn)
        assert self.live(self.forward, case, fn)[1] == 0

    @cases()
    def test_no_more_is_saved_than_without_remat(self, case):
        """In addition only copies of small tensors that may change, and the generator's state."""
        args, fn = case.make_args(), remat(case.fn)
        self.forward(case, fn, args)
        copies = sum(t.nbytes for t in (*tensor_leaves(args), *case.captured) if not t.requires_grad)
        rng = torch.get_rng_state().nbytes
        plain = self.live(self.forward, case, case.fn, args)[0]
        assert self.live(self.forward, case, fn, args)[0] <= plain + copies + rng


class TestOps:
    """What is recomputed: each product at most once, and the last one never."""

    def counts(self, fn, *args, depth=1):
        def step():
            torch.autograd.grad(chain(fn, *args, depth).sum(), args)

        plain = count_ops(lambda: torch.autograd.grad(chain(block, *args, depth).sum(), args))
        return {op: n - plain[op] for op, n in count_ops(step).items() if n != plain[op]}

    @pytest.mark.parametrize("depth", [1, 4])
    def test_the_last_product_is_not_recomputed(self, depth):
        found = self.counts(remat(block), rand(4, 4), rand(4, 4, seed=1), depth=depth)
        assert found["aten.mm"] == 2 * depth
        assert found["aten.tanh"] == 2 * depth
        assert found["aten.sin"] == 2 * depth
        assert set(found) <= {"aten.mm", "aten.tanh", "aten.sin", "aten.detach", "aten.alias"}

    def test_without_early_stop_all_products_are_recomputed(self):
        found = self.counts(remat(block, early_stop=False), rand(4, 4), rand(4, 4, seed=1))
        assert (found["aten.mm"], found["aten.tanh"], found["aten.sin"]) == (3, 2, 2)

    def test_the_forward_runs_the_operations_of_the_function(self):
        x, w = rand(4, 4), rand(4, 4, seed=1)
        actual, expected = count_ops(remat(block), x, w), count_ops(block, x, w)
        del expected["aten.detach"], actual["aten.detach"]
        assert actual == expected

    @cases()
    def test_no_op_is_recomputed_more_than_once(self, case):
        def forward(fn):
            with case.state():
                return fn(*case.make_args())

        def step(fn):
            with case.state():
                args = case.make_args()
                value = total(fn(*args))
                if value.requires_grad:
                    torch.autograd.grad(value, case.inputs(args), allow_unused=True)

        fn = remat(case.fn)
        step(fn)
        once, plain, ours = count_ops(forward, case.fn), count_ops(step, case.fn), count_ops(step, fn)
        own = {"aten.detach", "aten.clone", "aten.copy_", "aten.view", "aten.alias", "aten.equal"}
        for op, n in ours.items():
            assert op in own or n - plain[op] <= once[op], op

    def test_a_gradient_that_is_not_requested_is_not_computed(self):
        x, w = rand(4, 4), rand(4, 4, seed=1, grad=False)

        def mms(fn):
            return count_ops(lambda: torch.autograd.grad(fn(x, w).sum(), x))["aten.mm"]

        assert mms(remat(block)) == mms(block) + 2


def test_an_argument_that_is_passed_twice_is_one_object_in_all_runs() -> None:
    """`nn.MultiheadAttention` relies on this: it tests `query is key`."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        return (a.sin() if a is b else a.cos()) * b.exp()

    x = rand(3)
    (expected,) = torch.autograd.grad(fn(x, x).sum(), x)
    (found,) = torch.autograd.grad(remat(fn)(x, x).sum(), x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.func.grad(lambda q: remat(fn)(q, q).sum())(x.detach()), expected)
    attention, t = nn.MultiheadAttention(4, 2, batch_first=True).double(), rand(2, 3, 4)
    inputs = [t, *attention.parameters()]
    expected = torch.autograd.grad(attention(t, t, t)[0].sum(), inputs)
    assert all(map(torch.equal, torch.autograd.grad(remat(attention)(t, t, t)[0].sum(), inputs), expected))
