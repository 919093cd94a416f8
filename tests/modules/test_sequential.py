"""`remat.sequential`: functions called one after another, in a few regions."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import remat
from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, leaked_bytes, peak_bytes
from remat import PolicyError, is_recomputing, policies

pytestmark = pytest.mark.usefixtures("collector_off")


def plain(functions: Any) -> Callable:
    """The functions one after another, without regions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        first, *rest = functions
        return functools.reduce(lambda x, fn: fn(x), rest, first(*args, **kwargs))

    return call


def layers(count: int, width: int = 4, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()).double() for _ in range(count)]


def parameters(row: list[nn.Module]) -> list[Tensor]:
    return [p for layer in row for p in layer.parameters()]


def grads(f: Callable, x: Tensor, row: list[nn.Module]) -> tuple:
    return torch.autograd.grad(f(x).square().sum(), [x, *parameters(row)])


class Noted:
    """Functions that record in which run they are called."""

    def __init__(self, count: int) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.functions = [functools.partial(self.call, i) for i in range(count)]

    def call(self, i: int, x: Tensor) -> Tensor:
        self.calls.append((i, is_recomputing()))
        return x.sin().exp()

    def segments(self) -> list[list[int]]:
        """The functions of each recompute. The last segment is recomputed first; a new one starts where `i` falls."""
        found: list[list[int]] = []
        for i in [i for i, again in self.calls if again]:
            if found and i > found[0][-1]:
                found[0].append(i)
            else:
                found.insert(0, [i])
        return found


# --- segments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 16])
def test_segments(count: int) -> None:
    for segments in range(1, count + 1):
        noted = Noted(count)
        f, x = remat.sequential(noted.functions, segments), rand(3)
        out = f(x)
        assert noted.calls == [(i, False) for i in range(count)]
        (actual,) = torch.autograd.grad(out.sum(), x)
        lengths = [len(segment) for segment in noted.segments()]
        assert len(lengths) == segments and sum(lengths) == count and max(lengths) - min(lengths) <= 1
        assert [i for segment in noted.segments() for i in segment] == list(range(count))
        assert len(noted.calls) == 2 * count
        assert_same((actual,), torch.autograd.grad(plain(noted.functions)(x).sum(), x))


@pytest.mark.parametrize(
    "count, segments", [(1, 1), (2, 1), (3, 2), (4, 2), (6, 2), (7, 3), (9, 3), (12, 3), (100, 10)]
)
def test_the_number_of_segments_is_the_square_root_by_default(count: int, segments: int) -> None:
    noted = Noted(count)
    torch.autograd.grad(remat.sequential(noted.functions)(x := rand(3)).sum(), x)
    assert len(noted.segments()) == segments


def deep(x: Tensor) -> Tensor:
    """Saves its input and its result."""
    return x.sin().exp()


SIZE = 1024


def peak(f: Callable) -> float:
    """The peak, in units of the input's size."""
    x = rand(SIZE)
    return peak_bytes(lambda: torch.autograd.grad(f(x).sum(), x)) / (8 * SIZE)


def func_peak(f: Callable) -> float:
    return peak_bytes(grad(lambda x: f(x).sum()), rand(SIZE, grad=False)) / (8 * SIZE)


@pytest.mark.parametrize("measure", [peak, func_peak])
def test_memory_grows_with_the_square_root(measure: Callable) -> None:
    for count in (16, 64, 256):
        root = count**0.5
        found = measure(remat.sequential([deep] * count))
        assert found <= 2 * root + 4  # the inputs of the segments, and what the functions of one segment save
        assert measure(plain([deep] * count)) >= count
        for segments in (round(root / 4), round(root * 4)):
            assert measure(remat.sequential([deep] * count, segments)) > found


def test_only_the_inputs_of_segments_are_saved() -> None:
    x = rand(SIZE)
    for segments in (1, 2, 5, 10):
        kept = held_bytes(remat.sequential([deep] * 10, segments), x) / (8 * SIZE)
        assert kept == segments  # the result, and the inputs of all segments except the first
    assert held_bytes(plain([deep] * 10), x) / (8 * SIZE) == 10


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, iter, lambda row: (m for m in row), lambda row: nn.Sequential(*row),
                                  nn.ModuleList, lambda row: dict(enumerate(row)).values()])  # fmt: skip
def test_kinds_of_arguments(kind: Callable) -> None:
    row, x = layers(5), rand(3, 4)
    f = remat.sequential(kind(row), 2)
    for _ in range(2):
        assert_same(grads(f, x, row), grads(plain(row), x, row))


def test_a_module_that_occurs_twice_is_called_twice() -> None:
    (layer,), x = layers(1), rand(3, 4)
    for row in ([layer, torch.sin, layer], nn.Sequential(layer, nn.Tanh(), layer)):
        assert_same(grads(remat.sequential(row, 2), x, [layer]), grads(plain(row), x, [layer]))


def test_arguments_go_to_the_first_function() -> None:
    def first(x: Tensor, w: Tensor, *, flag: bool, more: dict) -> tuple:
        return (x * w).sin(), {"z": more["z"].exp(), "flag": flag}

    def second(pair: tuple) -> dict:
        return {"out": pair[0] * pair[1]["z"], "flag": pair[1]["flag"], "none": None}

    def last(tree: dict) -> list:
        return [tree["out"].cos(), tree["flag"], tree["none"]]

    x, w, z = rand(3), rand(3, seed=1), rand(3, seed=2)
    for segments in (1, 2, 3):
        results = []
        for f in (remat.sequential([first, second, last], segments), plain([first, second, last])):
            out = f(x, w, flag=True, more={"z": z})
            results.append((out, torch.autograd.grad(out[0].sum(), [x, w, z])))
        assert_same(*results)


def test_batch_norm_and_dropout() -> None:
    def row() -> list[nn.Module]:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)]
        return list(nn.Sequential(*parts).double())

    x, results = rand(6, 4), []
    for wrap in (remat.sequential, plain):
        modules = row()
        f = wrap(modules)
        torch.manual_seed(1)
        found = [grads(f, x, modules) for _ in range(3)]
        results.append((found, [b for m in modules for b in m.buffers()], torch.get_rng_state()))
        assert [int(m[1].num_batches_tracked) for m in modules] == [3] * 4
        for m in modules:
            m.eval()
        results[-1] += (f(x),)
    assert_same(*results)


TRANSFORMS: dict[str, Callable] = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vmap": vmap,
    "vmap(grad)": lambda f: vmap(grad(lambda x: f(x).sum())),
    "jacrev": lambda f: vmap(jacrev(f)),
    "hessian": lambda f: vmap(hessian(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "grad(grad)": lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).square().sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("segments", [None, 1, 5])
def test_under_torch_func(name: str, segments: int | None) -> None:
    row, x = [torch.sin, *layers(3), deep], rand(3, 4, grad=False)
    actual, expected = (TRANSFORMS[name](f)(x) for f in (remat.sequential(row, segments), plain(row)))
    assert_same(actual, expected, exact=name not in ("hessian", "grad(grad)"))


class Holds(nn.Module):
    """Contains modules, and the function that is made of them."""

    def __init__(self, wrap: Callable = remat.sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(4))
        self.f = wrap(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def test_functional_call() -> None:
    models, x = [Holds(), Holds(plain)], rand(3, 4, grad=False)
    params = {name: p.detach() * 2 for name, p in models[0].named_parameters()}

    def loss(model: nn.Module) -> Callable:
        return lambda params, x: functional_call(model, params, (x,)).square().sum()

    assert_same(*(grad(loss(model))(params, x) for model in models))
    assert_same(*(vmap(grad(loss(model)), (None, 0))(params, x) for model in models), exact=False)
    peaks = [peak_bytes(grad(loss(model)), params, rand(500, 4, grad=False)) for model in models]
    assert peaks[0] < peaks[1]


def test_later_changes_of_modules_take_effect() -> None:
    row, x = layers(4), rand(3, 4)
    f = remat.sequential(row)
    f(x)
    row[1][0].weight = nn.Parameter(rand(4, 4, seed=9))
    row[2][1] = nn.Sigmoid()
    assert_same(grads(f, x, row), grads(plain(row), x, row))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f)), copy.copy])
def test_copies(make_copy: Callable) -> None:
    row, x = [*layers(3), torch.sin, deep], rand(3, 4)
    f = remat.sequential(row, 2, policy=policies.save_ops(torch.ops.aten.tanh))
    again = make_copy(f)
    expected = plain(row)(x)
    assert_same(again(x), expected)
    assert held_bytes(again, x) == held_bytes(f, x) < held_bytes(plain(row), x)
    with torch.no_grad():
        row[0][0].weight.zero_()
    assert torch.equal(again(x), expected) == (make_copy is not copy.copy)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_copies_of_a_module_that_contains_one(make_copy: Callable) -> None:
    model, x = make_copy(Holds()), rand(3, 4)
    assert_same(grads(model, x, list(model.layers)), grads(plain(model.layers), x, list(model.layers)))
    assert held_bytes(model, x) < held_bytes(plain(model.layers), x)


def test_a_sequential_with_a_lambda_is_not_picklable() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(remat.sequential([lambda x: x]))


def test_compile() -> None:
    torch._dynamo.reset()
    row, x = layers(4), rand(3, 4)
    compiled = torch.compile(remat.sequential(row), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(grads(compiled, x, row), grads(plain(row), x, row))


# --- options ----------------------------------------------------------------------------------------------------------


def test_policy() -> None:
    row, x = layers(4), rand(64, 4)
    for policy, products in ((None, 8), ([torch.ops.aten.addmm], 4)):
        f = remat.sequential(row, 2, policy=policy)
        assert count_ops(grads, f, x, row)["aten.addmm"] == products
    everything = remat.sequential(row, 2, policy=policies.everything_saveable)
    assert held_bytes(everything, x) == held_bytes(plain(row), x)


def test_options() -> None:
    runs: list[bool] = []

    def odd(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return x.sin() * (1 if len(runs) == 1 else 2)

    x = rand(3)
    options: dict[str, Any] = {"determinism_check": "values", "early_stop": False, "preserve_rng_state": False}
    with pytest.raises(remat.RecomputeMismatchError):
        torch.autograd.grad(remat.sequential([odd, deep], 1, **options)(x).sum(), x)
    loud = remat.sequential([F.dropout], preserve_rng_state=False, determinism_check="values")
    quiet = remat.sequential([F.dropout, deep])
    torch.manual_seed(0)
    torch.autograd.grad(quiet(x).sum(), x)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    F.dropout(x)
    assert torch.equal(state, torch.get_rng_state())
    assert loud(x) is not None
    assert remat.sequential([deep], debug=True)(x) is not None


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def test_a_sequential_with_other_behaviour_is_an_error() -> None:
    hooked, own, patched = nn.Sequential(*layers(2)), Own(*layers(2)), nn.Sequential(*layers(2))
    hooked.register_forward_hook(lambda m, args, out: out * 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    for module, what in ((hooked, "hooks"), (own, "a forward"), (patched, "a forward")):
        with pytest.raises(ValueError, match=f"has {what} of its own"):
            remat.sequential(module)
        assert_same(remat.sequential(list(module))(x := rand(3, 4)), plain(module)(x))
        assert_same(remat.sequential([module])(x), module(x))
    chosen = remat.nn.apply(nn.Sequential(*layers(2)), nn.Sequential)
    assert_same(remat.sequential(chosen)(x), chosen(x))


ERRORS: list[tuple[Any, dict, type, str]] = [
    ([], {}, ValueError, "no functions"),
    (nn.Sequential(), {}, ValueError, "no functions"),
    ([torch.sin, 3], {}, TypeError, r"functions\[1\] must be a function or a module, got 3"),
    ([nn.Tanh(), "sin"], {}, TypeError, r"functions\[1\]"),
    (torch.sin, {}, TypeError, "functions"),
    (nn.Linear(2, 2), {}, TypeError, "functions"),
    (None, {}, TypeError, "functions"),
    ([torch.sin] * 3, {"segments": 0}, ValueError, "from 1 to 3"),
    ([torch.sin] * 3, {"segments": 4}, ValueError, "from 1 to 3"),
    ([torch.sin] * 3, {"segments": -1}, ValueError, "from 1 to 3"),
    ([torch.sin] * 3, {"segments": 1.5}, TypeError, "integer"),
    ([torch.sin] * 3, {"segments": True}, TypeError, "integer"),
    ([torch.sin], {"policy": "dots"}, PolicyError, "dots"),
    ([torch.sin], {"early_stop": None}, TypeError, "early_stop"),
    ([torch.sin], {"determinism_check": "x"}, ValueError, "determinism_check"),
]


@pytest.mark.parametrize("functions, options, kind, text", ERRORS)
def test_errors(functions: Any, options: dict, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        remat.sequential(functions, **options)


def test_everything_is_freed() -> None:
    row, x = layers(4), rand(3, 4)
    f = remat.sequential(row)
    assert leaked_bytes(grads, f, x, row) == 0
    with assert_freed_without_gc() as watch:
        watch(*row, *parameters(row))
        del row, f
