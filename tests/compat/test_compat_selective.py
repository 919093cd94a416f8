"""`context_fn` of `remat.compat.checkpoint` compared with torch's: selective contexts and other pairs."""

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import assert_same, rand, tensors
from comparison import NEWER, OTHER, TORCH, Fails, Outcome, libraries
from side_by_side import both, is_torch, values_and_grads
from surroundings import assert_as_before, surroundings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointError, CheckpointPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts_of

from benchmarks.measure import count_ops, held_bytes
from remat import MutationError, PolicyError, RematError, policies
from remat.compat import checkpoint

compared, row = TORCH.compared, TORCH.row
pytestmark = pytest.mark.filterwarnings("ignore:The policy .* has matched none:UserWarning")
aten = torch.ops.aten
MM = aten.mm.default
arguments = tensors((4, 4), (4, 4))


def deep(x: Tensor, w: Tensor) -> Tensor:
    """Two products; the backward needs the results of both and of the sine between them."""
    return ((x @ w).sin() @ w).sin()


def selective(policy: Any, **options: Any) -> Callable:
    return functools.partial(contexts_of, policy, **options)


def by(answer: Any) -> Callable:
    """A policy function that returns this for matrix products."""
    return lambda ctx, op, *args, **kwargs: answer if op == MM else CheckpointPolicy.PREFER_RECOMPUTE


def kept_and_run_again(call: Callable) -> tuple[int, int]:
    """Numbers of 4 x 4 matrices that a call saves, and of products recomputed in the backward (beyond its own 4)."""
    x, w = arguments()
    return held_bytes(call, x, w) // x.nbytes, count_ops(call(x, w).sum().backward)["aten.mm"] - 4


def region_of(module: Any, fn: Callable = deep, policy: Any = (MM,), **options: Any) -> Callable:
    """`fn` in a selective region."""
    policy = list(policy) if isinstance(policy, tuple) else policy
    return functools.partial(module.checkpoint, fn, use_reentrant=False, context_fn=selective(policy), **options)


@both
@pytest.mark.parametrize("answer", [*CheckpointPolicy, True, False, None, 1, "save"], ids=str)
@row("selective: `MUST_CPU_OFFLOAD`, `PREFER_CPU_OFFLOAD`")
def test_answers_of_a_policy_function(module: Any, answer: Any) -> None:
    """Torch recomputes what shall be offloaded; in both any other answer means recompute."""
    name = getattr(answer, "name", str(answer))
    saved = name.endswith("SAVE") or answer is True or (name.endswith("OFFLOAD") and not is_torch(module))
    call = region_of(module, policy=by(answer))
    assert kept_and_run_again(call) == ((3, 0) if saved else (1, 2))
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))
    if answer in (None, "save"):
        with pytest.raises(PolicyError, match="must return"):
            checkpoint(deep, *arguments(), policy=by(answer))


@both
@row("`context_fn`, selective")
def test_a_list_of_operators(module: Any) -> None:
    assert kept_and_run_again(region_of(module)) == (3, 0)
    for ops in ([aten.exp.default], []):
        assert kept_and_run_again(region_of(module, policy=ops)) == (1, 2)
    for wrong in (aten.mm, "aten.mm"):
        with pytest.raises(ValueError, match="OpOverload"):
            region_of(module, policy=[wrong])(*arguments())


@row("`context_fn`, selective", "`respect_saved_tensors_hooks`")
def test_two_policies_and_saved_values_that_are_hidden_from_hooks_are_errors() -> None:
    with pytest.raises(ValueError, match=r"two policies.*Combine them"):
        checkpoint(deep, *arguments(), context_fn=selective([MM]), policy=policies.save_matmuls)
    for call in (lambda **option: checkpoint(deep, *arguments(), **option), checkpoint):
        with pytest.raises(ValueError, match="call the regions that the hooks must not see outside of the hooks"):
            call(respect_saved_tensors_hooks=False)


@both
@row("selective: policy function")
def test_a_policy_function_is_called_in_the_first_run_only(module: Any) -> None:
    asked: list[tuple] = []
    policy = lambda ctx, op, *args, **kwargs: bool(asked.append((op, args[0].shape, ctx.is_recompute)))
    out = region_of(module, policy=policy)(*arguments())
    first = [(op, (4, 4), False) for op in (MM, aten.sin.default) * 2]
    assert asked == first
    out.sum().backward()
    if NEWER or not is_torch(module):  # torch 2.11 calls it in the recompute too
        assert asked == first


@both
@row("selective: views (`aten.view`, `aten.t`)")
def test_a_policy_does_not_judge_views(module: Any) -> None:
    """Torch calls the function for views. In a list they count as saved, but the value is computed all the same."""
    fn = lambda x, w: (x @ w.t()).view(-1)[:8].sin()
    asked: list[str] = []
    policy = lambda ctx, op, *args, **kwargs: bool(asked.append(str(op.overloadpacket)))
    call = region_of(module, fn, policy)
    assert_same(values_and_grads(call, *arguments()), values_and_grads(fn, *arguments()))
    others = {"aten.t", "aten.view", "aten.slice"} if is_torch(module) else set()
    assert set(asked) == {"aten.mm", "aten.sin", *others}

    def kept_and_products(*ops: Any) -> tuple[int, int]:
        call, (x, w) = region_of(module, lambda x, w: (x @ w).view(-1).sin(), ops), arguments()
        return held_bytes(call, x, w) // x.nbytes, count_ops(call(x, w).sum().backward)["aten.mm"] - 2

    assert kept_and_products() == (1, 1)  # the result
    assert kept_and_products(aten.view.default) == ((2, 1) if is_torch(module) else (1, 1))
    assert kept_and_products(MM) == kept_and_products(MM, aten.view.default) == (2, 0)


@both
@row("selective: what is saved")
def test_what_the_backward_does_not_need_is_not_saved(module: Any) -> None:
    """The backward needs nothing of the second product. Torch saves it."""
    call = region_of(module, lambda x, w: (x @ w).sin() @ w * 2)
    assert kept_and_run_again(call) == (3 if is_torch(module) else 2, 0)


DERIVATIVES: dict[str, Callable[[Callable, Tensor], Any]] = {
    "backward twice": lambda f, x: [torch.autograd.grad(y, x, retain_graph=True) for y in [f(x).sum()] for _ in (1, 2)],
    "double backward": lambda f, x: torch.autograd.grad(
        torch.autograd.grad(f(x).sum(), x, create_graph=True)[0].sin().sum(), x
    ),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x.detach()),
}
AGAIN = "selective: backward twice, double backward, `torch.func.grad`"


@compared(AGAIN, theirs=Fails(RuntimeError), exact=False)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_selective_regions_have_every_derivative(call: Callable, derivative: str) -> Any:
    x, w = arguments()
    return DERIVATIVES[derivative](lambda x: call(deep, x, w, context_fn=selective([MM])), x)


@libraries
@pytest.mark.parametrize("allow, theirs", [(False, Fails(RuntimeError, "mutated")), (True, OTHER)])
@row("selective: in-place changes in the region")
def test_a_product_that_changes_in_the_region(library: str, allow: bool, theirs: Outcome) -> None:
    fn = lambda x, w: (x @ w).mul_(2).sin() @ w
    context_fn = selective([MM], allow_cache_entry_mutation=allow)
    program = lambda call: values_and_grads(lambda x, w: call(fn, x, w, context_fn=context_fn), *arguments())
    TORCH.check(library, program, theirs)


@both
@pytest.mark.parametrize("allow", [False, True])
@row("selective: `allow_cache_entry_mutation=True`")
def test_a_saved_product_that_changes_after_the_region_is_an_error(module: Any, allow: bool) -> None:
    x, w = arguments()
    context_fn = selective([MM], allow_cache_entry_mutation=allow)
    fn = lambda x, w: (y := x @ w, y.sin().exp())
    y, z = module.checkpoint(fn, x, w, use_reentrant=False, context_fn=context_fn)
    y.detach().mul_(2)
    if is_torch(module) and allow:
        assert not torch.equal(torch.autograd.grad(z.sum(), x)[0], torch.autograd.grad(fn(x, w)[1].sum(), x)[0])
        return
    with pytest.raises(RuntimeError if is_torch(module) else MutationError, match=r"mutated|changed in place"):
        torch.autograd.grad(z.sum(), x)


@both
@pytest.mark.parametrize("option", [{}, {"respect_saved_tensors_hooks": True}])
@row("`respect_saved_tensors_hooks`")
def test_hooks_around_get_saved_values_without_a_warning(module: Any, option: dict) -> None:
    if is_torch(module) and option and torch.__version__ < (2, 15):
        pytest.skip("torch's function hasn't got this option yet")
    x, w = arguments()
    packed: list[Tensor] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            out = region_of(module, **option)(x, w)
    seen = sum(any(torch.equal(each, t) for t in packed) for each in (x @ w, (x @ w).sin() @ w))
    assert seen == (2 if not is_torch(module) or option else 0)
    assert not warned or (is_torch(module) and not option)
    assert_same(torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(deep(x, w).sum(), (x, w)))


@both
@pytest.mark.parametrize("outside", [True, False])
@row("selective: a region in a region")
def test_the_outer_region_decides_what_is_saved(module: Any, outside: bool) -> None:
    """Torch saves what the inner contexts decide, also from the first run, and always recomputes the inner region."""
    options = {"context_fn": selective([MM])}, {}
    outer, inner = options if outside else options[::-1]
    inside = functools.partial(module.checkpoint, deep, use_reentrant=False, **inner)
    call = functools.partial(module.checkpoint, lambda x, w: inside(x, w).sin(), use_reentrant=False, **outer)
    assert kept_and_run_again(call) == ((3, 2) if is_torch(module) else (3, 0) if outside else (1, 2))
    assert_same(values_and_grads(call, *arguments()), values_and_grads(lambda x, w: deep(x, w).sin(), *arguments()))


def test_a_policy_function_is_not_kept_alive() -> None:
    def run() -> weakref.ref:
        policy = lambda ctx, op, *args, **kwargs: op == MM
        values_and_grads(functools.partial(checkpoint, deep, context_fn=selective(policy)), *arguments())
        return weakref.ref(policy)

    run()
    found = [run() for _ in range(3)]
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


class Noted:
    """A context that can be entered many times."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __enter__(self) -> "Noted":
        self.log.append(f"{self.name} begins")
        return self

    def __exit__(self, *exception: Any) -> None:
        self.log.append(f"{self.name} ends")


@contextlib.contextmanager
def generated(name: str, log: list[str]) -> Iterator[None]:
    with Noted(name, log):
        yield


OTHERS = row("`context_fn`, other contexts")
NOTHING = contextlib.nullcontext()


@pytest.mark.parametrize("wrong", [(NOTHING, 1), (1, NOTHING), "ab"], ids=["1+3", "3+1", "ab"])
def test_what_is_not_a_pair_of_contexts_is_an_error(wrong: Any) -> None:
    for context_fn in (wrong, lambda: wrong):
        with pytest.raises(TypeError, match=r"context_fn must (be a function that )?returns? two context managers, "):
            checkpoint(torch.sin, rand(3), use_reentrant=False, context_fn=context_fn)


def in_contexts(module: Any, first: Any, again: Any, fn: Callable = deep, **options: Any) -> Callable:
    """`fn` in a region with these contexts."""
    return functools.partial(module.checkpoint, fn, use_reentrant=False, context_fn=lambda: (first, again), **options)


@both
@pytest.mark.parametrize("kind", [Noted, generated])
@OTHERS
def test_the_second_context_is_entered_for_each_recompute(module: Any, kind: Callable) -> None:
    log: list[str] = []
    fn = lambda x, w: (log.append("function"), deep(x, w))[1]
    x, w = arguments()
    pair = lambda: [kind("first", log), kind("again", log)]
    out = module.checkpoint(fn, x, w, use_reentrant=False, context_fn=pair).sum()
    assert log == ["first begins", "function", "first ends"]
    for n in (1, 2):
        if n == 2 and is_torch(module) and kind is generated:
            with pytest.raises((AttributeError, RuntimeError)):  # a form of "generator didn't yield"
                torch.autograd.grad(out, (x, w), retain_graph=True)
            return
        found = torch.autograd.grad(out, (x, w), retain_graph=True)
        assert log[3:] == ["again begins", "function", "again ends"] * n
        assert_same(found, torch.autograd.grad(deep(x, w).sum(), (x, w)))


class Log(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAC_IGNORED_OPS:
            self.log.append(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@both
@pytest.mark.parametrize("policy", [None, [MM]], ids=str)
@OTHERS
def test_modes_see_the_operations_of_their_runs(module: Any, policy: Any) -> None:
    """With a policy a mode sees also the operations whose results are saved."""
    if is_torch(module) and policy is not None:
        pytest.skip("torch's function has no policy")
    first: list[str] = []
    again: list[str] = []
    call = in_contexts(module, Log(first), Log(again), **({} if policy is None else {"policy": policy}))
    assert_same(values_and_grads(call, *arguments()), values_and_grads(deep, *arguments()))
    assert first == ["mm", "sin"] * 2 and again == ["mm", "sin", "mm"][: 3 if policy is None else 2]
    assert kept_and_run_again(call) == ((1, 2) if policy is None else (3, 0))


class Failing:
    """Changes a mode, and fails, unless it is told not to."""

    fails = True

    def __enter__(self) -> None:
        if self.fails:
            torch.set_grad_enabled(True)
            raise KeyError

    def __exit__(self, *exception: Any) -> None:
        assert not self.fails, "it was not entered"


@both
@OTHERS
def test_contexts_that_fail_leave_nothing_behind(module: Any) -> None:
    (x, w), before, failing = arguments(), surroundings(), Failing()
    with pytest.raises(KeyError):
        in_contexts(module, failing, NOTHING)(x, w)
    out = in_contexts(module, NOTHING, failing)(x, w)
    for _ in range(2):
        with pytest.raises(KeyError):
            torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert_as_before(before)
    if not is_torch(module):
        failing.fails = False
        assert_same(torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(deep(x, w).sum(), (x, w)))


SWALLOWS = pytest.mark.parametrize("kind", [Exception, BaseException])


@both
@SWALLOWS
@row("contexts that suppress exceptions")
def test_a_first_context_that_swallows_an_exception_is_an_error(module: Any, kind: type) -> None:
    if is_torch(module) and not NEWER:
        pytest.skip("torch 2.11 does not let the first context see an exception of the function")

    with pytest.raises(RuntimeError, match="suppressed an exception") as raised:
        in_contexts(module, contextlib.suppress(kind), NOTHING, lambda x: 1 // 0)(rand(3))
    assert is_torch(module) or isinstance(raised.value, RematError)


@both
@SWALLOWS
@row("contexts that suppress exceptions")
def test_a_second_context_may_swallow_the_exception_that_ends_a_recompute(module: Any, kind: type) -> None:
    """If it swallows one of the function, the recompute is incomplete."""
    call, (x, w), runs = in_contexts(module, NOTHING, contextlib.suppress(kind)), arguments(), iter((False, True))
    assert_same(values_and_grads(call, x, w), values_and_grads(deep, x, w))
    fails = lambda x: [h := x.sin().exp(), 1 // (not next(runs)), h.sin()][-1]
    with pytest.raises(CheckpointError, match=r"number of tensors|only 2"):
        torch.autograd.grad(in_contexts(module, NOTHING, contextlib.suppress(kind), fails)(x).sum(), x)
