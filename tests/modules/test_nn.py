"""`remat.nn.apply`: regions on chosen submodules, in place; all other behaviour of the model is unchanged."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
import torch.nn.utils.prune as prune
from accelerator import DEVICE, backend
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import functional_call

import remat.nn
from benchmarks.measure import assert_freed_without_gc, held_bytes, leaked_bytes, peak_bytes
from remat import PolicyError, RematError, checkpoint_name, disable_remat, is_recomputing, policies

RUNS: list[bool] = []


pytestmark = pytest.mark.usefixtures("collector_off")


class Block(nn.Module):
    """Records its runs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0, *, flag: bool = False) -> Tensor:
        RUNS.append(is_recomputing())
        return self.down(checkpoint_name(self.up(x).tanh(), "hidden").sin() * scale).exp().cos()


class Quiet(Block):
    """Records nothing, so that compilers accept it."""

    def forward(self, x):  # type: ignore  # fx can't pickle annotations that are strings
        return self.down(self.up(x).tanh().sin()).exp().cos()


class Model(nn.Module):
    def __init__(self, block: type = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.tail = nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


def made(make: Callable[[], Any] = Model) -> Any:
    """The same module in each call."""
    torch.manual_seed(0)
    return make().double()


def step(model: nn.Module, *args: Any) -> list[Tensor | None]:
    """The gradients of all parameters; each call draws the same random numbers."""
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad = None
    RUNS.clear()
    model(*(args or (X,))).square().sum().backward()
    return [p.grad for p in model.parameters()]


def check(model: nn.Module, plain: nn.Module, runs: list[bool] | None = None, *args: Any) -> None:
    """Check that one step gives the same gradients and buffers, and that the runs of the blocks are `runs`."""
    expected = step(plain, *args)
    actual = step(model, *args)
    assert runs is None or runs == RUNS
    assert_same(actual, expected)
    assert_same(list(model.buffers()), list(plain.buffers()))


X = rand(5, 4, grad=False)
AGAIN = [False, True]


# --- chosen modules ---------------------------------------------------------------------------------------------------

BLOCKS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
ROWS = 64
ROW = ROWS * 4 * 8  # bytes of the value passed from block to block
INSIDE = 5 * ROW  # of a block: results of tanh and sin, which are twice as wide, and of exp
TAIL = ROW + ROW // 2  # the result of tanh, and two numbers for each row

# `where`, the names of the chosen modules, by how many bytes less is saved, and how often blocks are recomputed.
WHERE: dict[str, tuple[Any, list[str], int, int]] = {
    "type": (Block, BLOCKS, 4 * INSIDE, 4),
    "types": ((Block, nn.Sequential), [*BLOCKS, "tail"], 4 * INSIDE + TAIL, 4),
    "name": (lambda name, module: name.endswith((".1", ".2")), ["blocks.1", "blocks.2", "tail.1", "tail.2"],
             2 * INSIDE - ROW, 2),  # without a region tanh saves its result, which the next region saves as its input
    "module": (lambda name, module: hasattr(module, "up"), BLOCKS, 4 * INSIDE, 4),
    "every second": (remat.nn.every(2, Block), ["blocks.0", "blocks.2"], 2 * INSIDE, 2),
    "every third": (remat.nn.every(3, Block), ["blocks.0", "blocks.3"], 2 * INSIDE, 2),
    "every first": (remat.nn.every(1, (Block, nn.Sequential)), [*BLOCKS, "tail"], 4 * INSIDE + TAIL, 4),
    "the model itself": (lambda name, module: name == "", [""], 4 * INSIDE + TAIL + 4 * ROW, 4),
    "the model's type": (Model, [""], 4 * INSIDE + TAIL + 4 * ROW, 4),
    "a module and its parent": ((Model, Block), ["", *BLOCKS], 4 * INSIDE + TAIL + 4 * ROW, 8),
}  # fmt: skip


def kept(model: nn.Module) -> int:
    return held_bytes(model, rand(ROWS, 4, grad=False))


@pytest.mark.parametrize("kind", WHERE)
def test_where(kind: str) -> None:
    where, names, saved, again = WHERE[kind]
    plain, model = made(), made()
    assert remat.nn.apply(model, where) is model
    assert [n for n, m in model.named_modules() if type(m) is not type(plain.get_submodule(n))] == names
    check(model, plain, [False] * 4 + [True] * again)
    assert kept(model) == kept(plain) - saved


def test_memory_by_the_number_of_chosen_modules() -> None:
    choices = [Model, Block, remat.nn.every(2, Block), remat.nn.every(4, Block)]
    bytes_kept = [kept(remat.nn.apply(made(), where)) for where in choices] + [kept(made())]
    assert bytes_kept == sorted(bytes_kept) and len(set(bytes_kept)) == 5
    assert bytes_kept[1] < bytes_kept[-1] / 2.5


def test_peak() -> None:
    x = rand(64, 4, grad=False)

    def peak(model: nn.Module) -> int:
        return peak_bytes(lambda: torch.autograd.grad(model(x).sum(), list(model.parameters())))

    plain = made(lambda: nn.Sequential(*(Block() for _ in range(16))))
    assert peak(remat.nn.apply(copy.deepcopy(plain), Block)) < peak(plain) / 3


def test_a_subclass_is_chosen_by_its_base() -> None:
    model = remat.nn.apply(made(lambda: Model(Quiet)), Block)
    assert kept(model) < kept(made(lambda: Model(Quiet))) / 2


def test_a_predicate_sees_each_module_once() -> None:
    shared = Block()
    seen: list = []
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with pytest.raises(ValueError, match="chooses none"):
        remat.nn.apply(model, lambda name, module: seen.append((name, module)))
    assert seen == list(model.named_modules())


def test_a_predicate_that_raises_changes_nothing() -> None:
    model = made()
    with pytest.raises(ZeroDivisionError):
        remat.nn.apply(model, lambda name, module: 1 // (name != "tail"))
    check(model, made(), [False] * 4)


# --- options ----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({}, True),
    "policy": ({"policy": policies.save_only_these_names("hidden")}, True),
    "list of operators": ({"policy": [torch.ops.aten.tanh.default]}, True),
    "everything": ({"policy": policies.everything_saveable}, False),
    "others": ({"preserve_rng_state": False, "determinism_check": "values", "early_stop": False, "debug": True}, True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, again = OPTIONS[name]
    check(remat.nn.apply(made(), Block, **options), made(), [False] * 4 + [True] * 4 * again)


def test_policy_decides_what_is_saved() -> None:
    def with_policy(policy: Any) -> int:
        return kept(remat.nn.apply(made(), Block, policy=policy))

    hidden = with_policy(policies.save_only_these_names("hidden")) - with_policy(None)
    assert hidden == 4 * 2 * ROW
    assert with_policy(policies.everything_saveable) == kept(made())


def test_a_second_apply_replaces_the_options() -> None:
    model = remat.nn.apply(made(), Block, policy=policies.everything_saveable)
    classes = [type(module) for module in model.modules()]
    check(remat.nn.apply(model, remat.nn.every(2, Block)), made(), [False] * 4 + [True] * 2)
    assert [type(module) for module in model.modules()] == classes
    check(remat.nn.apply(model, Block, policy=policies.everything_saveable), made(), [False] * 4)


def test_errors() -> None:
    model = made()
    wrong: list[tuple[Any, dict, type, str]] = [
        (nn.Conv2d, {}, ValueError, "chooses none of the model's modules.*Block, LayerNorm, Linear"),
        (remat.nn.every(2, nn.Conv2d), {}, ValueError, "every|chooses none"),
        (lambda name, module: False, {}, ValueError, "chooses none"),
        ("blocks.*", {}, TypeError, "where must be a type"),
        ((Block, "tail"), {}, TypeError, "where must be a type"),
        (None, {}, TypeError, "where must be a type"),
        (nn.ModuleList, {}, TypeError, "the ModuleList 'blocks' has no forward: use the modules in it"),
        (nn.Module, {}, TypeError, "has no forward"),
        (Block, {"policy": "dots"}, PolicyError, "dots"),
        (Block, {"early_stop": 1}, TypeError, "early_stop"),
        (Block, {"determinism_check": "some"}, ValueError, "determinism_check"),
    ]
    for where, options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            remat.nn.apply(model, where, **options)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        remat.nn.apply(torch.sin, Block)  # type: ignore[type-var]
    assert [type(m) for m in model.modules()] == [type(m) for m in made().modules()]
    check(model, made(), [False] * 4)


@pytest.mark.parametrize("n, of, kind", [(0, Block, ValueError), (-1, Block, ValueError), (1.5, Block, TypeError),
                                         (True, Block, TypeError), (2, "Block", TypeError)])  # fmt: skip
def test_errors_of_every(n: Any, of: Any, kind: type) -> None:
    with pytest.raises(kind, match="every"):
        remat.nn.every(n, of)


@pytest.mark.parametrize("container", [nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()}),
                                       nn.ParameterList([torch.ones(1)]), nn.ParameterDict()])  # fmt: skip
def test_containers_are_an_error(container: nn.Module) -> None:
    model = nn.Sequential(Block(), container)
    with pytest.raises(TypeError, match=f"the {type(container).__name__} '1' has no forward"):
        remat.nn.apply(model, lambda name, module: name in ("0", "1"))
    assert type(model[0]) is Block


LAZY: list[Callable] = [
    lambda: nn.LazyLinear(3),
    lambda: nn.LazyBatchNorm1d(affine=False),
    lambda: nn.Sequential(nn.LazyLinear(2)),
]


@pytest.mark.parametrize("make", LAZY)
def test_lazy_modules_are_an_error(make: Callable) -> None:
    lazy = make()
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lazy)
    with pytest.raises(TypeError, match=f"the {type(lazy).__name__} '1' is lazy: call it once"):
        remat.nn.apply(model, lambda name, module: name in ("0", "1"))
    assert type(model[0]) is nn.Sequential
    model.double()(X)
    plain = copy.deepcopy(model)
    check(remat.nn.apply(model, lambda name, module: name in ("0", "1")), plain)


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_an_error_but_can_be_inside() -> None:
    traced = torch.jit.trace(nn.Linear(4, 4).double(), X)
    model = nn.Sequential(Block().double(), nn.Sequential(traced, nn.Tanh()))
    with pytest.raises(TypeError, match=r"'1\.0' is TorchScript: use the module that calls it"):
        remat.nn.apply(model, lambda name, module: name in ("0", "1.0"))
    assert type(model[0]) is Block
    expected = step(model)
    remat.nn.apply(model, lambda name, module: name == "1")
    assert_same(step(model), expected)


# --- unchanged behaviour ----------------------------------------------------------------------------------------------


def test_the_model_looks_unchanged() -> None:
    plain, model = made(), remat.nn.apply(made(), (Model, Block, nn.Linear))
    for names in ("named_modules", "named_parameters", "named_buffers", "named_children"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
    assert list(model.state_dict()) == list(plain.state_dict()) and repr(model) == repr(plain)
    for module, before in zip(model.modules(), plain.modules(), strict=True):
        assert isinstance(module, type(before))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(module), name) == getattr(type(before), name)
        assert inspect.signature(type(module).forward) == inspect.signature(type(before).forward)
        assert inspect.signature(module.forward) == inspect.signature(before.forward)
    assert dir(model.blocks[0]) != [] and set(dir(model.blocks[0])) - set(dir(plain.blocks[0])) == {
        "_remat",
        "_remat_forward",
        "_remat_own",
        "_remat_regions",
    }


def test_state_dict_and_its_hooks() -> None:
    logs, results = [], []
    for wrap in (remat.nn.apply, lambda model, where: model):
        model, log = wrap(made(), Block), []
        block = model.blocks[1]
        block.register_state_dict_pre_hook(lambda m, prefix, keep, log=log: log.append(("save", prefix)))
        block.register_state_dict_post_hook(lambda m, d, prefix, meta, log=log: log.append(("saved", len(d))))
        block.register_load_state_dict_pre_hook(lambda m, d, prefix, *rest, log=log: log.append(("load", prefix)))
        block.register_load_state_dict_post_hook(lambda m, keys, log=log: log.append(("loaded", type(m).__name__)))
        state = {k: v + 1 for k, v in model.state_dict().items()}
        log.append(str(model.load_state_dict(state)))
        log.append(str(model.load_state_dict({}, strict=False)))
        logs.append(log)
        results.append((dict(model.state_dict()), step(model)))
    assert_same(*results)
    assert logs[0] == logs[1] and len(logs[0]) > 6


def register_hooks(module: nn.Module, log: list) -> None:
    """One hook of each kind; some of them change their inputs."""

    def note(kind: str) -> Callable:
        return lambda *args: log.append((kind, type(args[0]).__name__, len(args), is_recomputing()))

    def triple(module: Any, args: tuple, kwargs: dict) -> tuple:
        log.append(("triple", str(kwargs)))
        return args, {**kwargs, "scale": 3.0}

    module.register_forward_pre_hook(note("before"))
    module.register_forward_pre_hook(lambda m, args: (note("halve")(m), (args[0] / 2, *args[1:]))[1], prepend=True)
    module.register_forward_pre_hook(triple, with_kwargs=True)
    module.register_forward_hook(note("after"))
    module.register_forward_hook(lambda m, args, kwargs, out: log.append(("after", str(kwargs))), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: (note("double")(m), out * 2)[1])
    module.register_forward_hook(note("always"), always_call=True)
    module.register_full_backward_pre_hook(note("before the backward"))
    module.register_full_backward_pre_hook(lambda m, to_out: (to_out[0] * 2,))
    module.register_full_backward_hook(note("after the backward"))
    module.register_full_backward_hook(lambda m, to_in, to_out: (to_in[0] * 5,))


@pytest.mark.parametrize("policy", [None, policies.save_matmuls])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_fire_as_without_remat(before: bool, policy: Any) -> None:
    logs, results = [], []
    for wrap in (lambda model: remat.nn.apply(model, Block, policy=policy), lambda model: model):
        model, log, x = made(), [], rand(5, 4)
        if before:
            wrap(model)
        for block in model.blocks:
            register_hooks(block, log)
        if not before:
            wrap(model)
        out = model(x)
        results.append((out.detach(), torch.autograd.grad(out.sum(), [x, *model.parameters()])))
        logs.append(log)
    assert logs[0] == logs[1] and len(logs[0]) == 4 * 9
    assert_same(*results)


def test_hooks_of_modules_inside_a_region() -> None:
    """Backward hooks fire once. Forward hooks fire in the recompute too, where `is_recomputing()` is true."""
    logs = []
    for wrap in (remat.nn.apply, lambda model, where: model):
        model, log = wrap(made(), Block), []
        linear = model.blocks[2].up
        linear.register_full_backward_hook(lambda m, i, o, log=log: log.append("backward"))
        linear.register_forward_hook(lambda m, i, o, log=log: None if is_recomputing() else log.append("forward"))
        step(model)
        logs.append(log)
    assert logs[0] == logs[1] == ["forward", "backward"]


def test_always_called_hooks_after_an_exception() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    for wrap in (remat.nn.apply, lambda model, where: model):
        module, log = wrap(Fails(), Fails), []
        module.register_forward_hook(lambda m, a, out, log=log: log.append(out), always_call=True)
        module.register_forward_hook(lambda m, a, out, log=log: log.append("no"))
        with pytest.raises(ZeroDivisionError):
            module(X)
        assert log == [None]


def test_modes_dtypes_and_calls_without_grad() -> None:
    plain, model = made(), remat.nn.apply(made(), Block)
    for mode in (False, True):
        model.train(mode), plain.train(mode)
        check(model, plain, [False] * 4 + [True] * 4)
    for context in (torch.no_grad, torch.inference_mode, disable_remat):
        RUNS.clear()
        with context():
            assert_same(model(X).detach(), plain(X).detach())
        assert RUNS == [False] * 8
    with disable_remat():
        check(model, plain, [False] * 4)
    for move in (lambda m: m.float(), lambda m: m.to(torch.float64), lambda m: m.requires_grad_(False)):
        move(model), move(plain)
        x = X.to(next(model.parameters()).dtype).requires_grad_()
        assert_same(*(torch.autograd.grad(m(x).sum(), x) for m in (model, plain)))
    assert remat.nn.apply(made(), Block).to("meta").blocks[0](X.to("meta")).device.type == "meta"


# --- undo -------------------------------------------------------------------------------------------------------------


def test_undo() -> None:
    model = remat.nn.apply(made(), (Model, Block, nn.Linear))
    assert remat.nn.undo(model) is model and remat.nn.undo(model) is model
    assert [type(m) for m in model.modules()] == [type(m) for m in made().modules()]
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in made().modules()]
    check(model, made(), [False] * 4)
    assert kept(model) == kept(made())
    check(remat.nn.apply(model, Block), made(), [False] * 4 + [True] * 4)


def test_undo_of_a_part() -> None:
    model = remat.nn.apply(made(), Block)
    remat.nn.undo(model.blocks[2])
    check(model, made(), [False] * 4 + [True] * 3)


@pytest.mark.parametrize("change", [remat.nn.undo, lambda m: remat.nn.apply(m, (Model, Block, nn.Linear))])
def test_changed_between_forward_and_backward(change: Callable) -> None:
    model, plain = remat.nn.apply(made(), Block), made()
    loss = model(X).square().sum()
    change(model)
    loss.backward()
    assert_same([p.grad for p in model.parameters()], step(plain))


# --- shared modules ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.BatchNorm1d(4)
        self.second.up.weight = self.first.up.weight
        self.alias = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.alias(self.norm(self.second(self.first(x)))))


@pytest.mark.parametrize("where", [Block, nn.Linear, (Block, nn.BatchNorm1d), Tied, (Tied, Block, nn.Linear)])
def test_tied_weights_and_modules_called_twice(where: Any) -> None:
    model, plain = made(Tied), made(Tied)
    remat.nn.apply(model, where)
    assert model.first is model.alias and model.first.up.weight is model.second.up.weight
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    for _ in range(3):  # each step updates the statistics once
        check(model, plain)
    assert int(model.norm.num_batches_tracked) == 6
    again = copy.deepcopy(model)
    assert again.first is again.alias and again.first.up.weight is again.second.up.weight
    check(again, plain)


# --- parametrizations -------------------------------------------------------------------------------------------------


class Exp(nn.Module):
    """A parametrization that saves tensors itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sin() * x.cos()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x


def ups(model: Any) -> list[Any]:
    return [block.up for block in model.blocks]


def parametrize_all(model: Any) -> None:
    for up in ups(model):
        parametrize.register_parametrization(up, "weight", Exp())


def unparametrize_all(model: Any) -> None:
    for up in ups(model):
        parametrize.remove_parametrizations(up, "weight")


ORDERS = [
    ("p", "a", "u", "r"),
    ("p", "a", "r", "u"),
    ("a", "p", "u", "r"),
    ("a", "p", "r", "u"),
    ("a", "p", "a", "u", "a", "r", "u"),
    ("p", "a", "p", "u", "r"),
]


@pytest.mark.parametrize("where", [Block, nn.Linear, (Block, nn.Linear)])
@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_parametrizations_in_any_order(order: tuple[str, ...], where: Any) -> None:
    """(p)arametrize, (r)emove that, (a)pply and (u)ndo: the same numbers each time, and plain classes at the end."""
    model, plain = made(), made()
    for do in order:
        if do == "a":
            remat.nn.apply(model, where)
        elif do == "u":
            remat.nn.undo(model)
        else:
            for m in (model, plain):
                {"p": parametrize_all, "r": unparametrize_all}[do](m)
        check(model, plain)
        assert repr(model) == repr(plain) and list(model.state_dict()) == list(plain.state_dict())
        assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in plain.modules()]
        check(copy.deepcopy(model), plain)
    assert [type(m) for m in model.modules()] == [type(m) for m in made().modules()]


@pytest.mark.parametrize("policy", [None, policies.save_matmuls])
@pytest.mark.parametrize("where", [Block, nn.Linear, (Block, nn.Linear)])
@pytest.mark.parametrize("inside", [True, False])
def test_cached_parametrizations(inside: bool, where: Any, policy: Any) -> None:
    """The backward runs inside `cached()`, or after it; the weight is first read in the region, or before."""
    results = []
    for wrap in (lambda model: remat.nn.apply(model, where, policy=policy), lambda model: model):
        for before in (True, False):
            model = wrap(made())
            parametrize_all(model)
            with parametrize.cached():
                weights = [up.weight for up in ups(model)] if before else []
                loss = model(X).sum() + model(X * 2).sum()
                if inside:
                    loss.backward()
                assert all(up.weight is weight for up, weight in zip(ups(model), weights))
            if not inside:
                loss.backward()
            results.append([p.grad for p in model.parameters()])
    for other in results[1:]:
        assert_same(other, results[0])


def test_cached_weights_are_freed() -> None:
    up = nn.Linear(4, 4)
    parametrize.register_parametrization(up, "weight", Exp())
    region, x = remat.remat(lambda x: up(x).sin().exp()), torch.ones(4, 4, requires_grad=True)
    with assert_freed_without_gc() as watch, parametrize.cached():
        watch(up.weight)
        region(x).sum().backward()


def test_cached_parametrizations_under_torch_func_are_refused() -> None:
    plain, model = made(), made()
    parametrize_all(plain), parametrize_all(model)
    remat.nn.apply(model, Block)
    params = {n: p.detach() for n, p in model.named_parameters()}
    loss = lambda params: functional_call(model, params, (X,)).sum()
    with parametrize.cached(), pytest.raises(RematError, match="Leave out the cache"):
        torch.func.grad(loss)(params)
    assert torch.func.grad(loss)(params).keys() == params.keys()
    assert_same(step(model), step(plain))


NORMS: dict[str, Callable] = {
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old spectral_norm": nn.utils.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("where", [Block, nn.Linear, (Block, nn.Linear)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_weights(name: str, where: Any) -> None:
    """Before and after; each forward updates the buffers of spectral norm once."""

    def normed(model: Any) -> Any:
        torch.manual_seed(1)
        for up in ups(model):
            NORMS[name](up)
        return model

    for model in (remat.nn.apply(normed(made()), where), normed(remat.nn.apply(made(), where))):
        plain = normed(made())
        before = [b.clone() for b in plain.buffers()]
        for mode in (True, True, False):
            model.train(mode), plain.train(mode)
            check(model, plain)
        assert ("spectral" in name) == any(not torch.equal(a, b) for a, b in zip(model.buffers(), before))


# --- transforms and compilers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["type", "every second", "a module and its parent"])
def test_functional_call(kind: str) -> None:
    plain, model = made(), remat.nn.apply(made(), WHERE[kind][0])
    params = {n: p.detach() * 1.5 for n, p in plain.named_parameters()}

    def loss(model: nn.Module) -> Callable:
        return lambda params, x: functional_call(model, params, (x,)).square().sum()

    assert_same(*(torch.func.grad(loss(m))(params, X) for m in (model, plain)))
    RUNS.clear()
    torch.func.grad(loss(model))(params, X)
    assert RUNS.count(True) == WHERE[kind][3]
    per_sample = (torch.vmap(torch.func.grad(loss(m)), (None, 0))(params, X) for m in (model, plain))
    assert_same(*per_sample, exact=False)
    peaks = [peak_bytes(torch.func.grad(loss(m)), params, rand(512, 4, grad=False)) for m in (model, plain)]
    assert peaks[0] < peaks[1] * 0.8
    live = {n: p.requires_grad_() for n, p in params.items()}
    assert_same(*(torch.autograd.grad(loss(m)(live, X), list(live.values())) for m in (model, plain)))


def test_an_ensemble() -> None:
    models = [remat.nn.apply(Model().double(), Block) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")
    outs = torch.vmap(lambda p, b: functional_call(base, (p, b), (X,)))(params, buffers)
    assert_same(outs, torch.stack([remat.nn.undo(model)(X) for model in models]), exact=False)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    plain, model = made(lambda: Model(Quiet)), remat.nn.apply(made(lambda: Model(Quiet)), (Block, nn.Sequential))
    programs = [torch.export.export(m, (X,), strict=strict) for m in (model, plain)]
    assert_same(programs[0].module()(X), plain(X))
    assert list(programs[0].state_dict) == list(programs[1].state_dict)
    ops = [[node.target for node in p.graph.nodes if node.op == "call_function"] for p in programs]
    assert ops[0] == ops[1]


COMPILED: dict[str, Callable] = {
    "chosen": lambda model: remat.nn.apply(model, Block),
    "policy": lambda model: remat.nn.apply(model, Block, policy=policies.save_matmuls),
    "nested": lambda model: remat.nn.apply(model, (Model, Block)),
    "remat of it": lambda model: remat.remat(remat.nn.apply(model, (Model, Block))),
    "it of remat": lambda model: remat.nn.apply(remat.remat(model), (Model, Block)),
    "remat twice": lambda model: remat.remat(remat.remat(model)),
    "undone": lambda model: remat.nn.undo(remat.remat(remat.nn.apply(model, Model))),
}


@pytest.mark.parametrize("kind", COMPILED)
def test_compile(kind: str) -> None:
    torch._dynamo.reset()
    plain = made(lambda: Model(Quiet))
    model = COMPILED[kind](copy.deepcopy(plain))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled), step(plain))
    assert_same(step(model), step(plain))


def test_a_compiled_submodule() -> None:
    torch._dynamo.reset()
    plain, model = made(lambda: Model(Quiet)), remat.nn.apply(made(lambda: Model(Quiet)), Block)
    model.blocks[1].compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(model), step(plain))


def test_symbolic_trace() -> None:
    plain = made(Quiet)
    for wrap in (lambda m: remat.nn.apply(m, Block), remat.remat):
        assert_same(step(torch.fx.symbolic_trace(wrap(made(Quiet)))), step(plain))


GRAPHS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda graph: remat.nn.apply(graph, torch.fx.GraphModule),
    "second": remat.remat,
    "second of in place": lambda graph: remat.remat(remat.nn.apply(graph, torch.fx.GraphModule)),
    "in place of second": lambda graph: remat.nn.apply(remat.remat(graph), torch.fx.GraphModule),
}


@pytest.mark.parametrize("layers", GRAPHS)
def test_graph_modules(layers: str) -> None:
    """Each copy has its own class with the code of its graph; no copy gets the code of another."""
    plain = made(Quiet)
    less = kept(plain) - INSIDE
    graph = GRAPHS[layers](torch.fx.symbolic_trace(made(Quiet)))
    copies = [make_copy(graph) for make_copy in COPIES.values()]
    for module in (graph, *copies):
        assert kept(module) == less
        assert_same(step(module), step(plain))
        others = [m for m in (graph, *copies) if m is not module and m.graph is not module.graph]
        next(n for n in module.graph.nodes if n.target == "tanh").target = "sigmoid"
        module.recompile()
        assert not torch.equal(module(X), plain(X)) and kept(module) == less
        next(n for n in module.graph.nodes if n.target == "sigmoid").target = "tanh"
        assert all(torch.equal(other(X), plain(X)) for other in others)
        module.recompile()


# --- copies -----------------------------------------------------------------------------------------------------------


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replicated(model: Any) -> Any:
    """Copy a model as `DataParallel` does for each device, with the same parameters."""
    replica = model._replicate_for_data_parallel()
    replica._parameters = dict(model._parameters)
    replica._modules = {n: None if m is None else replicated(m) for n, m in model._modules.items()}
    return replica


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "save and load": saved_and_loaded,
    "replica": replicated,
}


class Reduces(Block):
    """Is rebuilt from its constructor arguments, so unknown attributes get lost."""

    def __reduce__(self) -> Any:
        return Reduces, (self.up.in_features,), self.state_dict()

    def __setstate__(self, state: dict) -> None:
        self.double().load_state_dict(state)


class Forgets(Block):
    """Its state contains only attributes that it knows."""

    def __getstate__(self) -> dict:
        return {"modules": dict(self._modules), "training": self.training}

    def __setstate__(self, state: dict) -> None:
        nn.Module.__init__(self)
        self.training = state["training"]
        for name, module in state["modules"].items():
            setattr(self, name, module)


class CopiesItself(Block):
    def __deepcopy__(self, memo: dict) -> Any:
        new = type(self)(self.up.in_features).double()
        new.load_state_dict(self.state_dict())
        memo[id(self)] = new
        return new


class CopiesPlain(Block):
    def __deepcopy__(self, memo: dict) -> Any:
        new = CopiesPlain(self.up.in_features).double()
        new.load_state_dict(self.state_dict())
        return new


class CopiesFields(Block):
    def __deepcopy__(self, memo: dict) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return new


LAYERS: dict[str, Callable[[Any], Any]] = {
    "in place": lambda module: remat.nn.apply(module, Block),
    "second": remat.remat,
    "second of in place": lambda module: remat.remat(remat.nn.apply(module, Block)),
    "in place of second": lambda module: remat.nn.apply(remat.remat(module), Block),
    "second of second": lambda module: remat.remat(remat.remat(module)),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("cls", [Block, Reduces, Forgets, CopiesItself, CopiesPlain, CopiesFields])
@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str, cls: type, layers: str) -> None:
    module, plain = LAYERS[layers](made(cls)), made(cls)
    again = COPIES[how](module)
    assert type(again) is type(module) and again is not module
    check(again, plain, AGAIN)
    check(module, plain, AGAIN)
    assert kept(again) == kept(module) < kept(plain) / 2
    if how not in ("copy", "replica"):
        assert not any(a is b for a, b in zip(again.parameters(), module.parameters()))


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_models(how: str) -> None:
    model = remat.nn.apply(made(), remat.nn.every(2, Block), policy=policies.save_only_these_names("hidden"))
    again = COPIES[how](model)
    check(again, made(), [False] * 4 + [True] * 2)
    assert kept(again) == kept(model) < kept(made())
    check(COPIES[how](remat.nn.undo(again)), made(), [False] * 4)


def test_options_of_layers_are_copied() -> None:
    module = remat.remat(remat.remat(made(Block), policy=policies.everything_saveable), policy=policies.save_matmuls)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert kept(again) == kept(remat.remat(made(Block), policy=policies.save_matmuls))


def test_a_module_that_is_pickled_by_name() -> None:
    module = remat.nn.apply(Named(), Named)
    globals()["NAMED"] = module
    assert pickle.loads(pickle.dumps(module)) is module


class Named(Block):
    def __reduce__(self) -> str:
        return "NAMED"


def test_averaged_models() -> None:
    results = []
    for wrap in (remat.nn.apply, lambda model, where: model):
        model = wrap(made(), Block)
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            step(model)
            optimizer.step()
            average.update_parameters(model)
        results.append((list(average.parameters()), average(X)))
    assert_same(*results)


# --- nested wrapping --------------------------------------------------------------------------------------------------


def test_remat_of_applied_modules_and_apply_to_remat_modules() -> None:
    """Two nested regions count as one for memory and for the number of runs."""
    plain = made(Block)
    for layers in LAYERS.values():
        module = layers(made(Block))
        check(module, plain, AGAIN)
        assert kept(module) == kept(remat.remat(made(Block)))
    module = made(Block)
    second = remat.remat(remat.nn.apply(module, Block))
    assert remat.nn.undo(second) is second
    check(second, plain, AGAIN)
    check(module, plain, [False])  # undo changes the module that they share
    check(remat.nn.apply(second, Block), plain, AGAIN)


def test_the_outer_policy_decides() -> None:
    saving, plain = policies.save_only_these_names("hidden"), made(Block)
    hidden = 2 * ROW
    nothing = kept(remat.remat(made(Block)))

    def kept_by(inner: Any, outer: Any) -> list[int]:
        modules = [
            remat.remat(remat.remat(made(Block), policy=inner), policy=outer),
            remat.remat(remat.nn.apply(made(Block), Block, policy=inner), policy=outer),
            remat.nn.apply(remat.remat(made(Block), policy=inner), Block, policy=outer),
        ]
        for module in modules:
            check(module, plain)
        return [kept(module) - nothing for module in modules]

    assert kept_by(None, saving) == [0] * 3 or kept_by(None, saving) == [hidden] * 3
    assert kept_by(saving, None) == [0] * 3
    assert kept_by(saving, saving) == [hidden] * 3


def test_forward_set_on_the_instance() -> None:
    for wrap in (lambda m: remat.nn.apply(m, Block), remat.remat, LAYERS["second of in place"]):
        module, plain = made(Block), made(Block)
        for m in (module, plain):
            m.forward = lambda x, m=m: Block.forward(m, x.exp()).sin()
        module = wrap(module)
        check(module, plain, AGAIN)
        assert list(inspect.signature(module.forward).parameters) == ["x", "m"]
        module.forward = plain.forward = lambda x: Block.forward(plain, x.cos())
        assert_same(module(X), plain(X))
        RUNS.clear()
        module(X.clone().requires_grad_()).sum().backward()
        assert RUNS == AGAIN
        del module.forward
        with pytest.raises(AttributeError):
            del module.forward
        check(module, made(Block), AGAIN)
    module = remat.nn.apply(made(Block), Block)
    module.forward = lambda x: x * 2
    assert_same(remat.nn.undo(module)(X), X * 2)


class Replaced(nn.Module):
    """A base that replaces `forward` of each subclass, as a base class in transformers does."""

    outermost: ClassVar[list[bool]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @functools.wraps(forward)
        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.outermost.append(type(self).forward is replaced)
            return forward(self, *args, **kwargs)

        cls.forward = replaced  # type: ignore[method-assign]


class OfReplaced(Block, Replaced):
    outermost: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Meta(type):
    """Replaces `forward` of each class."""

    def __new__(meta, name: str, bases: tuple, names: dict) -> Any:
        made = super().__new__(meta, name, bases, names)
        forward = made.forward  # type: ignore[attr-defined]
        made.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return made


class OfMeta(Block, metaclass=Meta):
    pass


class Required(nn.Module):
    """A base that requires a keyword from each subclass, and registers it."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, kind: str) -> None:
        Required.known[kind] = cls


class OfRequired(Block, Required, kind="block"):
    pass


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("cls", [OfReplaced, OfMeta, OfRequired])
def test_bases_that_change_their_subclasses(cls: type, layers: str, how: str) -> None:
    expected = kept(remat.nn.apply(made(Block), Block))
    module, plain = LAYERS[layers](made(cls)), made(cls)
    for each in (module, COPIES[how](module), remat.remat(module)):
        check(each, plain, AGAIN)
        assert kept(each) == expected
        assert isinstance(each, cls)
    assert Required.known == {"block": OfRequired}
    with assert_freed_without_gc() as watch:
        watch(*module.modules(), *module.parameters())
        del each, module


def test_forward_of_the_class_is_a_function() -> None:
    """Guards of compilers, and classes that inspect it, expect a function, and calling it runs the region."""
    module, plain = remat.nn.apply(made(OfReplaced), Block), made(OfReplaced)
    assert isinstance(type(module).forward, FunctionType) and type(module).forward is type(module).forward
    RUNS.clear()
    x = rand(5, 4)
    actual = torch.autograd.grad(type(module).forward(module, x).sum(), x)
    assert RUNS == AGAIN
    assert_same(actual, torch.autograd.grad(plain(x).sum(), x))
    torch._dynamo.reset()
    assert_same(torch.compile(module, backend="eager")(X), plain(X))


class CallsNoForward(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return self.up(x).sin()


class CallsForward(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).sin()


def test_a_call_that_does_not_reach_forward_is_an_error() -> None:
    for wrap in (lambda m: remat.nn.apply(m, Block), remat.remat, remat.compat.checkpoint_wrapper):
        module = made(CallsNoForward)
        with pytest.raises(TypeError, match="a CallsNoForward has a `__call__` that doesn't call it"):
            wrap(module)
        assert type(module) is CallsNoForward
        check(wrap(made(CallsForward)), made(CallsForward), AGAIN)


class OfLibrary(Block):
    """A module that its library checkpoints if this flag is set."""

    gradient_checkpointing = False


def test_combination_with_the_librarys_own_checkpoint_is_an_error() -> None:
    for wrap in (lambda m: remat.nn.apply(m, Block), remat.remat, remat.compat.checkpoint_wrapper):
        module = made(OfLibrary)
        module.gradient_checkpointing = True
        with pytest.raises(RematError, match=r"is on for a OfLibrary.*gradient_checkpointing_disable.*remat\.nn\.undo"):
            wrap(module)
        assert type(module) is OfLibrary
        module.gradient_checkpointing = False
        module = wrap(module)
        check(module, made(OfLibrary), AGAIN)
        module.gradient_checkpointing = True
        with pytest.raises(RematError, match="is on for a"):
            module(X)
        check(module.eval(), made(OfLibrary), AGAIN)  # in eval mode libraries don't checkpoint


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin().exp()


class Inherits(Block):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(x, *args, **kwargs).tanh()


class Decorated(Block):
    @remat.remat
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


@pytest.mark.parametrize("cls", [Static, Inherits, Decorated])
def test_kinds_of_forward(cls: type) -> None:
    module, plain, x = remat.nn.apply(made(cls), cls), made(cls), rand(5, 4)
    assert_same(*(torch.autograd.grad(m(x).sum(), x) for m in (module, plain)))


def test_a_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).double()
    plain = nn.TransformerEncoder(layer, 3)
    x, mask = rand(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    mask[:, 3:] = True
    chosen = remat.nn.apply(copy.deepcopy(plain), nn.TransformerEncoderLayer)
    copies = nn.TransformerEncoder(remat.nn.apply(copy.deepcopy(layer), nn.TransformerEncoderLayer), 3)
    attention = remat.nn.apply(copy.deepcopy(plain), (nn.MultiheadAttention, nn.LayerNorm))
    for model in (chosen, copies, attention):
        for mode in (True, False):
            model.train(mode), plain.train(mode)
            check(model, plain, None, x)
        assert held_bytes(model, x) < held_bytes(plain, x)
        for grad in (torch.enable_grad, torch.no_grad):
            with grad():
                out, expected = (m(x, src_key_padding_mask=mask).detach() for m in (model, plain))
            assert_same(out, expected)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x[None], None)
        return self.head(out).sum() + h.sin().sum() + c.sum()


def test_recurrent_modules() -> None:
    plain, model = made(Recurrent), remat.nn.apply(made(Recurrent), nn.LSTM)
    for m in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        m.lstm.flatten_parameters()
        check(m, plain)


class Arguments(nn.Module):
    def forward(self, batch: dict, /, *rest: Any, out: str = "y", **more: Any) -> dict:
        y = (batch["x"] * batch["w"][0]).sin().exp() * more.get("factor", 1)
        return {out: [y, None, y.detach()], "rest": rest, "more": more}


def test_arguments_and_results_of_all_kinds() -> None:
    module, plain = remat.nn.apply(Arguments(), Arguments), Arguments()
    batch = {"x": rand(3), "w": (rand(3, seed=1), "text")}
    results = []
    for m in (module, plain):
        result = m(batch, 1, None, out="z", factor=rand(3, seed=2), flag=True)
        results.append((result, torch.autograd.grad(result["z"][0].sum(), [batch["x"], batch["w"][0]])))  # type: ignore
    assert_same(*results)


# --- more processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without it")
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("static", [False, True])
def test_ddp(static: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(remat.nn.apply(made(), Block), static_graph=static)
    for _ in range(3):
        check(model, made(), [False] * 4 + [True] * 4)
    ends = DistributedDataParallel(remat.nn.apply(made(Tied), Block))
    plain = made(Tied)
    for _ in range(2):
        check(ends, plain)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("cls", [Block, OfReplaced])
@pytest.mark.parametrize("first", [True, False])
def test_fsdp(first: bool, cls: type) -> None:
    """`apply` runs before or after `fully_shard`, which adds a class of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def sharded_step(model: nn.Module) -> list:
        return [grad.full_tensor() for grad in step(model)]  # type: ignore[union-attr]

    mesh, model, expected = init_device_mesh("cpu", (1,)), made(lambda: Model(cls)), step(made())
    if first:
        remat.nn.apply(model, Block)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not first:
        remat.nn.apply(model, Block)
    for _ in range(2):
        assert_same(sharded_step(model), expected)
        assert RUNS == [False] * 4 + [True] * 4
    assert_same(sharded_step(remat.nn.undo(model)), expected)
    assert RUNS == [False] * 4


# --- everything is freed ----------------------------------------------------------------------------------------------


def test_everything_is_freed_after_a_step_without_cycles() -> None:
    model = remat.nn.apply(made(), Block)
    assert leaked_bytes(lambda model: torch.autograd.grad(model(X).sum(), list(model.parameters())), model) == 0
    with assert_freed_without_gc() as watch:
        watch(*model.modules(), *model.parameters())
        del model


def test_classes_are_made_once() -> None:
    assert len({type(remat.nn.apply(Block(), Block)) for _ in range(3)}) == 1
    assert len({type(remat.remat(remat.nn.apply(Block(), Block))) for _ in range(3)}) == 1


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda", reason="DataParallel is for CUDA")
def test_data_parallel() -> None:
    plain, model = made().to(DEVICE), remat.nn.apply(made(), Block).to(DEVICE)
    x = X.to(DEVICE)
    check(nn.DataParallel(model, [0]), plain, [False] * 4 + [True] * 4, x)
    check(nn.DataParallel(remat.remat(made().to(DEVICE)), [0]), plain, [False] * 4 + [True] * 4, x)
    check(nn.DataParallel(model), nn.DataParallel(plain), None, x)
    runs = 4 * min(backend.device_count(), len(x))
    assert sorted(RUNS) == [False] * runs + [True] * runs
