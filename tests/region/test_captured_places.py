"""Places that contain captured tensors: they are found and named, replaced for a run, and restored."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from remat._captured.captured import find
from remat._captured.variables import bound

W = torch.ones(2)
CONFIG = {"w": torch.ones(2), "nested": [torch.ones(2)]}
PAIR = (torch.ones(2), 3)
LATE: Any = None
FOUND: list[Any] = []  # by the last call of `Net`


def uses_global(x: Tensor) -> Tensor:
    return x * W


def uses_helper(x: Tensor) -> Tensor:
    return uses_global(x) + sum(PAIR[0] for _ in range(1))


def recursive(x: Tensor, n: int) -> Tensor:
    return x * W if n == 0 else recursive(x, n - 1)


def tensors(*roots: Any) -> list[Any]:
    return [value for _, value in find(*roots).tensors]


def paths(*roots: Any) -> list[str]:
    return [str(path) for path, _ in find(*roots).tensors]


def exchanged(found: Any, others: dict[int, Any] | None = None) -> bound:
    """A recompute: the variables have the values that were found, except for the tensors in `others`."""
    return bound(found.variables, {**{id(value): value for _, value in found.tensors}, **(others or {})})


Point = namedtuple("Point", "x y")


@dataclass
class Config:
    scale: Tensor
    name: str = "c"


@dataclass(frozen=True)
class Frozen:
    scale: Tensor


class Slots:
    __slots__ = ("__hidden", "empty", "w")

    def __init__(self) -> None:
        self.w = torch.ones(2)
        self.__hidden = torch.ones(2)


class Caller:
    def __init__(self) -> None:
        self.w = torch.ones(2)
        self.me = self

    def __call__(self, x: Tensor) -> Tensor:
        return self.helper(x) * self.prop

    def helper(self, x: Tensor) -> Tensor:
        return uses_global(x) * self.w

    @property
    def prop(self) -> Tensor:
        return CONFIG["w"]

    def unrelated(self) -> Any:
        return PAIR


class Stepper:
    def __init__(self) -> None:
        self.w = torch.ones(2)

    def step(self, x: Tensor) -> Tensor:
        return self.scaled(x) * self.w

    def scaled(self, x: Tensor) -> Tensor:
        return x * W

    def unrelated(self) -> Any:
        return PAIR


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        self.layers[1].weight = self.layers[0].weight
        self.register_buffer("scale", torch.ones(2))
        self.register_parameter("nothing", None)
        self.extra = [torch.ones(2)]

    def forward(self, x: Tensor) -> Tensor:
        FOUND[:] = [find(self)]
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * W


def closure() -> Callable:
    w, table, net, unset = torch.ones(2), {"a b": [torch.ones(2)]}, nn.Linear(2, 2), None
    del unset

    def fn(x: Tensor) -> Tensor:
        return net(x) * w * table["a b"][0] if x is not None else unset  # noqa: F821

    return fn


def helper_closure() -> Callable:
    w = torch.ones(2)

    def helper(x: Tensor) -> Tensor:
        return x * w

    def fn(x: Tensor) -> Tensor:
        return helper(x)

    return fn


def defaults(x: Tensor, w: Tensor = torch.ones(2), *, b: Tensor = torch.ones(2)) -> Tensor:  # noqa: B008
    return x * w + b


def nested_tuples() -> Callable:
    pair = (torch.ones(2), Point(torch.ones(2), [torch.ones(2)]))
    return lambda x: x * pair[0]


def attributes() -> Callable:
    def fn(x: Tensor) -> Tensor:
        return x

    fn.w = torch.ones(2)
    return fn


def objects() -> Callable:
    config, frozen, space = Config(torch.ones(2)), Frozen(torch.ones(2)), types.SimpleNamespace()
    space.w = torch.ones(2)
    generator = torch.Generator()
    return lambda x: (config, frozen, space, generator)


def hooked() -> nn.Module:
    w = torch.ones(2)
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, result: result * w)
    return module


def wrapped() -> Callable:
    fn = helper_closure()

    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args)

    return wrapper


CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "closure": (
        closure,
        ["closure variable 'w'", "net.weight", "net.bias", "table['a b'][0]"],
    ),
    "helper": (helper_closure, ["closure variable 'w' of helper"]),
    "global": (lambda: uses_global, ["global 'W'"]),
    "global container": (lambda: lambda x: CONFIG, ["CONFIG['w']", "CONFIG['nested'][0]"]),
    "global helper": (lambda: uses_helper, ["global 'W'", "PAIR[0]"]),
    "recursive": (lambda: recursive, ["global 'W'"]),
    "defaults": (
        lambda: defaults,
        ["defaults.__defaults__[0]", "defaults.__kwdefaults__['b']"],
    ),
    "tuples": (nested_tuples, ["pair[0]", "pair[1][0]", "pair[1][1][0]"]),
    "partial": (
        lambda: functools.partial(torch.add, torch.ones(2), other=torch.ones(2)),
        ["self.args[0]", "self.keywords['other']"],
    ),
    "partial in a cell": (
        lambda: (lambda p: lambda x: p(x))(functools.partial(torch.add, torch.ones(2))),
        ["p.args[0]"],
    ),
    "function attribute": (attributes, ["fn.w"]),
    "objects": (
        objects,
        ["config.scale", "frozen.scale", "space.w", "closure variable 'generator'"],
    ),
    "slots": (Slots, ["self._Slots__hidden", "self.w"]),
    "method": (lambda: Stepper().step, ["self.w"]),
    "method in a cell": (
        lambda: (lambda step: lambda x: step(x))(Stepper().step),
        ["step.__self__.w"],
    ),
    "callable object": (
        Caller,
        ["self.w"],
    ),
    "module": (
        Net,
        [
            "self.scale",
            "self.layers[0].weight",
            "self.layers[1].weight",
            "self.extra[0]",
            "global 'W'",
        ],
    ),
    "method of a module": (
        lambda: Net().forward,
        [
            "self.scale",
            "self.layers[0].weight",
            "self.layers[1].weight",
            "self.extra[0]",
            "global 'W'",
        ],
    ),
    "hook": (hooked, ["closure variable 'w' of self._forward_hooks[0]"]),
    "rnn": (
        lambda: nn.RNN(2, 2, bias=False),
        [
            "self.weight_ih_l0",
            "self.weight_hh_l0",
            "self._flat_weights[0]",
            "self._flat_weights[1]",
        ],
    ),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False)),
        [
            "self.parametrizations.weight.original0",
            "self.parametrizations.weight.original1",
        ],
    ),
    "wraps": (wrapped, ["closure variable 'w' of helper"]),
    "library wrapper": (
        lambda: torch.func.vmap(helper_closure()),
        ["closure variable 'w' of helper"],
    ),
    "lru_cache": (
        lambda: functools.lru_cache(helper_closure()),
        ["closure variable 'w' of helper"],
    ),
    "staticmethod": (lambda: staticmethod(uses_global), ["global 'W'"]),
    "method called by name": (
        lambda: (lambda stepper: lambda x: stepper.step(x))(Stepper()),
        ["stepper.w"],
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, list[str]]:
    make, expected = CASES[request.param]
    return make(), expected


def test_every_kind_of_place_is_found_and_named(case: tuple[Any, list[str]]) -> None:
    fn, expected = case
    found = [p.replace(f"[{k}]", "[0]") for p in paths(fn) for k in hook_keys(fn, p)]
    assert sorted(found) == sorted(expected)


def hook_keys(fn: Any, path: str) -> list[int]:
    """Hooks have ids from a counter of torch, which are not constants."""
    return list(fn._forward_hooks) if "_forward_hooks" in path else [0]


def test_replaced_and_restored_also_after_an_exception(case: tuple[Any, list[str]]) -> None:
    fn, _ = case
    found = find(fn)
    before = tensors(fn)
    others = {id(v): v if isinstance(v, torch.Generator) else v.detach() + 1 for v in before}
    with pytest.raises(ZeroDivisionError), exchanged(found, others):
        assert [*map(id, tensors(fn))] == [id(others[id(v)]) for v in before]
        raise ZeroDivisionError
    assert [*map(id, tensors(fn))] == [*map(id, before)]


def test_replaced_tensors_are_used() -> None:
    x = torch.ones(2)
    for fn in (uses_helper, helper_closure(), Caller(), Stepper().step, defaults, uses_global):
        expected = fn(x)
        with exchanged(find(fn), {id(value): torch.full((2,), 5.0) for value in tensors(fn)}):
            assert not torch.equal(fn(x), expected)
        assert torch.equal(fn(x), expected)


def test_arguments_of_a_partial() -> None:
    fn = functools.partial(torch.add, torch.ones(2), alpha=2)
    fn.note = "kept"
    with exchanged(find(fn), {id(tensors(fn)[0]): torch.zeros(2)}):
        assert fn(torch.ones(2)).tolist() == [2.0, 2.0]
    assert fn(torch.ones(2)).tolist() == [3.0, 3.0]
    assert fn.note == "kept"


def test_deleted_variables_exist_during_a_run() -> None:
    slots, caller, function, table = Slots(), Caller(), attributes(), {"w": torch.ones(2)}
    net = nn.Linear(2, 2)
    for fn, remove in [
        (slots, lambda: delattr(slots, "w")),
        (caller, lambda: delattr(caller, "w")),
        (function, lambda: delattr(function, "w")),
        (lambda x: table, table.clear),
        (net, lambda: delattr(net, "weight")),
    ]:
        found, before = find(fn), paths(fn)
        remove()
        after = paths(fn)
        assert after != before
        with exchanged(found):
            assert paths(fn) == before
        assert paths(fn) == after


def test_list_that_became_shorter() -> None:
    items = [torch.ones(2), torch.ones(2), torch.ones(2)]
    fn = lambda x: x * items[0]
    found, before = find(fn), list(items)
    del items[1:]
    with exchanged(found):
        assert [*map(id, items)] == [*map(id, before)]
    assert len(items) == 1


def test_tuple_is_rebuilt_and_its_identity_restored() -> None:
    holder = {"p": Point(torch.ones(2), (torch.ones(2), torch.ones(2)))}
    original = holder["p"]
    fn = lambda x: x * holder["p"].x
    others = {id(value): torch.zeros(2) for value in tensors(fn)}
    with exchanged(find(fn), others):
        p = holder["p"]
        assert type(p) is Point
        assert [id(p.x), id(p.y[0]), id(p.y[1])] == [*map(id, others.values())]
    assert holder["p"] is original


def test_tuple_that_was_replaced_afterwards() -> None:
    holder = {"p": (torch.ones(2), 1)}
    fn = lambda x: x * holder["p"][0]
    found = find(fn)
    later = holder["p"] = (torch.zeros(2), 1, 2)
    with exchanged(found):
        assert holder["p"][0] is found.tensors[0][1]
    assert holder["p"] is later


def test_torch_return_types_are_rebuilt() -> None:
    holder = [torch.ones(2, 2).max(0)]
    found = find(lambda x: holder)
    with exchanged(found, {id(value): torch.zeros(2) for _, value in found.tensors}):
        assert type(holder[0]) is torch.return_types.max
        assert holder[0].values.tolist() == [0.0, 0.0]


def test_tied_weights_are_found_in_two_places() -> None:
    values = [v for p, v in find(Net()).tensors if str(p).endswith("weight")]
    assert len(values) == 2
    assert values[0] is values[1]


def test_shared_parameter_dicts_are_visited_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.__dict__["_parameters"] = first.__dict__["_parameters"]
    assert len(tensors(nn.Sequential(first, second))) == 2


def test_cycles() -> None:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    node = {"loop": (loop,), "w": torch.ones(2)}
    loop.append(node)

    def fn(x: Tensor) -> Any:
        return fn, node

    assert sorted(paths(fn)) == ["node['loop'][0][0]", "node['w']"]


def test_search_in_deeply_nested_and_shared_tuples_ends() -> None:
    deep: Any = ()
    shared: Any = ("leaf",)
    for _ in range(5000):
        deep = (deep,)
    for _ in range(100):
        shared = (shared, shared)
    chain: Any = None
    for _ in range(5000):
        chain = types.SimpleNamespace(next=chain)
    assert tensors(lambda x: (deep, shared, chain)) == []


def test_large_plain_containers_are_not_searched() -> None:
    class Watched(list):
        looked = 0

        def __iter__(self) -> Any:
            for item in list.__iter__(self):
                type(self).looked += 1
                yield item

    numbers = Watched(range(100_000))
    few = Watched(range(1000))
    fn = lambda x: (numbers, few)
    assert tensors(fn) == []
    assert Watched.looked <= 64
    # Attributes are not judged by a sample: an object with many options may still have tensors.
    options = types.SimpleNamespace(**{f"o{i}": i for i in range(100)}, w=W)
    assert paths(lambda x: options) == ["options.w"]


def test_values_that_are_not_captured() -> None:
    assert tensors(torch.relu) == []
    assert tensors(nn.functional.relu) == []
    assert tensors(lambda x: torch.relu(x) * sys.maxsize) == []
    assert tensors(3) == []
    grad_holder = torch.ones(2, requires_grad=True)
    grad_holder.grad = torch.ones(2)
    assert len(tensors(lambda x: grad_holder)) == 1


def test_the_state_of_a_library_function_is_skipped() -> None:
    _, pullback = torch.func.vjp(torch.sin, torch.ones(2))
    assert tensors(pullback) == find(pullback).variables == []
    assert tensors(lambda g: pullback(g)) == []


def test_generic_roots_are_searched_together() -> None:
    w = torch.ones(2)
    net = nn.Linear(2, 2)
    assert sorted(paths(lambda net, x: net(x) * w, net, "text", None)) == [
        "closure variable 'w'", "self.bias", "self.weight",
    ]  # fmt: skip


def test_cells_in_a_loop_are_bound_to_their_earlier_values() -> None:
    def build() -> list[tuple[Callable, Any]]:
        fns = []
        for factor in (torch.tensor(2.0), torch.tensor(3.0)):
            fn = lambda x: x * factor
            fns.append((fn, find(fn)))
        return fns

    one = torch.tensor(1.0)
    results = []
    for fn, found in build():
        with exchanged(found):
            results.append(fn(one).item())
        assert fn(one).item() == 3.0
    assert results == [2.0, 3.0]


def test_cell_that_no_longer_contains_a_tuple() -> None:
    pair: Any = (torch.ones(2), 1)
    fn = lambda x: x * pair[0]
    first, found = pair[0], find(fn)
    pair = None
    with exchanged(found):
        assert pair[0] is first and pair[1] == 1
    assert pair is None


def test_containers_and_objects_that_lead_to_tensors() -> None:
    class Model:
        pass

    model = Model()
    model.config = {"scales": [torch.ones(2)]}
    model.layers = (nn.Linear(2, 2), 3)
    model.call = uses_global
    fn = lambda x: model
    found = find(fn)
    first = dict(vars(model)), model.config["scales"], model.config["scales"][0]
    model.config["scales"] = []
    inner = model.config
    model.config, model.layers = {}, (nn.Linear(2, 2), 4)
    del model.call
    second = dict(vars(model))
    with exchanged(found):
        assert model.call is uses_global and model.layers is first[0]["layers"]
        assert model.config["scales"][0] is first[2]
    assert vars(model) == second
    assert inner["scales"] == []


def test_a_first_run_keeps_its_changes() -> None:
    holder = Caller()
    holder.other = torch.ones(2)
    found, other, instead, new = find(holder), holder.other, torch.zeros(2), torch.zeros(2)
    ids = {id(value): instead for _, value in found.tensors}
    with bound(found.variables, ids, keep_changes=True):
        assert holder.w is instead and holder.other is instead
        holder.w = new
    assert holder.w is new
    assert holder.other is other
    with exchanged(found):
        holder.w = instead
    assert holder.w is new


def test_tensors_set_by_functional_call() -> None:
    net = Net()
    x = torch.ones(1, 2)
    swapped = {"layers.0.weight": torch.full((2, 2), 2.0), "scale": torch.full((2,), 3.0)}
    expected = functional_call(net, swapped, (x,))
    (found,) = FOUND
    held = {str(path): value for path, value in found.tensors}
    assert held["self.layers[0].weight"] is swapped["layers.0.weight"]
    assert held["self.layers[1].weight"] is swapped["layers.0.weight"]
    assert held["self.scale"] is swapped["scale"]
    own = [*map(id, tensors(net))]
    assert not {*own} & {id(value) for value in swapped.values()}
    assert not torch.equal(net(x), expected)
    with exchanged(found):
        assert torch.equal(net(x), expected)
    assert [*map(id, tensors(net))] == own


def test_functional_call_of_an_rnn() -> None:
    rnn = nn.RNN(2, 2)
    x = torch.ones(3, 1, 2)
    swapped = {name: torch.zeros_like(p) for name, p in rnn.named_parameters()}
    found: list[Any] = []
    handle = rnn.register_forward_pre_hook(lambda module, args: found.append(find(module)))
    expected, _ = functional_call(rnn, swapped, (x,))
    handle.remove()
    with exchanged(found[0]):
        assert torch.equal(rnn(x)[0], expected)
    assert not torch.equal(rnn(x)[0], expected)


def test_decorated_methods_are_searched() -> None:
    def doubled(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def wrapper(*args: Any) -> Any:
            return fn(*args) * 2

        return wrapper

    class Decorated(nn.Module):
        @doubled
        def forward(self, x: Tensor) -> Tensor:
            return x * W

    assert paths(Decorated()) == ["global 'W'"]


def test_odd_objects_cause_no_error() -> None:
    class Odd:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError(name)

    class LoudDict(OrderedDict):
        def values(self) -> Any:
            raise ZeroDivisionError

        items = keys = values

    held = [Odd(), LoudDict(w=torch.ones(2)), torch.ops.aten.mm, torch.ops.aten.mm.default, Config]
    assert paths(lambda x: held) == ["held[1]['w']"]


def test_pytest_is_not_part_of_the_state_of_a_region() -> None:
    """It inserts calls of its own functions where a test module has an assertion."""
    tensor = torch.ones(2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        assert tensor.shape == x.shape, "of one shape"
        return x + tensor

    assert paths(fn) == ["closure variable 'tensor'"]


def test_nothing_is_kept_alive() -> None:
    gc.disable()
    try:
        fn = helper_closure()
        find(fn)
        gone = weakref.ref(fn)
        del fn
        assert gone() is None
    finally:
        gc.enable()
