"""All compositions of up to three transforms: called, and differentiated as a whole by torch.autograd.

A composition is a word whose letters are the transforms, the outermost first. The region is at the innermost level, or
at every level.
"""

import itertools
from collections.abc import Callable

import torch
from cases import assert_same, rand
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from remat import remat

W = rand(3, 3, grad=False)
X = rand(3, seed=1, grad=False)
Fn = Callable[[Tensor], Tensor]


def f(x: Tensor) -> Tensor:
    h = torch.tanh(x @ W)
    return (h * h.sin()) @ W.T


TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "grad": lambda g: grad(lambda x: g(x).square().sum()),
    "vjp": lambda g: lambda x: (lambda out, pull: pull(out.cos())[0])(*vjp(g, x)),
    "jvp": lambda g: lambda x: sum(jvp(g, (x,), (x.cos(),))),
    "jacrev": lambda g: lambda x: jacrev(g)(x).reshape(-1, *x.shape).sum(0),
    "jacfwd": lambda g: lambda x: jacfwd(g)(x).reshape(-1, *x.shape).cos().sum(0),
    "vmap": vmap,
    "autograd": lambda g: lambda x: torch.autograd.grad(g(x).sin().sum(), x, create_graph=True)[0],
}
WORDS = [word for n in (1, 2, 3) for word in itertools.product(TRANSFORMS, repeat=n)]


def build(word: tuple[str, ...], base: Fn, every: bool = False) -> Fn:
    for name in reversed(word):
        base = TRANSFORMS[name](base)
        if every:
            base = remat(base)
    return base


def argument(word: tuple[str, ...]) -> Tensor:
    """One more dimension for each `vmap`."""
    x = X
    for _ in range(word.count("vmap")):
        x = torch.stack([x, x * 0.5 + 0.1])
    return x


def through(fn: Fn, word: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    x = argument(word).clone().requires_grad_()
    out = fn(x)
    return out.detach(), torch.autograd.grad(out.cos().sum(), x)[0]


def check(word: tuple[str, ...]) -> None:
    """Assert that a region has the same results as the plain function, where plain torch has any.

    It has none for `torch.autograd.grad` directly under a `vmap` or `jvp`, where its input does not require grad.
    """
    for run in (lambda fn, word: fn(argument(word).clone()), through):
        try:
            expected = run(build(word, f), word)
        except RuntimeError:
            assert "autograd" in word
            continue
        assert_same(run(build(word, remat(f)), word), expected, exact=False)
        if len(word) < 3 or run is through:  # it takes long, and `through` compares the value too
            assert_same(run(build(word, remat(f), every=True), word), expected, exact=False)
