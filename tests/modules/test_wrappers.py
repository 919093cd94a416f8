"""Every kind of callable can be wrapped, and the wrapper behaves like the callable."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from remat import is_recomputing, remat

RUNS: list[bool] = []


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def work(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
    """Works.

    On tensors.
    """
    RUNS.append(is_recomputing())
    return ((x * scale).sin() + shift).exp().cos()


def check(f: Callable, plain: Callable, *args: Any, **kwargs: Any) -> None:
    """Check that `f` is a region, with the values and gradients of `plain`."""
    x = leaf(3)
    RUNS.clear()
    actual = torch.autograd.grad(f(x, *args, **kwargs).sum(), x)
    assert RUNS == [False, True]
    same(actual, torch.autograd.grad(plain(x, *args, **kwargs).sum(), x))
    RUNS.clear()
    (func,) = torch.func.grad(lambda x: f(x, *args, **kwargs).sum())(x.detach()).unsqueeze(0)
    assert RUNS == [False, True]
    same(func, actual[0])


# --- functions --------------------------------------------------------------------------------------


@remat
def decorated(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
    """Works."""
    return work(x, scale, shift=shift)


@remat()
def decorated_with_nothing(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
    return work(x, scale, shift=shift)


@remat(policy=None, early_stop=False, determinism_check="values", debug=False)
def decorated_with_options(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
    return work(x, scale, shift=shift)


class Works:
    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __call__(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return work(x, scale * self.scale, shift=shift)

    def method(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return self(x, scale, shift=shift)

    @remat
    def decorated(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        """Works."""
        return self(x, scale, shift=shift)

    @remat(early_stop=False)
    def with_options(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return self(x, scale, shift=shift)

    @classmethod
    def of_class(cls, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return cls()(x, scale, shift=shift)

    @staticmethod
    def of_nobody(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return work(x, scale, shift=shift)

    @classmethod
    @remat
    def class_outside(cls, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return cls()(x, scale, shift=shift)

    @remat
    @classmethod
    def class_inside(cls, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return cls()(x, scale, shift=shift)

    @staticmethod
    @remat
    def static_outside(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return work(x, scale, shift=shift)

    @remat
    @staticmethod
    def static_inside(x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return work(x, scale, shift=shift)


class Inherits(Works):
    def __init__(self) -> None:
        super().__init__(3.0)

    def decorated(self, x: Tensor, scale: Any = 1, /, *, shift: Any = 0) -> Tensor:
        return super().decorated(x, scale, shift=shift)


OBJECT = Works()
KINDS: dict[str, tuple[Callable, Callable]] = {
    "function": (remat(work), work),
    "decorated": (decorated, work),
    "decorated with nothing": (decorated_with_nothing, work),
    "decorated with options": (decorated_with_options, work),
    "lambda": (remat(lambda x, s=1, shift=0: work(x, s, shift=shift)), work),
    "partial": (remat(functools.partial(work, shift=2)), functools.partial(work, shift=2)),
    "partial of it": (functools.partial(remat(work), shift=2), functools.partial(work, shift=2)),
    "callable object": (remat(OBJECT), OBJECT),
    "bound method": (remat(OBJECT.method), OBJECT.method),
    "method in the class": (OBJECT.decorated, OBJECT.method),
    "method with options": (OBJECT.with_options, OBJECT.method),
    "method of a subclass": (Inherits().decorated, Inherits().method),
    "unbound method": (functools.partial(Works.decorated, OBJECT), OBJECT.method),
    "bound classmethod": (remat(Works.of_class), Works.of_class),
    "classmethod outside": (Works.class_outside, Works.of_class),
    "classmethod inside": (Works.class_inside, Works.of_class),
    "classmethod of an instance": (OBJECT.class_inside, Works.of_class),
    "classmethod of a subclass": (Inherits.class_inside, Inherits.of_class),
    "staticmethod outside": (Works.static_outside, Works.of_nobody),
    "staticmethod inside": (Works.static_inside, Works.of_nobody),
    "staticmethod of an instance": (OBJECT.static_inside, Works.of_nobody),
    "staticmethod's function": (remat(Works.of_nobody), Works.of_nobody),
    "wrapped": (remat(functools.wraps(work)(lambda *a, **k: work(*a, **k))), work),
    "cached property of functools": (remat(functools.lru_cache(maxsize=0)(work)), work),
    "remat twice": (remat(OBJECT.method), OBJECT.method),
}


@pytest.mark.parametrize("pair", KINDS.values(), ids=KINDS)
def test_every_kind_of_callable(pair: tuple[Callable, Callable]) -> None:
    f, plain = pair
    check(f, plain)
    check(f, plain, 2.0)
    if "partial" not in str(plain):
        check(f, plain, 3, shift=torch.ones(3))


def test_torch_function_and_builtin() -> None:
    x = leaf(3)
    for fn in (torch.sin, Tensor.exp, nn.functional.gelu, torch.special.expit):
        same(torch.autograd.grad(remat(fn)(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


def test_remat_of_remat() -> None:
    x = leaf(3)
    RUNS.clear()
    twice = remat(remat(work))
    same(torch.autograd.grad(twice(x).sum(), x), torch.autograd.grad(work(x).sum(), x))
    same(torch.func.grad(lambda x: twice(x).sum())(x.detach()), torch.func.grad(
        lambda x: work(x).sum())(x.detach()))  # fmt: skip


def test_one_method_is_wrapped_once_for_all_instances() -> None:
    a, b = Works(1.0), Works(5.0)
    x = leaf(3)
    loss = a.decorated(x).sum() + b.decorated(x).sum()
    plain = a.method(x).sum() + b.method(x).sum()
    same(torch.autograd.grad(loss, x), torch.autograd.grad(plain, x))
    assert Works.decorated is Works.__dict__["decorated"]


# --- metadata ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [work, Works.method, OBJECT.method, Works.of_class], ids=lambda f: f.__qualname__)
def test_wraps(fn: Callable) -> None:
    f = remat(fn)
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        assert getattr(f, name) == getattr(fn, name)
    assert f.__wrapped__ == fn
    assert inspect.signature(f) == inspect.signature(fn)
    assert inspect.unwrap(f) == inspect.unwrap(fn)
    assert fn.__name__ in repr(f) and repr(f).startswith("remat(")
    assert inspect.getdoc(f) == inspect.getdoc(fn)


def test_signatures() -> None:
    assert inspect.signature(remat(OBJECT)) == inspect.signature(OBJECT)
    partial = functools.partial(work, shift=2)
    assert inspect.signature(remat(partial)) == inspect.signature(partial)
    assert inspect.signature(OBJECT.decorated) == inspect.signature(OBJECT.method)
    assert inspect.signature(Works.class_inside) == inspect.signature(Works.of_class)
    assert callable(remat(partial)) and repr(partial) in repr(remat(partial))


def test_attributes_of_functions() -> None:
    def fn(x: Tensor) -> Tensor:
        return x

    fn.version = 3
    assert remat(fn).version == 3
    assert decorated.__doc__ == "Works." and OBJECT.decorated.__doc__ == "Works."
    assert OBJECT.decorated.__name__ == "decorated"


# --- copies -----------------------------------------------------------------------------------------


COPIED = {
    "decorated": decorated,
    "decorated with options": decorated_with_options,
    "function": remat(work),
    "partial": remat(functools.partial(work, shift=2)),
    "callable object": remat(Works(3.0)),
    "bound method": remat(Works(3.0).method),
    "method in the class": Works(3.0).decorated,
    "classmethod": Works.class_inside,
    "staticmethod": Works.static_inside,
    "function of torch": remat(nn.functional.gelu),
}
COPIES = {
    "pickle": lambda f: pickle.loads(pickle.dumps(f)),
    "old pickle": lambda f: pickle.loads(pickle.dumps(f, protocol=2)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("f", COPIED.values(), ids=COPIED)
def test_copies(f: Callable, make_copy: Callable) -> None:
    again, x = make_copy(f), leaf(3)
    same(torch.autograd.grad(again(x).sum(), x), torch.autograd.grad(f(x).sum(), x))
    RUNS.clear()
    torch.autograd.grad(again(x).sum(), x)
    assert RUNS in ([False, True], [])
    assert getattr(again, "__name__", None) == getattr(f, "__name__", None)


def test_pickled_options() -> None:
    f = pickle.loads(pickle.dumps(remat(work, early_stop=False)))
    RUNS.clear()
    x = leaf(3)
    torch.autograd.grad(f(x).sum(), x)
    assert RUNS == [False, True]
    assert repr(f) == repr(remat(work, early_stop=False))


def test_a_lambda_is_not_picklable() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(remat(lambda x: x))


def test_deepcopy_does_not_share() -> None:
    works = Works(3.0)
    f = remat(works)
    again = copy.deepcopy(f)
    works.scale = 5.0
    x = torch.randn(3)
    same(again(x), Works(3.0)(x))
    same(f(x), Works(5.0)(x))


# --- modules ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.5)])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("shift", torch.zeros(4))
        self.width = 4

    def forward(self, x: Tensor, power: int = 1, *, flag: bool = False) -> Tensor:
        RUNS.append(is_recomputing())
        y = self.layers[0](self.norm(self.linear(x))).tanh()
        y = self.layers[1](y) if not flag else y
        return (y * self.scale * self.mask + self.shift).exp() ** power

    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    net = Net()
    plain = copy.deepcopy(net)
    return remat(net), plain


def step(module: nn.Module, x: Tensor, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    module.zero_grad()
    module(x, **kwargs).sum().backward()
    return [p.grad for p in module.parameters()], list(module.buffers())


def test_module_step(pair: tuple) -> None:
    f, plain = pair
    x = torch.randn(5, 3)
    # The statistics of the batch norm are tested elsewhere.
    f.eval(), plain.eval()
    for kwargs in ({}, {"flag": True}, {"power": 2}):
        RUNS.clear()
        actual = step(f, x, **kwargs)
        assert RUNS == [False, True]
        same(actual, step(plain, x, **kwargs))


def test_module_is_a_module(pair: tuple) -> None:
    f, plain = pair
    assert isinstance(f, nn.Module)
    for names in ("named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(f, names)()] == [n for n, _ in getattr(plain, names)()]
    assert [n for n, _ in f.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in f.named_children()] == [n for n, _ in plain.named_children()]
    assert len(list(f.modules())) == len(list(plain.modules()))
    assert f.get_parameter("layers.0.weight") is f.layers[0].weight
    assert f.get_submodule("layers.0") is f.layers[0] and f.get_buffer("shift") is f.shift
    assert f.width == 4 and f.linear.in_features == 3
    assert inspect.signature(f.forward).parameters
    assert "Linear(in_features=3" in repr(f) and "Net" in repr(f) and "remat" in repr(f).lower()
    with pytest.raises(AttributeError):
        f.nothing_of_that_name  # noqa: B018


def test_state_dict(pair: tuple) -> None:
    f, plain = pair
    assert list(f.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        for p in plain.parameters():
            p.normal_()
    f.load_state_dict(plain.state_dict())
    same(f.state_dict(), plain.state_dict())
    other = Net()
    other.load_state_dict(f.state_dict())
    same(dict(other.state_dict()), dict(plain.state_dict()))
    f.load_state_dict(plain.state_dict(), assign=True)
    assert f.linear.weight.data_ptr() == plain.linear.weight.data_ptr()
    wrapped = nn.ModuleDict({"a": remat(Net())})
    assert list(wrapped.state_dict()) == list(nn.ModuleDict({"a": Net()}).state_dict())


def test_shared_with_the_wrapped_module() -> None:
    net = Net()
    f = remat(net)
    assert all(a is b for a, b in zip(f.parameters(), net.parameters(), strict=True))
    f.scale = nn.Parameter(torch.zeros(4))
    assert net.scale is f.scale
    net.extra = nn.Parameter(torch.zeros(1))
    assert "extra" in dict(f.named_parameters())
    net.register_buffer("late", torch.ones(1))
    assert "late" in f.state_dict()
    f.shift = torch.ones(4)
    assert net.shift is f.shift and net.shift.sum() == 4


def test_train_and_eval(pair: tuple) -> None:
    f, plain = pair
    x = torch.randn(5, 3)
    for mode in (False, True, False):
        f.train(mode), plain.train(mode)
        assert f.training is mode
        assert [m.training for m in f.modules()] == [m.training for m in plain.modules()]
        torch.manual_seed(0)
        actual = f(x)
        torch.manual_seed(0)
        same(actual, plain(x))
    outer = nn.Sequential(f).train()
    assert f.layers[1].training and f.training
    outer.eval()
    assert not f.layers[1].training
    torch.manual_seed(0)
    same(outer(x), plain(x))


def test_wrapped_in_eval_mode() -> None:
    f = remat(Net().eval())
    assert not f.training and not f.norm.training


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.double(),
        lambda m: m.half().double(),
        lambda m: m.to("cpu", dtype=torch.float64, non_blocking=True),
        lambda m: m._apply(lambda t: t.double()),
    ],
)
def test_to(move: Callable) -> None:
    net = Net().eval()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(p.half())
        for b in net.buffers():
            b.copy_(b.half())
    f, plain = remat(copy.deepcopy(net)), move(copy.deepcopy(net))
    assert move(f) is f
    assert {p.dtype for p in f.parameters()} == {torch.float64}
    x = torch.randn(5, 3, dtype=torch.float64)
    same(step(f, x, flag=True), step(plain, x, flag=True))


def test_to_empty_from_meta() -> None:
    with torch.device("meta"):
        f = remat(Net())
    f.to_empty(device="cpu")
    assert {p.device.type for p in f.parameters()} == {"cpu"}
    f.load_state_dict(Net().state_dict())


def test_requires_grad_zero_grad_apply_and_optimizer(pair: tuple) -> None:
    f, plain = pair
    f.eval(), plain.eval()
    x = torch.randn(5, 3)
    seen: list = []
    f.apply(seen.append)
    assert len(seen) == len(list(plain.modules()))
    results = []
    for module in (f, plain):
        module.linear.requires_grad_(False)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).sum().backward()
            optimizer.step()
        results.append(list(module.parameters()))
        assert module.linear.weight.grad is None
        module.zero_grad()
        assert all(p.grad is None for p in module.parameters())
    same(*results)


def test_functional_call(pair: tuple) -> None:
    f, plain = pair
    f.eval(), plain.eval()
    x = torch.randn(5, 3)
    params = {n: torch.randn_like(p) for n, p in plain.named_parameters()}

    def loss(module: nn.Module) -> Callable:
        return lambda params: functional_call(module, params, (x,), {"flag": True}).sum()

    same(torch.func.grad(loss(f))(params), torch.func.grad(loss(plain))(params))
    per_sample = [
        torch.vmap(torch.func.grad(lambda p, row: functional_call(m, p, (row[None],)).sum()), (None, 0))(params, x)
        for m in (f, plain)
    ]
    torch.testing.assert_close(*per_sample)


@pytest.mark.parametrize("make_copy", [COPIES["pickle"], copy.deepcopy])
def test_module_copies(pair: tuple, make_copy: Callable) -> None:
    f, plain = pair
    f.eval(), plain.eval()
    again, x = make_copy(f), torch.randn(5, 3)
    assert type(again) is type(f)
    assert not any(a is b for a, b in zip(again.parameters(), f.parameters(), strict=True))
    same(dict(again.state_dict()), dict(f.state_dict()))
    assert not again.training
    RUNS.clear()
    actual = step(again, x)
    assert RUNS == [False, True]
    same(actual, step(plain, x))
    with torch.no_grad():
        again.scale.zero_()
    assert f.scale.sum() == 4 and again(x).eq(1).all()


def test_copies_of_a_model_with_a_shared_wrapped_module() -> None:
    shared = remat(nn.Linear(3, 3))
    model = nn.Sequential(shared, nn.Tanh(), shared)
    again = copy.deepcopy(model)
    assert again[0] is again[2] and len(list(again.parameters())) == 2
    x = torch.randn(2, 3)
    same(again(x), model(x))


def test_save_and_load(pair: tuple, tmp_path: Any) -> None:
    f, plain = pair
    torch.save(f, tmp_path / "module.pt")
    again = torch.load(tmp_path / "module.pt", weights_only=False)
    f.eval(), again.eval()
    x = torch.randn(2, 3)
    same(again(x), f(x))
    torch.save(f.state_dict(), tmp_path / "state.pt")
    plain.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def hooks_seen(module: nn.Module, x: Tensor) -> list[str]:
    seen: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: seen.append("pre")),
        module.register_forward_hook(lambda m, args, out: seen.append("after")),
        module.register_forward_hook(lambda m, args, out: out * 2),
        module.register_full_backward_hook(lambda m, gi, go: seen.append("backward")),
        module.register_full_backward_pre_hook(lambda m, go: seen.append("backward pre")),
    ]
    x = x.clone().requires_grad_()
    out = module(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    for handle in handles:
        handle.remove()
    return [*seen, out.detach(), grad]


def test_hooks_fire_as_without_remat(pair: tuple) -> None:
    f, plain = pair
    f.eval(), plain.eval()
    x = torch.randn(5, 3)
    actual, expected = hooks_seen(f, x), hooks_seen(plain, x)
    assert actual[:-2] == expected[:-2] == ["pre", "after", "backward pre", "backward"]
    same(actual[-2:], expected[-2:])


def test_hooks_on_submodules_and_on_the_wrapped_module() -> None:
    net = Net().eval()
    seen = []
    net.linear.register_forward_hook(lambda m, a, o: seen.append(("linear", is_recomputing())))
    net.register_forward_hook(lambda m, args, out: out * 3)
    x = torch.randn(5, 3)
    (expected,) = torch.autograd.grad(net(x).sum(), net.scale)
    seen.clear()
    same(torch.autograd.grad(remat(net)(x).sum(), net.scale)[0], expected)
    assert seen == [("linear", False), ("linear", True)]


def test_backward_hooks_on_submodules_fire_once() -> None:
    seen: list = []
    results = []
    for wrap in (remat, lambda f: f):
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        net.load_state_dict({k: torch.ones_like(v) for k, v in net.state_dict().items()})
        net[0].register_full_backward_hook(lambda m, gi, go: seen.append("0"))
        net[2].register_full_backward_hook(lambda m, gi, go: seen.append("2"))
        wrap(net)(torch.ones(2, 3)).sum().backward()
        results.append([p.grad for p in net.parameters()])
    assert seen == ["2", "0", "2", "0"]
    same(*results)


def test_gradient_hooks_on_parameters_fire_once() -> None:
    seen = []
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    layer[0].weight.register_hook(lambda grad: seen.append("hook") or grad * 2)
    layer[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    remat(layer)(torch.ones(2, 3)).sum().backward()
    assert seen == ["hook", "accumulated"]


def test_modules_in_models() -> None:
    class Model(nn.Module):
        def __init__(self, wrap: Callable) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([wrap(Net()) for _ in range(2)])
            self.blocks[1].linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, flag=True)
            return x

    f, plain = Model(remat).eval(), Model(lambda f: f).eval()
    plain.load_state_dict(f.state_dict())
    x = torch.randn(5, 3)
    same(step(f, x), step(plain, x))


def test_method_and_forward_of_a_module(pair: tuple) -> None:
    f, plain = pair
    f.eval(), plain.eval()
    x = leaf(5, 3)
    same(f.forward(x), plain.forward(x))
    method = remat(plain.twice)
    same(
        torch.autograd.grad(method(x).sum(), [x, plain.scale]),
        torch.autograd.grad(plain.twice(x).sum(), [x, plain.scale]),
    )
    same(f.twice(x), plain.twice(x))


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @remat
    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(is_recomputing())
        return self.linear(x).sin().exp()


def test_decorated_forward() -> None:
    model = Decorated()
    x = torch.randn(2, 3)
    RUNS.clear()
    model(x).sum().backward()
    assert RUNS == [False, True]
    expected = torch.autograd.grad(model.linear(x).sin().exp().sum(), list(model.parameters()))
    same([p.grad for p in model.parameters()], list(expected))
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    same(again(x), model(x))


# --- arguments of all kinds -------------------------------------------------------------------------


class Mode(enum.Enum):
    SIN = "sin"
    EXP = "exp"


@dataclasses.dataclass
class Inner:
    scale: Tensor
    power: int = 2
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    items: list
    mode: Mode = Mode.SIN


def odd(x: Tensor, config: Outer, mode: Any = None, *rest: Any, call: Callable | None = None, **more: Any) -> dict:
    RUNS.append(is_recomputing())
    y = getattr(x, config.mode.value)() ** config.inner.power * config.inner.scale
    if mode == "double":
        y = y * 2
    if call is not None:
        y = call(y)
    for item in rest:
        y = y + item if item is not None else y.exp()
    y = y * more.get("factor", 1) + sum(t.sum() for t in config.items if isinstance(t, Tensor))
    return {"y": y, "config": config, "mode": mode, "more": more, None: None}


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}),
        ((None,), {}),
        (("double",), {"call": torch.sin}),
        (("double", 1, 2.5, None, torch.ones(3)), {"call": lambda y: y.cos()}),
        ((Mode.EXP, None), {"factor": 3, "label": "a", "dtype": torch.float32, "on": True}),
        ((b"bytes",), {"call": nn.Tanh(), "size": torch.Size([2]), "slice": slice(1)}),
        ((object(),), {"call": functools.partial(torch.mul, 2), "device": torch.device("cpu")}),
        ((range(3),), {"factor": 1 + 2j, "s": {1, 2}, "kind": int, "module": torch}),
    ],
)
def test_odd_arguments(args: tuple, kwargs: dict) -> None:
    x, scale, item = leaf(3), leaf(3), leaf(2)
    config = Outer(Inner(scale, note=None), [item, None, "text", 3])
    results = []
    for f in (remat(odd), odd):
        RUNS.clear()
        out = f(x, config, *args, **kwargs)
        real = out["y"].real if out["y"].is_complex() else out["y"]
        results.append((out["y"].detach(), torch.autograd.grad(real.sum(), [x, scale, item])))
        assert out["config"].inner.scale is scale and out["config"].items[0] is item
        assert out["config"].mode is Mode.SIN and out["config"].items[1:] == [None, "text", 3]
        assert out["mode"] is (args[0] if args else None) and out[None] is None
        assert {k: v for k, v in kwargs.items() if k != "call"} == out["more"]
    same(*results)


def test_the_function_gets_its_own_arguments() -> None:
    seen: list = []

    def fn(*args: Any, **kwargs: Any) -> Any:
        if not is_recomputing():
            seen.extend([*args, *kwargs.values()])
        return args[0].sin()

    config, call, x = {"a": [1]}, lambda: None, leaf(3)
    remat(fn)(x, config, call=call)
    assert seen[0] is x and seen[1] is config and seen[2] is call


def test_keywords_with_names_used_by_remat() -> None:
    def fn(x: Tensor, *, self: Tensor, args: int, kwargs: int, fn: int, policy: str) -> Tensor:
        assert policy == "dots"
        return (x * self).sin() * args * kwargs * fn

    x, y = leaf(3), leaf(3)
    keywords = {"self": y, "args": 2, "kwargs": 3, "fn": 4, "policy": "dots"}
    same(
        torch.autograd.grad(remat(fn)(x, **keywords).sum(), [x, y]),
        torch.autograd.grad(fn(x, **keywords).sum(), [x, y]),
    )


def test_no_tensors_and_no_arguments() -> None:
    assert remat(lambda: 3)() == 3
    assert remat(lambda *a, **k: (a, k))(1, None, b="c") == ((1, None), {"b": "c"})
    assert remat(lambda: None)() is None
    w = leaf(3)
    same(torch.autograd.grad(remat(lambda: w.sin().exp())().sum(), w), torch.autograd.grad(
        w.sin().exp().sum(), w))  # fmt: skip


def test_results_that_are_arguments() -> None:
    x, y = leaf(3), torch.ones(3)
    out = remat(lambda x, y, z: (x, y, z, x.sin(), None, x))(x, y, "z")
    assert out[0] is x and out[1] is y and out[2] == "z" and out[4] is None and out[5] is x
    same(torch.autograd.grad((out[0] * out[3]).sum(), x), torch.autograd.grad((x * x.sin()).sum(), x))


def test_generators_and_iterators_as_arguments_are_passed_on() -> None:
    # The first run exhausts them, as the caller must know; here no run reads them.
    iterator = iter([1, 2])
    x = leaf(3)
    (grad,) = torch.autograd.grad(remat(lambda x, it: x.sin().exp())(x, iterator).sum(), x)
    same(grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert next(iterator) == 1
