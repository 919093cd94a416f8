"""`determinism_check="values"` under torch.func: values are compared below all levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import assert_same, cases, flat, rand
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import RecomputeMismatchError, is_recomputing, policies, remat

Fn = Callable[..., Tensor]
X, W = rand(3, 3, grad=False), rand(3, 3, seed=1, grad=False)
POLICIES = {
    "no policy": None,
    "matmuls": policies.save_matmuls,
    "sin": policies.save_ops("aten.sin"),
    "names": policies.save_only_these_names("none"),
}


def steady(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin() * 1.0).cos() @ w


def drifting(x: Tensor, w: Tensor) -> Tensor:
    """The same operations on other numbers."""
    factor = 1.5 if is_recomputing() else 1.0
    return ((x @ w).sin() * factor).cos() @ w


def drifting_little(x: Tensor, w: Tensor) -> Tensor:
    """One number differs, in its last bits."""
    h = (x @ w).sin()
    if is_recomputing():
        h = h + torch.zeros_like(h).index_put((torch.tensor(0),), torch.tensor(1e-15, dtype=h.dtype))
    else:
        h = h + torch.zeros_like(h).index_put((torch.tensor(0),), torch.tensor(0.0, dtype=h.dtype))
    return h.cos() @ w


def loss(fn: Fn) -> Fn:
    return lambda x, w: fn(x, w).sin().sum()


def by_vjp(fn: Fn) -> Fn:
    def call(x: Tensor, w: Tensor) -> Any:
        out, pull = vjp(fn, x, w)
        return vmap(pull)(torch.stack([out, out.cos()]))

    return call


def by_autograd(fn: Fn) -> Fn:
    def call(x: Tensor, w: Tensor) -> Any:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        result = fn(*leaves)
        tensors = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(sum(t.sin().sum() for t in tensors), leaves)

    return call


def by_dual(fn: Fn) -> Fn:
    def call(x: Tensor, w: Tensor) -> Any:
        with fwAD.dual_level():
            out = fn(fwAD.make_dual(x, x.cos()), w)
            return tuple(fwAD.unpack_dual(out))

    return call


def batches(x: Tensor) -> Tensor:
    return torch.stack([x, x.sin(), x.cos(), x.exp()])


# Each recomputes its region.
RECOMPUTES: dict[str, Callable[[Fn], Fn]] = {
    "grad": lambda fn: grad(loss(fn), argnums=(0, 1)),
    "vmap(grad)": lambda fn: lambda x, w: vmap(grad(loss(fn), argnums=(0, 1)))(batches(x), batches(w)),
    "vmap(grad), shared": lambda fn: vmap(grad(loss(fn), argnums=(0, 1)), in_dims=(0, None)),
    "vmap(grad), by rows": lambda fn: vmap(grad(loss(fn), argnums=(0, 1)), in_dims=(1, None), out_dims=1),
    "vmap(vmap(grad))": lambda fn: (
        lambda x, w: vmap(vmap(grad(loss(fn)), in_dims=(0, None)), in_dims=(None, 0))(x, batches(w))
    ),
    "grad(vmap)": lambda fn: grad(lambda x, w: vmap(fn, in_dims=(0, None))(x, w).sum(), argnums=(0, 1)),
    "autograd(vmap)": lambda fn: by_autograd(vmap(fn, in_dims=(0, None))),
    "autograd(vmap(grad))": lambda fn: by_autograd(vmap(grad(loss(fn), argnums=(0, 1)), in_dims=(0, None))),
    "grad(grad)": lambda fn: grad(lambda x, w: grad(loss(fn))(x, w).sin().sum()),
    "vmap(grad(grad))": lambda fn: vmap(grad(lambda x, w: grad(loss(fn))(x, w).sum()), in_dims=(0, None)),
    "jvp(grad)": lambda fn: lambda x, w: jvp(grad(loss(fn), argnums=(0, 1)), (x, w), (w, x)),
    "vmap(jvp(grad))": lambda fn: vmap(lambda x, w: jvp(grad(loss(fn)), (x, w), (x.cos(), w)), in_dims=(0, None)),
    "jvp(vmap(grad))": lambda fn: lambda x, w: jvp(vmap(grad(loss(fn)), in_dims=(0, None)), (x, w), (x.cos(), w)),
    "jacrev": lambda fn: jacrev(fn, argnums=(0, 1)),
    "vmap(jacrev)": lambda fn: vmap(jacrev(fn), in_dims=(0, None)),
    "jacfwd(grad)": lambda fn: jacfwd(grad(loss(fn))),
    "hessian": lambda fn: hessian(loss(fn)),
    "vmap of a pullback": by_vjp,
    "dual(grad)": lambda fn: by_dual(grad(loss(fn))),
    "dual(vmap(grad))": lambda fn: by_dual(vmap(grad(loss(fn)), in_dims=(0, None))),
}
# Each runs its region once.
ONCE: dict[str, Callable[[Fn], Fn]] = {
    "vmap": lambda fn: vmap(fn, in_dims=(0, None)),
    "vmap(vmap)": lambda fn: lambda x, w: vmap(vmap(fn, in_dims=(0, None)), in_dims=(None, 0))(x, batches(w)),
    "jvp": lambda fn: lambda x, w: jvp(fn, (x, w), (w, x)),
    "vmap(jvp)": lambda fn: vmap(lambda x, w: jvp(fn, (x, w), (x.cos(), w)), in_dims=(0, None)),
    "jvp(vmap)": lambda fn: lambda x, w: jvp(vmap(fn, in_dims=(0, None)), (x, w), (x.cos(), w)),
    "jacfwd": jacfwd,
    "dual(vmap)": lambda fn: by_dual(vmap(fn, in_dims=(0, None))),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*RECOMPUTES, *ONCE])
def test_equal_values_raise_no_error(name: str, policy: str) -> None:
    transform = (RECOMPUTES | ONCE)[name]
    region = remat(steady, policy=POLICIES[policy], determinism_check="values")
    assert_same(transform(region)(X, W), transform(steady)(X, W), exact=False)


@pytest.mark.parametrize("policy", ["no policy", "matmuls"])
@pytest.mark.parametrize("fn", [drifting, drifting_little])
@pytest.mark.parametrize("name", RECOMPUTES)
def test_other_values_are_found(name: str, fn: Fn, policy: str) -> None:
    region = remat(fn, policy=POLICIES[policy], determinism_check="values")
    with pytest.raises(RecomputeMismatchError, match="checksum"):
        RECOMPUTES[name](region)(X, W)


@pytest.mark.parametrize("name", RECOMPUTES)
def test_values_are_not_compared_by_default(name: str) -> None:
    RECOMPUTES[name](remat(drifting))(X, W)


@pytest.mark.parametrize("name", RECOMPUTES)
def test_other_values_in_a_nested_region(name: str) -> None:
    def program(fn: Fn) -> Fn:
        inner = remat(fn, determinism_check="values")
        return remat(lambda x, w: inner(x.sin(), w).cos(), determinism_check="values")

    transform = RECOMPUTES[name]
    assert_same(transform(program(steady))(X, W), transform(lambda x, w: steady(x.sin(), w).cos())(X, W), exact=False)
    with pytest.raises(RecomputeMismatchError, match="checksum"):
        transform(program(drifting))(X, W)


@cases(func=True, vmap=True)
def test_every_function_per_sample(case: Any) -> None:
    def run(fn: Callable) -> Any:
        with case.state():
            call, primals = flat(case, fn)
            total = lambda *args: sum(t.sin().sum() for t in call(*args) if not t.is_complex())
            argnums = tuple(range(len(primals)))
            stacked = [torch.stack([t, t.cos()]) for t in primals]
            return vmap(grad(total, argnums=argnums), randomness="different")(*stacked)

    assert_same(run(remat(case.fn, determinism_check="values")), run(case.fn), exact=False)


@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.save_ops("aten.mul"), None], ids=str)
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)])
def test_a_result_that_the_recompute_of_the_outer_region_skips(in_dims: tuple, argnums: Any, policy: Any) -> None:
    """Values are read for the comparison even if no operation reads them."""

    def program(outer: Callable, inner: Callable) -> Fn:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            scaled = w * 2
            scaled.mul_(0.5)
            return inner(lambda x: scaled * x)(x)

        per_sample = vmap(grad(loss(outer(fn)), argnums=argnums), in_dims=in_dims)

        def call(x: Tensor) -> Any:
            x = x.clone().requires_grad_()
            found = per_sample(*(batches(t) if dim == 0 else t for t, dim in zip((x, W), in_dims)))
            found = found if isinstance(found, tuple) else (found,)
            return found, torch.autograd.grad(sum(t.sin().sum() for t in found), x, allow_unused=True)

        return call

    ours = program(lambda fn: remat(fn, policy=policy), lambda fn: remat(fn, determinism_check="values"))
    assert_same(ours(X), program(lambda fn: fn, lambda fn: fn)(X), exact=False)
