"""Below all levels: changes in place, comparisons of runs, errors, and first runs that are started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from both import Fn, W, Wrap, X, both, f, through_autograd
from cases import assert_same
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import MutationError, RecomputeMismatchError, RematWarning, is_recomputing, policies, remat


def summed(fn: Fn) -> Fn:
    return lambda *args: fn(*args).sum()


def by_dual(fn: Fn) -> Fn:
    def call(x: Tensor, w: Tensor) -> Any:
        with fwAD.dual_level():
            return tuple(fwAD.unpack_dual(fn(fwAD.make_dual(x, x.cos()), w)))

    return call


BATCH = torch.stack([W, W.sin(), W.cos()])
MAPPED = {"in_dims": (0, None)}
# Each recomputes a region of `x` and `w`.
RECOMPUTES: dict[str, Callable[[Fn], Fn]] = {
    "grad": lambda fn: grad(summed(fn), (0, 1)),
    "vmap(grad)": lambda fn: lambda x, w: vmap(grad(summed(fn), (0, 1)))(BATCH, BATCH.cos()),
    "vmap(grad), shared": lambda fn: vmap(grad(summed(fn), (0, 1)), **MAPPED),
    "vmap(vmap(grad))": lambda fn: lambda x, w: vmap(vmap(grad(summed(fn)), **MAPPED), (None, 0))(x, BATCH),
    "grad(vmap)": lambda fn: grad(summed(vmap(fn, **MAPPED)), (0, 1)),
    "autograd(vmap)": lambda fn: lambda *args: through_autograd(vmap(fn, **MAPPED), *args),
    "autograd(vmap(grad))": lambda fn: lambda *args: through_autograd(vmap(grad(summed(fn)), **MAPPED), *args),
    "grad(grad)": lambda fn: grad(lambda x, w: grad(summed(fn))(x, w).sin().sum()),
    "vmap(grad(grad))": lambda fn: vmap(grad(lambda x, w: grad(summed(fn))(x, w).sum()), **MAPPED),
    "jvp(grad)": lambda fn: lambda x, w: jvp(grad(summed(fn), (0, 1)), (x, w), (w, x)),
    "jvp(vmap(grad))": lambda fn: lambda x, w: jvp(vmap(grad(summed(fn)), **MAPPED), (x, w), (x.cos(), w)),
    "vmap(jacrev)": lambda fn: vmap(jacrev(fn), **MAPPED),
    "hessian": lambda fn: hessian(summed(fn)),
    "vmap of a pullback": lambda fn: lambda x, w: vmap(vjp(fn, x, w)[1])(torch.stack([x, w])),
    "dual(grad)": lambda fn: by_dual(grad(summed(fn))),
    "dual(vmap(grad))": lambda fn: by_dual(vmap(grad(summed(fn)), **MAPPED)),
}
# Each runs its region once.
ONCE: dict[str, Callable[[Fn], Fn]] = {
    "vmap": lambda fn: vmap(fn, **MAPPED),
    "jvp": lambda fn: lambda x, w: jvp(fn, (x, w), (w, x)),
    "vmap(jvp)": lambda fn: vmap(lambda x, w: jvp(fn, (x, w), (x.cos(), w)), **MAPPED),
    "jvp(vmap)": lambda fn: lambda x, w: jvp(vmap(fn, **MAPPED), (x, w), (x.cos(), w)),
    "jacfwd": jacfwd,
    "dual(vmap)": lambda fn: by_dual(vmap(fn, **MAPPED)),
}
ALL = RECOMPUTES | ONCE


# --- values that differ -----------------------------------------------------------------------------------------------


def steady(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin() * 1.0).cos() @ w


def drifting(x: Tensor, w: Tensor) -> Tensor:
    """The same operations on other numbers."""
    return ((x @ w).sin() * (1.5 if is_recomputing() else 1.0)).cos() @ w


def drifting_little(x: Tensor, w: Tensor) -> Tensor:
    """One number differs, in its last bits."""
    h = (x @ w).sin()
    by = torch.tensor(1e-15 if is_recomputing() else 0.0, dtype=h.dtype)
    return (h + torch.zeros_like(h).index_put((torch.tensor(0),), by)).cos() @ w


@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.save_ops("aten.sin")], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_equal_values_raise_no_error(name: str, policy: Any) -> None:
    both(lambda wrap: ALL[name](wrap(steady))(X, W), policy=policy, determinism_check="values")
    inner = lambda wrap: wrap(lambda x, w: wrap(steady)(x.sin(), w).cos())
    both(lambda wrap: ALL[name](inner(wrap))(X, W), determinism_check="values")


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("name", RECOMPUTES)
def test_other_values_are_found(name: str, policy: Any) -> None:
    compared = remat(determinism_check="values", policy=policy)
    regions = [*map(compared, (drifting, drifting_little)), compared(lambda x, w: compared(drifting)(x.sin(), w).cos())]
    for region in regions:
        with pytest.raises(RecomputeMismatchError, match="checksum"):
            RECOMPUTES[name](region)(X, W)
    RECOMPUTES[name](remat(drifting))(X, W)  # not compared by default


@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.save_ops("aten.mul"), None], ids=str)
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)])
def test_a_compared_result_that_the_recompute_of_the_outer_region_skips(in_dims: tuple, policy: Any) -> None:
    """Values are read for the comparison even if no operation reads them."""

    def program(wrap: Wrap) -> Any:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            scaled = w * 2
            scaled.mul_(0.5)
            return wrap(lambda x: scaled * x, determinism_check="values", policy=None)(x)

        per_sample = vmap(grad(summed(wrap(fn)), (0, 1)), in_dims)
        args = lambda x: [torch.stack([t, t.sin()]) if dim == 0 else t for t, dim in zip((x, W), in_dims)]
        return through_autograd(lambda x: per_sample(*args(x)), X)

    both(program, policy=policy)


def test_debug_warns_where_it_compares_no_operations() -> None:
    with pytest.warns(RematWarning, match="debug=True compares no operations") as found:
        for _ in range(2):
            hessian(summed(remat(f, debug=True)))(X[0])
    assert len(found) == 1


def test_another_path_in_the_recompute_is_an_error() -> None:
    with pytest.raises(RecomputeMismatchError):
        grad(summed(remat(lambda x: x[:3].exp().sin() if is_recomputing() else x.sin().exp())))(X)


# --- changes in place -------------------------------------------------------------------------------------------------


def changes_intermediates(x: Tensor) -> Tensor:
    h = x.sin()
    h.mul_(2)
    h = h * x
    h.add_(x)[0] = 0
    return torch.zeros_like(x).copy_(h.cos()) * h


@pytest.mark.parametrize("transform", [grad, hessian, lambda f: vmap(grad(f))])
def test_intermediates_may_be_changed(transform: Callable) -> None:
    both(lambda wrap: transform(lambda x: wrap(changes_intermediates)(x).exp().sum())(X))


@pytest.mark.parametrize("transform", [grad, jacrev, lambda f: vmap(grad(f))])
def test_a_region_that_changes_its_argument_is_refused(transform: Callable) -> None:
    """Plain torch.func allows it where the argument is an intermediate."""
    with pytest.raises(MutationError, match=r"changes an argument or a captured tensor in place .*`\.clone\(\)`"):
        transform(lambda x: remat(lambda x: x.mul_(2).sin())(x.clone()).sum())(X)


@pytest.mark.parametrize("transform", [grad, jacrev, hessian, lambda f: vmap(grad(f))])
def test_a_captured_buffer_that_is_changed_is_correct_or_an_error(transform: Callable) -> None:
    """Plain torch.func raises an error for it."""
    buffer = torch.zeros((), dtype=X.dtype)
    region = remat(lambda x: x.sin() * buffer.add_(1))
    try:
        found = transform(summed(region))(X[:2])
    except RuntimeError as error:
        assert "mutate a captured Tensor" in str(error)
    else:
        assert_same((found, buffer), (transform(lambda x: x.sin().sum())(X[:2]), buffer * 0 + 1), exact=False)


def pulled(call: Callable, before: bool, change: Callable) -> None:
    x = X.clone()
    out, pull = vjp(call, x)
    if before:
        pull(out)
    change(x)
    pull(out)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("level", [lambda f: f, vmap, grad])
def test_an_argument_that_is_changed_before_the_pullback(level: Callable, before: bool) -> None:
    call = level(remat(lambda x: x.sin() * x if level is not grad else (x.sin() * x).sum()))
    with pytest.raises(MutationError, match=r"argument x was .*\nThe region is <lambda> called at .*test_bottom"):
        pulled(call, before, lambda x: x.add_(1))


@pytest.mark.parametrize("sparse", [False, True])
def test_another_tensor_that_is_changed_before_the_pullback(sparse: bool) -> None:
    """A captured one, which may be sparse, or a tangent."""
    w = W.to_sparse() if sparse else W.clone()
    change = lambda _: w.mul_(2)
    with pytest.raises(MutationError, match="closure variable 'w'"):
        pulled(remat(lambda x: (w @ x).sin()), False, change)
    if not sparse:
        with pytest.raises(MutationError, match="the derivative of argument"):
            pulled(lambda x: jvp(remat(torch.sin), (x,), (w,))[1], False, change)


def test_a_captured_tensor_that_is_changed_before_plain_autograd() -> None:
    """The region calls torch.func, and captures a tensor that its addition would not save without a region."""
    x = X.clone().requires_grad_()
    w = x * 2
    out = remat(lambda x: grad(lambda y: y.sin().sum())(x) + w)(x)
    w.add_(1)
    with pytest.raises(MutationError, match="closure variable 'w'"):
        out.sum().backward()


@pytest.mark.parametrize(
    "transform", [grad, lambda f: vmap(grad(f)), jacrev, hessian, lambda f: lambda x: jvp(grad(f), (x,), (x,))]
)
def test_an_intermediate_that_is_changed_before_the_backward(transform: Callable) -> None:
    def changes(x: Tensor) -> Tensor:
        h = x * 2
        y = remat(lambda h: h.sin() * h)(h)
        h.add_(1)
        return y.sum()

    with pytest.raises(MutationError):
        transform(changes)(X)


def test_a_first_run_that_is_started_again_leaves_no_trace() -> None:
    """That the function calls `grad`, which refuses saved-tensor hooks, is known only when it has run."""

    def program(wrap: Wrap) -> Any:
        buffer = torch.zeros(4, dtype=X.dtype)

        def fn(x: Tensor) -> Tensor:
            buffer.add_(torch.rand(4))
            return grad(lambda y: (y * x).sin().sum())(x) * buffer

        return through_autograd(wrap(fn), X), buffer

    both(program)


# --- errors in user code ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["forward", "recompute"])
@pytest.mark.parametrize("name", ALL)
def test_an_error_in_user_code_leaves_nothing_behind(name: str, again: bool) -> None:
    def fails(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin()
        if is_recomputing() or not again:
            raise KeyError("mine")
        return y.exp()

    if again and name in ONCE:
        assert ALL[name](remat(fails))(X, W) is not None
        return
    with torch.autocast("cpu"), pytest.raises(KeyError, match="mine"):
        ALL[name](remat(fails))(X, W)
    assert not torch._C._are_functorch_transforms_active()
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    assert torch._C._len_torch_function_stack() == 0
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled() and not is_recomputing()
    both(lambda wrap: ALL[name](wrap(steady))(X, W))
