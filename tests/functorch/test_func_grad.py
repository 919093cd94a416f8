"""`torch.func.grad` and `grad_and_value` of rematerialized functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, assert_same, cases, rand, scalar, total
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from benchmarks.measure import assert_freed_without_gc, count_ops, leaked_bytes, peak_bytes
from remat import RecomputeMismatchError, is_recomputing, remat

REGIONS = 6
Wrap = Callable[[Callable], Callable]


def plain(fn: Callable) -> Callable:
    return fn


def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The backward needs the first product; the second one is not recomputed."""
    return torch.tanh(x @ w1) @ w2


def network(wrap: Wrap) -> Callable[[list, Tensor], Tensor]:
    run = wrap(block)

    def net(weights: list, x: Tensor) -> Tensor:
        for w1, w2 in weights:
            x = run(x, w1, w2)
        return x

    return net


def loss(wrap: Wrap) -> Callable[[list, Tensor], Tensor]:
    net = network(wrap)
    return lambda weights, x: net(weights, x).sum()


def make_weights(width: int = 8) -> list[tuple[Tensor, Tensor]]:
    shape = (width, width)
    pairs = [(rand(*shape, seed=i), rand(*shape, seed=i + 50)) for i in range(REGIONS)]
    return [(a.detach() / 3, b.detach() / 3) for a, b in pairs]


WEIGHTS = make_weights()
X = rand(64, 8, grad=False)


def both(program: Callable[[Wrap], Any]) -> None:
    assert_same(program(remat), program(plain), exact=False)


# These differ in the last bits: sums in another order, or another formula of the backward, which torch chooses when
# it records the backward's graph. Plain torch.func always records it, a region only where it can be read.
ROUNDED = {"same_argument_twice", "group_norm", "transformer", "lstm", "reductions", "linear_algebra"}


def run(case: Case, fn: Callable, transform: Callable) -> Any:
    """A transform's result, and the state of the generator after it."""
    with case.state():
        call, primals = scalar(case, fn)
        return transform(call, tuple(range(len(primals))))(*primals), torch.get_rng_state()


@cases(func=True)
def test_value_and_gradients(case: Case) -> None:
    def transform(call: Callable, argnums: tuple) -> Callable:
        return grad_and_value(call, argnums=argnums)

    found, wanted = (run(case, fn, transform) for fn in (remat(case.fn), case.fn))
    assert_same(found, wanted, exact=case.name not in ROUNDED)


@cases(func=True, double=True)
def test_gradient_of_gradient(case: Case) -> None:
    def transform(call: Callable, argnums: tuple) -> Callable:
        def squares(*primals: Tensor) -> Tensor:
            grads = grad(call, argnums=argnums)(*primals)
            return sum((g.abs() ** 2).sum() for g in grads)

        return grad(squares, argnums=argnums)

    found, wanted = (run(case, fn, transform) for fn in (remat(case.fn), case.fn))
    assert_same(found, wanted, exact=False)


def test_every_option_of_argnums() -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x.sin() * y.exp() + z.cos()).sum()

    args = [rand(3, seed=i, grad=False) for i in range(3)]
    for argnums in (0, 2, -1, (0,), (2, 0), (1, -1)):
        both(lambda wrap: grad(wrap(f), argnums=argnums)(*args))
        both(lambda wrap: grad_and_value(wrap(f), argnums=argnums)(*args))


def test_aux() -> None:
    def f(x: Tensor, flag: bool) -> tuple[Tensor, dict]:
        h = x.sin()
        return (h * h.exp()).sum(), {"h": h if flag else h * 2, "l": [x, h.argsort()]}

    both(lambda wrap: grad(wrap(f), has_aux=True)(X[0], True))
    both(lambda wrap: grad_and_value(wrap(f), has_aux=True)(X[0], False))
    both(lambda wrap: grad(grad_of_aux(wrap(f)))(X[0]))


def grad_of_aux(f: Callable) -> Callable:
    """The gradient and an auxiliary result that depends on the argument, in one sum."""

    def g(x: Tensor) -> Tensor:
        gradient, aux = grad(f, has_aux=True)(x, True)
        return (gradient * aux["h"]).sum()

    return g


def test_parameters_in_a_pytree() -> None:
    params = {"a": {"w": X[:8], "b": [X[8], (X[9],)]}, "unused": X[0]}

    def f(params: dict, x: Tensor, *, power: int) -> Tensor:
        h = torch.tanh(x @ params["a"]["w"]) * params["a"]["b"][0] + params["a"]["b"][1][0]
        return (h**power).sum()

    both(lambda wrap: grad(wrap(f))(params, X, power=3))
    both(lambda wrap: grad(lambda p: wrap(f)(p, X, power=2))(params))


def test_one_recompute_per_region() -> None:
    for argnums in (0, 1, (0, 1)):
        ops = [count_ops(grad(loss(w), argnums=argnums), WEIGHTS, X) for w in (plain, remat)]
        before, after = ops
        assert after["aten.mm"] == before["aten.mm"] + REGIONS
        assert after["aten.tanh"] == 2 * REGIONS
        assert after["aten.tanh_backward"] == before["aten.tanh_backward"]


def test_only_requested_gradients_are_computed() -> None:
    """For one region: two products forward, one recomputed; two backward for `x`, one for `w2`."""
    w1, w2 = WEIGHTS[0]
    for argnums, products in {0: 2, 1: 2, 2: 1, (0, 2): 3, (0, 1, 2): 4}.items():
        gradient = grad(lambda *args: remat(block)(*args).sum(), argnums=argnums)
        assert count_ops(gradient, X, w1, w2)["aten.mm"] == 3 + products, argnums


def test_unused_region_is_not_recomputed() -> None:
    gradient = grad(lambda x: (remat(torch.tanh)(x), x.sum())[1])
    assert count_ops(gradient, X)["aten.tanh"] == 1


def test_recompute_stops_early() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().cos() + 1

    counts = count_ops(grad(lambda x: remat(f)(x).sum()), X)
    # The cosine saves its operand, which is a sine; nothing after it is recomputed.
    assert (counts["aten.add"], counts["aten.sin"]) == (1, 3)


def test_memory() -> None:
    memory = {wrap: peak_bytes(grad(loss(wrap)), WEIGHTS, X) for wrap in (plain, remat)}
    assert memory[remat] < 0.3 * memory[plain]
    assert leaked_bytes(grad(loss(remat)), WEIGHTS, X) == 0


def test_gradient_of_gradient_saves_operands_only() -> None:
    def program(wrap: Wrap) -> Callable:
        gradient = grad(loss(wrap), argnums=1)
        return grad(lambda weights, x: gradient(weights, x).square().sum(), argnums=1)

    assert_same(program(remat)(WEIGHTS, X), program(plain)(WEIGHTS, X), exact=False)
    memory = {wrap: peak_bytes(program(wrap), WEIGHTS, X) for wrap in (plain, remat)}
    assert memory[remat] < 0.6 * memory[plain]
    assert leaked_bytes(program(remat), WEIGHTS, X) == 0


def test_autograd_through_grad() -> None:
    def program(wrap: Wrap) -> Any:
        weights = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for a, b in WEIGHTS]
        x = X.clone().requires_grad_()
        gradient = grad(loss(wrap), argnums=1)(weights, x)
        assert gradient.requires_grad
        leaves = [x, *(w for pair in weights for w in pair)]
        return torch.autograd.grad(gradient.square().sum(), leaves)

    both(program)


def test_residuals_are_freed_without_garbage_collection() -> None:
    with assert_freed_without_gc() as watch:

        def f(x: Tensor) -> Tensor:
            h = x.sin()
            if not torch._C._functorch.is_functorch_wrapped_tensor(h):
                watch(h)
            return h.exp()

        grad(lambda x: remat(f)(x).sum())(X)
        grad(lambda x: grad(lambda x: remat(f)(x).sum())(x).sum())(X)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_regions_inside_regions(order: int) -> None:
    """The regions are new each time, so that nothing recorded in an earlier call matters."""

    def build(wrap: Wrap) -> Callable:
        inner = wrap(lambda x: x.sin().cos())
        middle = wrap(lambda x: inner(x.exp()).tanh() * x)
        fn = wrap(lambda x: middle(x).sin().sum())
        for _ in range(order):
            fn = total_gradient(fn)
        return fn

    for check in ("metadata", "none"):
        found = build(remat(determinism_check=check))(X[0])
        assert_same(found, build(plain)(X[0]), exact=False)
    # A second call of the same functions gives the same.
    again = build(remat)
    assert_same(again(X[0]), again(X[0]))


def total_gradient(fn: Callable) -> Callable:
    return lambda x: grad(fn)(x).square().sum()


def test_region_in_region_in_gradient_of_gradient() -> None:
    """The smallest case: the inner region's result is the operand of an op of the outer."""

    def build(wrap: Wrap) -> Callable:
        inner = wrap(torch.sin)
        return total_gradient(total_gradient(lambda x: wrap(lambda x: inner(x).sin())(x).sum()))

    both(lambda wrap: build(wrap)(X[0]))


def test_some_outputs_unused_or_not_differentiable() -> None:
    def f(x: Tensor, y: Tensor) -> tuple:
        values, places = x.sort()
        return values.sin(), places, (x * y).exp(), x > 0, torch.ones_like(x), y.detach() * 2

    args = rand(4, grad=False), rand(4, seed=1, grad=False)
    for i in (0, 2, 4, 5):
        both(lambda wrap: grad(lambda *a: wrap(f)(*a)[i].sum(), argnums=(0, 1))(*args))
        both(lambda wrap: hessian(lambda *a: wrap(f)(*a)[i].sum(), argnums=(0, 1))(*args))
    both(lambda wrap: grad(lambda *a: (wrap(f)(*a)[0][0], wrap(f)(*a)), has_aux=True)(*args))


@pytest.mark.parametrize("around", [lambda f: f, lambda f: lambda *a: grad(lambda *b: f(*b).sum())(*a)])
def test_results_require_grad_as_without_remat_if_autograd_records_the_transform(around: Callable) -> None:
    """A frozen part of a network requires no grad, so that its result can be changed in place."""

    def frozen(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ w).tanh()
        return scale * x

    def run(wrap: Wrap) -> Any:
        w, seen = rand(4, 4), []

        def loss(w: Tensor) -> Tensor:
            y = wrap(frozen)(w, X[:, :4])
            seen.append(y.requires_grad)
            y[0] = y[1].sin()
            y.mul_(0.5)
            return (y * w[0]).sin().sum()

        found = around(grad(loss))(w)
        return found.detach(), torch.autograd.grad(found.sum(), w), seen

    both(run)


def test_outputs_that_are_inputs_or_views_of_them() -> None:
    def f(x: Tensor, y: Tensor) -> tuple:
        return x, y.sin(), y, x, x.view(2, 2), y[1:]

    args = rand(4, grad=False), rand(4, seed=1, grad=False)

    def call(wrap: Wrap) -> Callable:
        return lambda *a: sum((out * out).exp().sum() for out in wrap(f)(*a))

    both(lambda wrap: grad(call(wrap), argnums=(0, 1))(*args))
    both(lambda wrap: hessian(call(wrap), argnums=(0, 1))(*args))
    both(lambda wrap: jacrev(wrap(f), argnums=(0, 1))(*args))


ONE_BELOW: dict[str, Callable[[Callable], Callable]] = {
    "grad": lambda f: lambda x: grad(lambda p: total(f(p, x)))(x),
    "grad, of the second": lambda f: lambda x: grad(lambda p: total(f(x, p)))(x),
    "in a lambda": lambda f: lambda x: grad(lambda p: total((lambda q: f(q, x))(p)))(x),
    "three": lambda f: lambda x: grad(lambda p, q: total((f(p, q), f(q, x))))(x, x),
    "vjp": lambda f: lambda x: vjp(lambda p: f(p, x), x)[1](tuple(x.cos() for _ in f(x, x)))[0],
    "jvp": lambda f: lambda x: jvp(lambda p: total(f(p, x)), (x,), (x.cos(),))[1],
    "vmap": lambda f: lambda x: vmap(lambda p: grad(lambda q: total(f(q, x)))(x) * p)(x),
}


@pytest.mark.parametrize("around", ["nothing", "autograd", "grad", "region"])
@pytest.mark.parametrize("name", ONE_BELOW)
def test_operands_that_are_the_same_tensor_below_the_levels(name: str, around: str) -> None:
    """A transform gives a function a tensor that it tracks, and the function also reads the same tensor untracked."""

    def swapped(p: Tensor, q: Tensor) -> tuple:
        return q, p

    def mixed(p: Tensor, q: Tensor) -> tuple:
        return p.sin() * q, p, q, p * 1

    def differentiates(p: Tensor, q: Tensor) -> tuple:
        out = (p * q).sin().sum()
        if not (out.requires_grad and p.requires_grad):
            return q * 2, q
        (g,) = torch.autograd.grad(out, p, create_graph=True, allow_unused=True)
        return q if g is None else g * q, q

    def run(fn: Callable, wrap: Wrap) -> Any:
        call, x = ONE_BELOW[name](wrap(fn)), X[0].clone()
        if around == "grad":
            return grad(lambda x: call(x).sin().sum())(x)
        if around == "region":
            return wrap(call)(x)
        x.requires_grad_(around == "autograd")
        out = call(x) + x
        return out if around == "nothing" else (out, *torch.autograd.grad(out.sin().sum(), x))

    for fn in (swapped, mixed, differentiates):
        both(lambda wrap: run(fn, wrap))


def test_complex_numbers() -> None:
    def f(z: Tensor) -> Tensor:
        return (z.exp() * 1j).abs().sum() + (z * z.conj()).real.sin().sum()

    z = rand(4, grad=False, dtype=torch.complex128)
    both(lambda wrap: grad(wrap(f))(z))
    both(lambda wrap: grad(lambda z: grad(wrap(f))(z).abs().sum())(z))


def test_no_dimensions_and_no_elements() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sin() * x).exp().sum()

    for x in (rand(grad=False), rand(0, grad=False)):
        both(lambda wrap: wrap(grad(wrap(f)))(x))
    both(lambda wrap: grad(wrap(grad(wrap(grad(wrap(f))))))(rand(grad=False)))


def no_grad_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = remat(lambda x: x.abs().exp())(x)
    return (x / scale).sin() * x.detach()


def no_grad_around_one(wrap: Wrap) -> Callable:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = wrap(torch.exp)(x)
        with torch.no_grad(), torch.enable_grad():
            both_ways = wrap(torch.sin)(x)
        return scale * wrap(torch.exp)(x) * both_ways

    return f


def test_no_grad_inside() -> None:
    for transform in (grad, hessian):
        both(lambda wrap: transform(lambda x: wrap(no_grad_inside)(x).sum())(X[0]))
        both(lambda wrap: transform(lambda x: no_grad_around_one(wrap)(x).sum())(X[0]))
        both(lambda wrap: transform(lambda x: wrap(no_grad_around_one(wrap))(x).sum())(X[0]))


def with_grad_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.square().exp()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "transform", [grad, hessian, lambda f: vmap(grad(f)), lambda f: grad(lambda x: grad(f)(x).sum())]
)
def test_region_enables_grad_mode_itself(transform: Callable, compiled: bool) -> None:
    """Its result has a gradient although the caller has disabled grad mode, as forces of a frozen model have."""

    def f(wrap: Wrap) -> Callable:
        def loss(x: Tensor) -> Tensor:
            with torch.no_grad():
                c = wrap(with_grad_inside)(x)
            return (c * x).sum()

        return torch.compile(transform(loss), backend="aot_eager") if compiled else transform(loss)

    both(lambda wrap: f(wrap)(X))


def test_no_grad_around() -> None:
    def all_of_them(wrap: Wrap) -> tuple:
        f = wrap(lambda x: (x.sin() * x).exp())
        return (
            grad(lambda x: f(x).sum())(X[0]),
            jacrev(f)(X[0]),
            jacfwd(f)(X[0]),
            hessian(lambda x: f(x).sum())(X[0]),
            jvp(f, (X[0],), (X[1],)),
            vjp(f, X[0])[1](X[1]),
            vmap(f)(X),
        )

    with torch.no_grad():
        both(all_of_them)


def test_inference_mode_around() -> None:
    with torch.inference_mode():
        x = X.clone()
        both(lambda wrap: grad(lambda x: wrap(torch.sin)(x).sum())(x))
        both(lambda wrap: jacrev(wrap(torch.sin))(x[0]))
        both(lambda wrap: jvp(wrap(torch.sin), (x,), (x,)))
        both(lambda wrap: vmap(wrap(torch.sin))(x))


def test_in_place_on_intermediates() -> None:
    def f(x: Tensor) -> Tensor:
        h = x.sin()
        h.mul_(2)
        h = h * x
        h.add_(x)
        h[0] = 0
        y = torch.zeros_like(x)
        y.copy_(h.cos())
        return y * h

    for transform in (grad, hessian, lambda f: vmap(grad(f))):
        x = X[:3] if transform not in (grad, hessian) else X[0]
        both(lambda wrap: transform(lambda x: wrap(f)(x).exp().sum())(x))


def test_argument_changed_in_place_is_an_error() -> None:
    """Plain torch.func allows it where the argument is an intermediate; a region can't, and raises an error."""

    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    for transform in (grad, jacrev, lambda f: vmap(grad(f))):
        with pytest.raises(RuntimeError, match=r"in.place"):
            transform(lambda x: remat(f)(x.clone()).sum())(X)


def test_captured_buffer_changed_in_place_is_correct_or_an_error() -> None:
    """Plain torch.func raises an error for it."""
    for transform in (grad, jacrev, hessian, lambda f: vmap(grad(f))):
        buffer = torch.zeros((), dtype=torch.float64)

        def f(x: Tensor) -> Tensor:
            buffer.add_(1)
            return x.sin() * buffer

        with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
            transform(lambda x: f(x).sum())(X[:2])
        buffer.zero_()
        try:
            found = transform(lambda x: remat(f)(x).sum())(X[:2])
        except RuntimeError as error:
            assert "mutate a captured Tensor" in str(error)
        else:
            assert_same(found, transform(lambda x: x.sin().sum())(X[:2]), exact=False)
            assert buffer == 1


TRANSFORMS = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](x),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,)),
    "vmap": vmap,
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: f(x).sum()),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum())),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum()),
}


@pytest.mark.parametrize("again", [False, True], ids=["forward", "recompute"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_error_in_user_code_leaves_nothing_behind(name: str, again: bool) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        if is_recomputing() or not again:
            raise KeyError("mine")
        return y.exp()

    if again and name in ("jvp", "vmap", "jacfwd"):
        assert TRANSFORMS[name](remat(f))(X[:2, :2]) is not None  # these have no recompute
        return
    with torch.autocast("cpu"), pytest.raises(KeyError, match="mine"):
        TRANSFORMS[name](remat(f))(X[:2, :2])
    assert not torch._C._are_functorch_transforms_active()
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    assert torch._C._len_torch_function_stack() == 0
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert not is_recomputing()
    both(lambda wrap: TRANSFORMS[name](wrap(torch.sin))(X[:2, :2]))


def test_another_path_in_the_recompute_is_an_error() -> None:
    calls = []

    def f(x: Tensor) -> Tensor:
        calls.append(0)
        return x.sin().exp() if len(calls) == 1 else x[:3].exp().sin()

    with pytest.raises(RecomputeMismatchError):
        grad(lambda x: remat(f)(x).sum())(X)


def test_a_region_that_draws_random_numbers_runs_once_in_the_forward() -> None:
    runs = []

    def loss(x: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            runs.append(is_recomputing())
            return torch.dropout(x.sin(), 0.5, True).exp()

        return remat(layer)(x).sum()

    for _ in range(3):
        runs.clear()
        grad(loss)(X)
    assert runs == [False, True]


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f)), jacrev], ids=["grad", "vmap(grad)", "jacrev"])
@pytest.mark.parametrize("given", ["argument", "captured", "module"])
def test_gradients_of_parameters_that_are_not_requested(given: str, transform: Callable) -> None:
    """They require grad below all levels, which does not affect the level that differentiates the input."""
    layer = torch.nn.Linear(8, 8, bias=False).double()
    w = layer.weight
    programs: dict[str, Callable] = {
        "argument": lambda x, wrap: wrap(lambda x, w: (x @ w.T).sin())(x, w).sum(),
        "captured": lambda x, wrap: wrap(lambda x: (x @ w.T).sin())(x).sum(),
        "module": lambda x, wrap: wrap(layer)(x).sin().sum(),
    }
    run = lambda wrap: transform(lambda x: programs[given](x, wrap))
    before, after = (count_ops(run(wrap), X)["aten.mm"] for wrap in (plain, remat))
    assert after == before + 1  # the recompute
    both(lambda wrap: run(wrap)(X))
