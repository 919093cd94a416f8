"""A rematerialized function looks like the function, and some calls of it are plain calls."""

from __future__ import annotations

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

from remat import disable_remat, is_recomputing, policies, remat


def backward(f: Callable, x: Tensor | None = None) -> Tensor:
    x = rand(3) if x is None else x
    return torch.autograd.grad(f(x).sum(), x)[0]


def smooth(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


@remat(policy=policies.save_matmuls)
def decorated(x: Tensor) -> Tensor:
    """The documentation."""
    return smooth(x)


def test_a_rematerialized_function_looks_like_the_function() -> None:
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "The documentation.")
    assert re.match(r"remat\(<function decorated at .*>, policy=policies.save_matmuls\)", repr(decorated))
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert decorated.__code__ is decorated.__wrapped__.__code__


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
