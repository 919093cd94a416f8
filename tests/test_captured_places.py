"""The places of captured tensors: all are found, named, read, bound anew and put back."""

from __future__ import annotations

import contextvars
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

from remat import CaptureError
from remat._captured import find
from remat._places import MISSING
from remat._rebound import rebound

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


def find_places(fn: Any) -> Any:
    return find(fn).places


def find_cells(fn: Any) -> Any:
    return find(fn).cells


def paths(*roots: Any) -> list[str]:
    return [place.path for place, _ in find(*roots).places]


def by_path(fn: Any) -> dict[str, Any]:
    return {place.path: place for place, _ in find_places(fn)}


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
        FOUND[:] = find_places(self)
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * W


OTHER, OTHER.sub = types.ModuleType("other"), types.ModuleType("other.sub")
OTHER.W, OTHER.table, OTHER.unread = torch.ones(2), {"w": torch.ones(2)}, torch.ones(2)
OTHER.sub.up, OTHER.sub.W = OTHER, torch.ones(2)
exec("def helper(x): return x * W", OTHER.sub.__dict__)
CONTEXT: contextvars.ContextVar = contextvars.ContextVar("w")
CONTEXT.set(torch.ones(2))


class Shared:
    scale = torch.ones(2)
    unread = torch.ones(2)

    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * cls.scale


class Heir(Shared):
    offset = torch.ones(2)

    def __call__(self, x: Tensor) -> Tensor:
        return self.scaled(x) + self.offset

    def both(self, x: Tensor) -> Tensor:
        return self.offset + super().scaled(x)


class SharedNet(nn.Module):
    scale = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * W


class Overrides(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(2, track_running_stats=False)

    def _check_input_dim(self, x: Tensor) -> None:
        W.sum()


class Cached:
    @functools.cached_property
    def scale(self) -> Tensor:
        return W * 2

    def step(self, x: Tensor) -> Tensor:
        return x * self.scale


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
    "method": (lambda: Stepper().step, ["self.w", "global 'W'"]),
    "method in a cell": (
        lambda: (lambda step: lambda x: step(x))(Stepper().step),
        ["step.__self__.w", "global 'W'"],
    ),
    "callable object": (
        Caller,
        ["self.w", "global 'W'", "CONFIG['w']", "CONFIG['nested'][0]"],
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
    "Python module": (
        lambda: lambda x: OTHER.W * OTHER.sub.helper(x),
        ["OTHER.W", "OTHER.sub.W"],
    ),
    "Python module in a cell": (
        lambda: (lambda other: lambda x: [other.table for _ in x])(OTHER),
        ["other.table['w']"],
    ),
    "class": (lambda: lambda x: Shared.scale * x, ["Shared.scale"]),
    "method of a class": (lambda: lambda x: Shared.scaled(x), ["Shared.scale"]),
    "class by its instance": (Heir, ["self.offset", "self.scale"]),
    "class by super": (lambda: Heir().both, ["self.offset", "self.scale"]),
    "class of a module": (SharedNet, ["self.scale"]),
    "method called by name": (
        lambda: (lambda stepper: lambda x: stepper.step(x))(Stepper()),
        ["stepper.w", "global 'W'"],
    ),
    "autograd function": (lambda: lambda x: Function.apply(x), ["global 'W'"]),
    "overridden part of a library's forward": (Overrides, ["self.weight", "self.bias", "global 'W'"]),
    "cached property": (lambda: Cached().step, ["global 'W'"]),
    "context variable": (lambda: lambda x: x * CONTEXT.get(), ["CONTEXT.get()"]),
    "set": (lambda: (lambda held: lambda x: held)({torch.ones(2)}), ["held{...}"]),
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
    """The ids that torch counts up for hooks are not constants."""
    return list(fn._forward_hooks) if "_forward_hooks" in path else [0]


def test_set_get_and_restore(case: tuple[Any, list[str]]) -> None:
    fn, _ = case
    found = find_places(fn)
    before = [id(value) for _, value in found]
    others = [torch.Generator() if isinstance(v, torch.Generator) else v + 1 for _, v in found]
    for (place, value), other in zip(found, others, strict=True):
        assert place.get() is value
        place.set(other)
    assert [id(v) for _, v in find_places(fn)] == [id(v) for v in others]
    for place, value in found:
        place.set(value)
    assert [id(v) for _, v in find_places(fn)] == before


def test_rebound_restores_also_after_an_exception(case: tuple[Any, list[str]]) -> None:
    fn, _ = case
    found = find_places(fn)
    others = [(place, torch.zeros(2)) for place, _ in found]
    with pytest.raises(ZeroDivisionError), rebound(others):
        assert all(place.get() is value for place, value in others)
        raise ZeroDivisionError
    assert all(place.get() is value for place, value in found)


def test_binding_changes_what_is_computed() -> None:
    x = torch.ones(2)
    for fn in (uses_helper, helper_closure(), Caller(), Stepper().step, defaults, uses_global):
        expected = fn(x)
        with rebound([(place, torch.full((2,), 5.0)) for place, _ in find_places(fn)]):
            assert not torch.equal(fn(x), expected)
        assert torch.equal(fn(x), expected)


def test_binding_partial_args() -> None:
    fn = functools.partial(torch.add, torch.ones(2), alpha=2)
    fn.note = "kept"
    with rebound([(find_places(fn)[0][0], torch.zeros(2))]):
        assert fn(torch.ones(2)).tolist() == [2.0, 2.0]
    assert fn(torch.ones(2)).tolist() == [3.0, 3.0]
    assert fn.note == "kept"


@pytest.mark.parametrize(
    ("fn", "path"),
    [
        (closure(), "closure variable 'w'"),
        (closure(), "net.weight"),
        (lambda x: LATE.get("w") * CONFIG["w"], "CONFIG['w']"),
        (Slots(), "self.w"),
        (Caller(), "self.w"),
        (attributes(), "fn.w"),
    ],
)
def test_missing_is_restored(fn: Any, path: str) -> None:
    place = by_path(fn)[path]
    value = place.get()
    place.set(MISSING)
    assert place.get() is MISSING
    place.set(MISSING)
    assert path not in paths(fn)
    with rebound([(place, value)]):
        assert place.get() is value
    assert place.get() is MISSING
    place.set(value)
    assert place.get() is value


def test_list_that_became_shorter() -> None:
    items = [torch.ones(2), torch.ones(2), torch.ones(2)]
    fn = lambda x: x * items[0]
    found = find_places(fn)
    del items[1:]
    with rebound(found):
        assert [id(t) for t in items] == [id(t) for _, t in found]
    assert len(items) == 1


def test_tuple_is_rebuilt_and_its_identity_restored() -> None:
    holder = {"p": Point(torch.ones(2), (torch.ones(2), torch.ones(2)))}
    original = holder["p"]
    fn = lambda x: x * holder["p"].x
    found = find_places(fn)
    others = [torch.zeros(2) for _ in found]
    with rebound([(place, other) for (place, _), other in zip(found, others, strict=True)]):
        p = holder["p"]
        assert type(p) is Point
        assert [id(p.x), id(p.y[0]), id(p.y[1])] == [id(t) for t in others]
    assert holder["p"] is original


def test_tuple_that_was_replaced_since() -> None:
    holder = {"p": (torch.ones(2), 1)}
    fn = lambda x: x * holder["p"][0]
    found = find_places(fn)
    later = holder["p"] = (torch.zeros(2), 1, 2)
    assert found[0][0].get() is MISSING
    with rebound(found):
        assert holder["p"][0] is found[0][1]
    assert holder["p"] is later


def test_tuple_in_two_places_is_bound_in_both() -> None:
    pair = (torch.ones(2),)
    holder = [pair, pair]
    assert paths(lambda x: holder) == ["holder[0][0]", "holder[1][0]"]


def test_torch_return_types_are_rebuilt() -> None:
    holder = [torch.ones(2, 2).max(0)]
    found = find_places(lambda x: holder)
    with rebound([(place, torch.zeros(2)) for place, _ in found]):
        assert type(holder[0]) is torch.return_types.max
        assert holder[0].values.tolist() == [0.0, 0.0]


def test_a_set_is_exchanged_as_a_whole_unless_it_has_one_member() -> None:
    w, other = torch.ones(2), torch.zeros(2)
    held = {w}
    (found,) = find_places(lambda x: held)
    assert found[0].path == "held{...}" and found[0].settable
    with rebound([(found[0], other)]):
        assert held == {other}
    assert held == {w}

    held.add(other)
    members = list(held)
    found = find(lambda x: held)
    assert {id(value) for _, value in found.places} == {id(w), id(other)}
    assert not any(place.settable for place, _ in found.places)
    later = torch.ones(2)
    held.clear()
    held.add(later)
    with rebound(found.holders()):
        assert [*map(id, held)] == [*map(id, members)]
    assert held == {later}


def test_what_can_not_be_bound_again_is_loud() -> None:
    held = {torch.ones(2), torch.ones(2)}
    found = find_places(lambda x: held)
    first = [(found[0][0], torch.ones(2))]
    before = list(held)
    with pytest.raises(CaptureError, match=r"captured held\{...\} now holds something else"), rebound(first):
        pass
    assert [*map(id, held)] == [*map(id, before)]


def test_members_of_a_frozenset_are_only_read() -> None:
    w = torch.ones(2)
    held = frozenset([w, Caller()])
    found = by_path(lambda x: held)
    assert not found["held{...}"].settable and found["held{...}.w"].settable
    assert find_places(lambda x: frozenset([1])) == []


def test_tied_weights_have_two_places() -> None:
    values = [v for p, v in find_places(Net()) if p.path.endswith("weight")]
    assert len(values) == 2
    assert values[0] is values[1]


def test_shared_parameter_dicts_are_seen_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.__dict__["_parameters"] = first.__dict__["_parameters"]
    assert len(find_places(nn.Sequential(first, second))) == 2


def test_cycles() -> None:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    node = {"loop": (loop,), "w": torch.ones(2)}
    loop.append(node)

    def fn(x: Tensor) -> Any:
        return fn, node

    assert sorted(paths(fn)) == ["node['loop'][0][0]", "node['w']"]


def test_deeply_nested_and_shared_tuples_end() -> None:
    deep: Any = ()
    shared: Any = ("leaf",)
    for _ in range(5000):
        deep = (deep,)
    for _ in range(100):
        shared = (shared, shared)
    chain: Any = None
    for _ in range(5000):
        chain = types.SimpleNamespace(next=chain)
    assert find_places(lambda x: (deep, shared, chain)) == []


def test_large_plain_containers_are_not_walked() -> None:
    class Watched(list):
        looked = 0

        def __iter__(self) -> Any:
            for item in list.__iter__(self):
                type(self).looked += 1
                yield item

    numbers = Watched(range(100_000))
    few = Watched(range(1000))
    fn = lambda x: (numbers, few)
    assert find_places(fn) == []
    assert Watched.looked <= 64
    # A sample does not judge attributes: a class with many options still has its tensors.
    options = types.SimpleNamespace(**{f"o{i}": i for i in range(100)}, w=W)
    assert paths(lambda x: options) == ["options.w"]


def test_what_is_not_captured() -> None:
    assert find_places(torch.relu) == []
    assert find_places(nn.functional.relu) == []
    assert find_places(lambda x: torch.relu(x) * sys.maxsize) == []
    assert find_places(3) == []
    grad_holder = torch.ones(2, requires_grad=True)
    grad_holder.grad = torch.ones(2)
    assert len(find_places(lambda x: grad_holder)) == 1
    # An attribute called W is not the global W.
    assert find_places(lambda x: x.W) == []


def test_the_state_of_a_library_function_is_left_alone() -> None:
    _, pullback = torch.func.vjp(torch.sin, torch.ones(2))
    assert find_places(pullback) == find_cells(pullback) == []
    assert find_places(lambda g: pullback(g)) == []


def test_generic_roots_are_walked_together() -> None:
    w = torch.ones(2)
    net = nn.Linear(2, 2)
    assert paths(lambda net, x: net(x) * w, net, "text", None) == [
        "self.weight",
        "self.bias",
        "closure variable 'w'",
    ]


def test_cells_in_a_loop_are_bound_to_what_they_held() -> None:
    def build() -> list[tuple[Callable, Any]]:
        fns = []
        for factor in (torch.tensor(2.0), torch.tensor(3.0)):
            fn = lambda x: x * factor
            fns.append((fn, find_cells(fn)))
        return fns

    one = torch.tensor(1.0)
    results = []
    for fn, cells in build():
        with rebound((), cells):
            results.append(fn(one).item())
        assert fn(one).item() == 3.0
    assert results == [2.0, 3.0]


def test_cells_are_found_whatever_they_hold_and_once() -> None:
    n, name = 3, "x"
    inner = lambda: (n, name)
    outer = lambda: (inner(), n)
    contents = {id(cell): value for cell, value in find_cells(outer)}
    assert len(find_cells(outer)) == len(contents) == 3
    assert set(map(str, contents.values())) == {"3", "x", str(inner)}


def test_cell_that_now_holds_something_else_than_a_tuple() -> None:
    pair: Any = (torch.ones(2), 1)
    fn = lambda x: x * pair[0]
    first = pair
    found = find(fn)
    pair = None
    with rebound(found.places, found.cells):
        assert pair is first
    assert pair is None


def test_containers_on_the_way_are_bound_outermost_first() -> None:
    class Model:
        pass

    model = Model()
    model.config = {"scales": [torch.ones(2)]}
    model.layers = (nn.Linear(2, 2), 3)
    model.call = uses_global
    fn = lambda x: model
    found = find(fn)
    first = dict(vars(model)), model.config["scales"], model.config["scales"][0]
    assert [place.path for place, _ in found.holders()] == [
        "closure variable 'model'", "model.config", "model.layers", "model.call", "model.config['scales']",
        "model.layers[0]",
    ]  # fmt: skip
    model.config["scales"] = []
    inner = model.config
    model.config, model.layers = {}, (nn.Linear(2, 2), 4)
    del model.call
    second = dict(vars(model))
    with rebound([*found.holders(), *found.places], found.cells):
        assert (vars(model), model.config["scales"], model.config["scales"][0]) == first
        assert model.layers is first[0]["layers"]
    assert vars(model) == second
    assert inner["scales"] == []


def test_an_attribute_or_method_put_on_a_class_later_is_found() -> None:
    class Late:
        def __call__(self, x: Tensor) -> Tensor:
            return x * self.scale

    late = Late()
    assert paths(late) == []
    Late.scale = torch.ones(2)
    assert paths(late) == ["self.scale"]
    found = find(late)
    first, Late.__call__ = Late.__call__, lambda self, x: x * CONFIG["w"]
    assert "CONFIG['w']" in paths(late) and "self.scale" not in paths(late)
    with rebound(found.holders()):
        assert Late.__call__ is first
    assert Late.__call__ is not first


def test_a_context_variable_without_a_value_is_left_without_one() -> None:
    ((place, w),) = find_places(lambda x: CONTEXT.get())

    def elsewhere() -> None:
        assert place.get() is MISSING
        with rebound([(place, w)]):
            assert CONTEXT.get() is w
        assert CONTEXT.get(None) is None

    contextvars.Context().run(elsewhere)


def test_a_first_run_keeps_its_changes() -> None:
    holder = Caller()
    holder.other = torch.ones(2)
    places = by_path(holder)
    w, other, bound, new = holder.w, holder.other, torch.zeros(2), torch.zeros(2)
    pairs = [(places["self.w"], bound), (places["self.other"], bound)]
    with rebound(pairs, keep_changes=True):
        holder.w = new
    assert holder.w is new
    assert holder.other is other
    with rebound([(places["self.w"], w)]):
        holder.w = bound
    assert holder.w is new


def test_places_hold_what_functional_call_put_there() -> None:
    net = Net()
    x = torch.ones(1, 2)
    swapped = {"layers.0.weight": torch.full((2, 2), 2.0), "scale": torch.full((2,), 3.0)}
    expected = functional_call(net, swapped, (x,))
    held = {place.path: value for place, value in FOUND}
    assert held["self.layers[0].weight"] is swapped["layers.0.weight"]
    assert held["self.layers[1].weight"] is swapped["layers.0.weight"]
    assert held["self.scale"] is swapped["scale"]
    found = list(FOUND)
    own = [(place, value) for place, value in find_places(net) if place.path.startswith("self")]
    assert not {id(value) for _, value in own} & {id(value) for value in swapped.values()}
    assert not torch.equal(net(x), expected)
    with rebound(found):
        assert torch.equal(net(x), expected)
    assert all(place.get() is value for place, value in own)


def test_functional_call_of_an_rnn() -> None:
    rnn = nn.RNN(2, 2)
    x = torch.ones(3, 1, 2)
    swapped = {name: torch.zeros_like(p) for name, p in rnn.named_parameters()}
    found: list[Any] = []
    handle = rnn.register_forward_pre_hook(lambda module, args: found.extend(find_places(module)))
    expected, _ = functional_call(rnn, swapped, (x,))
    handle.remove()
    with rebound(found):
        assert torch.equal(rnn(x)[0], expected)
    assert not torch.equal(rnn(x)[0], expected)


def test_decorated_methods_are_followed() -> None:
    def doubled(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def wrapper(*args: Any) -> Any:
            return fn(*args) * 2

        return wrapper

    class Decorated(nn.Module):
        table = [1]  # noqa: RUF012

        @doubled
        def forward(self, x: Tensor) -> Tensor:
            return self.shared(x) * self.table[0]

        @staticmethod
        def shared(x: Tensor) -> Tensor:
            return x * W

    assert paths(Decorated()) == ["global 'W'"]


def test_odd_objects_do_no_harm() -> None:
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


def test_pytest_is_no_state_of_a_region() -> None:
    """It puts calls of its own functions where a test module asserts something."""
    tensor = torch.ones(2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        assert tensor.shape == x.shape, "of one shape"
        return x + tensor

    found = find(fn)
    assert [place.path for place, _ in found.places] == ["closure variable 'tensor'"]
    assert len(found.contents) == 0


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
