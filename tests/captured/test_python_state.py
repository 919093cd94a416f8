"""Python state that a region reads, and that changes after its first run: the recompute sees the earlier state.

Some tests are of tensors that a region appends to a list or dict, as libraries do to collect outputs.
"""

import importlib
import sys
import weakref
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable
from functools import partial
from operator import is_
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cases import Wrap, assert_same, plain
from torch import Tensor, nn
from torch.func import vmap
from torch.quasirandom import SobolEngine

from benchmarks.measure import leaked_bytes
from remat import is_recomputing, policies, remat

X = torch.linspace(-1, 1, 12).reshape(4, 3)
nothing = lambda *_: None


def by_autograd(f: Callable, x: Tensor, change: Callable[[], object] = nothing) -> Any:
    """`change` is called between the forward and the backward."""
    x = x.clone().requires_grad_()
    out = f(x)
    change()
    return out.detach(), [torch.autograd.grad(out.square().sum(), x, retain_graph=True) for _ in range(2)]


def by_grad(f: Callable, x: Tensor, change: Callable[[], object] = nothing) -> Any:
    return torch.func.grad(lambda x: (f(x), change())[0].square().sum())(x)


WAYS: dict[str, tuple[Callable, Wrap]] = {
    "autograd": (by_autograd, remat),
    "a policy": (by_autograd, remat(policy=policies.save_matmuls)),
    "nested": (by_autograd, lambda fn: remat(remat(fn))),
    "grad": (by_grad, remat),
    "second grad": (lambda f, x, change: torch.func.grad(lambda x: by_grad(f, x, change).sin().sum())(x), remat),
}


class Program(NamedTuple):
    """A function, a change of what it reads, and a way to observe its state afterwards."""

    fn: Callable
    change: Callable[[], object]
    state: Callable[[], Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)
        self.n, self.k, self.numbers = 1, None, {"k": [1.0, 2.0]}

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.seen = x.detach().sum() if self.n % 2 else None
        h = self.dropout(self.linear(x)).tanh() * self.n * self.numbers["k"][0] * getattr(self, "late", 1.0)
        return h.exp() if self.k is None else (h * self.k).sin()


class Cached(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([*self.cache, self.linear(x)]).tanh().sum(0, keepdim=True).sin()
        self.cache.append(h.detach())
        return h


class Scaled(nn.Module):
    """It reads attributes of its parameter and of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("center", torch.zeros(3))
        self.weight.scale, self.center.shift = 2.0, 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight * self.weight.scale + self.center.shift  # type: ignore[operator]
        return (h * getattr(self.center, "late", 1.0)).sin().exp()


def count_calls(module: nn.Module, args: Any, result: Any) -> None:
    """A forward hook that counts on the parameters, as opacus does; the first call makes the attribute."""
    for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        each.calls = getattr(each, "calls", 0) + 1  # type: ignore[attr-defined]


def counted() -> Any:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
    model[0].weight.calls = 7
    model[2].eval()  # under `torch.func` its statistics can't change
    for layer in model:
        layer.register_forward_hook(count_calls)
    return model


def scaled_by_hooks() -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    model._handles = [
        model[0].register_forward_hook(lambda module, args, kwargs, result: result * 2, with_kwargs=True),
        model[2].register_forward_pre_hook(lambda module, args: args[0] * 3),
    ]
    return model


def other_hooks(model: Any) -> None:
    for handle in model._handles:
        handle.remove()
    model[1].register_forward_hook(lambda module, args, result: result * 4)
    model[3].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 5,), kwargs), with_kwargs=True)


def of_module(change: Callable[[Any], object], cls: Callable[[], Any] = Layer) -> Callable[[], Program]:
    def make() -> Program:
        module = cls()

        def state() -> Any:
            own = {name: value for name, value in vars(module).items() if name[0] != "_"}
            entries = [dict(vars(t)) for t in (*module.parameters(), *module.buffers())]
            modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]
            return modules, list(own), shapes([own, entries])

        return Program(module, lambda: change(module), state)

    return make


def shapes(tree: Any) -> Any:
    """A tree with the shapes of its tensors, which may come from a transform that has ended."""
    if isinstance(tree, dict):
        return {key: shapes(value) for key, value in tree.items()}
    return [*map(shapes, tree)] if isinstance(tree, list) else tree.shape if isinstance(tree, Tensor) else tree


def everything(layer: Any) -> None:
    vars(layer).update(late=3.0, n=layer.n + 1, k=torch.tensor(4.0), numbers={})
    layer.linear = nn.Linear(3, 3)
    layer.eval()


def attributes(module: Any) -> None:
    del module.weight.scale
    module.center.late, module.center.shift = 3.0, 4.0


def of_source(source: str, scope: Callable[[], dict], change: Callable[[dict], object]) -> Callable[[], Program]:
    """The function of a source with these globals."""

    def make() -> Program:
        variables = {"__name__": "user", **scope()}
        names, read = list(variables), lambda value: getattr(value, "__defaults__", value)
        exec(source, variables)
        return Program(variables["fn"], lambda: change(variables), lambda: [read(variables[name]) for name in names])

    return make


def other_defaults(scope: dict) -> None:
    scope["helper"].__defaults__, scope["helper"].__kwdefaults__ = (torch.tensor(4.0),), {"k": (1.0,)}


def of_closure() -> Program:
    n, pair = 0, (2.0, [torch.tensor(3.0)])

    def fn(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return (x * n * pair[0] * pair[1][0] * (late if n > 8 else 1)).sin()  # noqa: F821

    def change() -> None:
        nonlocal n, pair, late
        n, pair, late = 10, (5.0, []), 2.0

    late = 1.0
    del late
    return Program(fn, change, lambda: (n, pair, late))  # noqa: F821


PROGRAMS: dict[str, Callable[[], Program]] = {
    "numbers": of_module(lambda m: m.numbers["k"].__setitem__(0, 3.0)),
    "everything": of_module(everything),
    "cache cleared": of_module(lambda m: m.cache.clear(), Cached),
    "cache replaced": of_module(lambda m: setattr(m, "cache", []), Cached),
    "hooks that count": of_module(nothing, counted),
    "hooks that are added and removed": of_module(other_hooks, scaled_by_hooks),
    "attributes of a parameter and a buffer": of_module(attributes, Scaled),
    "closure": of_closure,
    "globals": of_source(
        "def fn(x):\n global STEP\n STEP += 1\n return (helper(x) * STEP).sin() * (1 if SHIFT is None else SHIFT)",
        lambda: {"STEP": 3, "SHIFT": None, "helper": torch.sin},
        lambda scope: scope.update(STEP=10, SHIFT=torch.tensor(3.0), helper=torch.cos)),
    "defaults": of_source(
        "def fn(x): return helper(x)",
        lambda: {"helper": lambda x, scale=2.0, *, k=(3.0,): (x * scale * k[0]).sin()},
        other_defaults),
    "objects of classes of libraries": of_source(
        "def fn(x): return (x * args.scale * options['k'][0] ).exp()",
        lambda: {"args": Namespace(scale=2.0), "options": UserDict(k=[3.0])},
        lambda scope: (setattr(scope["args"], "scale", 5.0), scope["options"]["k"].insert(0, 4.0))),
    "containers of Python's own classes": of_source(
        "def fn(x):\n c['k'] += 1\n return (x * c['k'] * c['j'] * l[0]).sin().exp()",
        lambda: {"c": ChainMap({"k": 1.0}, {"j": 2.0}), "l": UserList([0.5])},
        lambda scope: (scope["c"].maps.reverse(), scope["l"].insert(0, 3.0))),
    "replaced containers": of_source(  # the recompute gets copies of the old ones
        "def fn(x): return (x * d['w'][0] * o['w'] * l[0] * (1 + len(d['more']) + len(o) + len(l))).sin()",
        lambda: {"d": defaultdict(list, w=[X[0]]), "o": OrderedDict(w=X[1]), "l": [X[2]]},
        lambda scope: scope.update(d={}, o={}, l=())),
    "containers that get more entries": of_source(
        "def fn(x): return (x * l[-1] * len(d)).sin().exp()",
        lambda: {"l": [2.0], "d": {0: 1.0}},
        lambda scope: (scope["l"].append(3.0), scope["d"].update({9: 3.0}))),
    "dicts that the first run fills, with and without tensors": of_source(
        "def fn(x):\n k = len(d) + 2 * len(e)\n d['done'] = e['done'] = True\n return (x * k * d['w']).sin().exp()",
        lambda: {"d": {"w": X[0]}, "e": {}},
        nothing),
    "two containers that are one later": of_source(
        "def fn(x): return (x * l[0] * d['w']).sin() * m[0] * e['w']",
        lambda: {"l": [X[0]], "m": [X[1]], "d": {"w": X[2]}, "e": {"w": X[3]}},
        lambda scope: scope.update(l=scope["m"], e=scope["d"])),
}  # fmt: skip


@pytest.mark.parametrize("way, wrap", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recompute_reads_the_state_of_the_first_run(name: str, way: Callable, wrap: Wrap) -> None:
    def run(wrap: Wrap) -> Any:
        torch.manual_seed(1)
        program = PROGRAMS[name]()
        return way(wrap(program.fn), X, program.change), program.state()

    (found, state), (expected, wanted) = run(wrap), run(plain)
    assert_same(found, expected, exact=False)
    assert_same(state, wanted)


def test_a_sobol_engine_draws_the_same_points_again() -> None:
    def run(wrap: Wrap) -> Any:
        sobol = SobolEngine(3, scramble=True, seed=1)
        return by_autograd(wrap(lambda x: (x * sobol.draw(4)).exp()), X), sobol.num_generated

    assert_same(run(remat), run(plain), exact=False)


def force(module: nn.Module, x: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    return torch.autograd.grad(module(z).sin().sum(), z, create_graph=True)[0] * x


@pytest.mark.parametrize("removed", [True, False])
def test_backward_hooks_that_change_between_the_runs_are_no_mismatch(removed: bool) -> None:
    gradients = []
    for wrap in (remat, plain):
        torch.manual_seed(1)
        linear, x = nn.Linear(3, 3), X.clone().requires_grad_()
        register = partial(linear.register_full_backward_hook, lambda module, grads, results: (grads[0] * 2,))
        handle = register() if removed else None
        out = wrap(force)(linear, x)
        handle.remove() if handle else register()
        gradients.append(torch.autograd.grad(out.sum(), [x, *linear.parameters()]))
    assert_same(*gradients)


def test_tensors_in_attributes_of_parameters_are_left_alone() -> None:
    """A gradient that a backward has stored, as opacus and Megatron do: no region saves it, or loses it."""
    module: Any = Scaled()
    module.weight.old, module.weight.none = torch.ones(1000), None
    old = weakref.ref(module.weight.old)
    loss = remat(module)(X.clone().requires_grad_()).sum()
    del module.weight.old
    assert old() is None
    new = module.weight.none = module.center.new = torch.ones(1000)
    module.weight.list = [new]
    loss.backward()
    assert module.weight.none is new is module.center.new is module.weight.list[0]
    assert not hasattr(module.weight, "old")


@pytest.mark.parametrize("way", [by_autograd, by_grad])
@pytest.mark.parametrize("cleared", [False, True])
def test_a_list_keeps_what_a_recompute_adds(way: Callable, cleared: bool) -> None:
    """Also one that was cleared since the forward; but not one that each run fills anew or a module has, nor a dict."""
    log, last, counts, module = [torch.ones(3), "start"], [1.0], dict[str, bool](), nn.Module()
    module.log, module.seen, loop = [1], (seen := {"a": 1}), list[Any]()
    loop.append(loop)

    def fn(x: Tensor) -> Tensor:
        log.append(loop if is_recomputing() else "forward")
        last[:] = [2.0, 3.0]
        counts[f"run {len(counts)}"] = True
        module.log.append(len(module.log))
        module.seen["b"] = module.seen.pop("a", 0) + 1
        return (x * module.seen["b"] * len(module.log) * log[0]).sin().exp()

    def change() -> None:
        module.seen = {}
        log[:] = [] if cleared else log

    before = [] if cleared else [*log, "forward"]
    assert_same(way(remat(fn), X, change), way(lambda x: (x * 2 * 2).sin().exp(), X))
    assert log == [*before, *[loop] * (2 if way is by_autograd else 1)] and last == [2.0, 3.0]
    assert counts == {"run 0": True} and module.log == [1, 1] and seen == {"b": 2} and module.seen == {}


def storing_in_an_object(holder: Any) -> Callable:
    def fn(x: Tensor) -> Tensor:
        holder.last = x.sin()
        return holder.last * 0.9

    return fn


source = lambda text: lambda: of_source(text, dict, nothing)().fn
STORING: dict[str, Callable[[], Any]] = {
    "a module": lambda: storing_in_an_object(nn.Module()),
    "a module that vmap has called": lambda: (fn := storing_in_an_object(nn.Module()), vmap(fn)(X))[0],
    "an attribute that was a number": lambda: storing_in_an_object(SimpleNamespace(last=1.0)),
    "a new attribute": lambda: storing_in_an_object(SimpleNamespace()),
    "a slot": lambda: storing_in_an_object(type("Slotted", (), {"__slots__": ("last",)})()),
    "the function": source("def fn(x):\n fn.last = x.sin()\n return fn.last * 0.9"),
    "an empty cell": source(
        "def make():\n def fn(x):\n  nonlocal last\n  last = x.sin()\n  return last * 0.9\n last = 0\n del last\n"
        " return fn\nfn = make()"
    ),
    "a new global": source("def fn(x):\n global LAST\n LAST = x.sin()\n return LAST * 0.9"),
}


@pytest.mark.parametrize("name", STORING)
def test_a_region_in_a_region_stores_its_activation(name: str) -> None:
    """The inner region's first run leaves a tensor where the recompute must not find one to save."""
    weight = torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_()
    inner = remat(STORING[name]())
    out = remat(lambda x: inner(x) @ weight)(X)
    expected = (X.sin() * 0.9 @ weight).square().sum()
    assert_same(torch.autograd.grad(out.square().sum(), weight), torch.autograd.grad(expected, weight))


WRAPS: dict[str, Callable] = {
    "remat": remat,
    "a policy": remat(policy=policies.save_ops("aten.mm", "aten.sin")),
    "nested": lambda f: remat(lambda x: remat(f)(x)),
    "without early stop": remat(determinism_check="values", early_stop=False),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.usefixtures("collector_off")
def test_a_region_reads_what_was_collected(wrap: Callable) -> None:
    """The result depends on the list: on its length, its tensors with their histories, and on what isn't a tensor.

    Nothing is alive after the containers have been cleared, with a backward or without.
    """

    def program(wrap: Wrap, backward: bool = True) -> Any:
        outs: list[Any] = ["start"]
        seen: dict[Any, Any] = {}
        # The same containers, one that is made by a class, and one that holds itself.
        around: dict[str, Any] = defaultdict(list, outs=outs, seen=seen)
        around["self"] = around

        def f(x: Tensor) -> Tensor:
            h = x.sin() * len(outs)
            for t in around["self"]["outs"][1:]:
                h = h + t.cos() * h
            outs.append(h.exp())
            seen[len(outs)] = h.detach()
            around["pairs"].append({"t": (len(outs), h.cos())})
            return (h * sum(around["seen"].values())).tanh().sin()

        x, region = torch.linspace(-1, 1, 6).requires_grad_(), wrap(f)
        out = region(region(region(x)))
        state, result = (list(outs), list(seen), list(around["pairs"])), None
        if backward:
            loss = out.sum() + outs[-1].sum() + sum(pair["t"][1].sum() for pair in around["pairs"])
            gradients = torch.autograd.grad(loss, x, retain_graph=True)
            of_one = torch.autograd.grad(outs[2].sum(), x, retain_graph=True)
            outs, replaced = [], outs
            again = torch.autograd.grad(out.sum(), x)
            assert outs == [] and around["outs"] is replaced and around["self"] is around
            assert all(map(is_, [*replaced, *around["pairs"]], [*state[0], *state[2]])) and len(replaced) == 4
            assert list(seen) == state[1] and len(around["pairs"]) == 3
            result = out.detach(), gradients, of_one, again, list(seen.values())
        for container in (outs, around["outs"], seen, around):
            container.clear()
        return result

    assert_same(program(wrap), program(plain))
    assert [leaked_bytes(program, wrap, backward) for backward in (True, False)] == [0, 0]


def test_a_user_module_may_have_the_name_of_one_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "this.py").write_text("sum = 2.0  # a built-in name\ndef f(x): return (x * sum).sin().exp()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    module = importlib.import_module("this")
    found = by_autograd(remat(module.f), X, lambda: setattr(module, "sum", 5.0))
    assert_same(found, by_autograd(lambda x: (x * 2.0).sin().exp(), X))
    del sys.modules["this"]
