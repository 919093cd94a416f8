"""A policy changes what is kept and what is run again, never a number: each test compares with the plain function.

Uninitialized memory is filled with NaN here, so that a value which was never computed shows.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # its import, which the first dispatch mode starts, would hold on to the frames that it runs in
import torch.nn.functional as F
from cases import Case, assert_same, cases, rand, scalar, tensor_leaves, total
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from remat import (
    checkpoint_name,
    policies,
    remat,
)

Fn = Callable[..., Any]
Wrap = Callable[[Fn], Fn]
aten = torch.ops.aten
N = 4
X, Y, W = rand(N, N, grad=False), rand(N, N, seed=5, grad=False), rand(N, N, seed=77, grad=False) / 2
Z = rand(N, N, seed=6, grad=False, dtype=torch.complex128)


@pytest.fixture(autouse=True, scope="module")
def filled_memory() -> Iterator[None]:
    """What `torch.empty` returns holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def chosen(seed: int, answers: int = 2) -> Callable[..., Any]:
    """A predicate that answers by the operator and the shapes of its tensors, the same each time."""
    five = [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
    five += [CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD]

    def predicate(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor) and not a.is_nested]
        number = zlib.crc32(f"{op}{shapes}{seed}".encode()) % answers
        return five[number] if answers == 5 else number == 0

    predicate.__qualname__ = f"chosen({seed}, {answers})"
    return predicate


ODD = "sin mul add_ copy_ clone bernoulli_ uniform_ native_dropout zeros_like empty_like empty lift_fresh detach t_"
ODD_OPS = policies.save_ops(*(f"aten.{name}" for name in ODD.split()))
NAMES = policies.save_only_these_names("h", "a*")
POLICIES = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "matmuls": policies.save_matmuls,
    "without batch dims": policies.save_matmuls_without_batch_dims,
    "attention, convolutions": policies.save_attention | policies.save_convolutions,
    "odd": ODD_OPS,
    "not odd": ~ODD_OPS,
    "names": NAMES,
    "all but names": policies.save_anything_except_these_names("h"),
    "not named matmuls": policies.save_matmuls & ~NAMES,
    "half": policies.save_if(chosen(3)),
    "some and names": policies.save_if(chosen(5, 3)) | NAMES,
    "answers": policies.save_if(chosen(4, 5)),
    "offloaded": policies.offload(policies.save_if(chosen(7))),
}
EVERY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
FEW = ["everything", "matmuls", "odd", "not odd", "names", "half", "answers", "offloaded"]
SOME = pytest.mark.parametrize("policy", [POLICIES[name] for name in FEW], ids=FEW)


def both(run: Callable[[Wrap], Any], policy: Any, exact: bool = True, **options: Any) -> None:
    """Compares `run(wrap)` with a region in each place that is wrapped and without."""
    torch.manual_seed(1)
    expected = run(lambda fn: fn), torch.rand(1)
    torch.manual_seed(1)
    assert_same((run(lambda fn: remat(fn, policy=policy, **options)), torch.rand(1)), expected, exact)


def gradients(fn: Fn, *args: Tensor, orders: int = 1) -> tuple:
    """The result and the gradients up to an order, of leaves with these values."""
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    tree, found = fn(*leaves), []
    result = [t.detach().clone() for t in tensor_leaves(tree)]
    for i in range(orders):
        value = total(tree)
        if not value.requires_grad:
            break
        tree = torch.autograd.grad(value, leaves, create_graph=i + 1 < orders, allow_unused=True)
        found.append(tree)
    return result, found


def summed(fn: Fn) -> Fn:
    return lambda *args: total(fn(*args))


# --- the table of functions -------------------------------------------------------------------------------------------

OPTIONS = [{}, {"early_stop": False}, {"determinism_check": "values"}, {"determinism_check": "none"}, {"debug": True}]


@EVERY
@cases()
def test_autograd(case: Case, policy: Any) -> None:
    def run(wrap: Wrap, orders: int) -> tuple:
        with case.state():
            args, found = case.make_args(), []
            tree = wrap(case.fn)(*args)
            out = [t.detach().clone() for t in tensor_leaves(tree)]
            for i in range(orders):
                value = total(tree)
                if not value.requires_grad:
                    break
                kwargs = {"create_graph": i + 1 < orders, "allow_unused": True}
                tree = torch.autograd.grad(value, case.inputs(args), **kwargs)
                found.append(tree)
            after = [t.detach().clone() for t in (*tensor_leaves(args), *case.captured)]
            return out, found, after, torch.rand(1)

    names = [c.name for c in cases().args[1]]
    option = OPTIONS[(names.index(case.name) + list(POLICIES.values()).index(policy)) % len(OPTIONS)]
    inner = remat(case.fn, policy=policies.save_if(chosen(11)))
    expected = run(lambda fn: fn, 1)
    assert_same(run(lambda fn: remat(fn, policy=policy, **option), 1), expected)
    assert_same(run(lambda fn: remat(lambda *args: inner(*args), policy=policy), 1), expected)
    if case.double:
        assert_same(run(lambda fn: remat(fn, policy=policy), 3), run(lambda fn: fn, 3))


Transformed = Callable[[Fn, tuple, tuple], Any]


def pairs(args: tuple) -> tuple:
    return tuple(torch.stack([t, t.cos()]) for t in args)


def shared(args: tuple) -> tuple[tuple, tuple]:
    """The first argument with a batch dimension, and where that is."""
    return (torch.stack([args[0], args[0].cos()]), *args[1:]), (0,) + (None,) * (len(args) - 1)


TRANSFORMS: dict[str, Transformed] = {
    "grad": lambda f, args, n: grad(f, n)(*args),
    "vmap, grad": lambda f, args, n: vmap(grad(f, n), randomness="different")(*pairs(args)),
    "vmap, grad, shared": lambda f, args, n: vmap(grad(f, n), shared(args)[1], randomness="same")(*shared(args)[0]),
    "grad, vmap": lambda f, args, n: grad(lambda *a: vmap(f, shared(args)[1], randomness="different")(*a).sum(), n)(
        *shared(args)[0]
    ),
    "jvp, grad": lambda f, args, n: jvp(grad(f, n), args, tuple(t.cos() for t in args)),
    "grad, jvp": lambda f, args, n: grad(lambda *a: jvp(f, a, tuple(t.cos() for t in args))[1], n)(*args),
    "grad, grad": lambda f, args, n: grad(lambda *a: total(grad(f, n)(*a)), n)(*args),
    "vjp twice": lambda f, args, n: (lambda out, pull: (pull(out), pull(out * 2)))(*vjp(f, *args)),
}


def works(case: Case, transform: str) -> bool:
    """Whether plain torch can do it."""
    vmapped, forward = case.vmap or "vmap" not in transform, case.jvp or "jvp" not in transform
    return vmapped and forward and (case.double or transform not in ("jvp, grad", "grad, grad"))


@SOME
@cases(func=True)
def test_func(case: Case, policy: Any) -> None:
    if case.name == "lstm" and policy is not None:
        pytest.skip("under jvp a region of nn.LSTM is an error, with a policy or without")
    for name, transform in TRANSFORMS.items():
        if works(case, name):

            def run(wrap: Wrap, transform: Transformed = transform) -> tuple:
                with case.state():
                    call, primals = scalar(case, wrap(case.fn))
                    return transform(call, primals, tuple(range(len(primals)))), torch.rand(1)

            assert_same(run(lambda fn: remat(fn, policy=policy)), run(lambda fn: fn), exact=False)


# --- random programs --------------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class Waves(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, to_sine: Tensor, to_cosine: Tensor) -> Tensor:
        sine, cosine = ctx.saved_tensors
        return to_sine * cosine - to_cosine * sine


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def named(t: Tensor, name: str = "h") -> Tensor:
    return checkpoint_name(t, name)


def named_around_a_change(a: Tensor, b: Tensor) -> Tensor:
    t = named(a @ W)
    u = t * 2
    t.mul_(0.5)
    return u + named(t, "after")


def read_then_written(a: Tensor, b: Tensor) -> Tensor:
    buffer = torch.zeros(N, N, dtype=a.dtype)
    y = buffer.cos() * a
    buffer.add_(b.detach())
    z = buffer.sin() * y
    return z * buffer.fill_(2)


def filled_in_parts(a: Tensor, b: Tensor) -> Tensor:
    t = torch.empty(N, N, dtype=a.dtype)
    for i in range(N):
        t[i] = (a if i % 2 else b)[i].sin()
    return t * 2


def complex_aliases(a: Tensor, b: Tensor) -> Tensor:
    z = torch.complex(a, b.tanh()) * (1 + 1j)
    named(z.conj().imag)
    w = z * 2
    w.conj().mul_(1 + 2j)
    w.real.add_(1)
    return (z.conj() * w.exp().conj()).imag.tanh() + named(w.conj()).abs().log1p()


def without_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        s = torch.sin(named(b * 2), out=torch.empty(N, N, dtype=b.dtype)) @ W
    return a * s


def foreach(a: Tensor, b: Tensor) -> Tensor:
    pair = [a * 1, b * 2]
    torch._foreach_add_(pair, 0.5)
    first, second = torch._foreach_mul(pair, 2.0)
    return first.sin() + second


def math_attention(a: Tensor, b: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None], is_causal=True)[0, 0]


def own_generator(a: Tensor, b: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return a * torch.rand(N, N, generator=generator) + b * torch.randn(N, N, generator=generator)


def in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (a.float() @ W.float()).double() * b


def offloaded_by_hooks(a: Tensor, b: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (a.sin() * b).exp().clamp(max=4)


def differentiated(a: Tensor, b: Tensor) -> Tensor:
    inside = a * 1
    if not inside.requires_grad:
        return inside.cos() * b
    return torch.autograd.grad((inside.sin() * inside).sum(), inside, create_graph=True)[0] * 0.5


def resized_views(a: Tensor, b: Tensor) -> Tensor:
    t = a * 1
    t.unsqueeze_(0)
    t.squeeze_(0)
    return t.t_() @ b


def written(t: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(t)
    return t


def rows(a: Tensor, b: Tensor) -> Tensor:
    return torch.multinomial(b.detach().softmax(-1)[0], N, True)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda a, b: a.sin(),
    "exp": lambda a, b: named((a * 0.3).exp()),
    "relu": lambda a, b: a.relu() + b,
    "mul": lambda a, b: named(a * b, "a product"),
    "mm": lambda a, b: named(a @ b * 0.3),
    "linear": lambda a, b: F.linear(a, W, b[0]).tanh(),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b).tanh(),
    "constant": lambda a, b: a * torch.tensor([1.0, 2, -0.5, 0.25]).double() + torch.arange(4.0) * b,
    "named view": lambda a, b: (lambda t: named(t[0]) * t)(a * 1.5),
    "named around a change": named_around_a_change,
    "detached": lambda a, b: a * named(b.detach().exp().clamp(max=3)),
    "in place": lambda a, b: written(a * 1, lambda t: t.add_(b).mul_(0.5)),
    "parts in place": lambda a, b: written(a.clone(), lambda t: (t[0].copy_(t[1] * 2), t[:, 1].mul_(3))),
    "residual": lambda a, b: written(a * 1, lambda t: t.add_(torch.tanh(t @ W)).add_(torch.tanh(t @ W))),
    "data": lambda a, b: written(a * 1, lambda t: t.detach().add_(0.5)) * b,
    "read, then written": read_then_written,
    "filled in parts": filled_in_parts,
    "foreach": foreach,
    "sort": lambda a, b: (lambda v, i: v + i * 0.1)(*a.sort(1)),
    "topk": lambda a, b: (lambda v, i: torch.cat([v, v.exp()], 1).tanh() * b)(*a.topk(2)),
    "max": lambda a, b: (lambda v, i: v[:, None] * b + i)(*a.max(1)),
    "split": lambda a, b: torch.cat([t.sin() for t in reversed(a.split(2))]) * b,
    "unbind": lambda a, b: torch.stack([t.sin() for t in a.unbind(1)][::-1], 1),
    "layer_norm": lambda a, b: F.layer_norm(a, (N,), b[0], b[1]),
    "batch_norm": lambda a, b: F.batch_norm(a, None, None, b[0], None, training=True),
    "qr": lambda a, b: (lambda q, r: q * b @ r)(*torch.linalg.qr(a @ a.mT + 3 * torch.eye(N))),
    "casts": lambda a, b: a.float().sin().double() * b.to(torch.bfloat16).double(),
    "fft": lambda a, b: torch.fft.fft(a).abs().log1p() * b,
    "expand": lambda a, b: a[0].expand(N, N).sin() * b,
    "as_strided": lambda a, b: torch.as_strided(a.contiguous() * 2, (N, N), (1, N)).sin(),
    "gather": lambda a, b: a.gather(1, b.detach().argsort(1)).exp().clamp(max=5),
    "where": lambda a, b: torch.where(a > 0, a, b.sin()),
    "masked": lambda a, b: written(a * 1, lambda t: t.masked_fill_(b > 0.5, 0.1)) * b,
    "softmax": lambda a, b: a.softmax(-1) @ W,
    "loss": lambda a, b: F.cross_entropy(a, torch.arange(N)) * b,
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])[0, 0],
    "math attention": math_attention,
    "convolution": lambda a, b: F.relu(F.conv2d(a[None, None], W[None, None, :3, :3], padding=1), inplace=True)[0, 0],
    "embedding": lambda a, b: F.embedding(torch.tensor([1, 1, 0, 3]), a) * b,
    "dropout": lambda a, b: F.dropout(a, 0.4),
    "dropout in place": lambda a, b: F.dropout(named(b * 1), 0.4, inplace=True),
    "noise": lambda a, b: a * torch.rand(N, N) + torch.randn_like(b) * 0.1,
    "bernoulli": lambda a, b: a * named(torch.bernoulli(torch.full((N, N), 0.5, dtype=a.dtype))),
    "uniform": lambda a, b: a * torch.empty(N, N, dtype=a.dtype).uniform_(),
    "poisson": lambda a, b: a * torch.poisson(b.detach().abs().clamp(max=3)),
    "own generator": own_generator,
    "waves": lambda a, b: (lambda s, c: s * c * b)(*Waves.apply(a)),
    "no elements": lambda a, b: torch.cat([a, b[:0].sin()]) * a.mean().sin(),
    "variance": lambda a, b: a * b.var(0) / (a.norm() + 1),
}
# What torch.func refuses, or does in another order.
AUTOGRAD_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": lambda a, b: a * float(b.detach().tanh()[0, 0]),
    "branch": lambda a, b: a.sin() if b.sum() > 0 else a.cos(),
    "numpy": lambda a, b: a * torch.from_numpy(np.clip(b.detach().numpy(), -1, 1)),
    "tolist": lambda a, b: a * torch.tensor(b.detach().tanh()[0].tolist(), dtype=a.dtype),
    "without grad": without_grad,
    "complex aliases": complex_aliases,
    "square": lambda a, b: Square.apply(named(a * 0.5)) * b,
    "doubled": lambda a, b: Doubled.apply(a * 1).sin(),
    "sparse": lambda a, b: torch.sparse.mm(a.detach().relu().to_sparse(), b) + (a * 1).to_sparse().to_dense(),
    "multinomial": lambda a, b: a[rows(a, b)] * b,
    "resized views": resized_views,
    "checkpoint": lambda a, b: checkpoint(lambda t: F.dropout(t.sin() @ W, 0.3).exp(), a, use_reentrant=False) * 0.3,
    "hooks": offloaded_by_hooks,
    "autocast": in_bfloat16,
    "gradient": differentiated,
}

RANDOM_POLICIES = st.one_of(
    st.sampled_from([policies.everything_saveable, policies.save_matmuls, ~policies.save_matmuls, NAMES, ~NAMES]),
    st.builds(lambda s: policies.save_if(chosen(s)), st.integers(0, 999)),
    st.builds(lambda s: policies.save_if(chosen(s, 5)), st.integers(0, 999)),
    st.builds(lambda s: policies.save_if(chosen(s, 3)) | NAMES, st.integers(0, 999)),
    st.builds(lambda s: policies.offload(policies.save_if(chosen(s))), st.integers(0, 999)),
)
NESTINGS = st.sampled_from([None, None, lambda t: t, lambda t: t.sin() * 1.5])


def programs(steps: dict) -> Any:
    step = st.tuples(st.sampled_from(sorted(steps)), st.integers(0, 9), st.integers(0, 9))
    return st.lists(step, min_size=2, max_size=6)


def build(program: list, last: int, wrap: Wrap, inner: Wrap, rest: Fn | None) -> Fn:
    """A function of two matrices, in a region, perhaps as a region in another one with something after it."""

    def fn(*args: Tensor) -> Any:
        pool = list(args)
        for name, i, j in program:
            step = STEPS.get(name) or AUTOGRAD_STEPS[name]
            pool.append(step(pool[-1 - i % len(pool)], pool[j % len(pool)]))
        made = pool[len(args) :]
        return [pool[-1], (pool[-1], made[len(made) // 2]), {"sum": sum(made)}][last]

    if rest is None:
        return wrap(fn)
    nested = inner(fn)
    return wrap(lambda *args: torch.utils._pytree.tree_map(rest, nested(*args)))


MANY = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@MANY
@given(
    program=programs(STEPS | AUTOGRAD_STEPS),
    last=st.integers(0, 2),
    policy=RANDOM_POLICIES,
    inner=RANDOM_POLICIES,
    rest=NESTINGS,
    how=st.sampled_from(["once", "once", "twice", "again", "in parts"]),
    option=st.sampled_from([{}, {}, *OPTIONS[:4]]),
)
def test_random_programs(program: list, last: int, policy: Any, inner: Any, rest: Any, how: str, option: dict) -> None:
    def run(wrap: Wrap, within: Wrap) -> Any:
        torch.manual_seed(1)
        leaves = [t.clone().requires_grad_() for t in (X, Y)]
        out = tensor_leaves(build(program, last, wrap, within, rest)(*leaves))
        results = [t.detach().clone() for t in out]
        heads = [t for t in out if t.requires_grad]
        get = functools.partial(torch.autograd.grad, inputs=leaves, allow_unused=True)
        if not heads:
            return results
        if how == "once":
            return results, get(total(heads)), torch.rand(1)
        if how == "twice":
            value = total(heads)
            return results, get(value, retain_graph=True), get(value)
        if how == "in parts":
            return results, [get(t.sin().sum(), retain_graph=t is not heads[-1]) for t in heads]
        first = [g for g in get(total(heads), create_graph=True) if g is not None]
        value = total(first)
        return results, [g.detach() for g in first], get(value) if value.requires_grad else None

    plain = run(lambda fn: fn, lambda fn: fn)
    region = run(lambda fn: remat(fn, policy=policy, **option), lambda fn: remat(fn, policy=inner))
    assert_same(region, plain, exact=False)


@MANY
@given(
    program=programs(STEPS),
    last=st.integers(0, 2),
    policy=RANDOM_POLICIES,
    inner=RANDOM_POLICIES,
    rest=NESTINGS,
    transform=st.sampled_from(sorted(TRANSFORMS)),
    option=st.sampled_from([{}, {}, {"early_stop": False}, {"determinism_check": "none"}]),
)
def test_random_programs_under_func(
    program: list, last: int, policy: Any, inner: Any, rest: Any, transform: str, option: dict
) -> None:
    def run(wrap: Wrap, within: Wrap) -> Any:
        torch.manual_seed(1)
        fn = summed(build(program, last, wrap, within, rest))
        return TRANSFORMS[transform](fn, (X, Y), (0, 1)), torch.rand(1)

    try:
        plain = run(lambda fn: fn, lambda fn: fn)
    except RuntimeError:  # batching rules that torch doesn't have
        return
    region = run(lambda fn: remat(fn, policy=policy, **option), lambda fn: remat(fn, policy=inner))
    assert_same(region, plain, exact=False)
