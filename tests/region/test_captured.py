"""Captured tensors in plain autograd: read from any kind of place, changed in place, rebound, updated once."""

from __future__ import annotations

import contextvars
import functools
import math
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from remat import MutationError, remat

G: Any = None
TABLE: dict[str, Any] = {}
OTHER_MODULE = types.ModuleType("other_module")
CONTEXT: contextvars.ContextVar = contextvars.ContextVar("w")
UPDATED = (
    " was changed in place between the region's forward and its backward, which recomputes the region and would give "
    "wrong gradients. "
)  # fmt: skip
OF_PARAMETERS = "The usual cause is an `optimizer.step()` between the two: call it after the backward."
OF_OTHERS = "Change it after the backward, use the out-of-place operation, or give the region a copy: `.clone()`."


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def work(x: Tensor, w: Tensor) -> Tensor:
    return ((x * w).sin() * w).exp()


# --- every kind of place --------------------------------------------------------------------------


class Case(NamedTuple):
    fn: Callable
    path: str | None  # None: the search doesn't find it, only reading it does
    rebind: Callable[[Tensor], Any]


class Pair(NamedTuple):
    w: Tensor
    name: str


class Holder:
    def __init__(self, w: Tensor) -> None:
        self.w = w

    def __call__(self, x: Tensor) -> Tensor:
        return work(x, self.w)

    def method(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return work(x, self.prop)

    @property
    def prop(self) -> Tensor:
        return self.w


class Slots(Holder):
    __slots__ = ("w",)


class OnClass:
    w: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return work(x, self.w)


class Module(nn.Module):
    def __init__(self, w: Tensor, kind: str) -> None:
        super().__init__()
        if kind == "buffer":
            self.register_buffer("w", w)
        elif kind == "parameter":
            self.w = nn.Parameter(w) if type(w) is not nn.Parameter else w
        else:
            self.w = w

    def forward(self, x: Tensor) -> Tensor:
        return work(x, self.w)


def reads_global(x: Tensor) -> Tensor:
    return work(x, G)


def calls_reads_global(x: Tensor) -> Tensor:
    return sum(reads_global(x) for _ in range(1))


def closure(w: Tensor) -> Case:
    def rebind(other: Tensor) -> None:
        nonlocal w
        w = other

    return Case(lambda x: work(x, w), "closure variable 'w'", rebind)


def helper_closure(w: Tensor) -> Case:
    def helper(x: Tensor) -> Tensor:
        return work(x, w)

    def rebind(other: Tensor) -> None:
        nonlocal w
        w = other

    return Case(lambda x: helper(x), "closure variable 'w' of helper", rebind)


def set_global(w: Tensor) -> None:
    global G
    G = w


def a_global(w: Tensor, fn: Callable = reads_global) -> Case:
    set_global(w)
    return Case(fn, "global 'G'", set_global)


def global_of_a_helper(w: Tensor) -> Case:
    return a_global(w, calls_reads_global)


def global_dict(w: Tensor) -> Case:
    TABLE["w"] = [w]
    path = "TABLE['w'][0]"
    return Case(lambda x: work(x, TABLE["w"][0]), path, lambda t: TABLE.update(w=[t]))


def default(w: Tensor) -> Case:
    def fn(x: Tensor, w: Tensor = w) -> Tensor:
        return work(x, w)

    return Case(fn, "fn.__defaults__[0]", lambda t: setattr(fn, "__defaults__", (t,)))


def keyword_default(w: Tensor) -> Case:
    def fn(x: Tensor, *, w: Tensor = w) -> Tensor:
        return work(x, w)

    return Case(fn, "fn.__kwdefaults__['w']", lambda t: fn.__kwdefaults__.update(w=t))


def partial_argument(w: Tensor) -> Case:
    fn = functools.partial(lambda w, x: work(x, w), w)

    def rebind(other: Tensor) -> None:
        fn.__setstate__((fn.func, (other,), fn.keywords, {}))

    return Case(fn, "self.args[0]", rebind)


def partial_keyword(w: Tensor) -> Case:
    fn = functools.partial(work, w=w)
    return Case(fn, "self.keywords['w']", lambda t: fn.keywords.update(w=t))


def function_attribute(w: Tensor) -> Case:
    def fn(x: Tensor) -> Tensor:
        return work(x, fn.w)

    fn.w = w
    return Case(fn, "fn.w", lambda t: setattr(fn, "w", t))


def item_of_a_list(w: Tensor) -> Case:
    items = [None, w]
    return Case(lambda x: work(x, items[1]), "items[1]", lambda t: items.__setitem__(1, t))


def nested_dict(w: Tensor) -> Case:
    table = {"a": {"b": w}}
    path = "table['a']['b']"
    return Case(lambda x: work(x, table["a"]["b"]), path, lambda t: table["a"].update(b=t))


def item_of_a_tuple(w: Tensor) -> Case:
    pair = (None, (w, 1))

    def rebind(other: Tensor) -> None:
        nonlocal pair
        pair = (None, (other, 1))

    return Case(lambda x: work(x, pair[1][0]), "pair[1][0]", rebind)


def named_tuple(w: Tensor) -> Case:
    pair = Pair(w, "w")

    def rebind(other: Tensor) -> None:
        nonlocal pair
        pair = Pair(other, "w")

    return Case(lambda x: work(x, pair.w), "pair[0]", rebind)


def attribute(w: Tensor) -> Case:
    space = types.SimpleNamespace(w=w)
    return Case(lambda x: work(x, space.w), "space.w", lambda t: setattr(space, "w", t))


def slot(w: Tensor) -> Case:
    slots = Slots(w)
    return Case(lambda x: slots(x), "slots.w", lambda t: setattr(slots, "w", t))


def callable_object(w: Tensor) -> Case:
    holder = Holder(w)
    return Case(holder, "self.w", lambda t: setattr(holder, "w", t))


def bound_method(w: Tensor) -> Case:
    holder = Holder(w)
    return Case(holder.method, "self.w", lambda t: setattr(holder, "w", t))


def of_a_module(w: Tensor, kind: str) -> Case:
    module = Module(w, kind)

    def rebind(other: Tensor) -> None:
        module.w = nn.Parameter(other) if kind == "parameter" else other

    return Case(module, "self.w", rebind)


def buffer(w: Tensor) -> Case:
    return of_a_module(w, "buffer")


def plain_attribute_of_a_module(w: Tensor) -> Case:
    return of_a_module(w, "attribute")


def module_in_a_module(w: Tensor) -> Case:
    inner = Module(w, "buffer")
    fn = nn.Sequential(nn.Identity(), nn.ModuleDict({"a": inner})["a"])
    return Case(fn, "self[1].w", lambda t: setattr(inner, "w", t))


def module_in_a_closure(w: Tensor) -> Case:
    net = Module(w, "buffer")
    return Case(lambda x: net(x), "net.w", lambda t: setattr(net, "w", t))


def on_the_class(w: Tensor) -> Case:
    OnClass.w = w
    return Case(OnClass(), None, lambda t: setattr(OnClass, "w", t))


def in_another_module(w: Tensor) -> Case:
    OTHER_MODULE.w = w
    fn = lambda x: work(x, OTHER_MODULE.w)
    return Case(fn, None, lambda t: setattr(OTHER_MODULE, "w", t))


def context_variable(w: Tensor) -> Case:
    CONTEXT.set(w)
    return Case(lambda x: work(x, CONTEXT.get()), None, CONTEXT.set)


def in_a_set(w: Tensor) -> Case:
    bag = {w}

    def rebind(other: Tensor) -> None:
        bag.clear()
        bag.add(other)

    return Case(lambda x: work(x, next(iter(bag))), None, rebind)


def by_a_made_up_name(w: Tensor) -> Case:
    OTHER_MODULE.__dict__["w"] = w
    fn = lambda x: work(x, getattr(OTHER_MODULE, "_w"[1:]))
    return Case(fn, None, lambda t: setattr(OTHER_MODULE, "w", t))


WITH_PLACE = [
    closure, helper_closure, a_global, global_of_a_helper, global_dict, default, keyword_default,
    partial_argument, partial_keyword, function_attribute, item_of_a_list, nested_dict,
    item_of_a_tuple, named_tuple, attribute, slot, callable_object, bound_method, buffer,
    plain_attribute_of_a_module, module_in_a_module, module_in_a_closure,
]  # fmt: skip
WITHOUT_PLACE = [on_the_class, in_another_module, context_variable, in_a_set, by_a_made_up_name]


@pytest.fixture(params=WITH_PLACE, ids=lambda build: build.__name__)
def build(request: pytest.FixtureRequest) -> Callable:
    return request.param


@pytest.fixture(params=WITHOUT_PLACE, ids=lambda build: build.__name__)
def build_without(request: pytest.FixtureRequest) -> Callable:
    return request.param


@pytest.fixture(params=[True, False], ids=["requires grad", "plain"])
def w(request: pytest.FixtureRequest) -> Tensor:
    return torch.randn(3).requires_grad_(request.param)


def reference(x: Tensor, w: Tensor) -> Any:
    out = work(x, w)
    inputs = [t for t in (x, w) if t.requires_grad]
    return out.detach(), torch.autograd.grad(out.sum(), inputs)


def check_right(build: Callable, w: Tensor) -> None:
    x = torch.randn(3, requires_grad=True)
    out = remat(build(w).fn)(x)
    inputs = [t for t in (x, w) if t.requires_grad]
    actual = out.detach(), torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    same(actual, reference(x, w))
    same(torch.autograd.grad(out.sum(), inputs), actual[1])


def check_bound_anew(build: Callable, w: Tensor, wrap: Callable = remat) -> None:
    x = torch.randn(3, requires_grad=True)
    case = build(w)
    out = wrap(case.fn)(x)
    other = torch.full((3,), 7.0)
    case.rebind(other)
    inputs = [t for t in (x, w) if t.requires_grad]
    same((out.detach(), torch.autograd.grad(out.sum(), inputs)), reference(x, w))
    same(case.fn(x), work(x, other))  # the place contains what the user assigned


def test_correct_from_every_place(build: Callable, w: Tensor) -> None:
    check_right(build, w)


def test_rebound_before_the_backward(build: Callable, w: Tensor) -> None:
    # This is allowed: the recompute reads what the first run read.
    check_bound_anew(build, w)


def test_changed_in_place_before_the_backward(build: Callable, w: Tensor) -> None:
    x = torch.randn(3, requires_grad=True)
    case = build(w)
    loss = remat(case.fn)(x).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError) as raised:
        loss.backward()
    text, _, region = str(raised.value).partition("\nThe region is ")
    assert text == f"captured {case.path}{UPDATED}{OF_PARAMETERS if w.requires_grad else OF_OTHERS}"
    assert region == f"{raised.value.region}." and f" called at {__file__}:" in region
    assert x.grad is None and w.grad is None


def test_correct_without_a_place(build_without: Callable, w: Tensor) -> None:
    check_right(build_without, w)


def test_changed_in_place_without_a_place(build_without: Callable, w: Tensor) -> None:
    x = torch.randn(3, requires_grad=True)
    loss = remat(build_without(w).fn)(x).sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(MutationError, match=r"[Cc]aptured .* changed in place"):
        loss.backward()


def test_rebound_without_a_place_is_correct_or_an_error(build_without: Callable, w: Tensor) -> None:
    # Where autograd doesn't track the tensor, only its values show the change.
    fn = remat if w.requires_grad else remat(determinism_check="values")
    try:
        check_bound_anew(build_without, w, fn)
    except RuntimeError as error:
        assert "captured" in str(error) or "same each time" in str(error)


class Deep:
    def __init__(self, w: Tensor) -> None:
        self.config = types.SimpleNamespace(items={"w": w})

    def __call__(self, x: Tensor) -> Tensor:
        return work(x, self.config.items["w"])


def test_container_rebound_before_the_backward() -> None:
    w, other = torch.randn(3), torch.full((3,), 7.0)
    x = torch.randn(3, requires_grad=True)
    for replace in (
        lambda deep: setattr(deep, "config", types.SimpleNamespace(items={"w": other})),
        lambda deep: setattr(deep.config, "items", {"w": other}),
        lambda deep: deep.config.items.update(w=other),
    ):
        deep = Deep(w)
        out = remat(deep)(x)
        replace(deep)
        same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(work(x, w).sum(), x))
        assert deep.config.items["w"] is other


def test_submodule_rebound_before_the_backward() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).exp().sum(), inputs)
    out, other = remat(module)(x).exp(), nn.Linear(3, 3)
    module[0] = other
    same(torch.autograd.grad(out.sum(), inputs), expected)
    assert module[0] is other and other.weight.grad is None


def test_changed_through_a_view_and_through_data_ptr_sharing() -> None:
    w = torch.ones(4)
    x = torch.randn(2, requires_grad=True)
    part = w[:2]
    loss = remat(lambda x: work(x, part))(x).sum()
    w.mul_(2)
    with pytest.raises(MutationError, match="captured closure variable 'part' was changed"):
        loss.backward()


def test_changed_argument_is_named_by_its_path() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.ones(3)

    def fn(x: Tensor, tree: Any, *, options: Any) -> Tensor:
        return work(x, tree["ws"][1]) * options["scale"]

    for path in ("tree['ws'][1]", "options['scale']"):
        tree, options = {"ws": [None, w.clone()]}, {"scale": w.clone()}
        loss = remat(fn)(x, tree, options=options).sum()
        (tree["ws"][1] if "ws" in path else options["scale"]).mul_(2)
        with pytest.raises(MutationError) as raised:
            loss.backward()
        assert str(raised.value).startswith(f"argument {path}{UPDATED}{OF_OTHERS}\nThe region is fn called at ")


def test_parameter_changed_by_an_optimizer_is_named_and_the_next_step_works() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    f, optimizer = remat(model), torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3)
    stale = f(x).sum()
    f(x).sum().backward()
    optimizer.step()
    with pytest.raises(MutationError, match=re.escape("captured self[0].weight was changed")):
        stale.backward()
    optimizer.zero_grad()
    f(x).sum().backward()
    actual = [p.grad for p in model.parameters()]
    same(actual, list(torch.autograd.grad(model(x).sum(), list(model.parameters()))))


def test_rebinding_to_a_new_tensor_is_not_a_change() -> None:
    # The change is out of place: the captured tensor stays the same.
    w, x = torch.ones(3), torch.randn(3, requires_grad=True)
    before = w
    loss = remat(lambda x: work(x, w))(x).sum()
    w = w * 2
    same(torch.autograd.grad(loss, x), torch.autograd.grad(work(x, before).sum(), x))


# --- parameter objects swapped on modules -----------------------------------------------------------


class Sharding:
    """Sets full parameters on a module around its forward and backward, and frees them in between."""

    def __init__(self, module: nn.Module) -> None:
        self.slots = [(m, name) for m in module.modules() for name, p in m._parameters.items() if p is not None]
        self.shards = [m._parameters[name] for m, name in self.slots]
        self.full = [nn.Parameter(p.detach().clone()) for p in self.shards]
        self.sizes = [p.untyped_storage().size() for p in self.full]
        self.reshard()

    def unshard(self) -> None:
        for (module, name), full, shard, size in zip(self.slots, self.full, self.shards, self.sizes, strict=True):
            if full.untyped_storage().size() == 0:
                full.untyped_storage().resize_(size)
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(full):
                    full.copy_(shard)
            module._parameters[name] = full

    def reshard(self) -> None:
        for (module, name), full, shard in zip(self.slots, self.full, self.shards, strict=True):
            full.untyped_storage().resize_(0)
            module._parameters[name] = shard


def blocks() -> tuple[nn.Module, nn.Module]:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
    sharded = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
    sharded.load_state_dict(plain.state_dict())
    return plain, sharded


def test_swapped_parameters_around_the_region() -> None:
    plain, module = blocks()
    sharding, f = Sharding(module), remat(module)
    x = torch.randn(2, 3)
    for _ in range(2):
        sharding.unshard()
        out = f(x)
        sharding.reshard()
        out.register_hook(lambda grad: sharding.unshard())
        out.exp().sum().backward()
        sharding.reshard()
    for _ in range(2):
        plain(x).exp().sum().backward()
    same([p.grad for p in sharding.full], [p.grad for p in plain.parameters()])
    assert all(p.grad is None for p in sharding.shards)
    assert list(module.parameters()) == sharding.shards


def test_swapped_parameters_by_hooks_of_a_module_around_the_region() -> None:
    plain, module = blocks()
    sharding = Sharding(module)
    outer = remat(module)
    outer.register_forward_pre_hook(lambda module, args: sharding.unshard())

    def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        sharding.reshard()
        out.register_hook(lambda grad: sharding.unshard())
        return out

    outer.register_forward_hook(after)
    x = torch.randn(2, 3)
    outer(x).exp().sum().backward()
    sharding.reshard()
    plain(x).exp().sum().backward()
    same([p.grad for p in sharding.full], [p.grad for p in plain.parameters()])


def test_swapped_parameters_not_restored_for_the_backward() -> None:
    # The recompute uses the parameters of the first run, and leaves the module as it was before the backward.
    plain, module = blocks()
    originals = list(module.parameters())
    x = torch.randn(2, 3)
    loss = remat(module)(x).exp().sum()
    others = [nn.Parameter(torch.zeros_like(p)) for p in originals]
    for layer, i in ((module[0], 0), (module[2], 2)):
        layer.weight, layer.bias = others[i], others[i + 1]
    loss.backward()
    plain(x).exp().sum().backward()
    same([p.grad for p in originals], [p.grad for p in plain.parameters()])
    assert all(a is b for a, b in zip(module.parameters(), others, strict=True))
    assert all(p.grad is None for p in others)


# --- buffers are updated once -----------------------------------------------------------------------


def train_step(wrap: Callable, module: nn.Module, xs: list[Tensor]) -> Any:
    f, results = wrap(module), []
    for x in xs:
        module.zero_grad()
        loss = f(x).exp().sum()
        state = {k: v.clone() for k, v in module.state_dict().items()}
        loss.backward()
        same(dict(module.state_dict()), state)  # the backward updates nothing
        results.append((loss.detach(), [p.grad for p in module.parameters()], state))
    return results


class CountsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return (self.linear(x) * self.n).sin()


class CountsByAssignment(CountsInPlace):
    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return (self.linear(x) * self.n).sin()


class CountsAfterUse(CountsInPlace):
    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) * self.n.clone()).sin()
        self.n.add_(x.detach().sum())
        return y


class MovingAverage(CountsInPlace):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.n.mul_(0.9).add_(y.detach().mean(), alpha=0.1)
        return (y - self.n).sin()


class KeepsLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        self.calls[1].add_(self.calls[0])
        return (self.linear(x) * self.calls.sum()).sin()


STATEFUL = {
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()),
    "cumulative batch norm": lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Tanh()),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Linear(1, 4),
        nn.InstanceNorm1d(3, track_running_stats=True, affine=True),
    ),
    "two batch norms": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()),
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 3)
    ),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh()),
    "counter by add_": CountsInPlace,
    "counter by assignment": CountsByAssignment,
    "counter read before": CountsAfterUse,
    "moving average": MovingAverage,
    "plain tensor attribute": KeepsLists,
}


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_buffers_are_updated_once(make: Callable) -> None:
    torch.manual_seed(1)
    modules = [make(), make()]
    modules[1].load_state_dict(modules[0].state_dict())
    xs = [torch.randn(4, 3) for _ in range(3)]
    same(train_step(remat, modules[0], xs), train_step(lambda f: f, modules[1], xs))


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_buffers_are_updated_once_in_a_retained_graph(make: Callable) -> None:
    torch.manual_seed(1)
    module = make()
    x = torch.randn(4, 3, requires_grad=True)
    loss = remat(module)(x).exp().sum()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    first = torch.autograd.grad(loss, x, retain_graph=True)
    same(torch.autograd.grad(loss, x), first)
    same(dict(module.state_dict()), state)


@pytest.mark.parametrize("early_stop", [True, False])
def test_large_buffer_changed_by_the_region(early_stop: bool) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.ones(512, 513))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(1)
            return (x * self.total[0, 0].clone()).sin().exp()

    module = Large()
    f, x = remat(module, early_stop=early_stop), torch.linspace(0, 1, 3, requires_grad=True)
    loss = f(x).sum()
    with pytest.raises(MutationError) as raised:
        loss.backward()
    assert str(raised.value).partition("\n")[0] == (
        "captured self.total was changed in place by the region itself, so the region can't be recomputed from the old "
        "value. Of tensors that don't require grad, those of up to 16 KiB, and vectors and buffers of up to 1 MiB, are "
        "copied first. Give the region a copy: `.clone()`, or change the tensor outside of it."
    )
    assert module.total[0, 0] == 2 and x.grad is None


def test_embedding_with_max_norm() -> None:
    """It renormalizes rows of the parameter in place, in the forward."""
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2), nn.Tanh())
    with pytest.raises(MutationError, match="weight was changed in place by the region itself"):
        remat(model)(torch.tensor([0, 1, 1, 4])).sum().backward()


# --- the region changes its own input ---------------------------------------------------------------

BY_THE_REGION = (
    " requires grad and was changed in place by the region, which can't be recomputed from the new value. Use the "
    "out-of-place operation, or give the region a copy: `.clone()`."
)  # fmt: skip


def test_inplace_relu_on_the_input() -> None:
    h = torch.randn(2, 3, requires_grad=True).sin()
    f = remat(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))
    with pytest.raises(MutationError) as raised:
        f(h)
    assert str(raised.value).startswith(f"argument input{BY_THE_REGION}\nThe region is Sequential called at ")


def test_inplace_relu_inside() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    expected = torch.autograd.grad(model(x).exp().sum(), [x, *model.parameters()])
    same(torch.autograd.grad(remat(model)(x).exp().sum(), [x, *model.parameters()]), expected)


def test_input_without_gradient_changed_by_the_region() -> None:
    # A small one is copied first, so the recompute starts from the same value as the first run.
    w = torch.linspace(0, 1, 3, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        x.relu_()
        return ((x * w).sin() * w).exp()

    results = []
    for f in (remat(fn), fn):
        x = torch.tensor([-1.0, 0.5, 2.0])
        loss = f(x).sum()
        results.append((loss.detach(), torch.autograd.grad(loss, w), x))
    same(*results)
    assert math.isclose(results[0][2].min().item(), 0)


def test_captured_parameter_changed_by_the_region_is_correct_or_an_error() -> None:
    results = []
    for wrap in (lambda f: f, remat):
        w = torch.ones(3, requires_grad=True)

        def fn(x: Tensor) -> Tensor:
            with torch.no_grad():
                w.mul_(2)
            return (x * w).sin().exp()

        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        try:
            loss = wrap(fn)(x).sum()
            results.append(torch.autograd.grad(loss, [x, w]))
        except MutationError as error:
            assert "captured closure variable 'w'" in str(error)
            return
        same(w.detach(), torch.full((3,), 2.0))
    same(*results)
