"""A policy changes what is saved and what is recomputed, never a result: each program is compared with itself.

Uninitialized memory is filled with NaN here, so that a value which was never computed is noticed.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, Wrap, assert_same, module, orders_of, plain, rand, scalar, total
from cases import tensor_leaves as leaves_of
from random_programs.toolbox import chosen, pair
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import count_ops
from remat import checkpoint_name, policies, remat
from remat._policy.policy import as_policy

Fn = Callable[..., Any]
N = 4
W, COMPLEX = rand(N, N, seed=77, grad=False) / 2, rand(N, N, dtype=torch.complex128, grad=False)
WEIGHT, BIAS = rand(N, seed=1, grad=False), rand(N, seed=2, grad=False)
named = functools.partial(checkpoint_name, name="h")
then = lambda *steps: steps[-1]  # the last of these values, which are computed one after another
noisy = lambda x: x + 0.1 * torch.randn(x.shape, dtype=x.dtype)
step = lambda x: x - 0.1 * grad(lambda z: z.square().sum())(x)  # a gradient step
norm = lambda x: F.layer_norm(x, (N,), WEIGHT, BIAS)  # its mean and variance are saved, and not read in the forward
pytestmark = [pytest.mark.usefixtures("filled_memory"), pytest.mark.filterwarnings("ignore:The policy")]


operators = lambda names: as_policy([f"aten.{name}" for name in names.split()])  # which may return views
ODD = operators("sin mul add_ copy_ clone bernoulli_ uniform_ native_dropout zeros_like empty_like empty lift_fresh t_")
NAMES = policies.save_only_these_names("h", "a*")
POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "matmuls": policies.save_matmuls,
    "odd": ODD,
    "not odd": ~ODD,
    "in place": operators("mul_ bitwise_and_ relu_ rrelu_with_noise exp_ tanh_"),
    "names": NAMES,
    "all but names": policies.save_anything_except_these_names("h"),
    "half": policies.save_if(chosen(3)),
    "some and names": policies.save_if(chosen(5, 3)) | NAMES,
    "answers": policies.save_if(chosen(4, 5)),
    "offloaded": policies.offload(policies.save_matmuls | policies.save_ops("aten.exp", "aten.sin")),
    "budget": policies.budget(0.5),
}


@torch.library.custom_op("remat_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws random numbers, but has no tag that says so."""
    return x + torch.randn_like(x)


noise.register_autograd(lambda ctx, g: g)


@torch.library.custom_op("remat_tests::add_to", mutates_args={"x"})
def add_to(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return y * 2


def in_place_chain(x: Tensor) -> Tensor:
    h = x @ W
    h += x
    h = named(F.relu_(h)).clone()
    h[0] = h[1] * 2
    return h.sin() @ W


def residual_stream_in_place(x: Tensor) -> Tensor:
    h = x * 1
    for _ in range(3):
        h += named((h * 2) @ W)
    return h.sin()


def overwritten_after_it_was_saved(x: Tensor) -> Tensor:
    s = x.sin()
    t = s.index_select(1, torch.tensor([0, 2]))
    s.sigmoid_()  # saves its result, but no gradient flows through it
    s.scatter_(0, torch.tensor([[0, 1, 2, 3], [1, 0, 2, 2], [2, 2, 1, 0], [3, 0, 0, 1]]), x)
    return t.sin()


def constants(x: Tensor) -> Tensor:
    a, b = torch.tensor([2.0, 3, 4, 5]).double(), torch.tensor([5.0, 7, 1, 1]).double()
    return ((x * a).sin() * named(b * 1)).exp() * torch.arange(4.0).double()


def random_numbers(x: Tensor) -> Tensor:
    h = named(noise(x * 2).exp())
    mask = torch.bernoulli(torch.full((4, 4), 0.5, dtype=x.dtype))
    return (F.dropout(x * 3, 0.5) * h * mask + torch.rand(4, 4, dtype=x.dtype)).sin()


def partly_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ W).abs().amax()
        rows = [int(i) for i in (x @ W).argmax(1)]
    return (named(x @ W) / scale)[rows].tanh().exp()


def custom_operator(x: Tensor) -> Tensor:
    b = (x.detach() * 2).clone()
    y = add_to(b, x.detach().sin())
    return (named(x * b).exp().clamp(max=9) * y).sin()


def gradient_of_a_forward_derivative(x: Tensor) -> Tensor:
    """Forward mode makes zeros that have no memory."""
    z = x if x.requires_grad else x.detach().requires_grad_()
    tangent = jvp(lambda q: norm(q @ W).sin(), (z,), (torch.ones_like(z),))[1]
    return torch.autograd.grad(tangent.sum(), z, create_graph=True)[0]


REGION, LOOSE = remat(lambda z: step(torch.tanh(noisy(z)))), remat(lambda z: (z @ W).tanh() * noisy(z))
GRU = module(lambda: nn.GRU(N, N, 2, dropout=0.3))


def square(fn: Fn, name: str | None = None, dtype: torch.dtype = torch.float64, **flags: bool) -> Case:
    return Case(name or fn.__name__, fn, lambda: (rand(N, N, dtype=dtype),), **flags)


ALONE = {"func": False, "jvp": False, "vmap": False}
OF_COMPLEX: Any = {"dtype": torch.complex128, "jvp": False}
MORE = (
    square(lambda x: then(h := x @ W, v := h[:], torch._foreach_mul_([h], 2.0), v.sin()), "foreach in place", **ALONE),
    square(lambda z: then(h := z.exp(), named(h.conj()), (h * 2).sin().abs()), "conjugate named", **OF_COMPLEX),
    square(
        lambda z: then(h := z @ COMPLEX, g := h * 1, h.conj().mul_(2 + 1j), (g.sin() * h.sin()).abs()),
        "in place through a conjugate",
        **OF_COMPLEX,
    ),
    square(
        lambda x: then(h := x @ W, h.detach().view(torch.int64).bitwise_and_(-2), (named(h) * 1).sin()),
        "in place through another dtype",
    ),
    square(lambda x: then(s := torch.stack([x.sin(), x.cos()]), s.transpose_(0, 1), s.exp()), "transposed in place"),
    square(in_place_chain),
    square(residual_stream_in_place),
    square(overwritten_after_it_was_saved, vmap=False),
    square(constants),
    square(random_numbers, **ALONE, random=True),
    square(lambda x: F.rrelu(x * 2, 0.1, 0.3, training=True).sin(), "noise that is saved early", **ALONE, random=True),
    square(lambda x: named(noise(x)).sin() * noise(x).cos(), "an operator that draws, twice", **ALONE, random=True),
    square(partly_without_grad, vmap=False),
    square(custom_operator, vmap=False),
    square(lambda x: (x * 1).to_sparse().to_dense().mul(2).sin() @ W, "sparse", vmap=False, jvp=False, double=False),
    square(lambda x: checkpoint(lambda t: (t @ W).exp(), x.cos(), use_reentrant=False), "checkpointed inside", **ALONE),
    square(lambda x: (grad(lambda t: (t.sin() * t).sum())(named(x * 0.5)) * 2).sin(), "grad inside"),
    square(lambda x: (jvp(lambda t: (named(t.exp()) * t).sin(), (x * 0.5,), (x,))[1] * 2).sin(), "jvp inside"),
    square(lambda x: (norm(step(x)) @ W).sin(), "norm after a step"),
    square(gradient_of_a_forward_derivative, **ALONE),
    square(lambda x: REGION(noisy(REGION(x.cos()))).sin(), "a region that starts again", random=True, vmap=False),
    square(lambda x: (x.sin() - 0.1 * grad(lambda z: LOOSE(z).sum())(x)) @ W, "grad of a region", vmap=False),
    square(lambda x: GRU(x[None])[0].sin(), "GRU", **ALONE),
)

DERIVING = ("inside", "a step", "forward_derivative", "starts again", "of a region")
TABLE = (*CASES, *MORE)


OPTIONS = [{}, {"early_stop": False}, {"determinism_check": "values"}, {"determinism_check": "none"}, {"debug": True}]


def derived(fn: Fn, args: tuple) -> Any:
    """A gradient in a region, by a backward pass of its own, itself differentiable."""
    value = total(fn(*args))
    inputs = [t for t in leaves_of(args) if t.requires_grad and not t.is_leaf]
    return torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True) if inputs else value


def under_hooks(fn: Fn, args: tuple, pack: Callable, unpack: Callable) -> Any:
    with saved_tensors_hooks(pack, unpack):
        return fn(*args)


# Calls a region in another way; the wrapper makes regions around it.
AROUND: dict[str, Callable[[Fn, Wrap], Fn]] = {
    "called": lambda fn, wrap: fn,
    "in a region": lambda fn, wrap: wrap(lambda *args: fn(*args)),
    "in a region with a policy": lambda fn, wrap: wrap(lambda *args: fn(*args), policy=policies.save_if(chosen(11))),
    "before an operation": lambda fn, wrap: wrap(lambda *args: total(fn(*args)).sin(), policy=SINE),
    "under hooks": lambda fn, wrap: lambda *args: under_hooks(fn, args, lambda t: (t,), lambda packed: packed[0]),
    "under hooks that copy": lambda fn, wrap: lambda *args: under_hooks(fn, args, torch.clone, lambda t: t),
    "in torch's checkpoint": lambda fn, wrap: lambda *args: checkpoint(fn, *args, use_reentrant=False),
    "differentiated": lambda fn, wrap: wrap(lambda *args: derived(fn, args)),
}
SINE = policies.save_ops("aten.sin")


def observed(case: Case, around: Callable, wrap: Callable, orders: int = 1, **options: Any) -> tuple:
    """Results, gradients, what the case has changed, and the next random number."""
    with case.state():
        args, found = case.make_args(), []
        tree = around(wrap(case.fn, **options), wrap)(*args)
        out = [t.detach().clone() for t in leaves_of(tree)]
        for i in range(orders):
            value = total(tree)
            if not value.requires_grad:
                break
            tree = torch.autograd.grad(value, case.inputs(args), create_graph=i + 1 < orders, allow_unused=True)
            found.append(tree)
        return out, found, [t.detach().clone() for t in (*leaves_of(args), *case.captured)], torch.rand(1)


def ways(case: Case) -> list[str]:
    """What plain torch can do with a case. Its checkpoint changes statistics twice, and torch.func refuses hooks."""
    hooks = not any(part in case.name for part in DERIVING) and case.name != "noise that is saved early"
    excluded = {"hooks": not hooks, "torch's": case.stateful or not hooks, "differentiated": not case.double}
    return [name for name in AROUND if not any(no and word in name for word, no in excluded.items())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_autograd(case: Case, policy: str) -> None:
    number, possible = 2 * TABLE.index(case) + 3 * list(POLICIES).index(policy), ways(case)
    option, around = OPTIONS[number % len(OPTIONS)], AROUND[possible[number % len(possible)]]
    assert_same(observed(case, around, remat, policy=POLICIES[policy], **option), observed(case, around, plain))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [case for case in TABLE if case.double], ids=lambda case: case.name)
def test_higher_orders(case: Case, policy: str) -> None:
    expected = lambda orders: observed(case, AROUND["called"], plain, orders)
    orders = orders_of(expected)
    found = observed(case, AROUND["called"], remat, orders, policy=POLICIES[policy])
    assert_same(found, expected(orders), exact=False)  # a function that differentiates adds in another order


def first_mapped(transform: Callable[[tuple], Callable], args: tuple) -> Any:
    """A transform of functions in which only the first argument has a batch dimension."""
    return transform((0,) + (None,) * (len(args) - 1))(pair(args[0]), *args[1:])


TRANSFORMS: dict[str, Callable[[Fn, tuple, tuple], Any]] = {
    "vmap, grad": lambda f, args, n: vmap(grad(f, n), randomness="different")(*map(pair, args)),
    "vmap, grad, shared": lambda f, args, n: first_mapped(lambda dims: vmap(grad(f, n), dims, randomness="same"), args),
    "grad, vmap": lambda f, args, n: first_mapped(
        lambda dims: grad(lambda *a: vmap(f, dims, randomness="different")(*a).sum(), n), args
    ),
    "jvp, grad": lambda f, args, n: jvp(grad(f, n), args, tuple(t.cos() for t in args)),
    "grad, jvp": lambda f, args, n: grad(lambda *a: jvp(f, a, tuple(t.cos() for t in args))[1], n)(*args),
    "grad, grad": lambda f, args, n: grad(lambda *a: total(grad(f, n)(*a)), n)(*args),
    "vjp twice": lambda f, args, n: (lambda out, pull: (pull(out), pull(out * 2)))(*vjp(f, *args)),
}


def works(case: Case, transform: str) -> bool:
    """Whether plain torch, and a region without a policy, support it (a module's list of weights isn't replaced)."""
    vmapped, forward = case.vmap or "vmap" not in transform, case.jvp or "jvp" not in transform
    twice = transform in ("jvp, grad", "grad, grad")
    return vmapped and forward and (case.double or not twice) and not (case.name == "lstm" and "jvp" in transform)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", [case for case in TABLE if case.func], ids=lambda case: case.name)
def test_func(case: Case, policy: str) -> None:
    def run(wrap: Callable, transform: Callable) -> tuple:
        with case.state():
            call, primals = scalar(case, wrap(case.fn, policy=POLICIES[policy]))
            return transform(call, primals, tuple(range(len(primals)))), torch.rand(1)

    for name, transform in TRANSFORMS.items():
        if works(case, name):
            assert_same(run(remat, transform), run(plain, transform), exact=False)


IN_BACKWARD: dict[str, tuple[Fn, str, Tensor, dict[str, int]]] = {
    "an operation without a result runs again": (  # as `record_stream` may have to, for a tensor of the recompute
        lambda x: then(h := (x @ W).sin(), torch._assert_async((h < 2).all()), h.exp()),
        "mm", rand(N, N), {"_assert_async": 1, "sin": 1, "mm": 1},
    ),
    "a region that differentiates saves all results": (  # it is not known there which of them autograd has saved
        lambda x: F.layer_norm(step(x), (N,), WEIGHT).sin(),
        "native_layer_norm", rand(3, N), {"native_layer_norm": 0, "native_layer_norm_backward": 1},
    ),
    "a product with the values of a sparse matrix is saved": (  # `values` returns memory that another operation made
        lambda x: (x.to_sparse().coalesce().values().view(3, N) @ W).sin().exp(), "mm", rand(3, N), {"mm": 1},
    ),
    "a saved result of a write takes the place of what was skipped": (
        lambda x: ((x @ W).mul_(2).exp() * 2).sin(), "mul_", rand(N, N), {"mm": 1, "exp": 1},
    ),
    "complex products are saved": (
        lambda x: (x @ COMPLEX).sin() @ COMPLEX.conj(), "mm", rand(N, N, dtype=torch.complex128), {"mm": 2},
    ),
    "a product of which a product saves the conjugate is saved": (
        lambda x: (x @ COMPLEX).conj() @ x.sin(), "mm", rand(N, N, dtype=torch.complex128), {"mm": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_what_the_backward_pass_runs(name: str) -> None:
    fn, saved, x, counts = IN_BACKWARD[name]
    found = count_ops(torch.autograd.grad, remat(fn, policy=operators(saved))(x).abs().sum(), x)
    assert {name: found[f"aten.{name}"] for name in counts} == counts


REVERSE_OVER_FORWARD: dict[str, Fn] = {
    "a loss": lambda x, y: jvp(lambda x: F.mse_loss(x @ W, y), (x,), (y,))[1],
    "its gradient": lambda x, y: grad(lambda x: REVERSE_OVER_FORWARD["a loss"](x, y))(x),
    "over reverse": lambda x, y: vjp(lambda x: jvp(grad(lambda x: (x.sin() @ W - y).square().sum()), (x,), (y,))[1], x)[
        1
    ](y)[0],
}


@pytest.mark.parametrize("options", [{"policy": policies.save_matmuls}, {"debug": True}], ids=["policy", "debug"])
@pytest.mark.parametrize("name", REVERSE_OVER_FORWARD)
def test_reverse_over_forward_mode_in_a_region(name: str, options: dict) -> None:
    """Its backward pass gets zeros without memory, at which torch crashes if an operation on them is seen by a mode."""
    fn, x, y = REVERSE_OVER_FORWARD[name], rand(N, N), rand(N, N, seed=1, grad=False)
    found, expected = remat(fn, **options)(x, y), fn(x, y)
    assert_same(found, expected)
    if expected.requires_grad:
        assert_same(*(torch.autograd.grad(each.sum(), x) for each in (found, expected)))
        assert_same(*(jvp(grad(lambda x, g=g: g(x, y).sum()), (x,), (y,)) for g in (remat(fn, **options), fn)))


def test_a_value_that_an_inner_region_makes_in_inference_mode_is_saved() -> None:
    def inferred(x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = x.sin()
        return (x * scale.clone()).cos()

    nested, x = remat(lambda x: remat(inferred)(x * 1), policy=SINE), rand(N)
    assert_same(torch.autograd.grad(total(nested(x)), x), torch.autograd.grad(total(inferred(x)), x))
