"""`context_fn` of `remat.compat.checkpoint` compared with torch's: selective contexts and other pairs."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from cases import assert_same, rand
from side_by_side import Runs, both, is_torch, values_and_grads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.measure import count_ops, held_bytes
from remat import MutationError, PolicyError, RematError, policies
from remat.compat import checkpoint

aten = torch.ops.aten
MM = aten.mm.default
NEWER = torch.__version__ >= (2, 13)


def layers(x: Tensor, w: Tensor) -> Tensor:
    """Two products and a sine; the backward needs the result of the first product only."""
    return (x @ w).sin() @ w


def deep(x: Tensor, w: Tensor) -> Tensor:
    return layers(x, w).sin()


def arguments() -> tuple[Tensor, Tensor]:
    return rand(4, 4), rand(4, 4, seed=1)


def selective(policy: Any, **options: Any) -> Callable:
    return functools.partial(create_selective_checkpoint_contexts, policy, **options)


def by(answer: Any) -> Callable:
    """A policy function that returns this for matrix products."""
    return lambda ctx, op, *args, **kwargs: answer if op == MM else CheckpointPolicy.PREFER_RECOMPUTE


def kept_and_run_again(call: Callable) -> tuple[int, int]:
    """Numbers of 4 x 4 matrices that a call saves, and of products recomputed in the backward (beyond its own 4)."""
    x, w = arguments()
    return held_bytes(call, x, w) // x.nbytes, count_ops(call(x, w).sum().backward)["aten.mm"] - 4


# --- selective contexts -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("answer", [*CheckpointPolicy, True, False], ids=str)
def test_results_of_a_policy_function(module: Any, answer: Any) -> None:
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=selective(by(answer)))
    name = getattr(answer, "name", str(answer))
    saved = name.endswith("SAVE") or name == "True"
    if name.endswith("OFFLOAD"):  # torch recomputes it
        saved = not is_torch(module)
    assert kept_and_run_again(call) == ((3, 0) if saved else (1, 2))
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))


@both
def test_a_list(module: Any) -> None:
    def call(ops: list) -> Callable:
        return functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=selective(ops))

    assert kept_and_run_again(call([MM])) == (3, 0)
    assert kept_and_run_again(call([aten.exp.default])) == (1, 2)
    assert kept_and_run_again(call([])) == (1, 2)
    assert_same(values_and_grads(call([MM, aten.sin.default]), *arguments()), values_and_grads(deep, *arguments()))
    for wrong in (aten.mm, "aten.mm"):
        with pytest.raises(ValueError, match="OpOverload"):
            call([wrong])(*arguments())


@both
def test_other_results_mean_recompute(module: Any) -> None:
    for answer in (None, 1, "save"):
        call = functools.partial(module.checkpoint, deep, use_reentrant=False)
        assert kept_and_run_again(functools.partial(call, context_fn=selective(by(answer)))) == (1, 2)


def test_other_results_of_a_policy_are_errors() -> None:
    for answer in (None, 1, "save"):
        with pytest.raises(PolicyError, match="must return"):
            checkpoint(deep, *arguments(), policy=by(answer))


@both
def test_arguments_of_a_policy_function(module: Any) -> None:
    asked: list[tuple] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append((op, args[0].shape, ctx.is_recompute, getattr(ctx, "op_output", None)))
        return False

    x, w = arguments()
    out = module.checkpoint(deep, x, w, use_reentrant=False, context_fn=selective(policy))
    first = [MM, aten.sin.default, MM, aten.sin.default]
    assert [entry[0] for entry in asked] == first
    assert all(shape == (4, 4) and not again for _, shape, again, _ in asked)
    if NEWER:
        assert torch.equal(asked[0][3], x @ w)
        assert torch.equal(asked[3][3], out)
    out.sum().backward()
    if NEWER or not is_torch(module):  # torch 2.11 calls it in the recompute too
        assert [entry[0] for entry in asked] == first


VIEWS = {"aten.t.default", "aten.view.default", "aten.slice.Tensor", "aten.transpose.int", "aten.unsqueeze.default"}


@both
def test_policies_about_views(module: Any) -> None:
    """torch calls the function for views. In a list they count as saved, but the value is computed all the same."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w.t()).view(-1)[:8].view(2, 4).transpose(0, 1).contiguous().sin_()
        y = y * torch.empty_like(y).zero_() if y.sum().item() > 100 else y
        return y.unsqueeze(0).exp()

    asked: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(str(op))
        return False

    call = functools.partial(module.checkpoint, fn, use_reentrant=False, context_fn=selective(policy))
    assert_same(values_and_grads(call, *arguments()), values_and_grads(fn, *arguments()))
    assert set(asked) & VIEWS == (VIEWS if is_torch(module) else set())
    again = 1 + (is_torch(module) and not NEWER)  # torch 2.11 calls it in the recompute too
    assert [op for op in asked if op not in VIEWS] == again * [
        "aten.mm.default", "aten.clone.default", "aten.clone.default", "aten.sin_.default", "aten.sum.default",
        "aten._local_scalar_dense.default", "aten.exp.default",
    ]  # fmt: skip

    def kept_and_products(*ops: Any) -> tuple[int, int]:
        flat = lambda x, w: (x @ w).view(-1).sin()
        call = functools.partial(module.checkpoint, flat, use_reentrant=False, context_fn=selective([*ops]))
        x, w = arguments()
        return held_bytes(call, x, w) // x.nbytes, count_ops(call(x, w).sum().backward)["aten.mm"] - 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a list that saves nothing
        result = kept_and_products()[0]  # the caller owns it
        assert kept_and_products(aten.view.default) == ((result + 1, 1) if is_torch(module) else (result, 1))
        assert kept_and_products(MM) == kept_and_products(MM, aten.view.default) == (result + 1, 0)


@both
def test_a_policy_with_state(module: Any) -> None:
    """Every second product is saved."""

    def contexts() -> tuple:
        counts = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op != MM:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=contexts)
    assert kept_and_run_again(call) == (2, 1)
    assert kept_and_run_again(call) == (2, 1)
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))


@both
def test_what_the_backward_does_not_need_is_not_saved(module: Any) -> None:
    """The backward needs nothing of the second product. torch saves it."""
    call = functools.partial(
        module.checkpoint, lambda x, w: layers(x, w) * 2, use_reentrant=False, context_fn=selective([MM])
    )
    assert kept_and_run_again(call) == (3 if is_torch(module) else 2, 0)


def refused(module: Any, call: Callable[[Callable], Any]) -> Any:
    """Check `call` with a selective checkpoint; with torch's it raises."""
    region = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=selective([MM]))
    if not is_torch(module):
        return call(region)
    with pytest.raises(RuntimeError):
        call(region)
    return call(deep)


@both
def test_backward_twice(module: Any) -> None:
    def twice(fn: Callable) -> Any:
        x, w = arguments()
        out = fn(x, w).sum()
        return torch.autograd.grad(out, (x, w), retain_graph=True), torch.autograd.grad(out, (x, w))

    assert_same(refused(module, twice), twice(deep))


@both
def test_double_backward(module: Any) -> None:
    def second(fn: Callable) -> Any:
        x, w = arguments()
        (grad,) = torch.autograd.grad(fn(x, w).sum(), x, create_graph=True)
        return grad, torch.autograd.grad(grad.sin().sum(), (x, w))

    assert_same(refused(module, second), second(deep))


@both
def test_selective_under_torch_func(module: Any) -> None:
    def grad(fn: Callable) -> Any:
        return torch.func.grad(lambda x, w: fn(x, w).sum(), (0, 1))(*(t.detach() for t in arguments()))

    assert_same(refused(module, grad), grad(deep))


def test_selective_under_vmap_and_jacobians() -> None:
    region = functools.partial(checkpoint, deep, context_fn=selective([MM]))
    x, w = (t.detach() for t in arguments())
    batch = torch.stack([x, x.cos()])
    for transform in (lambda fn: torch.func.vmap(torch.func.grad(lambda x: fn(x, w).sum())), torch.func.vmap):
        own, plain = (transform(fn) for fn in (region, deep))
        args = (batch,) if transform is not torch.func.vmap else (batch, torch.stack([w, w]))
        assert_same(own(*args), plain(*args), exact=False)
    assert_same(torch.func.jacrev(region)(x, w), torch.func.jacrev(deep)(x, w), exact=False)
    assert_same(torch.func.jacfwd(region)(x, w), torch.func.jacfwd(deep)(x, w), exact=False)


def changes(x: Tensor, w: Tensor) -> Tensor:
    """It changes a product in place that its policy would save."""
    return (x @ w).mul_(2).sin() @ w


@pytest.mark.parametrize("allow", [False, True])
def test_changes_in_the_region(allow: bool) -> None:
    context_fn = selective([MM], allow_cache_entry_mutation=allow)
    call = functools.partial(checkpoint, changes, context_fn=context_fn)
    expected = values_and_grads(changes, *arguments())
    assert_same(values_and_grads(call, *arguments()), expected)
    original = functools.partial(torch.utils.checkpoint.checkpoint, changes, use_reentrant=False, context_fn=context_fn)
    if allow:
        assert not torch.equal(values_and_grads(original, *arguments())[1][0], expected[1][0])
    else:
        with pytest.raises(RuntimeError, match="mutated"):
            values_and_grads(original, *arguments())


@both
@pytest.mark.parametrize("allow", [False, True])
def test_changes_after_the_region(module: Any, allow: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (y := x @ w), y.sin().exp()

    context_fn = selective([MM], allow_cache_entry_mutation=allow)
    x, w = arguments()
    y, z = module.checkpoint(fn, x, w, use_reentrant=False, context_fn=context_fn)
    y.detach().mul_(2)
    if is_torch(module) and allow:
        (wrong,) = torch.autograd.grad(z.sum(), x)
        assert not torch.equal(wrong, torch.autograd.grad(fn(x, w)[1].sum(), x)[0])
        return
    with pytest.raises(RuntimeError, match=r"mutated|changed in place") as raised:
        torch.autograd.grad(z.sum(), x)
    assert is_torch(module) or isinstance(raised.value, MutationError)


@both
@pytest.mark.parametrize(
    "option", [{"early_stop": False}, {"preserve_rng_state": False}, {"determinism_check": "none"}]
)
def test_selective_with_other_options(module: Any, option: dict) -> None:
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=selective([MM]), **option)
    assert kept_and_run_again(call) == (3, 0)
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))


@both
@pytest.mark.parametrize("option", [{}, {"respect_saved_tensors_hooks": True}, {"respect_saved_tensors_hooks": False}])
def test_hooks_around_get_saved_values(module: Any, option: dict) -> None:
    if is_torch(module) and option and torch.__version__ < (2, 15):
        pytest.skip("torch's function hasn't got this option yet")
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=selective([MM]), **option)
    if not is_torch(module) and option.get("respect_saved_tensors_hooks") is False:
        with pytest.raises(ValueError, match="respect_saved_tensors_hooks"):
            call(*arguments())
        with pytest.raises(ValueError, match="respect_saved_tensors_hooks"):
            checkpoint(**option)
        return
    x, w = arguments()
    packed: list[Tensor] = []
    pack = lambda t: packed.append(t) or t
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = call(x, w)
    products = x @ w, (x @ w).sin() @ w
    seen = sum(any(torch.equal(each, t) for t in packed) for each in products)
    respected = not is_torch(module) or option.get("respect_saved_tensors_hooks") is True
    assert seen == (2 if respected else 0)
    assert not warned or (is_torch(module) and not option)
    assert_same(torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(deep(x, w).sum(), (x, w)))


def test_selective_with_debug() -> None:
    call = functools.partial(checkpoint, deep, context_fn=selective([MM]), debug=True)
    assert kept_and_run_again(call) == (3, 0)
    with pytest.raises(ValueError, match="debug"):
        torch.utils.checkpoint.checkpoint(
            deep, *arguments(), use_reentrant=False, context_fn=selective([MM]), debug=True
        )


def test_two_policies_are_an_error() -> None:
    with pytest.raises(ValueError, match="two policies"):
        checkpoint(deep, *arguments(), context_fn=selective([MM]), policy=policies.save_matmuls)


@both
def test_a_function_makes_new_contexts_for_each_call(module: Any) -> None:
    made = Runs(selective([MM]))
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=made)
    x, w = arguments()
    outs = [call(x, w) for _ in range(3)]
    torch.autograd.grad(sum(outs).sum(), (x, w))
    assert made.count == 3


@both
@pytest.mark.parametrize("outside", [True, False])
def test_selective_and_nested(module: Any, outside: bool) -> None:
    option = {"context_fn": selective([MM])}
    inner = functools.partial(module.checkpoint, deep, use_reentrant=False, **({} if outside else option))
    call = functools.partial(
        module.checkpoint, lambda x, w: inner(x, w).sin(), use_reentrant=False, **(option if outside else {})
    )
    # torch saves what the inner contexts decide, also from the first run, and always recomputes the inner region.
    # Here the outer region decides for everything inside it.
    assert kept_and_run_again(call) == ((3, 2) if is_torch(module) else (3, 0) if outside else (1, 2))
    plain = lambda x, w: deep(x, w).sin()
    assert_same(values_and_grads(call, *arguments()), values_and_grads(plain, *arguments()))


def test_a_policy_function_is_not_kept_alive() -> None:
    def run() -> weakref.ref:
        weight = rand(2, 2)

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return args[0] is not weight

        values_and_grads(functools.partial(checkpoint, deep, context_fn=selective(policy)), *arguments())
        return weakref.ref(policy)

    run()
    gc.collect()
    found = [run() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


def subclassed(log: list[str]) -> Callable:
    """A pair of subclasses of torch's modes, which log the operations."""

    class Caching(torch.utils.checkpoint._CachingTorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in torch.utils.checkpoint.SAC_IGNORED_OPS:
                log.append(f"first {func}")
            return super().__torch_dispatch__(func, types, args, kwargs)

    class Cached(torch.utils.checkpoint._CachedTorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in torch.utils.checkpoint.SAC_IGNORED_OPS:
                log.append(f"again {func}")
            return super().__torch_dispatch__(func, types, args, kwargs)

    def contexts() -> tuple:
        storage: Any = defaultdict(dict if NEWER else list)
        policy = by(CheckpointPolicy.MUST_SAVE)
        return Caching(policy, storage), Cached(policy, storage, False)

    return contexts


@both
def test_subclasses_of_torchs_modes_are_treated_as_any_pair(module: Any) -> None:
    log: list[str] = []
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=subclassed(log))
    x, w = arguments()
    assert_same(values_and_grads(call, x, w), values_and_grads(deep, x, w))
    ops = ["aten.mm.default", "aten.sin.default"] * 2
    assert log == [f"first {op}" for op in ops] + [f"again {op}" for op in ops[:3]]
    out = call(x, w).sum()
    torch.autograd.grad(out, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="extra time"):
        torch.autograd.grad(out, x)


# --- any other pair ---------------------------------------------------------------------------------------------------


class Noted:
    """A context that can be entered many times."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> Noted:
        self.log.append(f"{self.name} begins")
        return self

    def __exit__(self, *exception: Any) -> None:
        self.log.append(f"{self.name} ends")


class Decorating(Noted, contextlib.ContextDecorator):
    pass


@contextlib.contextmanager
def generated(name: str, log: list[str]) -> Iterator[None]:
    log.append(f"{name} begins")
    try:
        yield
    finally:
        log.append(f"{name} ends")


KINDS = [Noted, Decorating, generated]


@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("container", [tuple, list])
def test_a_pair_of_contexts(module: Any, kind: Callable, container: Callable) -> None:
    log: list[str] = []

    def fn(x: Tensor, w: Tensor) -> Tensor:
        log.append("function")
        return deep(x, w)

    x, w = arguments()
    pair = lambda: container([kind("first", log), kind("again", log)])
    out = module.checkpoint(fn, x, w, use_reentrant=False, context_fn=pair)
    assert log == ["first begins", "function", "first ends"]
    log.clear()
    found = torch.autograd.grad(out.sum(), (x, w))
    assert log == ["again begins", "function", "again ends"]
    assert_same(found, torch.autograd.grad(deep(x, w).sum(), (x, w)))


@both
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_context_is_entered_for_each_run(module: Any, kind: Callable) -> None:
    log: list[str] = []
    x, w = arguments()
    out = module.checkpoint(
        deep, x, w, use_reentrant=False, context_fn=lambda: (kind("first", log), kind("again", log))
    ).sum()
    first = torch.autograd.grad(out, (x, w), retain_graph=True)
    if is_torch(module) and kind is generated:
        with pytest.raises((AttributeError, RuntimeError)):  # a form of "generator didn't yield"
            torch.autograd.grad(out, (x, w))
        return
    assert_same(torch.autograd.grad(out, (x, w)), first)
    assert log == ["first begins", "first ends", *["again begins", "again ends"] * 2]


class Log(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in torch.utils.checkpoint.SAC_IGNORED_OPS:
            self.log.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@both
def test_dispatch_modes(module: Any) -> None:
    first: list[str] = []
    again: list[str] = []
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=lambda: (Log(first), Log(again)))
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))
    assert first == ["aten.mm", "aten.sin"] * 2
    assert again == ["aten.mm", "aten.sin", "aten.mm"]


class Doubled(TorchDispatchMode):
    """Doubles every sine."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is aten.sin.default else out


@both
def test_modes_that_change_values(module: Any) -> None:
    """The recompute saves other values than the first run, and the derivative uses those of the recompute."""

    def fn(x: Tensor) -> Tensor:
        return x.sin().exp().exp()

    def gradient(*contexts: Any) -> Tensor:
        x = rand(3)
        out = module.checkpoint(fn, x, use_reentrant=False, context_fn=lambda: contexts)
        return torch.autograd.grad(out.sum(), x)[0]

    x = rand(3)
    outer = (2 * x.sin()).exp()
    assert_same(gradient(Doubled(), Doubled()), (outer.exp() * outer * x.cos()).detach(), exact=False)
    with Doubled():
        doubled = torch.autograd.grad(fn(x).sum(), x)[0]
    assert_same(gradient(contextlib.nullcontext(), Doubled()), doubled)
    plain = torch.autograd.grad(fn(x).sum(), x)[0]
    assert_same(gradient(Doubled(), contextlib.nullcontext()), plain)


@both
def test_random_numbers_in_contexts(module: Any) -> None:
    """The second context starts with the generator state of the first."""

    class Draws:
        def __enter__(self) -> None:
            self.drawn = torch.rand(3)

        def __exit__(self, *exception: Any) -> None:
            torch.rand(3)

    first, again = Draws(), Draws()
    x = torch.ones(64, requires_grad=True)
    out = module.checkpoint(
        lambda x: F.dropout(x.sin()).exp() - 1, x, use_reentrant=False, context_fn=lambda: (first, again)
    )
    torch.rand(5)
    state = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(first.drawn, again.drawn)
    assert torch.equal(out.ne(0), grad.ne(0))
    assert torch.equal(state, torch.get_rng_state())


@both
def test_autocast_as_a_context(module: Any) -> None:
    def cast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        with cast():
            return deep(x, w)

    x, w = (t.detach().float().requires_grad_() for t in arguments())
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=lambda: (cast(), cast()))
    assert_same(values_and_grads(call, x, w), values_and_grads(plain, x, w))


@both
def test_contexts_and_nested(module: Any) -> None:
    log: list[str] = []

    def pair(name: str) -> Callable:
        return lambda: (generated(f"{name} 1", log), generated(f"{name} 2", log))

    def outer(x: Tensor, w: Tensor) -> Tensor:
        return module.checkpoint(deep, x, w, use_reentrant=False, context_fn=pair("inner")).sin()

    x, w = arguments()
    out = module.checkpoint(outer, x, w, use_reentrant=False, context_fn=pair("outer"))
    inner = ["inner 1 begins", "inner 1 ends"]
    assert log == ["outer 1 begins", *inner, "outer 1 ends"]
    log.clear()
    found = torch.autograd.grad(out.sum(), (x, w))
    assert log == ["outer 2 begins", *inner, "outer 2 ends", "inner 2 begins", "inner 2 ends"]
    assert_same(found, torch.autograd.grad(deep(x, w).sin().sum(), (x, w)))


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_under_torch_func(kind: Callable) -> None:
    log: list[str] = []

    def call(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(deep, x, w, context_fn=lambda: (kind("first", log), kind("again", log)))

    x, w = (t.detach() for t in arguments())
    loss, plain = (lambda x, w: call(x, w).sum()), (lambda x, w: deep(x, w).sum())
    assert_same(torch.func.grad(loss)(x, w), torch.func.grad(plain)(x, w))
    assert log == ["first begins", "first ends", "again begins", "again ends"]
    log.clear()
    batch = torch.stack([x, x.cos()])
    found = torch.func.vmap(torch.func.grad(loss), (0, None))(batch, w)
    assert_same(found, torch.func.vmap(torch.func.grad(plain), (0, None))(batch, w), exact=False)
    assert log == ["first begins", "first ends", "again begins", "again ends"]


def test_contexts_and_a_policy() -> None:
    """A mode sees each call of the function in the recompute, but saved values are not computed."""
    first: list[str] = []
    again: list[str] = []
    call = functools.partial(checkpoint, deep, context_fn=lambda: (Log(first), Log(again)), policy=[MM])
    assert kept_and_run_again(call) == (3, 0)
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))
    assert first[:4] == ["aten.mm", "aten.sin"] * 2
    assert again[0] == "aten.mm"


class Fails(Exception):
    pass


class Failing:
    def __enter__(self) -> None:
        torch.set_grad_enabled(True)
        raise Fails

    def __exit__(self, *exception: Any) -> None:
        raise AssertionError("it was not entered")


def ambient() -> tuple:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks, torch.is_grad_enabled(), torch.get_rng_state().tolist(), torch.get_default_dtype()


@both
def test_a_first_context_that_fails(module: Any) -> None:
    before = ambient()
    with pytest.raises(Fails):
        module.checkpoint(
            deep, *arguments(), use_reentrant=False, context_fn=lambda: (Failing(), contextlib.nullcontext())
        )
    assert ambient() == before
    call = functools.partial(module.checkpoint, deep, use_reentrant=False)
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))


@both
def test_a_second_context_that_fails(module: Any) -> None:
    x, w = arguments()
    out = module.checkpoint(deep, x, w, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), Failing()))
    before = ambient()
    for _ in range(2):
        with pytest.raises(Fails):
            torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert ambient() == before


def test_a_second_context_that_fails_once() -> None:
    class Once(Noted):
        def __enter__(self) -> Any:
            if not self.log:
                self.log.append("failed")
                raise Fails

    x, w = arguments()
    out = checkpoint(deep, x, w, context_fn=lambda: (contextlib.nullcontext(), Once("", []))).sum()
    with pytest.raises(Fails):
        torch.autograd.grad(out, x, retain_graph=True)
    assert_same(torch.autograd.grad(out, (x, w)), torch.autograd.grad(deep(x, w).sum(), (x, w)))


class Swallows(Noted):
    def __exit__(self, *exception: Any) -> bool:
        return True


SWALLOWS = [lambda: contextlib.suppress(Exception), lambda: Swallows("", [])]


@both
@pytest.mark.parametrize("swallows", SWALLOWS, ids=["suppress", "all"])
def test_a_first_context_that_swallows_exceptions(module: Any, swallows: Callable) -> None:
    if is_torch(module) and not NEWER:
        pytest.skip("torch 2.11 does not let the first context see an exception of the function")

    def fails(x: Tensor) -> Tensor:
        raise Fails

    with pytest.raises(RuntimeError, match="suppressed an exception") as raised:
        module.checkpoint(
            fails, rand(3), use_reentrant=False, context_fn=lambda: (swallows(), contextlib.nullcontext())
        )
    assert is_torch(module) or isinstance(raised.value, RematError)


@both
@pytest.mark.parametrize("swallows", SWALLOWS, ids=["suppress", "all"])
def test_a_second_context_that_swallows_exceptions(module: Any, swallows: Callable) -> None:
    """Also the exception that ends the recompute. If it swallows one of the function, the recompute is incomplete."""
    call = functools.partial(
        module.checkpoint, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), swallows())
    )
    x, w = arguments()
    assert_same(values_and_grads(functools.partial(call, deep), x, w), values_and_grads(deep, x, w))
    runs = iter((False, True))

    def fails(x: Tensor) -> Tensor:
        h = x.sin().exp()
        if next(runs):
            raise Fails
        return h.sin()

    with pytest.raises(CheckpointError, match=r"number of tensors|only 2"):
        torch.autograd.grad(call(fails, x).sum(), x)


@both
@pytest.mark.parametrize(
    "wrong", [None, 3, (1, 2), (contextlib.nullcontext(),) * 3, (contextlib.nullcontext, contextlib.nullcontext)]
)
def test_what_is_not_a_pair_of_contexts(module: Any, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)) as raised:
        module.checkpoint(deep, *arguments(), use_reentrant=False, context_fn=lambda: wrong)
    assert is_torch(module) or (raised.type is TypeError and "two context managers" in str(raised.value))


@both
def test_noop_context_fn(module: Any) -> None:
    assert module.noop_context_fn is torch.utils.checkpoint.noop_context_fn
    call = functools.partial(module.checkpoint, deep, use_reentrant=False, context_fn=module.noop_context_fn)
    assert kept_and_run_again(call) == (1, 2)
    with pytest.raises(TypeError):
        module.checkpoint(deep, *arguments(), use_reentrant=False, context_fn=None)
