"""A rematerialized function: its options, kinds, copies and arguments, and where a call of it is a plain call."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import threading
from collections.abc import Callable

import pytest
import torch
from cases import assert_same, rand
from side_by_side import Runs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.measure import held_bytes
from remat import disable_remat, is_recomputing, policies, remat


def backward(f: Callable, x: Tensor | None = None) -> Tensor:
    x = rand(3) if x is None else x
    return torch.autograd.grad(f(x).sum(), x)[0]


def smooth(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


# --- wrong options and functions --------------------------------------------------------------------------------------


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
