"""`remat.override`, and torch's two switches: options for all regions that are called under them."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from cases import assert_same, rand
from torch import Tensor, nn

import remat
from remat import RecomputeMismatchError, disable_remat, is_disabled, is_recomputing, override, policies
from remat.compat import checkpoint, checkpoint_sequential, checkpoint_wrapper

DEBUG, EARLY_STOP = (
    torch.utils.checkpoint.set_checkpoint_debug_enabled,
    torch.utils.checkpoint.set_checkpoint_early_stop,
)
Context = AbstractContextManager[Any]


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, fn: Callable) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


# All ways to make a region of a function with one argument.
WAYS: dict[str, Callable[[Callable], Callable]] = {
    "remat": remat.remat,
    "remat, policy": remat.remat(policy=policies.save_ops("aten.sin")),
    "remat of a module": lambda fn: remat.remat(Calls(fn)),
    "nn.apply": lambda fn: remat.nn.apply(Calls(fn), Calls),
    "sequential": lambda fn: remat.sequential([fn], 1),
    "compat.checkpoint": lambda fn: lambda x: checkpoint(fn, x),
    "compat.checkpoint, decorator": lambda fn: checkpoint()(fn),
    "compat.checkpoint_sequential": lambda fn: lambda x: checkpoint_sequential([fn, lambda x: x + 0], 2, x),
    "compat.checkpoint_wrapper": lambda fn: checkpoint_wrapper(Calls(fn)),
}
ENDED: list[bool] = []


def leaf() -> Tensor:
    return rand(64)


def ends_late(x: Tensor) -> Tensor:
    """A function with operations after its last saved tensor."""
    y = x.sin().exp().sin().neg()
    ENDED.append(is_recomputing())
    return y


def runs_to_its_end(out: Tensor) -> bool:
    """Whether the recompute runs to its end, in the backward of a result of `ends_late`."""
    ENDED.clear()
    out.sum().backward()
    return ENDED == [True]


def stops_late(f: Callable, context: Context) -> bool:
    with context:
        out = f(leaf())
    return runs_to_its_end(out)


def raises(f: Callable, context: Context, text: str) -> bool:
    with context:
        out = f(leaf())
    try:
        out.sum().backward()
    except RecomputeMismatchError as error:
        return text in str(error)
    return False


def draws_anew(f: Callable, context: Context) -> bool:
    torch.manual_seed(0)
    x = leaf()
    with context:
        out = f(x)
    torch.manual_seed(1)
    seeded = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(seeded, torch.get_rng_state()) == torch.equal(gradient == 0, out == 1)
    return not torch.equal(gradient == 0, out == 1)


def other_operation(x: Tensor) -> Tensor:
    """A function with one more operation in the recompute, which saves nothing."""
    return ((x.detach() * 2, x.sin())[1] if is_recomputing() else x.sin()).exp().sin()


def other_constant(x: Tensor) -> Tensor:
    """A function with the same operations but other values in the recompute."""
    return (x.sin() * (3 if is_recomputing() else 2)).exp().sin()


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).exp()


raises_mul, raises_checksum = (functools.partial(raises, text=text) for text in ("aten.mul", "checksum"))
# A context that sets the option, a function, and whether the option's effect is seen if its region runs in a context.
OPTIONS: dict[str, tuple[Callable[[], Context], Callable, Callable[[Callable, Context], bool]]] = {
    "early_stop": (lambda: override(early_stop=False), ends_late, stops_late),
    "torch's early stop": (lambda: EARLY_STOP(False), ends_late, stops_late),
    "debug": (lambda: override(debug=True), other_operation, raises_mul),
    "torch's debug": (lambda: DEBUG(True), other_operation, raises_mul),
    "determinism_check": (lambda: override(determinism_check="values"), other_constant, raises_checksum),
    "preserve_rng_state": (lambda: override(preserve_rng_state=False), dropout, draws_anew),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_an_option_applies_to_regions_that_are_called_in_the_context(way: str, option: str) -> None:
    context, fn, seen = OPTIONS[option]
    f = WAYS[way](fn)
    assert [seen(f, around) for around in (nullcontext(), context(), nullcontext())] == [False, True, False]


@pytest.mark.parametrize("changes", [{"debug": True}, {"early_stop": False}, {"determinism_check": "values"}], ids=str)
def test_gradients_are_the_same(changes: dict[str, Any]) -> None:
    x = leaf()
    expected = torch.autograd.grad(ends_late(x).sum(), x)
    for way in WAYS.values():
        with override(**changes):
            assert_same(torch.autograd.grad(way(ends_late)(x).sum(), x), expected)


@pytest.mark.parametrize("by_vmap", [False, True])
def test_under_torch_func(by_vmap: bool) -> None:
    derivative = torch.func.grad(lambda x: remat.remat(other_constant)(x).sum())
    derivative, x = (torch.func.vmap(derivative), rand(2, 3)) if by_vmap else (derivative, rand(3))
    derivative(x)
    with override(determinism_check="values"), pytest.raises(RecomputeMismatchError):
        derivative(x)
    derivative(x)


# --- precedence and lifetime ------------------------------------------------------------------------------------------


def test_the_options_around_the_forward_apply() -> None:
    f = remat.remat(ends_late)
    with override(early_stop=False):
        late = f(leaf())
    early = f(leaf())
    with override(early_stop=True):
        assert runs_to_its_end(late)
    with override(early_stop=False):
        assert not runs_to_its_end(early)


@pytest.mark.parametrize("lowering", ["autograd", "func"])
def test_inner_regions_are_recomputed_with_the_options_around_the_forward(lowering: str) -> None:
    """The outer region's recompute calls the inner region again, after the caller's context has ended."""
    runs = []

    def inner(x: Tensor) -> Tensor:
        runs.append(is_recomputing())  # in the forward, the outer region's recompute, and the inner region's recompute
        return (x.sin() * (3 if len(runs) == 3 else 2)).exp().sin()

    outer = remat.remat(lambda x: remat.remat(inner)(x).sin())

    def pullback() -> Callable[[], Any]:
        runs.clear()
        if lowering == "func":
            return functools.partial(torch.func.vjp(outer, torch.randn(3))[1], torch.ones(3))
        return outer(leaf()).sum().backward

    backward = pullback()
    with override(determinism_check="values"):  # around the backward only
        backward()
    assert runs == [False, True, True]
    with override(determinism_check="values"):
        backward = pullback()
    with pytest.raises(RecomputeMismatchError, match="checksum"):
        backward()


def test_the_innermost_context_takes_precedence_over_outer_ones_regions_and_torchs_switches() -> None:
    f, late = remat.remat(ends_late), remat.remat(early_stop=False)(ends_late)
    with override(early_stop=False, debug=True):
        with override(early_stop=True):
            assert not runs_to_its_end(f(leaf()))
            assert raises(remat.remat(other_operation), nullcontext(), "aten.mul")  # other options stay
        with override():
            assert runs_to_its_end(f(leaf()))
    with override(early_stop=True), EARLY_STOP(False):
        assert not runs_to_its_end(late(leaf()))
    with EARLY_STOP(True):
        assert not runs_to_its_end(late(leaf()))
        assert stops_late(late, override(early_stop=False))
    assert runs_to_its_end(late(leaf())) and not runs_to_its_end(f(leaf()))


def test_a_context_inside_a_region_also_applies_in_its_recompute() -> None:
    def ends(**changes: Any) -> int:
        """How many runs of the inner region reach its end: forward, outer recompute, inner recompute."""

        def outer(x: Tensor) -> Tensor:
            with override(**changes):
                y = remat.remat(ends_late)(x)
            return y.sin()

        ENDED.clear()
        with override(early_stop=True):
            remat.remat(outer)(leaf()).sum().backward()
        return len(ENDED)

    assert (ends(), ends(early_stop=False)) == (2, 3)


def test_options_are_restored_after_an_exception() -> None:
    def fails(x: Tensor) -> Tensor:
        if is_recomputing():
            raise KeyError
        return x.sin().exp()

    f, late = remat.remat(ends_late), remat.remat(early_stop=False)(ends_late)
    with override(early_stop=False):
        with pytest.raises(KeyError), override(early_stop=True), disable_remat():
            raise KeyError
        assert runs_to_its_end(f(leaf())) and not is_disabled()
        out = remat.remat(fails)(leaf())
    with override(early_stop=True):
        with pytest.raises(KeyError):
            out.sum().backward()
        assert not runs_to_its_end(late(leaf()))
    assert not runs_to_its_end(f(leaf()))


def in_a_thread(work: Callable[[], bool]) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start(), thread.join()
    return found[0]


def test_contexts_are_of_the_thread() -> None:
    f = remat.remat(ends_late)
    with override(early_stop=False):
        assert not in_a_thread(lambda: runs_to_its_end(f(leaf())))
        late = f(leaf())
    assert in_a_thread(lambda: runs_to_its_end(late))
    with disable_remat():
        assert not in_a_thread(is_disabled)


def test_a_decorated_function_and_a_copy_of_a_region() -> None:
    model = remat.nn.apply(Calls(ends_late), Calls)
    assert runs_to_its_end(override(early_stop=False)(model)(leaf()))
    with override(early_stop=False):
        twin = copy.deepcopy(model)
    assert not runs_to_its_end(twin(leaf())) and not runs_to_its_end(model(leaf()))  # they have their own options


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"debug": 1}, TypeError, "debug must be True or False, got 1"),
        ({"early_stop": "no"}, TypeError, "early_stop must be True or False, got 'no'"),
        ({"preserve_rng_state": 0}, TypeError, "preserve_rng_state must be True or False"),
        ({"determinism_check": "all"}, ValueError, "must be one of 'metadata', 'values', 'none'; got 'all'.$"),
        ({"determinism_check": "default"}, ValueError, r"got 'default'\. torch's 'default' is 'metadata' here"),
        ({"policy": None}, TypeError, "policy"),
    ],
)
def test_wrong_options_are_errors(changes: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text), override(**changes):
        pass
    if "policy" not in changes:
        with pytest.raises(error, match=text):
            remat.remat(torch.sin, **changes)
    assert not runs_to_its_end(remat.remat(ends_late)(leaf()))


def test_disabled_regions_are_plain_calls_in_the_context_of_the_forward() -> None:
    found = []

    def fn(x: Tensor) -> Tensor:
        found.append((is_disabled(), is_recomputing()))
        return x.sin().exp()

    f = remat.remat(fn)
    out = f(leaf()).sum()
    with disable_remat():
        out.backward()
    assert found == [(False, False), (False, True)]
    found.clear()
    for outer, inner in ((disable_remat(), override(early_stop=False)), (override(early_stop=False), disable_remat())):
        with outer, inner:
            with disable_remat():
                f(leaf()).sum().backward()
            assert is_disabled()
    assert found == [(True, False)] * 2 and not is_disabled()


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_a_compiled_region_keeps_its_own_options() -> None:
    context, fn, draws = OPTIONS["preserve_rng_state"]
    torch._dynamo.reset()
    f = torch.compile(remat.remat(fn), backend="aot_eager", fullgraph=True)
    assert not draws(f, context())
    torch._dynamo.reset()
    assert not draws(f, context())
    late = torch.compile(remat.remat(ends_late), backend="eager")  # `is_recomputing` breaks the graph
    assert not runs_to_its_end(late(leaf())) and stops_late(late, override(early_stop=False))
