"""The transforms of all these tests, and a comparison of a program with regions and without.

A program is a function of `wrap`, which makes a region of a function, or is `plain`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from cases import assert_same_results, plain, rand
from random_programs.toolbox import pair as rows
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp

from remat import remat

Fn = Callable[..., Any]
Wrap = Callable[..., Fn]
W, X, Y = rand(4, 4, grad=False), rand(4, 4, seed=1, grad=False), rand(4, 4, seed=2, grad=False)
V = X[0]
vmap = functools.partial(torch.func.vmap, randomness="different")
summed: Callable[[Fn], Fn] = lambda fn: lambda *args: fn(*args).sum()
squares: Callable[[Fn], Fn] = lambda fn: lambda x: fn(x).square().sum()
pushed: Callable[[Fn], Fn] = lambda fn: lambda x: jvp(fn, (x,), (x.cos(),))[1]


def both(program: Callable[[Wrap], Any], exact: bool = False, **options: Any) -> None:
    """Assert that a program has the same results with regions, and leaves the generator in the same state."""
    assert_same_results(program, functools.partial(remat, **options), plain, exact=exact)


def f(x: Tensor) -> Tensor:
    """Its backward needs the first product, not the second one."""
    return torch.tanh(x @ W) @ W


def forces(fn: Fn) -> Fn:
    """The gradient as users write it for the forces of a potential."""
    return lambda x: torch.autograd.grad(fn(x).sin().sum(), x, create_graph=True)[0]


def through_autograd(fn: Fn, *args: Tensor) -> Any:
    """The sum of a function's results, and its gradients by plain autograd."""
    leaves = [t.clone().requires_grad_() for t in args]
    out = fn(*leaves)
    value = sum(t.sin().sum() for t in (out if isinstance(out, (tuple, list)) else [out]))
    return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True)


def pulled(fn: Fn, *args: Tensor) -> Any:
    """A pullback is called twice."""
    out, pull = vjp(fn, *args)
    return out, pull(out), pull(out)


def by_dual(fn: Fn, x: Tensor) -> Any:
    with fwAD.dual_level():
        return tuple(fwAD.unpack_dual(fn(fwAD.make_dual(x, x.cos()))))


# These run a function once, at a tensor; it returns a tensor of the same shape.
ONCE: dict[str, Callable[[Fn, Tensor], Any]] = {
    "call": lambda g, x: g(x),
    "vmap": lambda g, x: vmap(g)(rows(x)),
    "jvp": lambda g, x: jvp(g, (x,), (x.cos(),)),
    "jacfwd": lambda g, x: jacfwd(g, randomness="different")(x),
    "vmap(jvp)": lambda g, x: vmap(pushed(g))(rows(x)),
    "jvp(vmap)": lambda g, x: jvp(vmap(g), (rows(x),), (rows(x),)),
    "dual": by_dual,
    "dual(vmap)": lambda g, x: by_dual(vmap(g), rows(x)),
}
# These need a recompute of a region.
RECOMPUTE: dict[str, Callable[[Fn, Tensor], Any]] = {
    "grad": lambda g, x: grad(summed(g))(x),
    "vjp": pulled,
    "jacrev": lambda g, x: jacrev(g)(x),
    "hessian": lambda g, x: jacfwd(jacrev(squares(g)), randomness="different")(x),
    "jacrev(jacrev)": lambda g, x: jacrev(jacrev(g))(x),
    "grad(grad)": lambda g, x: grad(squares(grad(squares(g))))(x),
    "jvp(grad)": lambda g, x: jvp(grad(squares(g)), (x,), (x.cos(),)),
    "grad(jvp)": lambda g, x: grad(squares(pushed(g)))(x),
    "vmap(grad)": lambda g, x: vmap(grad(squares(g)))(rows(x)),
    "grad(vmap)": lambda g, x: grad(squares(vmap(g)))(rows(x)),
    "vmap(jacrev)": lambda g, x: vmap(jacrev(g))(rows(x)),
    "vmap(vmap(grad))": lambda g, x: vmap(vmap(grad(squares(g))))(rows(rows(x))),
    "grad(vmap(grad))": lambda g, x: grad(squares(vmap(grad(squares(g)))))(rows(x)),
    "jvp(vmap(grad))": lambda g, x: jvp(vmap(grad(squares(g))), (rows(x),), (rows(x),)),
    "vmap of a pullback": lambda g, x: vmap(vjp(g, x)[1])(rows(x)),
    "autograd": through_autograd,
    "autograd, twice": lambda g, x: through_autograd(forces(g), x),
    "autograd(grad)": lambda g, x: through_autograd(grad(squares(g)), x),
    "autograd(vmap)": lambda g, x: through_autograd(vmap(g), rows(x)),
    "autograd(vmap(grad))": lambda g, x: through_autograd(vmap(grad(squares(g))), rows(x)),
    "dual(grad)": lambda g, x: by_dual(grad(squares(g)), x),
    "dual(vmap(grad))": lambda g, x: by_dual(vmap(grad(squares(g))), rows(x)),
    "in a region": lambda g, x: through_autograd(remat(lambda x: g(x * 1).sin()), x),
}
ALL = ONCE | RECOMPUTE
