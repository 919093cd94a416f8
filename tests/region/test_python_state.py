"""Python state that a function reads and that changes after its first run: the recompute sees the earlier state."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import remat

STEP: Any = 3
SHIFT: Any = None
Wrap = Callable[[Callable], Callable]


def plain(fn: Callable) -> Callable:
    return fn


def nested(fn: Callable) -> Callable:
    inner = remat(fn)
    return remat(lambda *args: inner(*args).cos())


def plainly_nested(fn: Callable) -> Callable:
    return lambda *args: fn(*args).cos()


def by_autograd(f: Callable, x: Tensor, change: Callable[[], object]) -> Any:
    x = x.clone().requires_grad_()
    out = f(x)
    change()
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


def by_vjp(f: Callable, x: Tensor, change: Callable[[], object]) -> Any:
    out, pull = torch.func.vjp(f, x)
    change()
    return out, pull(2 * out)[0]


def by_grad(f: Callable, x: Tensor, change: Callable[[], object]) -> Any:
    def loss(x: Tensor) -> Tensor:
        out = f(x)
        change()
        return out.square().sum()

    return f(x), torch.func.grad(loss)(x)


def by_second_grad(f: Callable, x: Tensor, change: Callable[[], object]) -> Any:
    return torch.func.grad(lambda x: by_grad(f, x, change)[1].sum())(x)


WAYS = {"autograd": by_autograd, "vjp": by_vjp, "grad": by_grad, "grad-grad": by_second_grad}


@dataclasses.dataclass
class Case:
    """A function, a change of what it reads, and a way to observe its state afterwards."""

    fn: Callable
    change: Callable[[], object] = lambda: None
    state: Callable[[], Any] = lambda: None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.n, self.scale, self.k = 1, 1.0, None
        self.flag = True
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.linear(x)).tanh() * self.scale * self.n
        if hasattr(self, "late"):
            h = h * self.late
        return (h if self.k is None else h * self.k).sin() if self.flag else h.exp()


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.late = x.detach().sum() if self.n % 2 else 2.0
        return super().forward(x)


class Cached(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = torch.cat([*self.cache, h]).tanh().sum(0, keepdim=True).sin()
        self.cache.append(h.detach())
        return h


class Slotted:
    __slots__ = ("late", "scale")

    def __init__(self) -> None:
        self.scale: Any = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin() * getattr(self, "late", 1.0)


def module(change: Callable[[Any], object], cls: type = Layer) -> Callable[[], Case]:
    def make() -> Case:
        layer = cls()

        def state() -> Any:
            own = ("training", "n", "scale", "k", "flag", "late", "cache")
            return [[m.training for m in layer.modules()], [getattr(layer, n, "none") for n in own], list(vars(layer))]

        return Case(layer, lambda: change(layer), state)

    return make


def delete_flag_and_add(layer: Any) -> None:
    layer.__dict__.update(late=3.0, n=layer.n + 1, scale=2.0, flag=False)


def of_slots() -> Case:
    held = Slotted()

    def change() -> None:
        held.scale, held.late = 5.0, 7.0

    return Case(held, change, lambda: (held.scale, held.late))


def of_globals() -> Case:
    global STEP, SHIFT
    STEP, SHIFT = 3, None

    def fn(x: Tensor) -> Tensor:
        global STEP
        STEP += 1
        h = (x * STEP).sin()
        return h if SHIFT is None else h * SHIFT

    def change() -> None:
        global STEP, SHIFT
        STEP, SHIFT = 10, torch.tensor(3.0)

    return Case(fn, change, lambda: (STEP, SHIFT))


def of_nonlocal() -> Case:
    n = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return (x * n).sin()

    def change() -> None:
        nonlocal n
        n = 10

    return Case(fn, change, lambda: n)


CASES: dict[str, Callable[[], Case]] = {
    "eval": module(lambda m: m.eval()),
    "train": module(lambda m: m.train(not m.training)),
    "part-eval": module(lambda m: m.dropout.eval()),
    "dropout.p": module(lambda m: setattr(m.dropout, "p", 0.0)),
    "scale": module(lambda m: setattr(m, "scale", 3.0)),
    "none-then-tensor": module(lambda m: setattr(m, "k", torch.tensor(4.0))),
    "flag": module(lambda m: setattr(m, "flag", False)),
    "added": module(delete_flag_and_add),
    "counting": module(lambda m: None, Counting),
    "counting-changed": module(delete_flag_and_add, Counting),
    "cache": module(lambda m: None, Cached),
    "cache-cleared": module(lambda m: m.cache.clear(), Cached),
    "cache-replaced": module(lambda m: setattr(m, "cache", []), Cached),
    "slots": of_slots,
    "globals": of_globals,
    "nonlocal": of_nonlocal,
}

X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture(autouse=True)
def its_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(globals(), "STEP", 3)
    monkeypatch.setitem(globals(), "SHIFT", None)
    yield


def run(make: Callable[[], Case], wrap: Wrap, way: Callable) -> Any:
    torch.manual_seed(1)
    case = make()
    result = way(wrap(case.fn), X, case.change)
    return result, case.state()


def values(tree: Any) -> Any:
    """Comparable values; of tensors only the shape, as they may come from a transform that has ended."""
    if isinstance(tree, Tensor):
        return [*tree.shape]
    if isinstance(tree, (list, tuple)):
        return [values(item) for item in tree]
    if isinstance(tree, dict):
        return {key: values(item) for key, item in tree.items()}
    return [*tree.encode()] if isinstance(tree, str) else tree


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrap, reference", [(remat, plain), (nested, plainly_nested)], ids=["one", "nested"])
def test_state_of_the_first_run(name: str, way: Callable, wrap: Wrap, reference: Wrap) -> None:
    expected, after = run(CASES[name], reference, way)
    actual, state = run(CASES[name], wrap, way)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(values(state), values(after))


def test_the_same_objects_remain_after_a_backward() -> None:
    layer = Cached()
    cache = layer.cache
    f = remat(layer)
    x = X.clone().requires_grad_()
    first = f(x)
    second = f(x)
    items = list(cache)
    attributes = dict(vars(layer))
    (first + second).sum().backward()
    assert layer.cache is cache
    assert len(cache) == 2 and all(a is b for a, b in zip(cache, items))
    assert all(vars(layer)[name] is value for name, value in attributes.items())
    assert list(vars(layer)) == list(attributes)


class Failing(Layer):
    """A module that counts and logs its runs, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.fail = collections.deque([False])
        self.log: list[int] = []
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.log.append(self.runs)
        if self.fail[0]:
            raise RuntimeError("in the run again")
        return (x * self.runs).sin().exp()


@pytest.mark.parametrize("way", [by_autograd, by_vjp])
def test_an_exception_in_the_recompute_leaves_the_state(way: Callable) -> None:
    layer = Failing()
    log = layer.log

    def change() -> None:
        layer.runs, layer.fail[0] = 5, True

    with pytest.raises(RuntimeError, match="in the run again"):
        way(remat(layer), X, change)
    assert layer.runs == 5 and layer.log is log and log == [1]


class Inner(Layer):
    """A module whose first run is abandoned, as it calls a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.func.grad(lambda x: (x * self.runs).sin().sum())(x) * x


def test_an_abandoned_first_run_leaves_no_trace() -> None:
    def program(wrap: Wrap) -> Any:
        layer = Inner()
        x = X.clone().requires_grad_()
        out = wrap(layer)(x)
        return out.detach(), torch.autograd.grad(out.sum(), x), layer.runs

    torch.testing.assert_close(program(remat), program(plain))


def test_contents_of_containers_in_a_closure_are_not_restored() -> None:
    log, counter = [], collections.Counter()

    def fn(x: Tensor) -> Tensor:
        log.append(1)
        counter["n"] += 1
        return x.sin().exp()

    by_autograd(remat(fn), X, lambda: None)
    assert len(log) == counter["n"] == 2
