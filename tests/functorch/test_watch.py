"""What a region can't do under torch.func, and is refused with the remedy; and what it needs its levels for."""

import collections
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from both import ALL, Fn, V, W, Wrap, X, Y, both, summed, through_autograd, vmap
from cases import assert_same, plain
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp
from torch.nn.utils.parametrize import cached

from benchmarks.measure import leaked_bytes
from remat import CaptureError, RematError, policies, remat

EVERYTHING = policies.everything_saveable
PLACES: dict[str, Callable[[Tensor], Fn]] = {
    "closure": lambda w: lambda x: torch.tanh(x @ w),
    "derived": lambda w: (lambda v: lambda x: torch.tanh(x @ v))(w.sin()),
    "set": lambda w: (lambda some: lambda x: torch.tanh(x @ next(iter(some))))({w}),
    "method of tensor": lambda w: (lambda mul: lambda x: torch.tanh(mul(x.reshape(-1, 4).t()).t()))(w.t().matmul),
}
HIDDEN = ("set", "method of tensor")  # the search doesn't visit these

# Transforms around a region of `x`, which captures a matrix `w` that only the transforms outside of these follow.
BETWEEN: dict[str, Callable[[Callable[[Tensor], Fn]], Fn]] = {
    "nothing": lambda region: lambda w: region(w)(X).sin().sum(0),
    "grad": lambda region: lambda w: grad(summed(region(w)))(X).sum(0),
    "jvp": lambda region: lambda w: jvp(region(w), (X,), (Y,))[1].sin().sum(0),
    "vmap(grad)": lambda region: lambda w: vmap(grad(summed(region(w))))(X).sin().sum(0),
}


def outer(transform: str, fn: Fn) -> Any:
    """A transform of a function of a matrix that the transform follows."""
    return ALL[transform](lambda x: fn(torch.outer(x.sin(), x)), V)


def is_refused(program: Callable[[Wrap], Any]) -> bool:
    """Whether the region raises a CaptureError. Otherwise its results are those of the plain function."""
    try:
        found = program(remat)
    except CaptureError as error:
        assert "Pass it as an argument" in str(error)
        return True
    except RuntimeError as error:  # torch refuses a tensor of another size before the region can
        assert "must match the size" in str(error)
        return True
    assert_same(found, program(plain), exact=False)
    return False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("transform", ALL)
@pytest.mark.parametrize("place", PLACES)
def test_a_captured_tensor_that_transforms_follow_is_found_or_refused(place: str, transform: str, between: str) -> None:
    if between == "jvp" and transform.startswith("dual"):
        pytest.skip("dual numbers don't nest")
    refused = is_refused(lambda wrap: outer(transform, BETWEEN[between](lambda w: wrap(PLACES[place](w)))))
    followed = transform not in ("call", "dual")
    if transform in ("autograd", "autograd, twice", "in a region"):
        followed = between in ("grad", "vmap(grad)")
    assert refused == (place in HIDDEN and followed)


@pytest.mark.parametrize("transform", ALL)
def test_captured_by_nested_regions_and_by_a_transform_in_a_region(transform: str) -> None:
    def call(wrap: Wrap, w: Tensor) -> Tensor:
        v = w.cos()
        inner = wrap(lambda x: (w, torch.tanh(x @ w) @ v, w))
        outs = wrap(lambda x: (v, inner(x)[1].sin() * w[0] + v[0], *inner(x)))(X)
        outs += (wrap(lambda x: grad(lambda x: torch.tanh(x @ w).sum())(x) * w[0])(X),)
        return sum((out * out).sum(0) for out in outs)

    both(lambda wrap: outer(transform, functools.partial(call, wrap)))


def mapped(x: Tensor, by: Tensor = Y) -> tuple[Tensor, Tensor]:
    """No function makes the tensor that the outer ``vmap`` returns."""
    y = vmap(lambda row: (row * by[0]).sin().exp())(x)
    return y, y.cos()


def test_a_hidden_tensor_that_a_region_inside_gets_is_refused() -> None:
    """The inner region runs below the level of the tensor."""
    inner = remat(torch.mul)

    def fn(x: Tensor) -> Tensor:
        hidden = {x}
        return remat(lambda a: inner(a, next(iter(hidden))))(x * 2).sum()

    with pytest.raises(CaptureError, match="Pass it as an argument"):
        grad(fn)(X)


@pytest.mark.parametrize("transform", [grad, lambda fn: lambda x: jvp(fn, (x,), (x,))], ids=["grad", "jvp"])
def test_cached_weights_are_refused(transform: Callable) -> None:
    with cached(), pytest.raises(RematError, match="Leave out the cache"):
        transform(lambda x: remat(torch.sin)(x).sum())(X)
    both(lambda wrap: vmap(wrap(torch.sin))(X))


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


class Stores:
    def __init__(self, detach: bool) -> None:
        self.detach, self.kept, self.cache = detach, None, None

    def __call__(self, x: Tensor) -> Tensor:
        self.cache = torch.arange(x.shape[-1]).to(x).cos() if self.cache is None else self.cache
        y = x.sin()
        self.kept = y.detach() if self.detach else y
        return y.cos() * self.cache


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "jvp", "jvp(vmap)", "jvp(grad)", "grad(jvp)", "hessian"])
def test_a_stored_tensor_that_would_lose_its_derivatives_is_refused(transform: str) -> None:
    with pytest.raises(CaptureError, match=r"stored a tensor of shape .* in self\.kept.*Return it"):
        ALL[transform](remat(Stores(detach=False)), V)


@pytest.mark.parametrize(("transform", "detach"), [*((transform, True) for transform in ALL), ("vmap", False)])
def test_a_constant_or_detached_tensor_may_be_stored_and_any_under_vmap_only(transform: str, detach: bool) -> None:
    reads = lambda wrap: lambda x: (s := Stores(detach), wrap(lambda y: y * s.kept)(wrap(s)(x)) * s.kept)[1]
    both(lambda wrap: [ALL[transform](wrap(fn), V) for fn in (Stores(detach), reads(wrap))])
    region = remat(Stores(detach))  # in plain torch nested transforms fail at a wrapper of a first call
    assert_same(ALL[transform](region, V), ALL[transform](region, V), exact=False)


def test_a_sparse_constant_may_be_stored_or_captured_under_jvp() -> None:
    kept, captured = list[Tensor](), torch.eye(4).to_sparse()
    both(lambda wrap: jvp(wrap(lambda x: (kept.append(torch.eye(4).to_sparse()), x.sin())[1]), (X,), (Y,)))
    both(lambda wrap: jvp(wrap(lambda x: x.sin() if captured.is_sparse else x), (X,), (Y,)))


# Results that are no trees, made of a tensor.
HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "object": lambda t: SimpleNamespace(mean=t),
    "distribution": lambda t: torch.distributions.Normal(t, t.exp()),
    "iterator": lambda t: map(torch.sin, t),
    "generator in a tuple": lambda t: (1, (row.sin() for row in t)),
    "view of a dict": lambda t: {"a": t}.values(),
    "set": lambda t: {t},
    "collection": lambda t: collections.UserDict(a=t),
    "bound method": lambda t: t.mul,
    "closure": lambda t: lambda: t,
    "pullback": lambda t: vjp(lambda x: (x * t).sin(), V)[1],
}


@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian", "vmap(grad)", "autograd(grad)"])
@pytest.mark.parametrize("name", HOLDERS)
def test_a_result_that_holds_tensors_and_is_no_tree_is_refused(name: str, transform: str) -> None:
    region = remat(lambda x: (x.cos(), HOLDERS[name](x.sin())))
    with pytest.raises(CaptureError, match=r"returned a .*Return the tensors themselves"):
        ALL[transform](lambda x: region(x)[0], V)
    if name != "pullback":
        both(lambda wrap: ALL[transform](lambda x: wrap(lambda x: (x.cos(), HOLDERS[name](x.detach())))(x)[0], V))


def pulls(wrap: Wrap, of: Fn, inside: bool) -> Fn:
    """A region calls a pullback at `of` its argument, which it makes ``inside``, or captures, and keeps."""

    def fn(s: Tensor) -> Tensor:
        w = of(s)
        make, kept = functools.partial(vjp, lambda x: vmap(torch.mul)(x.sin() * w, x), V), collections.deque[Fn]()
        pull = make()[1]
        keep = lambda pull: (kept.append(pull), pull)[1]
        return wrap(lambda v: keep(make()[1] if inside else pull)(v)[0] * grad(summed(torch.sin))(v))(s.cos())

    return fn


@pytest.mark.parametrize("name", ["grad", "jvp", "jvp(vmap)", "hessian", "vmap(grad)", "autograd", "autograd(grad)"])
def test_a_captured_pullback_is_refused_if_it_depends_on_what_is_followed(name: str) -> None:
    with pytest.raises(CaptureError, match="call `vjp` and the pullback in one region"):
        ALL[name](pulls(remat, torch.exp, inside=False), V)
    both(lambda wrap: ALL[name](pulls(wrap, torch.exp, inside=True), V))
    if name not in ("jvp", "jvp(vmap)", "hessian"):
        both(lambda wrap: ALL[name](pulls(wrap, torch.ones_like, inside=False), V))


def test_a_pullback_that_a_region_of_autograd_returns_is_refused() -> None:
    with pytest.raises(CaptureError, match="returned a function"):
        remat(HOLDERS["pullback"])(V.clone().requires_grad_())


def test_a_returned_function_does_not_lead_to_its_globals() -> None:
    both(lambda wrap: grad(lambda x: wrap(lambda x: (x.sin(), both, torch, Stores))(x)[0].sum())(X))


def hooked(tensor: Tensor) -> Tensor:
    """The hook reads the gradient, so its result would differ if the gradient had a visible batch dimension."""
    if tensor.requires_grad:
        tensor.register_hook(lambda g: g * 1.5 * g.sum().cos())
    return tensor


def hooks_gradient(x: Tensor) -> Tensor:
    energy = (x.sin() * x).sum()
    if not energy.requires_grad:
        return x.sin()
    return hooked(torch.autograd.grad(energy, x, create_graph=True)[0]).sin() * x


def freezes(x: Tensor) -> Tensor:
    x.requires_grad = False
    return x.sin() * x


class StraightThrough(torch.autograd.Function):
    """Rounds, with the gradient of the identity; the gradient of the `vmap` rule would be zero."""

    forward = staticmethod(lambda x: (x * 4).round())
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: g * 4)
    vmap = staticmethod(lambda info, dims, x: ((x * 4).round(), dims[0]))


ACTS: dict[str, Fn] = {
    "hooks made": lambda x: hooked(x.sin()).sin() * x.cos(),
    "hooks argument": lambda x: hooked(x).sin().cos(),
    "hooks gradient": hooks_gradient,
    "detaches": lambda x: (x.sin().detach_() * x.exp()).sin() * x,
    "reads data": lambda x: (x.sin().data * x.cos()).exp(),
    "freezes": freezes,
    "rounds": lambda x: StraightThrough.apply(x.sin()) * x,
    "scatters": lambda x: x.sin().select_scatter(x.cos().sum(), 0, 0).exp(),
}
NESTS: dict[str, Callable[[Wrap, Fn], Fn]] = {
    "one": lambda wrap, fn: wrap(fn),
    "two": lambda wrap, fn: wrap(lambda x: wrap(fn)(x.cos() * 1).sin() * x),
    "in a transform": lambda wrap, fn: wrap(lambda x: grad(lambda y: fn(y * 1).sum())(x) * x),
    "not followed": lambda wrap, fn: lambda x: grad(lambda y: (wrap(fn)(x) * y.sin()).sum())(V),
}
SINGLE = ("autograd", "grad", "jacrev", "vjp")


def may_be_refused(act: str, transform: str, nest: str) -> bool:
    if act in ("rounds", "scatters"):
        return False
    single = transform in SINGLE and nest != "not followed"
    # `hooks_gradient` asks for a gradient, so its level is restored above the graph.
    return not single or act in ("hooks argument", "hooks gradient")


@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("transform", ALL)
@pytest.mark.parametrize("act", ACTS)
def test_a_region_acts_on_one_level_as_without_remat_or_is_refused(act: str, transform: str, nest: str) -> None:
    if transform == "dual" and act in ("reads data", "detaches"):
        pytest.skip("the tangent is cut too")
    fn = ACTS[act]
    try:
        expected = ALL[transform](NESTS[nest](plain, fn), V)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch can't run it")
    for policy in (None, EVERYTHING, policies.save_ops("aten.sin", "aten.exp")):
        try:
            found = ALL[transform](NESTS[nest](functools.partial(remat, policy=policy), fn), V)
        except RematError as error:
            assert any(t in str(error) for t in ("outside of the region", "Use `.detach()`", "Use `slice_")), error
            assert may_be_refused(act, transform, nest), policy
        else:
            assert_same(found, expected, exact=False)


REFUSED = {"hooks made": "hook on a tensor", "hooks argument": "hook on an", "detaches": "Use `.detach"}


@pytest.mark.parametrize("transform", ["grad(grad)", "vmap(grad)", "autograd(grad)"])
@pytest.mark.parametrize(("act", "text"), REFUSED.items())
def test_refused_under_several_levels(act: str, text: str, transform: str) -> None:
    with pytest.raises(RematError, match=text):
        ALL[transform](remat(ACTS[act]), V)


@pytest.mark.parametrize("around", [lambda f: f, lambda f: grad(summed(f))], ids=["nothing", "grad"])
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


def test_a_full_backward_hook_of_a_module_under_jvp() -> None:
    """The hook is installed where an input requires grad, which no tensor of the level does."""

    def program(wrap: Wrap) -> Any:
        layer, calls = torch.nn.Linear(len(V), len(V), dtype=V.dtype), []
        layer.register_full_backward_hook(lambda *_: calls.append(None))
        region = wrap(lambda x: layer(x).sin())
        return through_autograd(lambda w: jvp(lambda p: p * region(w.relu()), (V,), (V.cos(),)), V), len(calls)

    both(program)


def test_a_derivative_inside_that_would_not_call_the_hooks_of_inputs_is_an_error() -> None:
    def step(x: Tensor) -> Tensor:
        return grad(lambda x: x.sin().sum())(x) * torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]

    x = V.clone().requires_grad_()
    assert_same(remat(step)(x), step(x))
    x.register_hook(lambda g: 2 * g)
    with pytest.raises(RematError, match=r"autograd\.grad, which would not call the hooks on the region's inputs"):
        remat(step)(x)
