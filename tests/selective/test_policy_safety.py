"""A policy changes what is saved and what is recomputed, never a result: each test compares with the plain function.

Uninitialized memory is filled with NaN here, so that a value which was never computed is noticed.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # its import, which the first dispatch mode starts, would keep the frames in which it runs alive
import torch.nn.functional as F
from cases import (
    CASES,
    Case,
    assert_same,
    cases,
    default_dtype,
    module,
    orders_of,
    rand,
    scalar,
    total,
)  # fmt: skip
from cases import tensor_leaves as leaves_of
from random_programs.toolbox import chosen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, hessian, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import leaked_bytes, peak_bytes
from remat import MutationError, RecomputeMismatchError, checkpoint_name, disable_remat, is_recomputing, policies, remat
from remat._policy.policy import as_policy

Fn = Callable[..., Any]
Wrap = Callable[[Fn], Fn]
N = 4
X, Y, W = rand(N, N, grad=False), rand(N, N, seed=5, grad=False), rand(N, N, seed=77, grad=False) / 2


@pytest.fixture(autouse=True, scope="module")
def filled_memory() -> Iterator[None]:
    """Fill the memory that `torch.empty` returns with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    gc.collect()
    gc.freeze()  # the collector needn't visit existing objects in each measurement
    yield
    gc.unfreeze()
    torch.use_deterministic_algorithms(False)


ODD = "sin mul add_ copy_ clone bernoulli_ uniform_ native_dropout zeros_like empty_like empty lift_fresh _conj t_"
ODD_OPS = as_policy([f"aten.{name}" for name in ODD.split()])  # including operations that return views
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


def plain(fn: Fn) -> Fn:
    return fn


def both(run: Callable[[Wrap], Any], policy: Any, exact: bool = True) -> None:
    """Compare `run(wrap)` where `wrap` makes regions with `run(wrap)` where it does nothing."""
    torch.manual_seed(1)
    expected = run(plain), torch.rand(1)
    torch.manual_seed(1)
    assert_same((run(lambda fn: remat(fn, policy=policy)), torch.rand(1)), expected, exact)


def gradients(fn: Fn, x: Tensor = X) -> tuple:
    """The results and the gradient."""
    leaf = x.detach().clone().requires_grad_()
    tree = fn(leaf)
    out = [t.detach().clone() for t in leaves_of(tree)]
    return out, torch.autograd.grad(total(tree), leaf)


def summed(fn: Fn) -> Fn:
    return lambda *args: total(fn(*args))


def written(t: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """The tensor, after a change in place."""
    change(t)
    return t


def named(t: Tensor, name: str = "h") -> Tensor:
    return checkpoint_name(t, name)


# --- the table of functions -------------------------------------------------------------------------------------------

OPTIONS = [{}, {"early_stop": False}, {"determinism_check": "values"}, {"determinism_check": "none"}, {"debug": True}]


@pytest.mark.sampled(3)
@EVERY
@cases()
def test_autograd(case: Case, policy: Any) -> None:
    def run(wrap: Wrap, orders: int = 1) -> tuple:
        with case.state():
            args, found = case.make_args(), []
            tree = wrap(case.fn)(*args)
            out = [t.detach().clone() for t in leaves_of(tree)]
            for i in range(orders):
                value = total(tree)
                if not value.requires_grad:
                    break
                kept = i + 1 < orders
                tree = torch.autograd.grad(value, case.inputs(args), create_graph=kept, allow_unused=True)
                found.append(tree)
            return out, found, [t.detach().clone() for t in (*leaves_of(args), *case.captured)], torch.rand(1)

    option = OPTIONS[(CASES.index(case) + list(POLICIES.values()).index(policy)) % len(OPTIONS)]
    inner = remat(case.fn, policy=policies.save_if(chosen(11)))
    assert_same(run(lambda fn: remat(fn, policy=policy, **option)), run(plain))
    assert_same(run(lambda fn: remat(lambda *args: inner(*args), policy=policy)), run(plain))
    if case.double:
        orders = orders_of(lambda orders: run(plain, orders))
        assert_same(run(lambda fn: remat(fn, policy=policy), orders), run(plain, orders))


def pairs(args: tuple) -> tuple:
    return tuple(torch.stack([t, t.cos()]) for t in args)


def first_mapped(transform: Callable[[tuple], Callable], args: tuple) -> Any:
    """A transform of functions in which only the first argument has a batch dimension."""
    dims = (0,) + (None,) * (len(args) - 1)
    return transform(dims)(torch.stack([args[0], args[0].cos()]), *args[1:])


TRANSFORMS: dict[str, Callable[[Fn, tuple, tuple], Any]] = {
    "grad": lambda f, args, n: grad(f, n)(*args),
    "vmap, grad": lambda f, args, n: vmap(grad(f, n), randomness="different")(*pairs(args)),
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


@pytest.mark.sampled(4)
@SOME
@cases(func=True)
def test_func(case: Case, policy: Any) -> None:
    for name, transform in TRANSFORMS.items():
        if works(case, name):

            def run(wrap: Wrap, transform: Callable = transform) -> tuple:
                with case.state():
                    call, primals = scalar(case, wrap(case.fn))
                    return transform(call, primals, tuple(range(len(primals)))), torch.rand(1)

            assert_same(run(lambda fn: remat(fn, policy=policy)), run(plain), exact=False)


# --- tensors that are read or stored without a visible operation ------------------------------------------------------


def at(address: int) -> float:
    return ctypes.c_double.from_address(address).value


READERS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda s: torch.from_numpy(s.numpy().copy()),
    "numpy of a view": lambda s: torch.from_numpy(s.view(2, 8).t().numpy().copy()).reshape(N, N),
    "numpy, forced": lambda s: torch.from_numpy(s.data.numpy(force=True).copy()),
    "a NumPy function": lambda s: float(np.sum(np.asarray(s.unbind()[1]))),
    "tolist": lambda s: torch.tensor(s.tolist(), dtype=s.dtype),
    "numbers": lambda s: torch.tensor(list(s[0]), dtype=s.dtype),
    "float": lambda s: float(s[0, 0]) + len(range(int(s[0, 0]) + 3)),
    "branch": lambda s: 1.0 if s[0, 0] > 0.1 and s[0, 0] in s else 2.0,
    "slice": lambda s: X[s[0, 0].long() % 2 :].sum(),
    "from_dlpack": lambda s: torch.from_dlpack(s).clone(),
    "to_dlpack": lambda s: torch.from_dlpack(torch.utils.dlpack.to_dlpack(s)).clone(),
    "data_ptr": lambda s: at(s.data_ptr()) + at(s[1].data_ptr()),
    "storage": lambda s: at(s.untyped_storage().data_ptr()),
    "bytes": lambda s: s.untyped_storage().tolist()[3] / 10,
    "split at": lambda s: torch.tensor_split(s, (s[0, :2].round().long() % N).sort().values)[1].sum(),
    "text": lambda s: float(str(s[0, 0].clone()).partition("(")[2].partition(",")[0]) + len(f"{s}"),
    "copy": lambda s: copy.deepcopy(s),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "parameter": lambda s: nn.Parameter(s).detach().clone(),
    "set_": lambda s: torch.from_numpy(torch.empty(0, dtype=s.dtype).set_(s).numpy().copy()),
}


def in_a_thread(fn: Fn) -> Fn:
    """In a thread that works off a queue, and must not be stopped: the caller waits for its result."""

    def run(s: Tensor) -> Any:
        answers: queue.Queue = queue.Queue()
        threading.Thread(target=lambda: answers.put(fn(s)), daemon=True).start()
        return answers.get(timeout=60)

    return run


# Readers of a differentiated value that the dispatcher does not see.
OUT_OF_SIGHT: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor of numbers": lambda s: torch.tensor([s.sum(), s[0, 1]], dtype=s.dtype).sum(),
    "torch.tensor of rows": lambda s: torch.tensor([list(row) for row in s], dtype=s.dtype).sum(),
    "torch.as_tensor": lambda s: torch.as_tensor([s.sum(), s[0, 1]]).sum(),
    "new_tensor": lambda s: s.new_tensor([s.sum(), s[0, 1]]).sum(),
    "operations in a thread": in_a_thread(lambda s: (s * 2).sum().detach()),
    "a view in a thread": lambda s: in_a_thread(lambda t: t.sum().detach())(s.view(2, 8)[1]),
    "a number in a thread": in_a_thread(lambda s: s.sum().item()),
    "numpy in a thread": in_a_thread(lambda s: float(np.sum(s.detach().numpy()))),
}
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda x: (x.detach() * 3).abs(),
    "detached view": lambda x: (x * 3).abs().view(N, N).detach(),
    "data": lambda x: (x * 3).abs().data,
    "without grad": torch.no_grad()(lambda x: (x * 3).abs().view(2, 8).view(N, N)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("reader", READERS)
def test_unseen_reads(reader: str, source: str) -> None:
    """A recompute skips values that no visible operation needs, but not if they are read in other ways."""

    def fn(x: Tensor) -> Tensor:
        h = named(x.sin())
        return ((h * 2).exp() * READERS[reader](SOURCES[source](x))).sin()

    both(lambda wrap: gradients(wrap(fn)), NAMES)


@pytest.mark.parametrize("reader", OUT_OF_SIGHT)
def test_unseen_reads_of_a_differentiated_value(reader: str) -> None:
    """If nothing else needs the value, it is skipped until it is read."""

    def fn(x: Tensor) -> Tensor:
        h = named(x.sin())
        return ((h * 2).exp() * OUT_OF_SIGHT[reader]((x * 3).abs())).sin()

    both(lambda wrap: gradients(wrap(fn)), NAMES)


def test_the_dtype_of_a_skipped_value_can_be_read() -> None:
    runs = []

    def fn(x: Tensor) -> Tensor:
        runs.append(1)
        h, placeholders = named(x.sin()), (x * 3).abs()
        return ((h * 2).exp() * placeholders.new_tensor([1.0, 2, 3, 4])).sin()

    gradients(remat(fn, policy=NAMES))
    assert len(runs) == 2


@functools.lru_cache(maxsize=1)
def table(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) * 2).cos()


@EVERY
def test_a_cache_that_a_recompute_fills_contains_real_values(policy: Any) -> None:
    def run(wrap: Wrap) -> tuple:
        table.cache_clear()
        fn = wrap(lambda x: (named(x.sin() * table(len(x))[:, None]) * 2).exp())
        return gradients(lambda x: fn(x).sum() + fn(x[:3]).sum()), fn(X), fn(X[:3])

    both(run, policy)


# --- surrounding contexts ---------------------------------------------------------------------------------------------


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


AROUND: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a mode in the forward": (Passing, nullcontext),
    "a mode in the backward": (nullcontext, Passing),
    "hooks": (lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone), nullcontext),
    "save_on_cpu": (torch.autograd.graph.save_on_cpu, nullcontext),
    "dtype in the forward": (lambda: default_dtype(torch.float64), nullcontext),
    "dtype in the backward": (nullcontext, lambda: default_dtype(torch.float64)),
    "device in the backward": (nullcontext, lambda: torch.device("meta")),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad),
}


@SOME
@pytest.mark.parametrize("name", AROUND)
def test_contexts(name: str, policy: Any) -> None:
    linear = module(lambda: nn.Linear(N, N)).float()

    def fn(x: Tensor) -> Tensor:
        h = named(linear(x).float().exp().clamp(max=5))
        return F.dropout((h * 2).sin() @ W.float(), 0.5) * h * torch.rand(N, N).float() * linear(x)

    def run(wrap: Wrap) -> tuple:
        x = X.float().requires_grad_()
        with AROUND[name][0]():
            out = wrap(fn)(x)
            value = out.float().sum()
        with AROUND[name][1]():
            return out.detach(), torch.autograd.grad(value, [x, *linear.parameters()])

    both(run, policy)


# --- typical user code ------------------------------------------------------------------------------------------------


class Exponential(torch.autograd.Function):
    """Goes through NumPy, names a value, saves inputs, outputs and attributes of the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        y = named(torch.from_numpy(np.exp(scale * x.detach().numpy())) * 1)
        ctx.save_for_backward(x, y)
        ctx.scale, ctx.kept = scale, [x.detach() * 2]
        return y, x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple:
        x, y = ctx.saved_tensors
        return g * y * ctx.scale + h * ctx.kept[0] / x, None


@torch.library.custom_op("remat_tests::add_to", mutates_args={"x"})
def add_to(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return y * 2


def custom_operator(x: Tensor) -> Tensor:
    b = (x.detach() * 2).clone()
    y = add_to(b, x.detach().sin())
    return (named(x * b).exp().clamp(max=9) * y).sin()


def views_returned(x: Tensor) -> tuple[Tensor, ...]:
    h = (x * 2).exp()
    return h.t(), h[0], h, h, written(x @ W, lambda t: t.add_(1))


WRITTEN: dict[str, Fn] = {
    "Function": lambda x: (lambda a, b: (a * b).sin() * a)(*Exponential.apply((x * 0.5).sin(), 1.5)),
    "custom operator": custom_operator,
    "func.grad": lambda x: (grad(lambda t: (t.sin() * t).sum())(named(x * 0.5)) * 2).sin(),
    "func.vmap": lambda x: (vmap(lambda t: (named(t.exp()) * t.sum()).sin())(x * 0.5) * 2).exp(),
    "func.jvp": lambda x: (jvp(lambda t: (named(t.exp()) * t).sin(), (x * 0.5,), (x,))[1] * 2).sin(),
    "func.hessian": lambda x: (hessian(lambda t: (t.exp() * t).sum())(x[0] * 0.5) * 2).sin(),
    "views": views_returned,
    "data-dependent shapes": lambda x: (x[x.detach() > 0] * 2).exp().sin() * x.detach().round().unique().sum(),
}


@EVERY
@pytest.mark.parametrize("name", WRITTEN)
def test_user_code(name: str, policy: Any) -> None:
    both(lambda wrap: gradients(wrap(WRITTEN[name])), policy)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Fn]] = {
    "MHA": (lambda: nn.MultiheadAttention(N, 2, dropout=0.1, batch_first=True), lambda x: (x[None],) * 3),
    "GRU": (lambda: nn.GRU(N, N, 2, dropout=0.3), lambda x: (x[None],)),
    "LSTM": (lambda: nn.LSTM(N, N, 2, dropout=0.3), lambda x: (x[None],)),
    "transformer": (lambda: nn.TransformerEncoderLayer(N, 2, 8, 0.2, batch_first=True), lambda x: (x[None],)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(N), nn.ReLU(inplace=True), nn.Dropout(0.3)), lambda x: (x,)),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm1d(N, track_running_stats=True)), lambda x: (x[None],)),
    "rrelu": (lambda: nn.Sequential(nn.Linear(N, N), nn.RReLU()), lambda x: (x,)),
}


@SOME
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, policy: Any) -> None:
    make, arguments = LAYERS[name]

    def run(wrap: Wrap) -> tuple:
        inside = module(make)
        x, layer = X.clone().requires_grad_(), wrap(inside)
        grads = [torch.autograd.grad(total(layer(*arguments(x))), [x, *inside.parameters()]) for _ in range(2)]
        return grads, [b.clone() for b in inside.buffers()]

    both(run, policy)


# --- functions that do the same in another way in the recompute -------------------------------------------------------


def other_order(x: Tensor) -> Tensor:
    if is_recomputing():
        b, a = x.exp(), x.sin()
    else:
        a, b = x.sin(), x.exp()
    return (a * b).cos() * a


def buffers_swapped(x: Tensor) -> Tensor:
    a, b = x.detach() * 2, x.detach() * 2
    if is_recomputing():
        a, b = b, a
    a.add_(1)
    return (x * a).sin() * (x * b).exp().clamp(max=9)


def operand_of_a_late_one_cleared(x: Tensor) -> Tensor:
    a = x.detach() * 2
    late = a.sin()
    if is_recomputing():
        a.zero_()
    return (named((x * 3).exp().clamp(max=9)) * 2).sin() * late * late


CACHE: dict[str, Any] = {}


def cached_constant(x: Tensor) -> Tensor:
    if "a" not in CACHE:
        CACHE["a"] = torch.tensor([2.0, 3, 4, 5], dtype=x.dtype)
    b = torch.tensor([5.0, 7, 1, 1], dtype=x.dtype)
    return ((x * CACHE["a"]).sin() * b).exp()


def cached_for_a_key(x: Tensor) -> Tensor:
    """With calls for other keys in between, the cache has another entry by the time of the recompute."""
    key = x.shape[0]
    if CACHE.get("key") != key:
        CACHE["key"], CACHE["v"] = key, torch.arange(4.0) * key
    return (x.sin() * CACHE["v"]).exp()


OTHERWISE = [other_order, buffers_swapped, operand_of_a_late_one_cleared, cached_constant, cached_for_a_key]


@pytest.mark.parametrize("policy", [*POLICIES.values(), ["aten.mul"], ["aten.cos"], ["aten.exp"]], ids=repr)
@pytest.mark.parametrize("fn", OTHERWISE, ids=lambda fn: fn.__name__)
def test_correct_or_an_error(fn: Fn, policy: Any) -> None:
    def run(wrap: Wrap) -> tuple:
        CACHE.clear()
        region = wrap(fn)
        return gradients(lambda x: region(x).sum() + region(x[:3]).sum())

    try:
        found = run(lambda fn: remat(fn, policy=policy))
    except (RecomputeMismatchError, MutationError):
        return
    assert_same(found, run(plain), exact=False)


# --- changes, errors, threads -----------------------------------------------------------------------------------------


def block(x: Tensor) -> Tensor:
    h = named((x @ W).exp().clamp(max=5))
    return (h * 2).sin() @ x * h


@EVERY
def test_results_may_be_changed_in_place(policy: Any) -> None:
    """The saved value is not the returned one, unless plain autograd needs that too."""

    def run(wrap: Wrap) -> tuple:
        region = wrap(lambda x: torch.tanh(x @ W) @ W)

        def stream(h: Tensor) -> Tensor:
            for _ in range(3):
                h = written(region(h), lambda out, h=h: out.add_(h))
            return h

        return gradients(stream)

    both(run, policy)


X3 = torch.stack([X, Y])  # the result of a product with W has a version counter of its own


def gradients_under(hooks: Any, f: Fn, x: Tensor) -> tuple:
    with hooks:
        return gradients(f, x)


WAYS: dict[str, Callable[[Fn, Tensor], Any]] = {
    "autograd": gradients,
    "hooks": functools.partial(gradients_under, saved_tensors_hooks(lambda t: (t,), lambda packed: packed[0])),
    "hooks that copy": functools.partial(gradients_under, saved_tensors_hooks(torch.clone, lambda t: t)),
    "grad": lambda f, x: grad(f)(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(f)(x).sin().sum())(x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (x.cos(),)),
    "vmap of grad": lambda f, x: vmap(grad(f))(x),
    "vmap of jvp of grad": lambda f, x: vmap(lambda x: jvp(grad(f), (x,), (x.cos(),)))(x),
}


@SOME
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("x", [X, X3], ids=["2d", "3d"])
def test_a_saved_value_that_is_changed_later_is_recomputed(x: Tensor, way: str, policy: Any) -> None:

    def run(wrap: Wrap) -> Any:
        region = wrap(lambda x: (y := x.sin() @ W, y.relu() * 2 + y))

        def f(x: Tensor) -> Tensor:
            y, z = region(x)
            return (y.neg_() * z * z).sum()

        return WAYS[way](f, x)

    both(run, policy, exact=False)


class Interrupt(BaseException):
    """An exception that user code doesn't catch."""


def surroundings() -> tuple:
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    return modes, torch._C._autograd._top_saved_tensors_default_hooks(True), torch.is_grad_enabled()


@EVERY
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_exceptions(when: str, policy: Any) -> None:
    """An exception that user code doesn't catch propagates and leaves no trace, and the next backward is right."""
    failing, before = [True], surroundings()  # a list, as variables are restored for a recompute

    def fn(x: Tensor) -> Tensor:
        h = block(x)
        if failing[0] and is_recomputing() == (when == "backward"):
            raise Interrupt
        return F.dropout(h * 2, 0.3).sin() * h.exp().clamp(max=2)

    region, x = remat(fn, policy=policy), X.clone().requires_grad_()
    for run in (lambda: gradients(region), lambda: grad(summed(region))(X)):
        with pytest.raises(Interrupt) if when == "forward" else suppress(Interrupt):
            run()
        assert surroundings() == before
    failing[0] = when == "backward"
    torch.manual_seed(1)
    value = total(region(x))
    with suppress(Interrupt):  # the saved values may suffice without a recompute
        torch.autograd.grad(value, x, retain_graph=True)
    failing[0] = False
    torch.manual_seed(1)
    assert_same(torch.autograd.grad(value, x), gradients(fn)[1])


@EVERY
def test_threads(policy: Any) -> None:
    """Regions in several threads at once, and one graph with backward passes in several threads."""
    region, found, x = remat(block, policy=policy), [], X.clone().requires_grad_()
    value = total(region(x))

    def work() -> None:
        for _ in range(5):
            found.append([*gradients(region)[1], grad(summed(region))(X)])
            found.append(torch.autograd.grad(value, x, retain_graph=True) * 2)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([list(pair) for pair in found], [list(gradients(block)[1]) * 2] * 30)


@EVERY
def test_memory(policy: Any) -> None:
    """Everything is freed without the garbage collector, and neither pass needs more than without remat."""

    x = torch.ones(64, 64, dtype=torch.float64) / 64

    def plain_block(x: Tensor, y: Tensor) -> Tensor:
        h = named((x @ y).exp())
        return (h * 2).sin() @ y * h

    def forward(fn: Fn) -> Tensor:
        y = x.clone().requires_grad_()
        return fn(fn(fn(y, y), y), y).sum()

    region = remat(plain_block, policy=policy)
    for run in (forward, lambda fn: forward(fn).backward(), lambda fn: grad(lambda y: fn(y, y).sum())(x)):
        run(region)
        assert leaked_bytes(lambda: run(region) is None) == 0
        inputs = 2 * x.nbytes if policy is POLICIES["everything"] else 0
        assert peak_bytes(run, region) <= peak_bytes(run, plain_block) + inputs + 4096


def test_disable_remat() -> None:
    """No policy is called."""

    def predicate(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        raise AssertionError("asked")

    with disable_remat():
        both(lambda wrap: gradients(wrap(block)), predicate)
    with pytest.raises(AssertionError, match="asked"):
        gradients(remat(block, policy=predicate))
