"""`remat.sequential`: functions called one after another, in a few regions."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn

import remat
from benchmarks.measure import count_ops, held_bytes, peak_bytes
from remat import PolicyError, is_recomputing, policies

pytestmark = pytest.mark.usefixtures("collector_off")


def plain(functions: Any) -> Callable:
    """The functions one after another, without regions."""
    first, *rest = functions
    return lambda *args, **kwargs: functools.reduce(lambda x, fn: fn(x), rest, first(*args, **kwargs))


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(count)]


def grads(f: Callable, x: Tensor, row: list[nn.Module]) -> tuple:
    return torch.autograd.grad(f(x).square().sum(), [x, *(p for layer in row for p in layer.parameters())])


def deep(x: Tensor) -> Tensor:
    """Saves its input and its result."""
    return x.sin().exp()


def lengths(count: int, segments: int | None) -> list[int]:
    """The lengths of the segments. The last one is recomputed first; a new one starts where the position falls."""
    calls: list[tuple[int, bool]] = []

    def call(i: int, x: Tensor) -> Tensor:
        calls.append((i, is_recomputing()))
        return deep(x)

    functions, x = [functools.partial(call, i) for i in range(count)], rand(3)
    (found,) = torch.autograd.grad(remat.sequential(functions, segments)(x).sum(), x)
    assert calls[:count] == [(i, False) for i in range(count)] and len(calls) == 2 * count
    again = [i for i, _ in calls[count:]]
    ends = [k for k in range(1, count) if again[k] != again[k - 1] + 1] + [count]
    assert sorted(again) == list(range(count))
    assert_same(found, torch.autograd.grad(plain(functions)(x).sum(), x)[0])
    return [end - start for start, end in zip([0, *ends], ends)][::-1]


@pytest.mark.parametrize("count, default", [(1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (12, 3)])
def test_segments_are_nearly_equal_and_by_default_the_square_root_is_their_number(count: int, default: int) -> None:
    for segments in (None, *range(1, count + 1)):
        found = lengths(count, segments)
        assert len(found) == (segments or default) and sum(found) == count and max(found) - min(found) <= 1


X = rand(1024)


def test_memory_grows_with_the_square_root() -> None:
    peak = lambda f: peak_bytes(lambda: torch.autograd.grad(f(X).sum(), X)) / X.nbytes
    for count in (16, 64, 144):
        root = count**0.5
        found = peak(remat.sequential([deep] * count))
        assert found <= 2 * root + 4  # the inputs of the segments, and what the functions of one segment save
        assert peak(plain([deep] * count)) >= count
        for segments in (round(root / 4), round(root * 4)):
            assert peak(remat.sequential([deep] * count, segments)) > found


def test_only_the_inputs_of_segments_are_saved() -> None:
    for segments in (1, 2, 5, 10):
        kept = held_bytes(remat.sequential([deep] * 10, segments), X)
        assert kept == segments * X.nbytes  # the result, and the inputs of all segments except the first


@pytest.mark.parametrize("kind", [list, iter, lambda row: nn.Sequential(*row), nn.ModuleList,
                                  lambda row: dict(enumerate(row)).values()])  # fmt: skip
def test_kinds_of_iterables(kind: Callable) -> None:
    """A module that occurs twice is called twice."""
    row, x = layers(4), rand(3, 4)
    row.insert(2, row[0])
    f = remat.sequential(kind(row), 2)
    for _ in range(2):
        assert_same(grads(f, x, row), grads(plain(row), x, row))


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_all_arguments_go_to_the_first_function_and_results_to_the_next(segments: int) -> None:
    def first(x: Tensor, w: Tensor, *, flag: bool, more: dict) -> tuple:
        return (x * w).sin(), {"z": more["z"].exp(), "flag": flag}

    functions = [first, lambda pair: {"out": pair[0] * pair[1]["z"], **pair[1]}, lambda tree: [tree["out"].cos(), tree]]
    (x, w, z), results = [rand(3, seed=i) for i in range(3)], []
    for f in (remat.sequential(functions, segments), plain(functions)):
        out = f(x, w, flag=True, more={"z": z})
        results.append((out, torch.autograd.grad(out[0].sum(), [x, w, z])))
    assert_same(*results)


class Holds(nn.Module):
    """Contains modules, and the function that is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(4))
        self.forward = remat.sequential(self.layers)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f)), copy.copy])
def test_copies(make_copy: Callable) -> None:
    row, x = [*layers(3), torch.sin, deep], rand(3, 4)
    f = remat.sequential(row, 2, policy=policies.save_ops(torch.ops.aten.tanh))
    again, model = make_copy(f), make_copy(Holds())
    expected = plain(row)(x)
    assert_same(again(x), expected)
    assert held_bytes(again, x) == held_bytes(f, x) < held_bytes(plain(row), x)
    with torch.no_grad():
        row[0][0].weight.zero_()
    assert torch.equal(again(x), expected) == (make_copy is not copy.copy)
    assert_same(grads(model, x, list(model.layers)), grads(plain(model.layers), x, list(model.layers)))
    assert held_bytes(model, x) < held_bytes(plain(model.layers), x)


def test_policies_and_other_options() -> None:
    row, x = layers(4), rand(64, 4)
    for policy, products in ((None, 8), ([torch.ops.aten.addmm], 4)):
        assert count_ops(grads, remat.sequential(row, 2, policy=policy), x, row)["aten.addmm"] == products
    assert held_bytes(remat.sequential(row, 2, policy=policies.everything_saveable), x) == held_bytes(plain(row), x)
    assert count_ops(grads, remat.sequential(row, 2, early_stop=False), x, row)["aten.tanh"] == 8


def test_a_sequential_with_other_behaviour_is_an_error() -> None:
    hooked, patched = nn.Sequential(*layers(2)), nn.Sequential(*layers(2))
    own = type("Own", (nn.Sequential,), {"forward": lambda self, x: x})(*layers(2))
    hooked.register_forward_hook(lambda m, args, out: out * 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    x = rand(3, 4)
    for module, what in ((hooked, "hooks"), (own, "a forward"), (patched, "a forward")):
        with pytest.raises(ValueError, match=rf"has {what} of its own.*Pass `list\(module\)`.*`remat\(module\)`"):
            remat.sequential(module)
        assert_same(remat.sequential(list(module))(x), plain(module)(x))
    chosen = remat.nn.apply(nn.Sequential(*layers(2)), nn.Sequential)  # its forward is the same
    assert_same(remat.sequential(chosen)(x), chosen(x))


ERRORS: list[tuple[Any, dict, type, str]] = [
    (nn.Sequential(), {}, ValueError, "no functions"),
    ([torch.sin, 3], {}, TypeError, r"functions\[1\] must be a function or a module, got 3"),
    (nn.Linear(2, 2), {}, TypeError, "must be an iterable of functions, such as a list"),
    ([torch.sin] * 3, {"segments": 0}, ValueError, "from 1 to 3"),
    ([torch.sin] * 3, {"segments": 4}, ValueError, "from 1 to 3"),
    ([torch.sin] * 3, {"segments": True}, TypeError, "integer"),
    ([torch.sin], {"policy": "dots"}, PolicyError, "dots"),
]


@pytest.mark.parametrize("functions, options, kind, text", ERRORS)
def test_errors(functions: Any, options: dict, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        remat.sequential(functions, **options)
