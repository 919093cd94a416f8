"""`remat.override`, and torch's two switches: options for all regions that are called under them."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
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

SWITCHES = torch.utils.checkpoint.set_checkpoint_debug_enabled, torch.utils.checkpoint.set_checkpoint_early_stop


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
every_way = pytest.mark.parametrize("way", WAYS)


ENDED: list[bool] = []


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


def other_constant(x: Tensor) -> Tensor:
    """A function with the same operations but other values in the recompute."""
    return (x.sin() * (3 if is_recomputing() else 2)).exp().sin()


def other_operation(x: Tensor) -> Tensor:
    """A function with one more operation in the recompute, which saves nothing."""
    return ((x.detach() * 2, x.sin())[1] if is_recomputing() else x.sin()).exp().sin()


def leaf() -> Tensor:
    return rand(3)


# --- each option for each kind of region ------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("stop", [lambda: override(early_stop=False), lambda: SWITCHES[1](False)])
def test_early_stop(way: str, stop: Callable[[], AbstractContextManager]) -> None:
    f = WAYS[way](ends_late)
    assert not runs_to_its_end(f(leaf()))
    with stop():
        out = f(leaf())
    assert runs_to_its_end(out)
    assert not runs_to_its_end(f(leaf()))


@every_way
@pytest.mark.parametrize("debug", [lambda: override(debug=True), lambda: SWITCHES[0](True)])
def test_debug(way: str, debug: Callable[[], AbstractContextManager]) -> None:
    f = WAYS[way](other_operation)
    f(leaf()).sum().backward()
    with debug():
        out = f(leaf())
    with pytest.raises(RecomputeMismatchError, match=r"aten\.mul"):
        out.sum().backward()
    f(leaf()).sum().backward()


@every_way
def test_determinism_check(way: str) -> None:
    f = WAYS[way](other_constant)
    f(leaf()).sum().backward()
    with override(determinism_check="values"):
        out = f(leaf())
    with pytest.raises(RecomputeMismatchError, match="checksum"):
        out.sum().backward()
    f(leaf()).sum().backward()


@every_way
def test_preserve_rng_state(way: str) -> None:
    f = WAYS[way](lambda x: F.dropout(x.sin(), 0.5).exp())

    def zeros_and_state() -> tuple[Tensor, Tensor]:
        """The zeros of the gradient, and the generator's state after a backward with another seed."""
        torch.manual_seed(0)
        x = rand(64)
        out = f(x)
        torch.manual_seed(1)
        out.sum().backward()
        assert x.grad is not None
        return x.grad == 0, torch.get_rng_state()

    with torch.random.fork_rng():
        torch.manual_seed(1)
        seeded = torch.get_rng_state()
        expected, state = zeros_and_state()
        assert torch.equal(state, seeded)
        with override(preserve_rng_state=False):
            other, state = zeros_and_state()
        assert not torch.equal(state, seeded) and not torch.equal(other, expected)
        assert torch.equal(zeros_and_state()[0], expected)


@pytest.mark.parametrize("name", ["grad", "vjp", "vmap(grad)", "jacrev", "jvp(grad)"])
def test_under_torch_func(name: str) -> None:
    f = remat.remat(other_constant)
    derivatives: dict[str, Callable[[Tensor], Any]] = {
        "grad": torch.func.grad(lambda x: f(x).sum()),
        "vjp": lambda x: torch.func.vjp(f, x)[1](torch.ones(3)),
        "vmap(grad)": lambda x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x + 1])),
        "jacrev": torch.func.jacrev(f),
        "jvp(grad)": lambda x: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (x,), (x,)),
    }
    x = torch.randn(3)
    derivatives[name](x)
    with override(determinism_check="values"), pytest.raises(RecomputeMismatchError):
        derivatives[name](x)
    derivatives[name](x)


@every_way
def test_gradients_are_the_same(way: str) -> None:
    f = WAYS[way](ends_late)
    x = leaf()
    expected = torch.autograd.grad(ends_late(x).sum(), x)
    for changes in ({"debug": True}, {"early_stop": False}, {"determinism_check": "values"}):
        with override(**changes):
            assert_same(torch.autograd.grad(f(x).sum(), x), expected)


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


def test_disabled_around_the_backward_only() -> None:
    found = []

    def fn(x: Tensor) -> Tensor:
        found.append(is_disabled())
        return x.sin().exp()

    out = remat.remat(fn)(leaf()).sum()
    with disable_remat():
        out.backward()
    assert found == [False, False]


def test_the_innermost_override_applies_and_other_options_stay() -> None:
    f = remat.remat(ends_late)
    with override(early_stop=False, debug=True):
        with override(early_stop=True):
            assert not runs_to_its_end(f(leaf()))
            with pytest.raises(RecomputeMismatchError, match=r"aten\.mul"):
                remat.remat(other_operation)(leaf()).sum().backward()
        assert runs_to_its_end(f(leaf()))
        with override():
            assert runs_to_its_end(f(leaf()))
    assert not runs_to_its_end(f(leaf()))


def test_precedence_over_options_of_the_region_and_torchs_switches() -> None:
    f = remat.remat(early_stop=False)(ends_late)
    with override(early_stop=True):
        assert not runs_to_its_end(f(leaf()))
        with SWITCHES[1](False):
            assert not runs_to_its_end(f(leaf()))
    with SWITCHES[1](True):
        assert not runs_to_its_end(f(leaf()))
        with override(early_stop=False):
            assert runs_to_its_end(f(leaf()))
        with override(debug=True):
            assert not runs_to_its_end(f(leaf()))
    assert runs_to_its_end(f(leaf()))


def test_in_a_region() -> None:
    """An override inside the function also applies in its recompute."""

    def ends(**changes: Any) -> int:
        """How many runs of the inner region reach its end: forward, outer recompute, inner recompute."""
        ended = []

        def inner(x: Tensor) -> Tensor:
            y = x.sin().exp().sin()
            ended.append(is_recomputing())
            return y

        def outer(x: Tensor) -> Tensor:
            with override(**changes):
                y = remat.remat(inner)(x)
            return y.sin()

        with override(early_stop=True):
            remat.remat(outer)(leaf()).sum().backward()
        return len(ended)

    assert (ends(), ends(early_stop=False)) == (2, 3)


def test_options_are_restored_after_an_exception() -> None:
    f = remat.remat(ends_late)
    with pytest.raises(KeyError), override(early_stop=False):
        raise KeyError
    assert not runs_to_its_end(f(leaf()))
    with override(early_stop=False):
        with pytest.raises(KeyError), override(early_stop=True), disable_remat():
            raise KeyError
        assert runs_to_its_end(f(leaf())) and not is_disabled()

    def fails(x: Tensor) -> Tensor:
        if is_recomputing():
            raise KeyError
        return x.sin().exp()

    with override(early_stop=False):
        out = remat.remat(fails)(leaf())
    with override(early_stop=True):
        with pytest.raises(KeyError):
            out.sum().backward()
        assert not runs_to_its_end(remat.remat(early_stop=False)(ends_late)(leaf()))
    assert not runs_to_its_end(f(leaf()))


def test_disable_remat_and_override() -> None:
    runs = []

    def fn(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return ends_late(x)

    f = remat.remat(fn)
    for contexts in (
        (disable_remat(), override(early_stop=False)),
        (override(early_stop=False), disable_remat()),
    ):
        with contexts[0], contexts[1]:
            f(leaf()).sum().backward()
            assert is_disabled()
    assert runs == [False, False] and not is_disabled()


def test_override_is_thread_local() -> None:
    f = remat.remat(ends_late)
    found: list[bool] = []

    def in_a_thread(work: Callable[[], bool]) -> None:
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
        thread.join()

    with override(early_stop=False):
        in_a_thread(lambda: runs_to_its_end(f(leaf())))
        late = f(leaf())
    in_a_thread(lambda: runs_to_its_end(late))
    assert found == [False, True]


def test_as_a_decorator() -> None:
    @override(early_stop=False)
    def call(x: Tensor) -> Tensor:
        return remat.remat(ends_late)(x)

    assert runs_to_its_end(call(leaf()))
    assert not runs_to_its_end(remat.remat(ends_late)(leaf()))


def test_regions_are_not_changed() -> None:
    """A copy made under an override has the region's own options."""
    model = remat.nn.apply(Calls(ends_late), Calls)
    with override(early_stop=False):
        assert runs_to_its_end(model(leaf()))
        twin = copy.deepcopy(model)
    assert not runs_to_its_end(twin(leaf())) and not runs_to_its_end(model(leaf()))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"debug": 1}, TypeError, "debug must be True or False, got 1"),
        ({"early_stop": "no"}, TypeError, "early_stop must be True or False, got 'no'"),
        ({"preserve_rng_state": 0}, TypeError, "preserve_rng_state must be True or False"),
        ({"determinism_check": "all"}, ValueError, "determinism_check must be one of"),
        ({"policy": None}, TypeError, "policy"),
    ],
)
def test_wrong_options_are_errors(changes: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text), override(**changes):
        pass
    assert not runs_to_its_end(remat.remat(ends_late)(leaf()))


# --- is_disabled ------------------------------------------------------------------------------------------------------


def test_is_disabled() -> None:
    assert not is_disabled()
    with disable_remat():
        assert is_disabled()
        with disable_remat():
            assert is_disabled()
        assert is_disabled()
    with override(debug=True):
        assert not is_disabled()
    found: list[bool] = []
    with disable_remat():
        thread = threading.Thread(target=lambda: found.append(is_disabled()))
        thread.start()
        thread.join()
    assert found == [False] and not is_disabled()


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_a_compiled_region_keeps_its_own_options() -> None:
    torch._dynamo.reset()
    f = torch.compile(remat.remat(lambda x: F.dropout(x.sin(), 0.5).exp()), backend="aot_eager", fullgraph=True)
    x = rand(64)

    def zeros() -> Tensor:
        torch.manual_seed(0)
        out = f(x)
        torch.manual_seed(1)
        return torch.autograd.grad(out.sum(), x)[0] == 0

    expected = zeros()
    with override(preserve_rng_state=False, debug=True, early_stop=False, determinism_check="values"):
        assert torch.equal(zeros(), expected)
        torch._dynamo.reset()
        assert torch.equal(zeros(), expected)


def test_a_region_with_a_graph_break_is_eager() -> None:
    torch._dynamo.reset()
    f = torch.compile(remat.remat(ends_late), backend="eager")  # `is_recomputing` breaks the graph
    assert not runs_to_its_end(f(leaf()))
    with override(early_stop=False):
        assert runs_to_its_end(f(leaf()))
