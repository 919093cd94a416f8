"""Every function, every transform, every composition of them: the same values, derivatives and random numbers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from both import Fn, V, W, Wrap, X, Y, both, f, pulled, rows, squares, through_autograd, vmap
from cases import CASES, Case, assert_same, flat, rand, total
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp
from words import WORDS, check

from remat import remat

Transform = Callable[[Callable, Sequence[Tensor]], Any]
every: Callable[[Sequence[Tensor]], tuple[int, ...]] = lambda args: tuple(range(len(args)))
cosines: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = lambda args: tuple(t.cos() for t in args)
loss: Callable[[Fn], Fn] = lambda call: lambda *args: total(call(*args))
gradients: Callable[[Fn], Fn] = lambda call: lambda *args: grad(loss(call), every(args))(*args)
mapped: Transform = lambda call, args: vmap(call)(*map(rows, args))


def twice_pulled(call: Callable, args: Sequence[Tensor]) -> Any:
    out, pull = vjp(call, *args)
    grads, second = vjp(lambda *args: vjp(call, *args)[1](out), *args)
    return grads, second(grads), vjp(pull, out)[1](grads)


# What differentiates a function at its arguments, and the flags of the cases where plain torch can do it.
TRANSFORMS: dict[str, tuple[Transform, tuple[str, ...]]] = {
    "grad_and_value": (lambda f, args: grad_and_value(loss(f), every(args))(*args), ()),
    "vjp": (lambda f, args: pulled(f, *args), ()),
    "vjp(vjp)": (twice_pulled, ("double",)),
    "grad(grad)": (lambda f, args: gradients(gradients(f))(*args), ("double",)),
    "jvp": (lambda f, args: jvp(f, tuple(args), cosines(args)), ("jvp",)),
    "jvp, one argument": (lambda f, args: jvp(lambda x: f(x, *args[1:]), args[:1], cosines(args[:1])), ("jvp",)),
    "jvp(jvp)": (lambda f, args: jvp(lambda *a: jvp(f, a, cosines(a)), tuple(args), cosines(args)), ("jvp", "double")),
    "jvp(grad)": (lambda f, args: jvp(grad(loss(f)), tuple(args), cosines(args)), ("jvp", "double")),
    "jacrev": (lambda f, args: jacrev(f, every(args))(*args), ("jacobian", "vmap")),
    "jacfwd": (lambda f, args: jacfwd(f, every(args), randomness="different")(*args), ("jacobian", "jvp", "vmap")),
    "hessian": (lambda f, args: hessian(loss(f), -1)(*args), ("jacobian", "jvp", "vmap", "double", "not random")),
    "jacrev(jacrev)": (lambda f, args: jacrev(jacrev(loss(f), -1), -1)(*args), ("jacobian", "vmap", "double")),
    "vmap": (mapped, ("vmap",)),
    "vmap(grad)": (lambda f, args: mapped(gradients(f), args), ("vmap",)),
    "vmap(grad(grad))": (lambda f, args: mapped(gradients(gradients(f)), args), ("vmap", "double")),
    "autograd(vmap)": (lambda f, args: through_autograd(lambda *a: mapped(loss(f), a), *args), ("vmap", "jvp")),
}
# In these, sums have another order, or torch chooses another formula where it records the graph of the backward.
ROUNDED = {"same_argument_twice", "group_norm", "transformer", "lstm", "reductions"}
PAIRS = [
    pytest.param(case, name, id=f"{name}-{case.name}")
    for name, (_, flags) in TRANSFORMS.items()
    for case in CASES
    if case.func
    and all(not getattr(case, flag[4:]) if flag.startswith("not ") else getattr(case, flag) for flag in flags)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_every_function(case: Case, name: str) -> None:
    def run(fn: Callable) -> Any:
        with case.state():
            call, args = flat(case, fn)
            return TRANSFORMS[name][0](call, args), torch.get_rng_state()

    exact = name.startswith("jvp,") or name == "jvp" or (name in ("grad_and_value", "vjp") and case.name not in ROUNDED)
    assert_same(run(remat(case.fn)), run(case.fn), exact=exact)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("word", WORDS, ids=["-".join(word) for word in WORDS])
def test_every_composition_of_three_transforms(word: tuple[str, ...]) -> None:
    """Called directly, and with torch.autograd around the whole."""
    check(word)


def of_all_kinds(x: Tensor, y: Tensor) -> tuple:
    """Differentiable or not, of one argument or of both, inputs and views of inputs, new and batched or not."""
    values, places = x.sort()
    return (
        values.sin(), y.cos() * 3, (x * y).exp(), torch.ones_like(y), y.detach() * 2, x, y, x, x[1:], y.view(2, 2),
        places, x > 0,
    )  # fmt: skip


def floats(wrap: Wrap) -> Fn:
    """Those that can be differentiated."""
    return lambda x, y: wrap(of_all_kinds)(x, y)[:10]


OUTS = (0, None, 0, None, None, 0, None, 0, 0, None, 0, 0)


def tree(params: dict, x: Tensor, *, power: int = 2) -> tuple[dict, dict]:
    h = torch.tanh(x @ params["a"]["w"]) * params["a"]["b"][0] + params["a"]["b"][1][0]
    return {"h": h**power, "l": [h.exp(), x], "same": h}, {"places": h.argmax(), "h": h}


INDICES = torch.tensor([[0, 1, 2, 1], [2, 2, 1, 0]])


def step_of(norm: Fn) -> Fn:
    """A step of gradient descent."""
    return lambda x, w: w - 0.1 * grad(lambda w: norm(x, w).sin().sum())(w)


PARAMS = {"a": {"w": W, "b": [V, (X[1],)]}, "unused": Y[0]}


def without_tangents(wrap: Wrap, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad._set_fwd_grad_enabled(False):
        return wrap(torch.sin)(x) + x


ARGUMENTS: dict[str, Callable[[Wrap], Any]] = {
    "results of all kinds": lambda wrap: [
        *[transform(floats(wrap), (0, 1))(V, Y[0]) for transform in (jacrev, jacfwd)],
        jvp(wrap(of_all_kinds), (V, Y[0]), (Y[0], V)),
        jvp(lambda x: wrap(of_all_kinds)(x, Y[0]), (V,), (Y[0],)),
        vmap(wrap(of_all_kinds), (0, None), OUTS)(X, Y[0]),
        vmap(lambda *a: pulled(floats(wrap), *a), (0, None))(X, Y[0]),
        grad(lambda x: (floats(wrap)(x, Y[0])[0][0], wrap(of_all_kinds)(x, Y[0])), has_aux=True)(V),
    ],
    "argnums": lambda wrap: [
        grad_and_value(lambda *a: total(wrap(lambda x, y, z: x.sin() * y.exp() + z.cos())(*a)), argnums)(W, X, Y)
        for argnums in (2, -1, (0,), (2, 0), (1, -1))
    ],
    "trees and aux": lambda wrap: [
        grad(lambda p: (lambda out, aux: (total(out), aux))(*wrap(tree)(p, X, power=3)), has_aux=True)(PARAMS),
        jvp(wrap(tree), (PARAMS, X), (PARAMS, Y), has_aux=True),
        jacfwd(wrap(tree), has_aux=True)(PARAMS, V),
        jacrev(wrap(tree), (0, 1), has_aux=True)(PARAMS, V),
        (lambda out, pull, aux: (out, pull(out), aux))(*vjp(wrap(tree), PARAMS, X, has_aux=True)),
        grad(lambda p: total(grad(lambda q: total(wrap(tree)(q, X)[0]))(p)))(PARAMS),
    ],
    "options of a pullback": lambda wrap: [
        [pull(Y, create_graph=False), pull(Y, retain_graph=True), pull(Y, retain_graph=False, create_graph=False)]
        for _, pull in [vjp(wrap(f), X)]
    ],
    "dimensions": lambda wrap: [
        vmap(wrap(lambda x, y: (x.sin() @ W * y, y.sin())), dims, out)(*args)
        for dims, out, args in [*[((d, None), (d, None), (X.T, Y[0])) for d in (1, -1)], ((None, 0), 0, (Y[0], X))]
    ],
    "dimensions of trees": lambda wrap: vmap(
        lambda d, x: wrap(lambda d, x, *, k: {"o": d["a"] * x.sin() * k, "n": [d["b"][0].cos()]})(d, x, k=2.0),
        ({"a": 0, "b": (None,)}, 1),
    )({"a": X, "b": (Y[0],)}, X.T),
    "nested vmap": lambda wrap: [
        vmap(vmap(wrap(torch.mul), (0, None)), (None, 0))(X, Y),
        vmap(vmap(wrap(torch.mul)), (0, None), 1)(X.expand(2, 4, 4), Y),
        vmap(grad(lambda x, y: total(vmap(wrap(torch.mul), (0, None))(x, y)), (0, 1)), (None, 0))(X, Y),
        vmap(vmap(vmap(wrap(torch.sin))))(rand(2, 2, 2, grad=False)),
    ],
    "complex numbers": lambda wrap: [
        transform(wrap(lambda z: (z.exp() * 1j).abs().sum() + (z * z.conj()).real.sin().sum()))
        for z in [rand(4, grad=False, dtype=torch.complex128)]
        for transform in (lambda f: grad(f)(z), lambda f: grad(lambda z: total(grad(f)(z)))(z))
    ],
    "second derivatives of norms with mapped weights": lambda wrap: [
        vmap(grad(lambda x, w: sum(map(total, grad(loss(wrap(norm)), (0, 1))(x, w))), (0, 1)))(rand(3, 5, 4), X[:3])
        for norm in (
            lambda x, w: F.layer_norm(x, (4,), w, w.cos()),
            lambda x, w: F.batch_norm(x, None, None, w, w.cos(), True),
        )[: 1 + (torch.__version__ < "2.15")]  # whose derivative of batch norm can't be mapped
    ],
    "a gradient inside, of a norm with mapped weights": lambda wrap: [
        vmap(grad(lambda x, w: wrap(step_of(norm))(x, w).sin().sum(), (0, 1)))(rand(3, 5, 4), X[:3])
        for norm in (lambda x, w: F.layer_norm(x, (4,), w), lambda x, w: wrap(F.layer_norm)(x, (4,), w) * 1.5)
    ],
    "mapped functions with another derivative below the level": lambda wrap: [
        vmap(grad(lambda w, i: wrap(F.embedding)(i, w, padding_idx=0).sin().sum()))(rand(2, 3, 2), INDICES),
        *[vmap(grad(wrap(wrap(fn))))(INDICES.double()) for fn in (torch.max, Tensor.min, torch.median)],
    ],
    "an argument with an infinite derivative is not read": lambda wrap: vmap(
        grad(lambda x, w: wrap(lambda p, q, w: q @ w)(*wrap(lambda x: ((x * 0).sqrt(), x.sin()))(x), w).sum(), (0, 1)),
        (0, None),
    )(X, W),
    "linearize": lambda wrap: [
        linearize(lambda x: wrap(f)(wrap(f)(x)).sin() * x, X)[1](Y),
        vmap(linearize(wrap(f), X)[1])(torch.stack([X, Y])),
    ],
    "no grad around": lambda wrap: torch.no_grad()(
        lambda: [grad(squares(wrap(f)))(X), jacrev(wrap(f))(V), jvp(wrap(f), (X,), (Y,)), vmap(wrap(f))(X)]
    )(),
    "inference mode around": lambda wrap: torch.inference_mode()(
        lambda: [
            [
                *[grad(squares(wrap(f)))(x), jacrev(wrap(f))(x[0]), jvp(wrap(f), (x,), (x,))],
                *[vmap(grad(squares(wrap(f))))(x), wrap(grad(squares(wrap(f))))(x)],
                jvp(grad(squares(wrap(f))), (x,), (Y,)),
            ]
            for x in (X, X + 0)  # the second one is an inference tensor
        ]
    )(),
    "forward gradients disabled": lambda wrap: jacfwd(functools.partial(without_tangents, wrap))(V),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_results_and_options(name: str) -> None:
    both(ARGUMENTS[name])
