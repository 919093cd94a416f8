"""Objects whose classes override Python's special methods in any way, where a region finds its variables."""

from __future__ import annotations

import collections
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn

import remat
from remat import policies


def unusable(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(type(self).__name__)


SPECIAL = [
    "__len__", "__iter__", "__eq__", "__ne__", "__hash__", "__bool__", "__getattr__", "__getitem__", "__contains__",
    "__reversed__", "__repr__", "__str__", "__add__", "__lt__",
]  # fmt: skip
UNUSABLE: dict[str, Any] = {
    **dict.fromkeys([*SPECIAL, "keys", "values", "items", "get", "copy", "pop", "index", "count"], unusable),
    "__class_getitem__": None,
}


def subclass(base: type, **names: Any) -> Any:
    """A class that has the contents of its base, and no usable special method of its own."""
    return type(f"Unusable{base.__name__.title()}", (base,), {**UNUSABLE, **names, "__module__": __name__})


class Holder:
    def __init__(self, w: Tensor) -> None:
        self.w = w


class Slots:
    __slots__ = ("w",)

    def __init__(self, w: Tensor) -> None:
        self.w = w


Pair = collections.namedtuple("Pair", "w n")
Tuple, List, Dict = subclass(tuple), subclass(list), subclass(dict)
Ordered, Default, Named = subclass(OrderedDict), subclass(defaultdict), subclass(Pair)
Object, Slotted = subclass(Holder), subclass(Slots, __slots__=())
Key = subclass(object, __hash__=lambda self: 7)
KEYS = [Key()]  # pytest looks into the objects of a module

# A container of the tensor, and how the base's own methods read it.
PLACES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda w: Tuple((w, 2)), lambda c: tuple.__getitem__(c, 0)),
    "named tuple": (lambda w: Named(w, 2), lambda c: tuple.__getitem__(c, 0)),
    "list": (lambda w: List([w, 2]), lambda c: list.__getitem__(c, 0)),
    "dict": (lambda w: Dict(w=w, n=2), lambda c: dict.__getitem__(c, "w")),
    "ordered dict": (lambda w: Ordered([("w", w), ("n", 2)]), lambda c: OrderedDict.__getitem__(c, "w")),
    "default dict": (lambda w: Default(int, {"w": w, "n": 2}), lambda c: dict.__getitem__(c, "w")),
    "object": (Object, lambda c: c.w),
    "slots": (Slotted, lambda c: c.w),
    "nested tuples": (lambda w: (Tuple((Tuple((w,)),)), 2), lambda c: tuple.__getitem__(tuple.__getitem__(c[0], 0), 0)),
    "key": (lambda w: {KEYS[0]: w}, lambda c: c[KEYS[0]]),
    "among": (lambda w: [Tuple(), List(), Dict(), KEYS[0], w], lambda c: c[4]),
}


class Model(nn.Module):
    def __init__(self, container: Any, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.container, self.read = container, read

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.read(self.container)).sin().cos()


class Functor:
    def __init__(self, container: Any, read: Callable[[Any], Tensor]) -> None:
        self.container, self.read = container, read

    __call__ = Model.forward
    __eq__ = __bool__ = __len__ = __iter__ = unusable  # `__getattr__` is also called by `functools.wraps` and `inspect`
    __hash__ = unusable  # type: ignore[assignment]


def closure(container: Any, read: Callable[[Any], Tensor]) -> Callable:
    return lambda x: (x * read(container)).sin().cos()


def default(container: Any, read: Callable[[Any], Tensor]) -> Callable:
    return lambda x, container=container: (x * read(container)).sin().cos()


def partial(container: Any, read: Callable[[Any], Tensor]) -> Callable:
    return functools.partial(lambda container, x: (x * read(container)).sin().cos(), container)


def argument(container: Any, read: Callable[[Any], Tensor], wrap: Any) -> Callable:
    fn = wrap(lambda x, container: (x * read(container)).sin().cos())
    return lambda x: fn(x, container)


WAYS: dict[str, Callable[[Any, Callable, Callable], Callable]] = {
    "module": lambda container, read, wrap: wrap(Model(container, read)),
    "callable object": lambda container, read, wrap: wrap(Functor(container, read)),
    "closure": lambda container, read, wrap: wrap(closure(container, read)),
    "default": lambda container, read, wrap: wrap(default(container, read)),
    "partial": lambda container, read, wrap: wrap(partial(container, read)),
    "argument": argument,
}


def by_autograd(make: Callable, wrap: Callable) -> Any:
    w, x = torch.linspace(1, 2, 3).requires_grad_(), torch.ones(3)
    return torch.autograd.grad(make(w, wrap)(x).sum(), w)


def by_grad(make: Callable, wrap: Callable) -> Any:
    return torch.func.grad(lambda w: make(w, wrap)(torch.ones(3)).sum())(torch.linspace(1, 2, 3))


def by_second_grad(make: Callable, wrap: Callable) -> Any:
    return torch.func.jacrev(lambda w: by_grad(lambda u, wrap: make(u * w, wrap), wrap))(torch.ones(3))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("differentiate", [by_autograd, by_grad, by_second_grad])
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=["no policy", "policy"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_contents_are_found_by_the_methods_of_the_base(place: str, way: str, policy: Any, differentiate: Any) -> None:
    build, read = PLACES[place]

    def make(w: Tensor, wrap: Callable) -> Callable:
        return WAYS[way](build(w), read, wrap)

    region = functools.partial(remat.remat, policy=policy)
    if way == "argument" and "tuple" in place and place != "named tuple" and differentiate is not by_autograd:
        with pytest.raises(remat.CaptureError):  # it is no pytree, and can't be changed
            differentiate(make, region)
    else:
        assert_same(differentiate(make, region), differentiate(make, lambda fn: fn))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "among"])
def test_contents_have_their_earlier_values_in_the_recompute(place: str) -> None:
    build, read = PLACES[place]
    holder = [build(torch.tensor(2.0))]
    x = torch.tensor(0.5, requires_grad=True)
    y = remat.remat(lambda x: (x * read(holder[0])).sin())(x)
    later = holder[0] = build(torch.tensor(5.0))
    assert_same(torch.autograd.grad(y, x)[0], 2 * torch.tensor(1.0).cos())
    assert holder[0] is later


def test_a_rebuilt_tuple_keeps_its_attributes() -> None:
    class Scaled(tuple):
        scale = 1

        def __new__(cls, first: Any, second: Any) -> Any:
            return super().__new__(cls, (first, second))

    def grad(wrap: Callable) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            pair = Scaled(w, 1)
            pair.scale = 3
            return wrap(lambda x: (x * pair[0] * pair.scale).sin())(torch.ones(3)).sum()

        return torch.func.grad(loss)(torch.ones(3))

    assert_same(grad(remat.remat), grad(lambda fn: fn))


@pytest.mark.parametrize("method", ["__eq__", "__bool__", "__len__", "__iter__"])
def test_modules_with_special_methods(method: str) -> None:
    """What is remembered for one module is found by identity."""

    class Odd(nn.Linear):
        __hash__ = nn.Module.__hash__

    setattr(Odd, method, unusable)
    module, x = Odd(3, 3), torch.ones(2, 3)
    for _ in range(2):
        expected = torch.autograd.grad(module(x).sum(), [*module.parameters()])
        for region in (remat.remat(module), remat.remat(module.forward), remat.remat(lambda x: module(x))):
            assert_same(torch.autograd.grad(region(x).sum(), [*module.parameters()]), expected)


def test_equal_modules_are_different_modules() -> None:
    """One changes a large buffer in each call, which is copied from then on; the other doesn't."""

    class Counting(nn.Module):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step
            self.count: Tensor
            self.register_buffer("count", torch.zeros(2**19))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Counting)

        __hash__ = lambda self: 1

        def forward(self, x: Tensor) -> Tensor:
            self.count += self.step
            return (x * self.count[0]).sin()

    from remat._core.known import known_of

    assert known_of(Counting(0)) is not known_of(Counting(1))
    assert known_of(first := Counting(0)) is known_of(first)
