"""Every kind of callable can be wrapped by `remat`, and the wrapper behaves like the callable."""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import COPIES
from cases import assert_same, rand
from torch import Tensor

from remat import is_recomputing, policies, remat

RUNS: list[bool] = []


def work(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
    """Works.

    On tensors.
    """
    RUNS.append(is_recomputing())
    return ((x * scale).sin() + shift).exp().cos()


@remat
def decorated(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
    """Works."""
    return work(x, scale, shift=shift)


class Works:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __call__(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return work(x, scale * self.scale, shift=shift)

    def method(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return self(x, scale, shift=shift)

    decorated = remat(early_stop=False)(method)

    @classmethod
    def of_class(cls, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return cls()(x, scale, shift=shift)

    @classmethod
    @remat
    def class_outside(cls, *args: Any, **kwargs: Any) -> Tensor:
        return cls.of_class(*args, **kwargs)

    class_inside = remat(of_class)
    static_outside = staticmethod(remat(work))
    static_inside = remat(staticmethod(work))


class Inherits(Works):
    def __init__(self) -> None:
        super().__init__(3.0)

    def decorated(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return super().decorated(x, scale, shift=shift)


OBJECT = Works()
SHIFTED = functools.partial(work, shift=2)
KINDS: dict[str, tuple[Callable, Callable]] = {
    "function": (remat(work), work),
    "decorated": (decorated, work),
    "partial": (remat(SHIFTED), SHIFTED),
    "callable object": (remat(OBJECT), OBJECT),
    "bound method": (remat(OBJECT.method), OBJECT.method),
    "method in the class": (OBJECT.decorated, OBJECT.method),
    "method of a subclass": (Inherits().decorated, Inherits().method),
    "bound classmethod": (remat(Works.of_class), Works.of_class),
    "classmethod outside": (Works.class_outside, Works.of_class),
    "classmethod inside": (Works.class_inside, Works.of_class),
    "staticmethod outside": (Works.static_outside, work),
    "staticmethod inside": (Works.static_inside, work),
}
DIFFERENT: list[tuple[tuple, dict]] = [((), {}), ((2.0,), {}), ((3,), {"shift": torch.ones(3)})]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_callable_is_a_region(kind: str) -> None:
    f, plain = KINDS[kind]
    for args, kwargs in DIFFERENT:
        x = rand(3)
        RUNS.clear()
        actual = torch.autograd.grad(f(x, *args, **kwargs).sum(), x)[0]
        assert RUNS == [False, True]
        assert_same(actual, torch.autograd.grad(plain(x, *args, **kwargs).sum(), x)[0])
        RUNS.clear()
        assert_same(torch.func.grad(lambda x: f(x, *args, **kwargs).sum())(x.detach()), actual)
        assert RUNS == [False, True]


@pytest.mark.parametrize(
    "fn", [work, Works.method, OBJECT.method, Works.of_class, OBJECT, SHIFTED], ids=lambda fn: type(fn).__name__
)
def test_a_wrapper_has_the_metadata_of_the_callable(fn: Callable) -> None:
    f = remat(fn)
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        assert getattr(f, name, None) == getattr(fn, name, None)
    assert f.__wrapped__ == fn and inspect.unwrap(f) == inspect.unwrap(fn)
    assert inspect.signature(f) == inspect.signature(fn) and repr(f) == f"remat({fn!r})"
    assert repr(remat(fn, policy=policies.save_matmuls)) == f"remat({fn!r}, policy=policies.save_matmuls)"
    assert inspect.signature(OBJECT.decorated) == inspect.signature(OBJECT.method)
    assert inspect.signature(Works.class_inside) == inspect.signature(Works.of_class)


COPIED = (
    "decorated", "function", "partial", "callable object", "bound method", "method in the class", "classmethod inside",
    "staticmethod inside",
)  # fmt: skip


@pytest.mark.parametrize("how", [how for how in COPIES if how != "replica"])
@pytest.mark.parametrize("name", COPIED)
def test_copies_are_regions(name: str, how: str) -> None:
    f, x = KINDS[name][0], rand(3)
    again = COPIES[how](f)
    RUNS.clear()
    found = torch.autograd.grad(again(x).sum(), x)
    assert RUNS == [False, True]
    assert_same(found, torch.autograd.grad(f(x).sum(), x))
    assert getattr(again, "__name__", None) == getattr(f, "__name__", None)
    assert (again is f) == (name == "decorated")  # as for a plain function


def test_copies_have_the_options_and_share_nothing() -> None:
    f = remat(Works(3.0), policy=policies.everything_saveable)
    for make_copy in (copy.deepcopy, COPIES["pickle"]):
        again, x = make_copy(f), rand(3)
        RUNS.clear()
        torch.autograd.grad(again(x).sum(), x)
        assert RUNS == [False]
        again._fn.scale = 5.0
        assert_same((f(x), again(x)), (Works(3.0)(x), Works(5.0)(x)))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(remat(lambda x: x))


def test_the_function_gets_its_own_arguments_and_returns_them() -> None:
    seen: list = []

    def fn(*args: Any, **kwargs: Any) -> Any:
        if not is_recomputing():
            seen.extend([*args, *kwargs.values()])
        return (*args, args[0].sin(), None, args[0])

    config, call, x = iter([1, 2]), lambda: None, rand(3)
    out = remat(fn)(x, config, call=call)
    assert all(a is b for a, b in zip(seen, (x, config, call), strict=True))
    assert (out[0] is x, out[1] is config, out[3], out[4] is x) == (True, True, None, True)
    assert_same(torch.autograd.grad((out[0] * out[2]).sum(), x), torch.autograd.grad((x * x.sin()).sum(), x))
    assert next(config) == 1


def test_keywords_may_have_the_names_that_remat_uses() -> None:
    def fn(x: Tensor, *, self: Tensor, args: int, kwargs: int, fn: int, policy: str) -> Tensor:
        assert policy == "dots"
        return (x * self).sin() * args * kwargs * fn

    x, y = rand(3), rand(3, seed=1)
    keywords = {"self": y, "args": 2, "kwargs": 3, "fn": 4, "policy": "dots"}
    found, expected = (torch.autograd.grad(f(x, **keywords).sum(), [x, y]) for f in (remat(fn), fn))
    assert_same(found, expected)


def test_calls_without_tensors_and_without_arguments() -> None:
    assert remat(lambda *a, **k: (a, k))(1, None, b="c") == ((1, None), {"b": "c"})
    assert remat(lambda: None)() is None
