"""`torch.autograd.forward_ad` levels around and between regions, in every order with reverse mode."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import assert_same, cases, flat, rand, scalar, tensor_leaves, total
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from benchmarks.measure import (
    PeakMemory,
    assert_freed_without_gc,
    count_ops,
    gc_disabled,
    held_bytes,
    leaked_bytes,
    peak_bytes,
)
from remat import MutationError, RematError, is_recomputing, policies, remat

N, KB = 32, 32 * 32 * 8


def block(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() @ w).sin() @ w


def nested(x: Tensor, w: Tensor) -> Tensor:
    """The computation of `nested_regions` without regions."""
    return block(block(x, w).cos(), w) * x


INNER = remat(block)


@remat
def nested_regions(x: Tensor, w: Tensor) -> Tensor:
    return INNER(INNER(x, w).cos(), w) * x


PAIRS = [
    pytest.param(block, remat(block), id="region"),
    pytest.param(block, remat(block, early_stop=False), id="without-early-stop"),
    pytest.param(block, remat(remat(block)), id="twice"),
    pytest.param(nested, nested_regions, id="nested"),
]
pairs = pytest.mark.parametrize("plain,ours", PAIRS)


@pytest.fixture
def x() -> Tensor:
    return rand(3, 3)


@pytest.fixture
def w() -> Tensor:
    return rand(3, 3, seed=1)


@pytest.fixture
def v() -> Tensor:
    return rand(3, 3, seed=2, grad=False)


@pytest.fixture
def u() -> Tensor:
    return rand(3, 3, seed=3, grad=False)


class TestForward:
    @cases(jvp=True)
    def test_same_tangents(self, case):
        def run(fn):
            with case.state(), fwAD.dual_level():
                call, primals = flat(case, fn)
                duals = [fwAD.make_dual(t, torch.ones_like(t)) for t in primals]
                return [tuple(fwAD.unpack_dual(t)) for t in call(*duals)]

        assert_same(run(remat(case.fn)), run(case.fn))

    @cases(jvp=True)
    def test_forward_then_reverse(self, case):
        """The gradients of primal and tangent wrt both; for softmax, and sometimes group norm, torch itself raises."""

        def run(fn):
            with case.state(), fwAD.dual_level():
                call, primals = flat(case, fn)
                primals = [t.requires_grad_() for t in primals]
                tangents = [torch.ones_like(t).requires_grad_() for t in primals]
                outs = [fwAD.unpack_dual(t) for t in call(*map(fwAD.make_dual, primals, tangents))]
                values = [part for pair in outs for part in pair if part is not None]
                return values, torch.autograd.grad(total(values), [*primals, *tangents], allow_unused=True)

        try:
            expected = run(case.fn)
        except NotImplementedError as error:
            assert "native_group_norm_backward" in str(error)
            with pytest.raises(NotImplementedError, match="native_group_norm_backward"):
                run(remat(case.fn))
            return
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            assert case.name in ("attention", "reductions", "loss")
            with pytest.raises(MutationError):
                run(remat(case.fn))
            return
        assert_same(run(remat(case.fn)), expected)

    @pairs
    def test_under_no_grad(self, plain, ours, x, w, v):
        def run(fn):
            with torch.no_grad(), fwAD.dual_level():
                return tuple(fwAD.unpack_dual(fn(fwAD.make_dual(x, v), w)))

        assert_same(run(ours), run(plain))

    def test_nothing_is_saved_when_nothing_requires_grad(self, v):
        x, w, v = (rand(N, N, seed=i, grad=False) for i in range(3))

        def run():
            with fwAD.dual_level():
                return tuple(fwAD.unpack_dual(remat(block)(fwAD.make_dual(x, v), w)))

        assert held_bytes(run) == 2 * KB

    def test_after_the_level_the_primal_remains(self, x, w, v):
        with fwAD.dual_level():
            out = remat(block)(fwAD.make_dual(x, v), w)
        assert_same(torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(block(x, w).sum(), (x, w)))


class TestReverseOverForward:
    """Hessian-vector products by a backward through a tangent."""

    def product(self, fn, x, w, v, after, wanted="tangent", **options):
        with fwAD.dual_level():
            out = fwAD.unpack_dual(fn(fwAD.make_dual(x, v), w))
            value = getattr(out, wanted).sin().sum()
            if not after:
                return torch.autograd.grad(value, (x, w), **options)
        return torch.autograd.grad(value, (x, w), **options)

    @pairs
    @pytest.mark.parametrize("after", [False, True], ids=["in the level", "after the level"])
    @pytest.mark.parametrize("wanted", ["primal", "tangent"])
    def test_backward(self, plain, ours, x, w, v, after, wanted):
        expected = self.product(plain, x, w, v, after, wanted)
        assert_same(self.product(ours, x, w, v, after, wanted), expected)

    def test_is_the_hessian_vector_product(self, x, w, v):
        def directional(x):
            with fwAD.dual_level():
                return fwAD.unpack_dual(remat(block)(fwAD.make_dual(x, v), w)).tangent.sum()

        (actual,) = torch.autograd.grad(directional(x), x)
        (g,) = torch.autograd.grad(block(x, w).sum(), x, create_graph=True)
        (expected,) = torch.autograd.grad((g * v).sum(), x)
        assert_same(actual, expected, exact=False)

    @pairs
    def test_both_at_once_and_twice(self, plain, ours, x, w, v):
        def run(fn):
            with fwAD.dual_level():
                out = fwAD.unpack_dual(fn(fwAD.make_dual(x, v), w))
            value = (out.primal * out.tangent).sum()
            first = torch.autograd.grad(value, (x, w), retain_graph=True)
            return first, torch.autograd.grad(value, (x, w))

        assert_same(run(ours), run(plain))

    @pairs
    @pytest.mark.parametrize("after", [False, True], ids=["in the level", "after the level"])
    def test_third_order(self, plain, ours, x, w, v, after):
        def run(fn):
            g, h = self.product(fn, x, w, v, after, create_graph=True)
            return torch.autograd.grad(g.sin().sum() + h.cos().sum(), (x, w))

        assert_same(run(ours), run(plain))

    @pairs
    def test_a_tangent_that_is_differentiated(self, plain, ours, x, w, v):
        def run(fn):
            tangent = v.clone().requires_grad_()
            with fwAD.dual_level():
                out = fwAD.unpack_dual(fn(fwAD.make_dual(x, tangent), w)).tangent
            return torch.autograd.grad(out.sin().sum(), (x, w, tangent))

        assert_same(run(ours), run(plain))

    @pairs
    def test_an_intermediate_as_dual(self, plain, ours, x, w, v):
        def run(fn):
            with fwAD.dual_level():
                dual = fwAD.make_dual(x, v)
                h = fn((dual @ w).sin(), dual.cos())
                out = fwAD.unpack_dual(fn(h, w))
                return torch.autograd.grad((out.primal + out.tangent).sin().sum(), (x, w))

        assert_same(run(ours), run(plain))

    @pytest.mark.parametrize("check", ["metadata", "none"])
    def test_an_intermediate_as_dual_of_nested_regions(self, x, w, v, check):
        """The tangent has a history before the regions in the forward, and none in the recompute."""

        def run(wrap):
            inner = wrap(torch.sin)
            outer = wrap(lambda a: inner(a) * a)
            with fwAD.dual_level():
                out = fwAD.unpack_dual(outer(fwAD.make_dual(x, v) * w))
                return torch.autograd.grad((out.primal + out.tangent).sin().sum(), (x, w))

        assert_same(run(lambda fn: remat(fn, determinism_check=check)), run(lambda fn: fn))

    def test_the_region_is_recomputed_once(self, x, w, v):
        runs = []

        def noting(x, w):
            runs.append(is_recomputing())
            return block(x, w)

        self.product(remat(noting), x, w, v, True)
        assert runs == [False, True]

    def test_the_recompute_stops_early(self, x, w, v):
        def mms(fn):
            return count_ops(self.product, fn, x, w, v, True)["aten.mm"]

        assert mms(remat(block)) < mms(remat(block, early_stop=False)) <= mms(block) + 9

    def test_saves_only_the_inputs(self):
        """For a chain of regions, one primal and one tangent per region."""
        x, w, v = rand(N, N), rand(N, N, seed=1), rand(N, N, seed=2, grad=False)

        def forward(fn, depth):
            with fwAD.dual_level():
                h = fwAD.make_dual(x, v)
                for _ in range(depth):
                    h = fn(h, w)
                return fwAD.unpack_dual(h).tangent

        held = {depth: held_bytes(forward, remat(block), depth) / KB for depth in (4, 8)}
        assert held[8] - held[4] == 4 * 2
        assert held_bytes(forward, block, 8) / KB > 2 * held[8]


class TestForwardOverReverse:
    """Hessian-vector products by a backward that carries tangents."""

    def product(self, fn, x, w, v, **options):
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, v)
            grads = torch.autograd.grad(fn(dual, w).sin().sum(), (dual, w), **options)
            return [tuple(fwAD.unpack_dual(g)) for g in grads]

    @pairs
    @pytest.mark.parametrize("options", [{}, {"retain_graph": True}, {"create_graph": True}], ids=str)
    def test_tangents_of_gradients(self, plain, ours, x, w, v, options):
        assert_same(self.product(ours, x, w, v, **options), self.product(plain, x, w, v, **options))

    def test_is_the_hessian_vector_product(self, x, w, v):
        (primal, tangent), _ = self.product(remat(block), x, w, v)
        (g,) = torch.autograd.grad(block(x, w).sin().sum(), x, create_graph=True)
        assert_same(primal, g, exact=False)
        assert_same(tangent, torch.autograd.grad((g * v).sum(), x)[0], exact=False)

    @pairs
    def test_the_cotangent_carries_the_tangent(self, plain, ours, x, w, v, u):
        """The forward has run before the level, so only the cotangent has a tangent."""

        def run(fn):
            out = fn(x, w)
            with fwAD.dual_level():
                grads = torch.autograd.grad(out, (x, w), fwAD.make_dual(v, u))
                return [tuple(fwAD.unpack_dual(g)) for g in grads]

        assert_same(run(ours), run(plain))

    @pairs
    def test_backward_of_the_tangent_of_the_gradient(self, plain, ours, x, w, v):
        def run(fn):
            with fwAD.dual_level():
                dual = fwAD.make_dual(x, v)
                (g,) = torch.autograd.grad(fn(dual, w).sin().sum(), dual, create_graph=True)
                tangent = fwAD.unpack_dual(g).tangent
            return torch.autograd.grad(tangent.sin().sum(), (x, w))

        assert_same(run(ours), run(plain))

    @pairs
    def test_the_same_graph_backward_in_and_after_the_level(self, plain, ours, x, w, v):
        def run(fn):
            with fwAD.dual_level():
                dual = fwAD.make_dual(x, v)
                value = fn(dual, w).sin().sum()
                first = torch.autograd.grad(value, w, retain_graph=True)[0]
                first = tuple(fwAD.unpack_dual(first))
            return first, torch.autograd.grad(value, (x, w))

        assert_same(run(ours), run(plain))

    @pairs
    def test_a_graph_from_one_level_in_the_next(self, plain, ours, x, w, v, u):
        """The old level's tangents no longer exist; the new level has those of the cotangent."""

        def run(fn):
            with fwAD.dual_level():
                out = fn(fwAD.make_dual(x, v), w)
            with fwAD.dual_level():
                grads = torch.autograd.grad(out, (x, w), fwAD.make_dual(v, u))
                return [tuple(fwAD.unpack_dual(g)) for g in grads]

        actual, expected = run(ours), run(plain)
        assert_same([g for g, _ in actual], [g for g, _ in expected])
        assert_same([t for _, t in actual], [t for _, t in expected])

    @pairs
    def test_dual_and_gradient_inside_the_function(self, plain, ours, x, w, v):
        """The whole product is inside a region."""

        def product(fn):
            def inside(x, w):
                with fwAD.dual_level():
                    out = fwAD.unpack_dual(fn(fwAD.make_dual(x, v), w))
                    return (out.primal * out.tangent).sin()

            return inside

        expected = torch.autograd.grad(product(plain)(x, w).sum(), (x, w))
        assert_same(torch.autograd.grad(product(ours)(x, w).sum(), (x, w)), expected)
        assert_same(torch.autograd.grad(remat(product(plain))(x, w).sum(), (x, w)), expected)
        assert_same(torch.autograd.grad(remat(product(ours))(x, w).sum(), (x, w)), expected)


class TestCapturedDuals:
    """A dual tensor that the region captures."""

    def runs(self, wrap, x, w, v, after):
        with fwAD.dual_level():
            dual = fwAD.make_dual(w, v)
            out = fwAD.unpack_dual(wrap(lambda x: block(x, dual))(x))
            value = (out.primal + out.tangent).sin().sum()
            if not after:
                return torch.autograd.grad(value, (x, w))
        return torch.autograd.grad(value, (x, w))

    @pytest.mark.parametrize("after", [False, True], ids=["in the level", "after the level"])
    def test_backward(self, x, w, v, after):
        assert_same(self.runs(remat, x, w, v, after), self.runs(lambda fn: fn, x, w, v, after))

    def test_value(self, x, w, v):
        with fwAD.dual_level():
            dual = fwAD.make_dual(w, v)
            actual = fwAD.unpack_dual(remat(lambda x: block(x, dual))(x))
            expected = fwAD.unpack_dual(block(x, dual))
            assert_same(tuple(actual), tuple(expected))

    def test_in_nested_regions(self, x, w, v):
        def run(wrap):
            with fwAD.dual_level():
                dual = fwAD.make_dual(w, v)
                inner = wrap(lambda x: (x @ dual).tanh())
                out = fwAD.unpack_dual(wrap(lambda x: inner(inner(x).sin()) @ dual)(x))
            return torch.autograd.grad(out.tangent.sin().sum(), (x, w))

        assert_same(run(remat), run(lambda fn: fn))

    def test_forward_over_reverse(self, x, w, v):
        def run(wrap):
            with fwAD.dual_level():
                dual = fwAD.make_dual(w, v)
                out = wrap(lambda x: block(x, dual))(x)
                grads = torch.autograd.grad(out.sum(), (x, dual))
                return [tuple(fwAD.unpack_dual(g)) for g in grads]

        assert_same(run(remat), run(lambda fn: fn))

    def test_a_captured_dual_with_a_history(self, x, w, v):
        def run(wrap):
            with fwAD.dual_level():
                h = (fwAD.make_dual(x, v) @ w).sin()
                out = fwAD.unpack_dual(wrap(lambda y: (y @ h).tanh() * h)(w))
                return torch.autograd.grad((out.primal * out.tangent).sum(), (x, w))

        assert_same(run(remat), run(lambda fn: fn))

    def test_a_module_with_dual_parameters(self, x, v):
        layer = torch.nn.Linear(3, 3).double()
        weight = layer.weight.detach().clone()

        def run(call):
            del layer._parameters["weight"]
            with fwAD.dual_level():
                layer.weight = fwAD.make_dual(weight.requires_grad_(), v)
                try:
                    out = fwAD.unpack_dual(call(x))
                    value = (out.tangent * out.primal.exp()).sum()
                    return torch.autograd.grad(value, (x, weight, layer.bias))
                finally:
                    del layer.weight
                    layer.register_parameter("weight", torch.nn.Parameter(weight.detach()))

        f = lambda x: layer(layer(x).tanh())
        assert_same(run(remat(f)), run(f))


class TestOtherProperties:
    @cases(jvp=True, double=True, random=False, stateful=False)
    def test_finite_differences_of_forward_mode(self, case):
        call, primals = scalar(case, remat(case.fn))
        if case.name in ("empty", "embedding", "detached_part") or sum(t.numel() for t in primals) > 20:
            return  # nothing to differentiate, or the gradient differs from the derivative on purpose
        inputs = tuple(t.requires_grad_() for t in primals)
        assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True, atol=1e-4)

    def test_random_numbers_are_the_same(self, x, v):
        def f(x):
            return (torch.nn.functional.dropout(x.sin(), 0.5) * torch.rand_like(x)).exp()

        def run(fn):
            torch.manual_seed(3)
            with fwAD.dual_level():
                out = fwAD.unpack_dual(fn(fwAD.make_dual(x, v)))
            return *torch.autograd.grad(out.tangent.sum(), x), torch.rand(1)

        assert_same(run(remat(f)), run(f))

    @pytest.mark.parametrize("backward", [False, True])
    def test_nothing_leaks(self, x, w, v, backward):
        with assert_freed_without_gc() as watch:

            def f(x, w):
                h = (x @ w).tanh()
                if not is_recomputing():
                    watch(h)
                return (h @ w).sin()

            with fwAD.dual_level():
                dual = fwAD.make_dual(x * 1, v * 1)
                watch(dual)
                out = remat(f)(dual, w)
                tangent = fwAD.unpack_dual(out).tangent
                watch(out, tangent)
            if backward:
                torch.autograd.grad(tangent.sum(), (x, w))
            del dual, out, tangent

    def test_bytes_after_a_backward_in_the_level(self):
        x, w, v = rand(N, N), rand(N, N, seed=1), rand(N, N, seed=2, grad=False)
        with gc_disabled(), PeakMemory() as memory:
            with fwAD.dual_level():
                out = remat(block)(fwAD.make_dual(x, v), w)
                torch.autograd.grad(fwAD.unpack_dual(out).tangent.sum(), (x, w))
                del out
            assert memory.live == 0

    def test_the_level_is_as_it_was_after_a_backward(self, x, w, v):
        """The recompute may need a level of its own, which ends with the recompute."""
        with fwAD.dual_level():
            out = fwAD.unpack_dual(remat(block)(fwAD.make_dual(x, v), w)).tangent
        torch.autograd.grad(out.sum(), x)
        with pytest.raises(RuntimeError, match="dual_level"):
            fwAD.make_dual(x, v)
        with fwAD.dual_level():
            assert_same(fwAD.unpack_dual(fwAD.make_dual(x, v).sin()).tangent, v * x.cos())

    def test_a_recompute_that_raises_leaves_no_level(self, x, w, v):
        @remat
        def f(x, w):
            h = (x @ w).tanh()
            if is_recomputing():
                raise KeyError("on purpose")
            return (h @ w).sin()

        with fwAD.dual_level():
            out = fwAD.unpack_dual(f(fwAD.make_dual(x, v), w)).tangent
        with pytest.raises(KeyError, match="on purpose"):
            torch.autograd.grad(out.sum(), x)
        with fwAD.dual_level():
            assert fwAD.unpack_dual(fwAD.make_dual(x, v)).tangent is not None


FUNC = {
    "grad": lambda fn: grad(lambda x, w: fn(x, w).sin().sum(), argnums=(0, 1)),
    "grad_and_value": lambda fn: grad_and_value(lambda x, w: fn(x, w).sin().sum()),
    "grad(grad)": lambda fn: grad(lambda x, w: grad(lambda x: fn(x, w).sin().sum())(x).cos().sum()),
    "vmap": lambda fn: vmap(fn, in_dims=(0, None)),
    "vmap(grad)": lambda fn: vmap(grad(lambda x, w: fn(x, w).sin().sum(), argnums=(0, 1)), in_dims=(0, None)),
    "grad(vmap)": lambda fn: grad(lambda x, w: vmap(fn, in_dims=(0, None))(x, w).sin().sum()),
    "jacrev": jacrev,
    "captured": lambda fn: lambda x, w: grad(lambda x: fn(x, w).sin().sum())(x),
    "unused": lambda fn: lambda x, w: grad(lambda w: fn(w, w).sin().sum() * 2)(w * 1) * x.sin(),
}
func = pytest.mark.parametrize("name", FUNC)


class TestAroundTorchFunc:
    """Duals that `torch.func.grad` and `vmap` are called with."""

    @cases(func=True, jvp=True, double=True)
    def test_every_function(self, case):
        def run(fn):
            with case.state(), fwAD.dual_level():
                call, primals = scalar(case, fn)
                duals = [fwAD.make_dual(t, t.cos()) for t in primals]
                grads = grad(call, argnums=tuple(range(len(duals))))(*duals) if duals else ()
                return [tuple(fwAD.unpack_dual(t)) for t in grads]

        assert_same(run(remat(case.fn)), run(case.fn), exact=False)

    @func
    @pairs
    @pytest.mark.parametrize("moves", [(0,), (1,), (0, 1)], ids=str)
    def test_tangents(self, name, plain, ours, x, w, v, moves):
        x, w = x.detach(), w.detach()

        def run(fn):
            with fwAD.dual_level():
                args = [fwAD.make_dual(t, v) if i in moves else t for i, t in enumerate((x, w))]
                found = FUNC[name](fn)(*args)
                assert not any(t.requires_grad for t in tensor_leaves(found))
                return [tuple(fwAD.unpack_dual(t)) for t in tensor_leaves(found)]

        expected = run(plain)
        assert any(tangent is not None for _, tangent in expected)
        assert_same(run(ours), expected, exact=False)

    @func
    @pairs
    @pytest.mark.parametrize("followed", ["primal", "tangent", "both"])
    def test_backward_through_them(self, name, plain, ours, x, w, v, followed):
        def run(fn):
            leaves = [t.detach().clone().requires_grad_() for t in (x, w, v)]
            primals = leaves[:2] if followed != "tangent" else [x.detach(), w.detach()]
            tangent = leaves[2] if followed != "primal" else v
            with fwAD.dual_level():
                found = tensor_leaves(FUNC[name](fn)(fwAD.make_dual(primals[0], tangent), primals[1]))
                parts = [part for t in found for part in fwAD.unpack_dual(t) if part is not None]
                return torch.autograd.grad(sum(t.sin().sum() for t in parts), leaves, allow_unused=True)

        assert_same(run(ours), run(plain), exact=False)

    @pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.everything_saveable], ids=repr)
    @func
    def test_under_a_policy(self, name, policy, x, w, v):
        x, w = x.detach(), w.detach()

        def run(fn):
            with fwAD.dual_level():
                found = FUNC[name](fn)(fwAD.make_dual(x, v), w)
                return [tuple(fwAD.unpack_dual(t)) for t in tensor_leaves(found)]

        assert_same(run(remat(block, policy=policy, determinism_check="values")), run(block), exact=False)

    @pytest.mark.parametrize("differentiated", ["primal", "tangent"])
    def test_made_inside_is_an_error(self, differentiated, x, v):
        def product(x):
            dual = (x, v) if differentiated == "primal" else (v, x)
            with fwAD.dual_level():
                return fwAD.unpack_dual(remat(torch.sin)(fwAD.make_dual(*dual))).tangent.sum()

        with pytest.raises(RematError, match="Make the dual tensor outside of that function"):
            grad(product)(x.detach())

    def test_memory(self):
        x, v = (rand(64, 64, seed=i, grad=False) for i in range(2))

        def program(wrap):
            run = wrap(lambda x: x.sin().exp().sin().exp().sin())

            def chain(x):
                for _ in range(20):
                    x = run(x)
                return x.sum()

            def call():
                with fwAD.dual_level():
                    return fwAD.unpack_dual(grad(chain)(fwAD.make_dual(x, v))).tangent

            return call

        assert_same(program(remat)(), program(lambda fn: fn)(), exact=False)
        # The level keeps the tangents of tensors that a backward reads alive until it ends, also without remat.
        assert peak_bytes(program(remat)) < 0.6 * peak_bytes(program(lambda fn: fn))
        assert leaked_bytes(program(remat)) == 0


# --- levels that are entered in a region ------------------------------------------------------------------------------


def moved(fn, x, y):
    """The derivative of `fn` in a direction, by a level of its own."""
    with fwAD.dual_level():
        out, tangent = fwAD.unpack_dual(fn(fwAD.make_dual(x * 1, y.cos()), y))
        return out * 0 if tangent is None else tangent * 1


def forces(x, y):
    """Runs a backward pass inside."""
    p = x * 1
    (g,) = torch.autograd.grad((p * y).sin().sum(), p, create_graph=True)
    return g * x


INSIDE = {
    "a level": lambda wrap: wrap(lambda x, y: moved(block, x, y)),
    "forces": lambda wrap: wrap(lambda x, y: moved(forces, x, y)),
    "after a transform": lambda wrap: wrap(lambda x, y: moved(block, grad(lambda p: block(p, y).sum())(x), y)),
}


@pytest.mark.parametrize("policy", [None, policies.everything_saveable, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("program", INSIDE)
@pytest.mark.filterwarnings("ignore:The policy")
def test_levels_inside_of_regions(program, policy):
    def run(wrap):
        x, w = rand(3, 3), rand(3, 3, seed=1)
        found = [INSIDE[program](wrap)(x, w)]
        for _ in range(2):
            found += torch.autograd.grad((found[-1] + x * w).sin().sum(), (x, w), create_graph=True)
        return found

    expected = run(lambda fn: fn)
    region = run(lambda fn: remat(fn, policy=policy))
    assert_same(region, expected, exact=False)
    assert_same(region[0], expected[0])
    assert not fwAD._current_level >= 0


@pytest.mark.parametrize("program", INSIDE)
def test_first_derivatives_with_levels_inside_of_regions(program):
    """The graph is freed as the backward runs; the second call uses what the first one recorded."""
    ours = INSIDE[program](remat)
    for _ in range(2):
        results = []
        for fn in (ours, INSIDE[program](lambda fn: fn)):
            x, w = rand(3, 3), rand(3, 3, seed=1)
            results.append(torch.autograd.grad(fn(x, w).sum(), (x, w)))
        assert_same(*results, exact=False)


@pytest.mark.parametrize("program", ["a level", "forces"])
def test_levels_inside_of_regions_save_memory(program):
    def chain(wrap):
        def call(x):
            w = torch.eye(64, dtype=x.dtype)
            y = x.clone().requires_grad_()
            h = y
            for _ in range(10):
                h = INSIDE[program](wrap)(h, w)
            return torch.autograd.grad(h.sum(), y)

        return call

    x = rand(64, 64, grad=False)
    chain(remat)(x)
    assert peak_bytes(chain(remat), x) < 0.6 * peak_bytes(chain(lambda fn: fn), x)
    assert leaked_bytes(chain(remat), x) == 0


def test_a_region_that_enters_a_level_around_a_region_raises():
    """A recompute of the inner region would enter one too, and torch can't nest them."""
    x, w = rand(3, 3), rand(3, 3, seed=1)
    out = remat(lambda x, y: moved(remat(block), x.sin(), y.sin()))(x, w)
    with pytest.raises(RuntimeError, match="Nested forward mode AD"):
        out.sum().backward()


def test_a_level_in_a_level_raises_as_without_remat():
    def fn(x):
        with fwAD.dual_level(), fwAD.dual_level():
            return x.sin()

    for each in (fn, remat(fn)):
        with pytest.raises(RuntimeError, match="Nested forward mode AD"):
            each(rand(3))


@pytest.mark.parametrize("kind", ["updated", "batch norm"])
def test_statistics_with_tangents(kind):
    """A buffer that is updated from a dual tensor has a tangent from then on: a recompute changes a copy of both."""

    def run(wrap):
        mean, norm = torch.zeros(3, dtype=torch.double), torch.nn.BatchNorm1d(3).double()

        def update(x):
            if kind == "batch norm":
                return norm(x).tanh() * norm.running_mean.clone()
            mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
            with torch.no_grad():
                mean.add_(x.mean(0) * 0.1)
            return x.tanh() + mean.clone()

        region, x = wrap(update), rand(3, 3)
        with fwAD.dual_level():
            y = region(fwAD.make_dual(x * 1, x.cos()))
            y = region(y) if kind == "batch norm" else y
            out, tangent = fwAD.unpack_dual(y)
        return torch.autograd.grad((out.cos() * tangent).sum(), x), [mean, *norm.buffers()]

    assert_same(run(remat), run(lambda fn: fn), exact=False)
