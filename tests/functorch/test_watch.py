"""What a region can't do under torch.func, and is refused with the remedy; and what it needs its levels for.

Below all levels one graph serves all transforms, on operands that were unwrapped.
"""

from __future__ import annotations

import contextvars
import copy
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import Fn, Program, W, Wrap, X, Y, both, plain, through_autograd
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize

from benchmarks.measure import leaked_bytes, peak_bytes
from remat import CaptureError, RematError, policies, remat

BATCH = rand(2, 4, 4, seed=3, grad=False)
EVERYTHING = policies.everything_saveable

# --- captured tensors -------------------------------------------------------------------------------------------------

other = types.ModuleType("remat_test_other")  # an imported module: the search for captured tensors skips its attributes
sys.modules["remat_test_other"] = other
variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
LINEAR = nn.Linear(4, 4, bias=False)
del LINEAR.weight


def in_torch_module(w: Tensor) -> Fn:
    linear = copy.copy(LINEAR)
    linear.weight = w  # a plain attribute, as functional_call does it
    return lambda x: torch.tanh(linear(x))


def derived_in_other_module(w: Tensor) -> Fn:
    other.w, other.v = w.sin(), w.cos()
    return lambda x: torch.tanh(x @ other.w) @ other.v + other.w.sum()


def in_variables_object(w: Tensor) -> Fn:
    variable.set(types.SimpleNamespace(weights=[w, w.cos()]))
    return lambda x: torch.tanh(x @ variable.get().weights[0]) * variable.get().weights[1].sum()


def behind_weak_reference(w: Tensor) -> Fn:
    reference = weakref.ref(w)
    return lambda x: torch.tanh(x @ reference())


def bound_method_of_tensor(w: Tensor) -> Fn:
    product = w.t().matmul
    return lambda x: torch.tanh(product(x.reshape(-1, 4).t()).t())


FOUND: dict[str, Callable[[Tensor], Fn]] = {
    "closure": lambda w: lambda x: torch.tanh(x @ w),
    "views": lambda w: (lambda turned, row: lambda x: torch.tanh(x @ turned.t()) * row)(w.t(), w[0]),
    "derived": lambda w: (lambda v: lambda x: torch.tanh(x @ v))(w.sin()),
    "torch module": in_torch_module,
}
# Places that the search doesn't visit.
HIDDEN: dict[str, Callable[[Tensor], Fn]] = {
    "set": lambda w: (lambda some: lambda x: torch.tanh(x @ next(iter(some))))({w}),
    "derived, other module": derived_in_other_module,
    "object of variable": in_variables_object,
    "weak reference": behind_weak_reference,
    "method of tensor": bound_method_of_tensor,
}
PLACES = FOUND | HIDDEN

# Transforms that follow `w` outside: each gets a loss of `w` and `x`.
OUTER: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda f: grad(f, (0, 1))(W, X),
    "vmap(grad), w shared": lambda f: vmap(grad(f, (0, 1)), (None, 0))(W, BATCH),
    "vmap(grad)": lambda f: vmap(grad(f, (0, 1)))(torch.stack([W, Y]), BATCH),
    "grad(vmap)": lambda f: grad(lambda w, x: vmap(f, (None, 0))(w, x).sum(), (0, 1))(W, BATCH),
    "jvp": lambda f: jvp(lambda w: f(w, X), (W,), (W,)),
    "jacfwd": lambda f: jacfwd(f, (0, 1))(W, X),
    "hessian": lambda f: hessian(lambda w: f(w, X))(W)[0],
    "grad by w of grad by x": lambda f: grad(lambda w: grad(f, 1)(w, X).sin().sum())(W),
    "grad by w of jacfwd by x": lambda f: grad(lambda w: jacfwd(f, 1)(w, X).sin().sum())(W),
    "grad by w of vmap(grad) by x": lambda f: grad(lambda w: vmap(grad(f, 1), (None, 0))(w, BATCH).sin().sum())(W),
}


def is_refused(program: Program) -> bool:
    """Whether the region raises a CaptureError. Otherwise its results are those of the plain function."""
    try:
        found = program(remat)
    except CaptureError as error:
        assert "Pass it as an argument" in str(error)
        return True
    assert_same(found, program(plain), exact=False)
    return False


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("place", PLACES)
def test_a_captured_tensor_that_a_transform_follows_is_found_or_refused(place: str, outer: str) -> None:
    def program(wrap: Wrap) -> Any:
        return OUTER[outer](lambda w, x: wrap(PLACES[place](w))(x).sin().sum())

    assert is_refused(program) == (place in HIDDEN)


INNER: dict[str, Callable[[Fn], Fn]] = {
    "grad": lambda g: grad(lambda x: g(x).sum()),
    "vmap": vmap,
    "jvp": lambda g: lambda x: jvp(g, (x,), (x,))[1],
    "jacrev": jacrev,
    "hessian": lambda g: hessian(lambda x: g(x).sum()),
    "vmap(grad)": lambda g: vmap(grad(lambda x: g(x).sum())),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("place", PLACES)
def test_a_captured_tensor_that_autograd_follows_around_a_transform(place: str, inner: str) -> None:
    def program(wrap: Wrap) -> Any:
        return through_autograd(lambda w, x: INNER[inner](wrap(PLACES[place](w)))(x), W, X)

    assert is_refused(program) == (place in HIDDEN and inner not in ("vmap", "jvp"))


@pytest.mark.parametrize("outer", OUTER)
def test_tensors_that_are_captured_by_two_nested_regions_and_returned(outer: str) -> None:
    def build(wrap: Wrap) -> Fn:
        def call(w: Tensor, x: Tensor) -> Tensor:
            v = w.cos()
            inner = wrap(lambda x: (w, torch.tanh(x @ w) @ v, w))
            outs = wrap(lambda x: (v, inner(x)[1].sin() * w[0] + v[0], *inner(x)))(x)
            return sum((out * out).sum() for out in outs)

        return call

    both(lambda wrap: OUTER[outer](build(wrap)))


@pytest.mark.parametrize("outer", OUTER)
def test_a_captured_tensor_that_only_an_outer_transform_follows(outer: str) -> None:
    def build(wrap: Wrap) -> Fn:
        inner = lambda w: lambda x: grad(lambda x: torch.tanh(x @ w).sum())(x) * w[0]
        return lambda w, x: wrap(inner(w))(x).sin().sum()

    both(lambda wrap: OUTER[outer](build(wrap)))


def test_a_wrapper_of_an_operand_that_is_read_in_an_inner_transform_is_refused() -> None:
    """Below the outer levels, the inner one has the wrapper's level number, and the operand is not a wrapper."""

    def build(wrap: Wrap) -> Fn:
        def call(w: Tensor, x: Tensor) -> Tensor:
            other.x = x
            return wrap(lambda w, x: vmap(lambda row: (row * other.x.sum() * w).sin())(x))(w, x).sum()

        return call

    assert is_refused(lambda wrap: grad(lambda w: vmap(build(wrap), (None, 0))(w, W).cos().sum())(X[0]))


def mapped(x: Tensor, by: Tensor = Y) -> tuple[Tensor, Tensor]:
    """No function makes the tensor that the outer ``vmap`` returns."""
    y = vmap(lambda row: (row * by[0]).sin().exp())(x)
    return y, y.cos()


MADE_INSIDE: dict[str, Callable[[Wrap], Fn]] = {
    "grad": lambda wrap: grad(wrap(lambda x: mapped(x)[0].sum())),
    "vjp": lambda wrap: lambda x: vjp(wrap(lambda x: mapped(x)[0]), x)[1](x)[0],
    "jacrev": lambda wrap: jacrev(wrap(lambda x: mapped(x)[0].sum(0))),
    "returned too": lambda wrap: grad(lambda x: sum(t.sum() for t in wrap(mapped)(x))),
}


@pytest.mark.parametrize("policy", [None, EVERYTHING], ids=["no policy", "everything"])
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_tensors_made_inside_and_kept_are_not_captured(name: str, policy: Any) -> None:
    region = remat(MADE_INSIDE[name](remat), policy=policy)
    assert_same(found := region(X), MADE_INSIDE[name](plain)(X), exact=False)
    assert not found.requires_grad
    assert leaked_bytes(region, X) == 0


def test_a_result_that_is_read_is_not_captured_if_autograd_records_the_region() -> None:
    runs, weight = [], rand(4, 4)
    program = grad(lambda x: sum(t.sum() for t in remat(lambda x: runs.append(0) or mapped(x, weight))(x)))
    assert program(X).requires_grad
    assert len(runs) == 2
    assert leaked_bytes(lambda: torch.autograd.grad(program(X).sum(), weight)) == 0


@pytest.mark.parametrize("policy", [None, EVERYTHING], ids=["no policy", "everything"])
def test_a_captured_tensor_of_a_level_that_has_ended(policy: Any) -> None:
    """A buffer that a function under `jvp` has set anew; operations see the tensor that it wraps."""

    def program(wrap: Wrap) -> Any:
        module = nn.Module()
        module.scale = torch.full((4,), 0.5, dtype=X.dtype)

        def refreshed(x: Tensor) -> Tensor:
            module.scale = module.scale * 0.5 + 1
            return x * module.scale.cos()

        def outer(x: Tensor) -> Tensor:
            y = jvp(refreshed, (x,), (torch.ones_like(x),))[1]
            return wrap(lambda x: (x * module.scale).sin())(x) + y

        return through_autograd(wrap(outer), X[0]), module.scale + 0

    both(program, exact=True, policy=policy)


# --- stored tensors ---------------------------------------------------------------------------------------------------


class Stores:
    def __init__(self, detach: bool) -> None:
        self.detach, self.kept = detach, None

    def __call__(self, x: Tensor) -> Tensor:
        y = x.sin()
        self.kept = y.detach() if self.detach else y
        return y.cos()


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f)), lambda f: lambda x: jvp(f, (x,), (x,))])
def test_a_stored_tensor_that_would_lose_its_derivatives_is_refused(transform: Callable) -> None:
    with pytest.raises(CaptureError, match=r"stored a tensor of shape .* in self\.kept.*Return it"):
        transform(lambda x: remat(Stores(detach=False))(x).sum())(X)


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f))])
def test_a_tensor_that_is_detached_or_stored_under_vmap_only_is_allowed(transform: Callable) -> None:
    both(lambda wrap: transform(lambda x: wrap(Stores(detach=True))(x).sum())(X))
    both(lambda wrap: vmap(wrap(Stores(detach=False)))(X))


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_parameters_that_a_recurrent_layer_lists_anew_are_not_stored(cls: type[nn.Module]) -> None:
    layer = cls(4, 4).double()
    params = {name: torch.stack([p, p.cos()]).detach() for name, p in layer.named_parameters()}

    def program(wrap: Wrap) -> Any:
        region = wrap(copy.deepcopy(layer))
        return vmap(grad(lambda p: functional_call(region, p, (X,))[0].sum()))(params)

    both(program)


def test_cached_parametrizations_are_refused() -> None:
    with parametrize.cached(), pytest.raises(RematError, match="Leave out the cache"):
        grad(lambda x: remat(torch.sin)(x).sum())(X)


# --- functions that act on one level ----------------------------------------------------------------------------------

RAN: list[str] = []


def hook(tensor: Tensor) -> None:
    """The hook reads the gradient, so its result would differ if the gradient had a visible batch dimension."""

    def changed(g: Tensor) -> Tensor:
        RAN.append("hook")
        return g * 1.5 * g.sum().cos()

    if tensor.requires_grad:
        tensor.register_hook(changed)


def hooks_made(x: Tensor) -> Tensor:
    h = x.sin()
    hook(h)
    return h.sin() * x.cos()


def hooks_argument(x: Tensor) -> Tensor:
    hook(x)
    return x.sin().cos()


def hooks_gradient(x: Tensor) -> Tensor:
    energy = (x.sin() * x).sum()
    if not energy.requires_grad:
        return x.sin()
    (g,) = torch.autograd.grad(energy, x, create_graph=True)
    hook(g)
    return g.sin() * x


def detaches(x: Tensor) -> Tensor:
    y = x.sin()
    y.detach_()
    return (y * x.exp()).sin() * x


def reads_data(x: Tensor) -> Tensor:
    return (x.sin().data * x.cos()).exp()


def freezes(x: Tensor) -> Tensor:
    x.requires_grad = False
    return x.sin() * x


class StraightThrough(torch.autograd.Function):
    """Rounds, with the gradient of the identity; the gradient of the `vmap` rule would be zero."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x * 4).round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 4

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return (x * 4).round(), dims[0]


class GeneratedRule(torch.autograd.Function):
    generate_vmap_rule = True
    forward, setup_context, backward = StraightThrough.forward, StraightThrough.setup_context, StraightThrough.backward


def rounds(x: Tensor) -> Tensor:
    return StraightThrough.apply(x.sin()) * x


def rounds_by_generated_rule(x: Tensor) -> Tensor:
    return GeneratedRule.apply(x.sin()) * x


ACTS = [hooks_made, hooks_argument, hooks_gradient, detaches, reads_data, freezes, rounds, rounds_by_generated_rule]
NESTS: dict[str, Callable[[Wrap, Fn], Fn]] = {
    "one": lambda wrap, fn: wrap(fn),
    "two": lambda wrap, fn: wrap(wrap(fn)),
    "of an intermediate": lambda wrap, fn: wrap(lambda x: wrap(fn)(x.cos() * 1).sin() * x),
    "in a transform": lambda wrap, fn: wrap(lambda x: grad(lambda y: fn(y * 1).sum())(x) * x),
}


def by_grad(fn: Fn) -> Fn:
    return grad(lambda x: fn(x).sum())


def from_leaf(fn: Fn) -> Fn:
    return lambda x: through_autograd(lambda x: fn(x * 1), x)[1][0]


def pulled_twice(fn: Fn) -> Fn:
    return lambda x: (lambda out, pull: pull(out)[0] + pull(x)[0])(*vjp(fn, x))


SINGLE: dict[str, Callable[[Fn], Fn]] = {"grad": by_grad, "jacrev": jacrev, "vjp, pulled twice": pulled_twice}
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "autograd": from_leaf,
    **SINGLE,
    "grad(grad)": lambda fn: by_grad(by_grad(fn)),
    "vmap(grad)": lambda fn: vmap(by_grad(fn)),
    "jvp(grad)": lambda fn: lambda x: sum(jvp(by_grad(fn), (x,), (x.cos(),))),
    "grad(vmap)": lambda fn: by_grad(vmap(fn)),
    "grad(vmap(grad))": lambda fn: by_grad(vmap(by_grad(fn))),
    "autograd(grad)": lambda fn: from_leaf(by_grad(fn)),
    "autograd, given from outside": lambda fn: from_leaf(lambda x: by_grad(lambda y: fn(x * y) * y)(Y)),
    "grad, not followed": lambda fn: by_grad(lambda x: by_grad(lambda y: fn(x) * y.sin())(Y)),
}


def may_be_refused(fn: Fn, transform: str) -> bool:
    if fn in (rounds, rounds_by_generated_rule):
        return fn is rounds and "vmap(grad" in transform
    # `hooks_gradient` asks for a gradient, so its level is restored above the graph.
    return transform not in ("autograd", *SINGLE) or fn in (hooks_argument, hooks_gradient)


@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("fn", ACTS, ids=lambda fn: fn.__name__)
def test_a_region_acts_on_one_level_as_without_remat_or_is_refused(fn: Fn, transform: str, nest: str) -> None:
    try:
        expected = TRANSFORMS[transform](NESTS[nest](plain, fn))(X)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch can't run it")
    for policy in (None, EVERYTHING, policies.save_ops("aten.sin", "aten.exp")):
        region = NESTS[nest](lambda fn, policy=policy: remat(fn, policy=policy), fn)
        try:
            found = TRANSFORMS[transform](region)(X)
        except RematError as error:
            assert any(remedy in str(error) for remedy in ("outside of the region", "Use `.detach()`")), error
            assert may_be_refused(fn, transform), policy
        else:
            assert_same(found, expected, exact=False)


REFUSED = {
    hooks_made: "hook on a tensor",
    hooks_argument: "hook on an argument",
    detaches: "Use `.detach",
    rounds: "Set `",
}


@pytest.mark.parametrize("transform", ["grad(grad)", "vmap(grad)", "autograd(grad)"])
@pytest.mark.parametrize("fn", [*REFUSED, reads_data], ids=lambda fn: fn.__name__)
def test_refused_under_several_levels(fn: Fn, transform: str) -> None:
    if fn is rounds and transform != "vmap(grad)":
        return both(lambda wrap: TRANSFORMS[transform](wrap(fn))(X))
    with pytest.raises(RematError, match=REFUSED.get(fn, "`.data`")):
        TRANSFORMS[transform](remat(fn))(X)


@pytest.mark.parametrize("transform", SINGLE)
def test_hooks_run_as_often_as_without_remat(transform: str) -> None:
    counts = []
    for wrap in (plain, remat):
        RAN.clear()
        SINGLE[transform](wrap(hooks_made))(X)
        counts.append(len(RAN))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("fn", [hooks_made, detaches, reads_data])
def test_such_a_region_saves_only_its_inputs_under_a_single_level(fn: Fn) -> None:
    def program(wrap: Wrap) -> Fn:
        def chain(x: Tensor) -> Tensor:
            for _ in range(8):
                x = wrap(lambda x: fn(fn(x).sin().exp().sin()))(x)
            return x

        return by_grad(chain)

    x = rand(64, 64, grad=False)
    assert peak_bytes(program(remat), x) < 0.5 * peak_bytes(program(plain), x)
    assert leaked_bytes(program(remat), x) == 0


# --- functions that see their levels ----------------------------------------------------------------------------------


def depends(x: Tensor, y: Tensor) -> Tensor:
    """Energies are differentiated only with respect to what requires grad."""
    p, out = x * 1, ((x * y).sin() + y).sum()
    if not (p.requires_grad and out.requires_grad):
        return out * y
    (g,) = torch.autograd.grad(out, p, create_graph=True, allow_unused=True)
    return y if g is None else g.sin() * y


def is_computed(x: Tensor, y: Tensor) -> Tensor:
    h = x.sin()
    return (h * 2 if h.is_leaf else h * 3) * y


def has_a_node(x: Tensor, y: Tensor) -> Tensor:
    h = x.sin()
    return (h * 2 if h.grad_fn is None else h * 3) * y


def forces(fn: Fn) -> Fn:
    return lambda x: torch.autograd.grad(fn(x).sin().sum(), x, create_graph=True)[0]


def drops(x: Tensor, y: Tensor) -> Tensor:
    """Dropout draws in the order of elements at a level, in that of memory below."""
    return F.dropout(torch.outer(x, y).t() * 1, 0.5).sum(0)


# Ways to pass two tensors, one of which is not followed by the innermost level.
GIVEN: dict[str, Callable[[Fn, Wrap], Fn]] = {
    "x from outside": lambda fn, wrap: lambda x: grad(lambda y: wrap(fn)(x, y).sum())(Y[0]),
    "y from outside": lambda fn, wrap: lambda y: grad(lambda x: wrap(fn)(x, y).sum())(Y[0]),
    "x captured": lambda fn, wrap: lambda x: grad(lambda y: wrap(lambda y: fn(x, y))(y).sum())(Y[0]),
    "both": lambda fn, wrap: lambda x: grad(lambda y: wrap(fn)(x * y, y).sum())(x.cos()),
    "mapped": lambda fn, wrap: lambda x: vmap(grad(lambda y: wrap(fn)(x, y).sum()), randomness="same")(Y).sum(0),
    "unbatched": lambda fn, wrap: (
        lambda x: grad(lambda y: vmap(wrap(fn), (None, 0), randomness="different")(x, Y * y).sum())(X[0])
    ),
    "in a region": lambda fn, wrap: lambda x: grad(lambda y: wrap(lambda y: wrap(fn)(x, y).sin())(y).sum())(Y[0]),
}
ORDERS: dict[str, Callable[[Fn], Any]] = {
    "value": lambda f: f(X[0]),
    "autograd": lambda f: through_autograd(lambda x: f(x) + x, X[0]),
    "autograd, twice": lambda f: through_autograd(lambda x: forces(lambda x: f(x) + x)(x) + x, X[0]),
    "grad": lambda f: grad(lambda x: f(x).sin().sum())(X[0]),
    "jvp": lambda f: jvp(f, (X[0],), (Y[0],)),
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sin().sum()), randomness="same")(X[:2]),
}


@pytest.mark.parametrize("fn", [depends, is_computed, has_a_node, drops])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("order", ORDERS)
def test_a_function_sees_what_its_innermost_level_follows(order: str, given: str, fn: Fn) -> None:
    for _ in range(2):  # the second call uses what the first one recorded
        both(lambda wrap: ORDERS[order](GIVEN[given](fn, wrap)))


@pytest.mark.parametrize(
    "transform", [grad, jacrev, hessian, lambda f: vmap(grad(f)), lambda f: grad(lambda x: grad(f)(x).sum())]
)
def test_inputs_require_grad_as_without_remat(transform: Callable) -> None:
    """In the first run: code such as `if not x.requires_grad: x.requires_grad_()` depends on it."""

    def program(wrap: Wrap) -> bool:
        seen = []
        transform(lambda x: wrap(lambda x: seen.append(x.requires_grad) or x.sin())(x).sum())(X)
        return seen[0]

    both(program)


@pytest.mark.parametrize("around", [lambda f: f, by_grad], ids=["nothing", "grad"])
def test_results_require_grad_as_without_remat_if_autograd_records_the_transform(around: Callable) -> None:
    """A frozen part of a network requires no grad, so that its result can be changed in place."""

    def frozen(w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ w).tanh()
        return scale * x

    def program(wrap: Wrap) -> Any:
        seen = []

        def loss(w: Tensor) -> Tensor:
            y = wrap(frozen)(w, X)
            seen.append(y.requires_grad)
            y[0] = y[1].sin()
            y.mul_(0.5)
            return (y * w[0]).sin().sum()

        return through_autograd(around(grad(loss)), W), seen

    both(program)
