"""`remat.override`, and torch's two switches: options for all regions that are called under them."""

import copy
import functools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import in_threads, rand
from random_programs.toolbox import Apply
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

import remat
from benchmarks.measure import count_ops, held_bytes
from remat import RecomputeMismatchError, disable_remat, is_disabled, is_recomputing, override, policies
from remat.compat import checkpoint, checkpoint_sequential, checkpoint_wrapper

Context = AbstractContextManager[Any]
NOTHING = nullcontext()


# All ways to make a region of a function with one argument.
WAYS: dict[str, Callable[[Callable], Callable]] = {
    "remat": remat.remat,
    "remat, policy": remat.remat(policy=policies.save_ops("aten.sin")),
    "remat of a module": lambda fn: remat.remat(Apply(fn)),
    "nn.apply": lambda fn: remat.nn.apply(Apply(fn), Apply),
    "sequential": lambda fn: remat.sequential([fn], 1),
    "compat.checkpoint": lambda fn: lambda x: checkpoint(fn, x),
    "compat.checkpoint, decorator": lambda fn: checkpoint()(fn),
    "compat.checkpoint_sequential": lambda fn: lambda x: checkpoint_sequential([fn, lambda x: x + 0], 2, x),
    "compat.checkpoint_wrapper": lambda fn: checkpoint_wrapper(Apply(fn)),
}
ENDED: list[bool] = []


def ends_late(x: Tensor) -> Tensor:
    """A function with operations after its last saved tensor."""
    y = x.sin().exp().sin().neg()
    ENDED.append(is_recomputing())
    return y


# Their recomputes have one more operation, which saves nothing, or the same operations but other values.
other_operation = lambda x: ((x.detach() * 2, x.sin())[1] if is_recomputing() else x.sin()).exp().sin()
other_constant = lambda x: (x.sin() * (3 if is_recomputing() else 2)).exp().sin()
dropout = lambda x: F.dropout(x.sin(), 0.5).exp()


def effect(f: Callable, context: Context = NOTHING) -> str:
    """What is special about the recompute, in the backward of a call of `f` in a context."""
    ENDED.clear()
    torch.manual_seed(0)
    x = rand(64)
    with context:
        out = f(x)
    ended = len(ENDED)
    torch.manual_seed(1)
    seeded = torch.get_rng_state()
    try:
        (gradient,) = torch.autograd.grad(out.sum(), x)
    except RecomputeMismatchError as error:
        return "compares operations" if "aten.mul" in str(error) else "compares values" * ("checksum" in str(error))
    if not torch.equal(gradient == 0, out == 1):
        return "draws anew"
    assert torch.equal(seeded, torch.get_rng_state())
    return "runs to its end" if len(ENDED) > ended else ""


# A context that sets an option, a function, and the effect on it.
OPTIONS: dict[str, tuple[Callable[[], Context], Callable, str]] = {
    "early_stop": (lambda: override(early_stop=False), ends_late, "runs to its end"),
    "torch's early stop": (lambda: set_checkpoint_early_stop(False), ends_late, "runs to its end"),
    "debug": (lambda: override(debug=True), other_operation, "compares operations"),
    "torch's debug": (lambda: set_checkpoint_debug_enabled(True), other_operation, "compares operations"),
    "determinism_check": (lambda: override(determinism_check="values"), other_constant, "compares values"),
    "preserve_rng_state": (lambda: override(preserve_rng_state=False), dropout, "draws anew"),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_an_option_applies_to_regions_that_are_called_in_the_context(way: str, option: str) -> None:
    context, fn, expected = OPTIONS[option]
    f = WAYS[way](fn)
    assert [effect(f), effect(f, context()), effect(f)] == ["", expected, ""]


MATMULS = policies.save_matmuls


@pytest.mark.parametrize(
    ("own", "policy", "saved"),
    [(None, "unchanged", 0), (None, MATMULS, 2), (MATMULS, "unchanged", 2), (MATMULS, None, 0)],
)
def test_a_policy_replaces_that_of_a_region_unless_it_is_unchanged(own: Any, policy: Any, saved: int) -> None:
    x, region = rand(64, 64), remat.remat(lambda x: ((x @ x).sin() @ x).exp(), policy=own)
    with override(policy=policy):
        assert held_bytes(region, x) == (1 + saved) * x.nbytes  # the result, and products
        out = region(x)
    assert count_ops(out.sum().backward)["aten.mm"] == 2 * 2 + (2 - saved)


@pytest.mark.parametrize("lowering", ["autograd", "func"])
def test_inner_regions_are_recomputed_with_the_options_around_the_forward(lowering: str) -> None:
    """The outer region's recompute calls the inner region again, after the caller's context has ended."""
    runs = deque[bool]()  # which isn't restored

    def inner(x: Tensor) -> Tensor:
        runs.append(is_recomputing())  # in the forward, the outer region's recompute, and the inner region's recompute
        return (x.sin() * (3 if len(runs) == 3 else 2)).exp().sin()

    outer = remat.remat(lambda x: remat.remat(inner)(x).sin())

    def pullback() -> Callable[[], Any]:
        runs.clear()
        if lowering == "func":
            return functools.partial(torch.func.vjp(outer, torch.randn(3))[1], torch.ones(3))
        return outer(rand(3)).sum().backward

    backward = pullback()
    with override(determinism_check="values"):  # around the backward only
        backward()
    assert [*runs] == [False, True, True]
    with override(determinism_check="values"):
        backward = pullback()
    with pytest.raises(RecomputeMismatchError, match="checksum"):
        backward()


END = "runs to its end"
early, late = remat.remat(ends_late), remat.remat(early_stop=False)(ends_late)


def test_the_innermost_context_takes_precedence_over_outer_ones_regions_and_torchs_switches() -> None:
    assert (effect(early), effect(late)) == ("", END)
    with override(early_stop=False, debug=True):
        with override(early_stop=True):
            assert effect(early) == "" and effect(remat.remat(other_operation)) == "compares operations"
        with override():
            assert effect(early) == END
    with override(early_stop=True), set_checkpoint_early_stop(False):
        assert effect(late) == ""
    with set_checkpoint_early_stop(True):
        assert effect(late) == "" and effect(late, override(early_stop=False)) == END
    with override(early_stop=False):  # also around the backward, which doesn't matter
        assert effect(early, override(early_stop=True)) == ""


def test_a_context_inside_a_region_also_applies_in_its_recompute() -> None:
    def ends(**changes: Any) -> int:
        """How many runs of the inner region reach its end: forward, outer recompute, inner recompute."""
        ENDED.clear()
        with override(early_stop=True):
            remat.remat(lambda x: override(**changes)(early)(x).sin())(rand(3)).sum().backward()
        return len(ENDED)

    assert (ends(), ends(early_stop=False)) == (2, 3)


def test_options_are_restored_after_an_exception() -> None:
    def fails(x: Tensor) -> Tensor:
        if is_recomputing():
            raise KeyError
        return x.sin().exp()

    with override(early_stop=False):
        with pytest.raises(KeyError), override(early_stop=True), disable_remat():
            raise KeyError
        assert effect(early) == END and not is_disabled()
        out = remat.remat(fails)(rand(3))
    with override(early_stop=True):
        with pytest.raises(KeyError):
            out.sum().backward()
        assert effect(late) == ""
    assert effect(early) == ""


def test_contexts_are_of_the_thread_and_copies_of_regions_have_their_own_options() -> None:
    model = remat.nn.apply(Apply(ends_late), Apply)
    with override(early_stop=False):
        assert in_threads(lambda: effect(early)) == [""]
        twin = copy.deepcopy(model)
    assert effect(twin) == "" and effect(override(early_stop=False)(model)) == END
    with disable_remat():
        assert in_threads(is_disabled) == [False]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"debug": 1}, TypeError, "debug must be True or False, got 1"),
        ({"early_stop": "no"}, TypeError, "early_stop must be True or False, got 'no'"),
        ({"preserve_rng_state": 0}, TypeError, "preserve_rng_state must be True or False"),
        ({"determinism_check": "all"}, ValueError, "one of 'metadata', 'values', 'none' or 'default'; got 'all'.$"),
        ({"policy": 3}, remat.PolicyError, "policy"),
    ],
)
def test_wrong_options_are_errors(changes: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text), override(**changes):
        pass
    with pytest.raises(error, match=text):
        remat.remat(torch.sin, **changes)
    assert effect(early) == ""


def test_a_compiled_region_keeps_its_own_options() -> None:
    f = torch.compile(remat.remat(dropout), backend="aot_eager", fullgraph=True)
    assert [effect(f), effect(f, override(preserve_rng_state=False))] == ["", ""]
    torch._dynamo.reset()
    assert effect(f, override(preserve_rng_state=False)) == ""  # also if it is compiled in the context
    broken = torch.compile(remat.remat(ends_late), backend="eager")  # `is_recomputing` breaks the graph
    assert [effect(broken), effect(broken, override(early_stop=False))] == ["", END]
