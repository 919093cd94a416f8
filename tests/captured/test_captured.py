"""What a function captures: how it is found and named without running it, and restored for another run.

The last tests run regions: the tensors of the first run are used again, and changes of them are noticed.
"""

import functools
import gc
import random
import re
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same
from places import HIDDEN, PLACES, Build, work
from torch import Tensor, nn

from remat import MutationError, remat
from remat._captured.captured import Captured as find
from remat._captured.captured import visits
from remat._captured.variables import Copy, Entries, Items, bound

W = torch.ones(2)
PAIR = (torch.ones(2), 3)
uses_global: Callable = lambda x: x * W
paths: Callable[..., list[str]] = lambda *roots: [str(path) for path, _ in find(*roots).tensors]
tensors: Callable[..., list[Any]] = lambda *roots: [value for _, value in find(*roots).tensors]


def held_by(held: Any) -> Callable:
    """A function whose variable `held` has this value."""
    return lambda x: held


def run_again(found: Any, others: dict[int, Any] | None = None) -> bound:
    """A recompute: variables have the values that were found, but for the tensors in `others`."""
    return bound(found.variables, {**{id(value): value for _, value in found.tensors}, **(others or {})})


class Rows(list):
    def __init__(self) -> None:
        super().__init__([torch.ones(2)])
        self.scale = torch.ones(2)


class Slots:
    __slots__ = ("__hidden", "empty", "w")

    def __init__(self) -> None:
        self.w = torch.ones(2)
        self.__hidden = torch.ones(2)


class Caller:
    def __init__(self) -> None:
        self.w, self.me = torch.ones(2), self

    def __call__(self, x: Tensor) -> Tensor:
        return self.step(x) * W

    def step(self, x: Tensor, scale: Tensor = PAIR[0]) -> Tensor:
        return uses_global(x) * self.w * scale

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
        return self.layers[1](self.layers[0](x)) * self.scale * W


Sharded: Any = type("Sharded", (Net, type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"})), {})


def hooked() -> nn.Module:
    first, then, module = torch.ones(2), torch.ones(2), nn.Identity()
    module.register_forward_pre_hook(lambda module, args: args[0] * first)
    module.register_forward_hook(lambda module, args, result: result * then)
    return module


NET = ["self.scale", "self.extra[0]", "self.layers[0].weight", "global 'W'"]
CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    **{name: (lambda build=build: build(torch.ones(2)).fn, [path]) for name, (path, build) in PLACES.items()},
    "partial in a closure": (lambda: held_by(functools.partial(torch.add, torch.ones(2))), ["held.args[0]"]),
    "partial function": (lambda: functools.partial(held_by(torch.ones(2))), ["closure variable 'held' of self.func"]),
    "generator": (lambda: held_by(torch.Generator()), ["closure variable 'held'"]),
    "method of a generator": (lambda: held_by(random.Random(0).random), ["held.__self__"]),
    "slots": (Slots, ["self.w", "self._Slots__hidden"]),
    "caller": (Caller, ["self.w", "global 'W'"]),
    "method of it": (lambda: Caller().step, ["self.w", "global 'W'", "self.step.__defaults__[0]"]),
    "module": (Net, NET),
    "method of a module": (lambda: Net().forward, NET),
    "hooks": (hooked, [
        "closure variable 'then' of self._forward_hooks[n]", "closure variable 'first' of self._forward_pre_hooks[n]"]),
    "rnn": (lambda: nn.RNN(2, 2, bias=False), ["self.weight_ih_l0", "self.weight_hh_l0"]),  # not `_flat_weights`
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False)), [
        "self.parametrizations.weight.original0", "self.parametrizations.weight.original1"]),
    "wrapper of a library": (lambda: torch.func.vmap(uses_global), ["global 'W'"]),
    "another function in one": (lambda: torch.overrides.wrap_torch_function(uses_global)(torch.sin), ["global 'W'"]),
    "doctest of one": (lambda: eval("lambda x: x * w", {"__name__": "torch", "w": torch.ones(2)}), ["global 'w'"]),
    "list with attributes": (lambda: held_by(Rows()), ["held[0]", "held.scale"]),
    "attribute whose name is no identifier": (lambda: held_by(types.SimpleNamespace(**{"a b": W})), ["held['a b']"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_found_in_every_place_and_named(name: str) -> None:
    make, expected = CASES[name]
    assert sorted(re.sub(r"hooks\[\d+\]", "hooks[n]", path) for path in paths(make())) == sorted(expected)


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_replaced_for_a_run_and_put_back_also_after_an_exception(name: str) -> None:
    fn = CASES[name][0]()
    before = tensors(fn)
    others = {id(v): v.detach() + 1 if isinstance(v, Tensor) else v for v in before}
    with pytest.raises(ZeroDivisionError), run_again(find(fn), others):
        assert [*map(id, tensors(fn))] == [id(others[id(v)]) for v in before]
        raise ZeroDivisionError
    assert [*map(id, tensors(fn))] == [*map(id, before)]


def test_modules_and_buffers_are_listed() -> None:
    found = find(net := Net())
    assert [str(path) for path, _ in found.modules()] == ["self", "self.layers", "self.layers[0]", "self.layers[1]"]
    assert found.buffers == {id(net.scale)}


def test_fsdp_replaces_the_parameters_of_its_modules() -> None:
    net = Sharded()
    net.view = torch.ones(2)  # of a parameter
    assert sorted(paths(net)) == ["global 'W'", "self.extra[0]", "self.scale"]
    holders = [each.holder for each in find(nn.Sequential(net)).variables]
    assert not any(holder is vars(each) for holder in holders for each in (net, net.scale))


def test_a_tensor_in_two_places_is_found_once() -> None:
    net = Net()
    (weight,) = (value for path, value in find(net).tensors if str(path).endswith("weight"))
    assert weight is net.layers[0].weight is net.layers[1].weight
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    vars(layers[1])["_parameters"] = vars(layers[0])["_parameters"]
    assert paths(layers) == ["self[0].weight", "self[0].bias"]
    number = 1
    assert len(find(lambda x: number, lambda x: len(number)).variables) == 3  # with the attributes of both functions


tanh = torch.ones(2)


def test_all_roots_are_searched_and_an_attribute_is_no_global_of_its_name() -> None:
    net = nn.Linear(2, 2)
    assert paths(lambda x: x.tanh()) == []
    assert paths(lambda net, x: net(x) * tanh, net, "text", None) == ["global 'tanh'", "self.weight", "self.bias"]


def test_odd_objects_cause_no_error() -> None:
    odd = type("Odd", (), {"__slots__": (), "__getattr__": lambda self, name: 1 // 0})()
    scripted = torch.jit.script(nn.Linear(2, 2))
    number = type("Number", (complex,), {})(1j)  # the slots of its base are read-only
    bare = nn.Identity.__new__(nn.Identity)
    held = [odd, torch.ops.aten.mm, torch.ops.aten.mm.default, Slots, scripted, number, bare, OrderedDict(w=W)]
    assert paths(lambda x: held) == ["held[7]['w']"]
    with run_again(find(lambda x: held)):
        pass


def test_libraries_classes_and_sets_are_not_searched() -> None:
    vjp = torch.func.vjp(torch.sin, torch.ones(2))[1]
    assert find(vjp).variables == find(re.sub).variables == []  # nor are their variables restored
    lazy: Any = type("Lazy", (types.ModuleType,), {})("lazy")
    sets, lazy.w = [torch.Tensor, Slots, {W}, frozenset({W}), lazy], W
    for fn in (torch.relu, nn.functional.relu, lambda x: x * sys.maxsize, 3, vjp, held_by(vjp), held_by(sets)):
        assert tensors(fn) == []


def test_a_search_in_cycles_and_deep_and_shared_containers_ends() -> None:
    loop: list[Any] = [torch.ones(2)]
    node = {"loop": (loop,), "w": torch.ones(2)}
    loop += [loop, node]
    deep, shared, chain = (), ("leaf",), None  # type: ignore[var-annotated]
    for i in range(5000):
        deep, chain, shared = (deep,), types.SimpleNamespace(next=chain), (shared, shared) if i < 100 else shared

    def fn(x: Tensor) -> Any:
        return fn, node, deep, shared, chain

    assert paths(fn) == ["node['w']", "node['loop'][0][0]"]


@pytest.mark.parametrize("before, after, found", [(31, 1000, True), (32, 0, False), (0, 9999, True), (0, 10000, False)])
@pytest.mark.parametrize("kind", [list, tuple, lambda items: dict(enumerate(items))])
def test_a_long_container_is_data_if_its_first_entries_are(kind: Any, before: int, after: int, found: bool) -> None:
    held = kind([*[1] * before, W, *[1] * after])
    assert paths(lambda x: held) == [f"held[{before}]"] * found


@pytest.mark.parametrize("item, size, restored", [(1, 1000, True), (1, 1001, False), (W, 1001, True)])
def test_numbers_of_a_module_are_restored_unless_they_are_many(item: Any, size: int, restored: bool) -> None:
    module, row = nn.Identity(), (*[1] * 32, W)
    module.table, module.numbers, module.row = dict.fromkeys(range(size), item), [item] * size, row
    found = find(module)
    module.table[0] = module.numbers[0] = 2
    with run_again(found):
        assert (module.table[0], module.numbers[0]) == ((item, item) if restored else (2, 2))
    assert (module.table[0], module.numbers[0]) == (2, 2)
    module.table, module.numbers, module.row = {}, [], None
    with run_again(found):
        assert len(module.table) == len(module.numbers) == size and module.row is row


def test_a_recompute_while_a_dict_is_iterated_over() -> None:
    numbers = OrderedDict(a=1, b=1)
    found = find(held_by(numbers))
    for key in numbers:  # an error if it was cleared
        numbers[key] = 2
        with run_again(found):
            assert numbers == {"a": 1, "b": 1}


def test_a_container_of_another_class_at_the_same_address_is_not_filled() -> None:
    copy, holder = Copy([1], {0: 1}), {"held": {}}
    copy.address = id(holder["held"])
    with bound([Entries(holder, {"held": copy})], {}):
        assert holder == {"held": [1]}
    assert holder == {"held": {}}


def test_classes_that_are_made_at_run_time_are_freed() -> None:
    """As those of parametrized modules, which may hold tensors."""
    local = type("Local", (nn.Linear,), {"__call__": lambda self, x: x})
    find(local(2, 2), held_by(type("Object", (local,), {})(2, 2)))
    assert {type(None), nn.Parameter} <= visits.keys()  # these are remembered
    watched = weakref.ref(local)
    del local
    gc.collect()
    assert watched() is None


cell: Callable[[Any], Any] = lambda fn: fn.__closure__[0]  # of the variable `held`
of: Callable[[Any], Any] = lambda fn: cell(fn).cell_contents


# A function, and what happens to its variables between the two runs.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "a slot is deleted": (Slots, lambda slots: delattr(slots, "w")),
    "an attribute is deleted": (Caller, lambda caller: delattr(caller, "w")),
    "a parameter is replaced": (Net, lambda net: setattr(net.layers[0], "weight", nn.Parameter(torch.zeros(2, 2)))),
    "a layer is removed": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lambda net: net.pop(0)),
    "defaults are removed": (lambda: lambda x, w=W, *, b=PAIR[0]: x * w + b, lambda fn: (
        setattr(fn, "__defaults__", None), setattr(fn, "__kwdefaults__", None))),
    "a key is renamed": (lambda: held_by({"w": torch.ones(2)}), lambda fn: of(fn).update(v=of(fn).pop("w"))),
    "a list gets shorter": (lambda: held_by([torch.ones(2), torch.ones(2)]), lambda fn: of(fn).pop()),
    "a list gets longer": (lambda: held_by([torch.ones(2)]), lambda fn: of(fn).append(torch.ones(2))),
    "an item is replaced": (lambda: held_by([torch.ones(2), 1]), lambda fn: of(fn).__setitem__(0, torch.zeros(2))),
    "another tuple": (lambda: held_by((torch.ones(2), 1)), lambda fn: setattr(cell(fn), "cell_contents", (W, 1, 2))),
    "a variable is emptied": (lambda: held_by(torch.ones(2)), lambda fn: delattr(cell(fn), "cell_contents")),
    "a partial gets other arguments": (lambda: functools.partial(torch.add, torch.ones(2), alpha=2), lambda fn: (
        fn.__setstate__((fn.func, (torch.zeros(2),), {}, {"note": "kept"})))),
}  # fmt: skip


def identities(fn: Any) -> list[tuple[str, int]]:
    return [(str(path), id(value)) for path, value in find(fn).tensors]


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_finds_what_the_first_run_found(name: str) -> None:
    make, change = CHANGES[name]
    fn = make()
    found, before = find(fn), identities(fn)
    change(fn)
    after, note = identities(fn), getattr(fn, "note", None)
    assert after != before
    with run_again(found):
        assert identities(fn) == before
    assert identities(fn) == after and getattr(fn, "note", None) == note
    run_again(found).put()  # for good, as after a first run that is abandoned
    assert identities(fn) == before


def test_variables_are_put_back_if_one_of_them_cannot_be_set() -> None:
    broken: Any = type("Broken", (Items,), {"put": lambda self, values: 1 // 0})([1], {0: 2})
    holder = Caller()
    found, holder.me = find(holder), None
    with pytest.raises(ZeroDivisionError), bound([*found.variables, broken], {}):
        pass
    assert holder.me is None


CHANGED = (
    " was changed in place between the region's forward and its backward, which recomputes the region and would give "
    "wrong gradients. "
)  # fmt: skip
OF_PARAMETERS = "The usual cause is an `optimizer.step()` between the two: call it after the backward."
OF_OTHERS = "Change it after the backward, use the out-of-place operation, or give the region a copy: `.clone()`."
every_place = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(params=[True, False], ids=["requires grad", "plain"])
def w(request: pytest.FixtureRequest) -> Tensor:
    return torch.randn(3).requires_grad_(request.param)


def check_bound_anew(build: Build, w: Tensor, wrap: Callable = remat) -> None:
    """The gradients are those of `w`, though the place has another tensor since, which remains there."""
    x, other = torch.randn(3, requires_grad=True), torch.full((3,), 7.0)
    inputs = [t for t in (x, w) if t.requires_grad]
    fn, rebind = build(w)
    out, expected = wrap(fn)(x), work(x, w)
    rebind(other)
    gradients = [torch.autograd.grad(out.sum(), inputs, retain_graph=True) for _ in range(2)]
    assert_same((out.detach(), gradients), (expected.detach(), [torch.autograd.grad(expected.sum(), inputs)] * 2))
    assert torch.equal(fn(x), work(x, other))


@every_place
def test_another_tensor_in_the_place_before_the_backward(place: str, w: Tensor) -> None:
    check_bound_anew(PLACES[place][1], w)


@every_place
def test_a_change_in_place_is_an_error_that_names_the_place(place: str, w: Tensor) -> None:
    path, build = PLACES[place]
    x = torch.randn(3, requires_grad=True)
    loss = remat(build(w).fn)(x).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError) as raised:
        loss.backward()
    text, _, region = str(raised.value).partition("\nThe region is ")
    assert text == f"captured {path}{CHANGED}{OF_PARAMETERS if w.requires_grad else OF_OTHERS}"
    assert region == f"{raised.value.region}." and f" called at {__file__}:" in region
    assert x.grad is None and w.grad is None


@pytest.mark.parametrize("place", HIDDEN)
def test_a_place_that_is_not_found(place: str, w: Tensor) -> None:
    """A change in place is an error. With another tensor in the place the result is right, or an error."""
    x = torch.randn(3, requires_grad=True)
    out, expected = remat(HIDDEN[place](w).fn)(x), work(x, w)
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x))
    loss = remat(HIDDEN[place](w).fn)(x).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError, match=r"[Cc]aptured .* changed in place"):
        loss.backward()
    # Where autograd doesn't follow the tensor, only its values show the change.
    try:
        check_bound_anew(HIDDEN[place], w, remat if w.requires_grad else remat(determinism_check="values"))
    except RuntimeError as error:
        assert "captured" in str(error) or "same each time" in str(error)


def test_a_parameter_that_hooks_of_the_module_replace_around_the_forward() -> None:
    """`remat.remat(module)` runs them outside the region, whose recompute uses the parameter of the first run."""
    module, x, full = nn.Linear(3, 3), torch.randn(2, 3), nn.Parameter(torch.randn(3, 3))
    region, shard = remat(module), module.weight
    region.register_forward_pre_hook(lambda module, args: setattr(module, "weight", full))
    region.register_forward_hook(lambda module, args, out: setattr(module, "weight", shard))
    region(x).exp().sum().backward()
    assert_same((full.grad,), torch.autograd.grad(nn.functional.linear(x, full, module.bias).exp().sum(), full))
    assert module.weight is shard and shard.grad is None


class Refusing(nn.Parameter):
    """Like hypll's parameters, it lets torch read its attributes, and refuses functions and methods."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ == "__get__", func
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_parameter_that_refuses_methods_is_no_error() -> None:
    net, x = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    net.refusing = Refusing(torch.ones(2))
    assert_same(torch.autograd.grad(remat(net)(x).sin().sum(), x), torch.autograd.grad(net(x).sin().sum(), x))
