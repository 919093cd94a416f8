"""A rematerialized function: its options, kinds, copies and arguments, and where a call of it is a plain call."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from side_by_side import Runs
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.measure import held_bytes
from remat import PolicyError, disable_remat, is_recomputing, policies, remat
from remat._region.arguments import Tensors, take_apart


def backward(f: Callable, x: Tensor | None = None) -> Tensor:
    x = rand(3) if x is None else x
    return torch.autograd.grad(f(x).sum(), x)[0]


def smooth(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


# --- wrong options and functions --------------------------------------------------------------------------------------


def numbers(x: Tensor) -> Iterator[Tensor]:
    yield x.exp()


async def later(x: Tensor) -> Tensor:
    return x.exp()


class Yields(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x


WRONG: list[tuple[Any, dict, type[Exception], str]] = [
    *((smooth, {"policy": policy}, PolicyError, re.escape(repr(policy))) for policy in ("dots", 3, True, {"a": 1})),
    *((fn, {}, TypeError, "remat takes a function or another callable, got") for fn in (3, "sin", [torch.sin])),
    (torch.ones(3), {}, TypeError, r"Pass the function, not its result: `remat\(fn\)\(x\)`"),
    (nn.Linear, {}, TypeError, "not the class Linear: wrap an instance, or its method"),
    *((fn, {}, TypeError, "is a generator function") for fn in (numbers, classmethod(numbers), Yields())),
    (later, {}, TypeError, "later is an async function"),
    *((smooth, {"determinism_check": check}, ValueError, f"one of 'metadata', 'values', 'none'; got {check!r}")
      for check in ("value", None, True, "")),
    (smooth, {"determinism_check": "default"}, ValueError, "torch's 'default' is 'metadata' here"),
    *((smooth, {option: value}, TypeError, f"{option} must be True or False, got ")
      for option, value in (("preserve_rng_state", None), ("early_stop", 1), ("debug", torch.tensor(True)))),
    (smooth, {"static_argnums": None}, TypeError, "unexpected keyword argument 'static_argnums'"),
]  # fmt: skip


@pytest.mark.parametrize("fn, options, error, message", WRONG)
def test_wrong_options_and_functions_are_errors_at_once(fn: Any, options: dict, error: type, message: str) -> None:
    for wrap in (lambda: remat(fn, **options), lambda: remat(**options)(fn)):
        with pytest.raises(error, match=message):
            wrap()


def test_a_result_that_is_computed_later_is_an_error() -> None:
    for call in (remat(lambda x: numbers(x)), torch.vmap(remat(lambda x: numbers(x)))):
        with pytest.raises(TypeError, match=r"returned a generator, whose body would run outside the region\. Return"):
            call(rand(3))


# --- kinds of functions, and copies of them ---------------------------------------------------------------------------


@remat(policy=policies.save_matmuls)
def decorated(x: Tensor) -> Tensor:
    """The documentation."""
    return smooth(x)


class Methods:
    def __init__(self) -> None:
        self.scale = torch.full((3,), 2.0, dtype=torch.float64)

    @remat
    def method(self, x: Tensor) -> Tensor:
        return smooth(x * self.scale)

    @remat
    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return smooth(x * 2)

    partial = remat(functools.partial(lambda x, n: smooth(x * n), n=2))


CALLS: dict[str, Callable] = {
    "method": Methods().method,
    "method of the class": functools.partial(Methods.method, Methods()),
    "class method": Methods.of_class,
    "partial in a class": Methods().partial,
    "copied": copy.deepcopy(remat(Methods().method)),
    "pickled": pickle.loads(pickle.dumps(remat(Methods().of_class))),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_and_copies_are_regions(name: str) -> None:
    plain, x = lambda x: smooth(x * 2), rand(3)
    assert_same(backward(CALLS[name]), backward(plain))
    assert held_bytes(CALLS[name], x) < held_bytes(plain, x)


def test_a_rematerialized_function_looks_like_the_function() -> None:
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "The documentation.")
    assert re.match(r"remat\(<function decorated at .*>, policy=policies.save_matmuls\)", repr(decorated))
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert decorated.__code__ is decorated.__wrapped__.__code__


# --- where a call is a plain call -------------------------------------------------------------------------------------


def test_is_recomputing() -> None:
    seen: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append(is_recomputing()))  # it is thread-local
        thread.start()
        thread.join()
        seen.append(is_recomputing())
        return smooth(x)

    backward(remat(fn))
    torch.func.grad(lambda x: remat(fn)(x).sum())(torch.randn(3))
    assert seen == [False, False, False, True] * 2 and not is_recomputing()


def test_under_disable_remat_regions_are_plain_calls() -> None:
    runs, x = Runs(smooth), rand(3)
    region, expected = remat(runs), backward(smooth, x)
    with disable_remat():
        with disable_remat():
            pass
        assert_same(backward(region, x), expected)
        assert_same(torch.vmap(torch.func.grad(region))(x), expected)
    assert_same(backward(disable_remat()(region), x), expected)
    assert runs.count == 3
    loss = region(x).sum()
    with pytest.raises(KeyError), disable_remat():  # regions that ran before are recomputed
        loss.backward()
        raise KeyError
    backward(remat(lambda x: disable_remat()(region)(x) * region(x)), x)
    assert runs.count == 3 + 2 + 5


def test_a_region_is_inlined_where_make_fx_traces() -> None:
    x = rand(3)
    traced = make_fx(lambda x: torch.autograd.grad(remat(smooth)(x).sum(), x)[0])(x)
    assert_same(traced(x), backward(smooth, x))
    assert [str(node.target) for node in traced.graph.nodes].count("aten.exp.default") == 1


# --- arguments --------------------------------------------------------------------------------------------------------

A, B, C = (torch.full((2,), float(i)) for i in range(3))
ARGUMENTS: dict[str, tuple[tuple, dict, list[str]]] = {
    "positional": ((A, B), {}, ["args[0]", "args[1]"]),
    "twice": ((A, B, A), {}, ["args[0]", "args[1]"]),
    "keyword": ((A,), {"w": B}, ["args[0]", "kwargs['w']"]),
    "a number": ((A, 3, B), {}, ["args[0]", "args[2]"]),
    "containers": (({"z": A, "y": [B]},), {"w": (C,)}, ["args[0]['z']", "args[0]['y'][0]", "kwargs['w'][0]"]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_tensors_go_back_where_they_were(name: str) -> None:
    args, kwargs, names = ARGUMENTS[name]
    given, tensors = take_apart(args, kwargs)
    assert (given is take_apart(args, kwargs)[0]) is (name == "positional")  # these share one structure
    assert isinstance(given, Tensors) is (name in ("positional", "keyword", "containers"))
    assert sorted(given.name(i) for i in range(len(tensors))) == sorted(f"argument {name}" for name in names)
    filled = given.filled([*tensors, torch.zeros(2)])  # the last one is an operand beyond the arguments
    assert_same([list(filled[0]), filled[1]], [list(args), kwargs])
