"""Modules whose calls are regions, made in each way: nothing else about them changes."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
import torch.nn.utils.prune as prune
from blocks import AGAIN, ALL, COPIES, INSIDE, RUNS, WAYS, Block, Model, OfReplaced, Quiet, X, check, kept, made, step
from cases import assert_same, rand, repeated
from torch import Tensor, nn
from torch.func import functional_call

import remat.nn
from benchmarks.measure import assert_freed_without_gc, leaked_bytes
from remat import RematError, disable_remat, is_recomputing, policies
from remat._modules.region_class import is_sequence, regions_of, restored, segmented
from remat._modules.region_class import regions as regions_within
from remat._region.options import Options

pytestmark = pytest.mark.usefixtures("collector_off")
every_way = pytest.mark.parametrize("way", WAYS)
every_copy = pytest.mark.parametrize("how", COPIES)
regions = lambda way: made(Model, Block, WAYS[way])  # a model whose blocks are regions
wrapper = remat.compat.checkpoint_wrapper


@every_way
def test_the_model_looks_unchanged(way: str) -> None:
    plain, model = made(), regions(way)
    for names in ("named_modules", "named_parameters", "named_buffers", "named_children"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
    own = "Block" if way == "in place" else "RematBlock"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain).replace("Block", own)
    for module, before in zip(model.modules(), plain.modules(), strict=True):
        assert isinstance(module, type(before))
        for name in ("__qualname__", "__module__", "__doc__"):
            assert getattr(type(module), name) == getattr(type(before), name)
        assert inspect.signature(type(module).forward) == inspect.signature(type(before).forward)
        assert inspect.signature(module.forward) == inspect.signature(before.forward)
    added = set(dir(model.blocks[0])) - set(dir(plain.blocks[0]))
    assert added - {"_remat"} == {"_remat_forward", "_remat_own", "_remat_regions"}


@every_way
def test_a_step_is_the_same_and_a_block_saves_its_input(way: str) -> None:
    """In any number of layers they are one region, whatever the mode, dtype and device."""
    model, plain = regions(way), made()
    assert kept(model) == kept(plain) - 4 * INSIDE
    changes: list[Callable] = [lambda m: m, nn.Module.eval, nn.Module.train, nn.Module.float, lambda m: m.to(X.dtype)]
    for change in changes:
        assert change(model) is model
        change(plain)
        check(model, plain, ALL, X.to(model.tail[2].weight.dtype))
    for off in (torch.no_grad, torch.inference_mode, disable_remat):
        with off():
            assert_same(model(X).detach(), plain(X).detach())
    assert regions(way).to("meta").blocks[0](X.to("meta")).device.type == "meta"


def test_the_second_module_shares_all_state_with_the_first() -> None:
    module = made(Quiet).eval()
    second, third, graphs = remat.remat(module), remat.remat(module), list[Any]()
    assert vars(second) is vars(module) and not second.training
    second.scale = nn.Parameter(torch.zeros(4))
    module.register_buffer("late", torch.ones(1))
    assert module.scale is second.scale and "late" in second.state_dict()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        second.nothing  # noqa: B018
    second.compile(backend=lambda graph, inputs: (graphs.append(graph), graph)[1])  # and only this one
    for region in (third, second):
        region(X)
        assert bool(graphs) is (region is second)


def register_hooks(module: nn.Module, log: list) -> None:
    """One hook of each kind; some of them change what they get."""

    def note(kind: str, change: Callable = lambda *args: None) -> Callable:
        return lambda *args: (log.append((kind, len(args), is_recomputing())), change(*args))[1]

    module.register_forward_pre_hook(note("before"))
    module.register_forward_pre_hook(note("halve", lambda m, args: (args[0] / 2, *args[1:])), prepend=True)
    module.register_forward_pre_hook(note("triple", lambda m, args, kwargs: (args, {"scale": 3.0})), with_kwargs=True)
    module.register_forward_hook(note("after"), with_kwargs=True)
    module.register_forward_hook(note("double", lambda m, args, out: out * 2))
    module.register_forward_hook(note("always"), always_call=True)
    module.register_full_backward_pre_hook(note("before the backward", lambda m, to_out: (to_out[0] * 2,)))
    module.register_full_backward_hook(note("after the backward", lambda m, to_in, to_out: (to_in[0] * 5,)))


@every_way
@pytest.mark.parametrize("before", [True, False])
def test_hooks_fire_outside_of_the_region_as_often_as_before(before: bool, way: str) -> None:
    logs, results = [], []
    for wrap in (WAYS[way], lambda module: module):
        module, log, x = made(Block), [], rand(5, 4)
        register_hooks(module, log if before else [])
        module = wrap(module)
        register_hooks(module, [] if before else log)
        out = module(x)
        results.append((out.detach(), torch.autograd.grad(out.sum(), [x, *module.parameters()])))
        logs.append(log)
    assert logs[0] == logs[1] and len(logs[0]) == 8
    assert_same(*results)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.BatchNorm1d(4)
        self.second.up.weight = self.first.up.weight
        self.alias = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.alias(self.norm(self.second(self.first(x)))))


@pytest.mark.parametrize("where", [Block, nn.Linear, (Block, nn.BatchNorm1d), (Tied, Block, nn.Linear)])
def test_tied_weights_and_modules_that_are_called_twice(where: Any) -> None:
    model, plain = remat.nn.apply(made(Tied), where), made(Tied)
    again = copy.deepcopy(model)
    for each in (model, again):
        assert each.first is each.alias and each.first.up.weight is each.second.up.weight
    for _ in range(3):  # each step updates the statistics once
        check(model, plain)
    assert int(model.norm.num_batches_tracked) == 6
    check(again, made(Tied))


class Reduces(Block):
    """Is rebuilt from its constructor arguments, so unknown attributes get lost."""

    def __reduce__(self) -> Any:
        return Reduces, (), self.state_dict()

    def __setstate__(self, state: dict) -> None:
        self.double().load_state_dict(state)


@every_copy
@pytest.mark.parametrize("cls, way", [*((Block, way) for way in WAYS), (Reduces, "second of in place")])
def test_copies_have_the_same_regions(how: str, cls: type, way: str) -> None:
    module, plain = WAYS[way](made(cls)), made(cls)
    again = COPIES[how](module)
    assert type(again) is type(module) and again is not module
    check(again, plain, AGAIN)
    check(module, plain, AGAIN)
    assert kept(again) == kept(module) == kept(plain) - INSIDE
    if how not in ("copy", "replica"):
        assert not any(a is b for a, b in zip(again.parameters(), module.parameters()))


@every_copy
def test_copies_have_the_same_options(how: str) -> None:
    model = remat.nn.apply(made(), remat.nn.every(2, Block), policy=policies.save_only_these_names("hidden"))
    again = COPIES[how](model)
    check(again, made(), [False] * 4 + [True] * 2)
    assert kept(again) == kept(model) < kept(made())
    check(COPIES[how](remat.nn.undo(again)), made(), [False] * 4)
    module = remat.remat(remat.remat(made(Block), policy=policies.everything_saveable), policy=policies.save_matmuls)
    assert kept(COPIES[how](module)) == kept(remat.remat(made(Block), policy=policies.save_matmuls))


@pytest.mark.parametrize("inner, outer", [(wrapper, remat.remat), (remat.remat, wrapper), (remat.remat, remat.remat)])
def test_the_outer_policy_decides(inner: Callable, outer: Callable) -> None:
    module = outer(inner(made(Block), policy=policies.save_only_these_names("hidden")))
    check(module, made(Block))
    assert kept(module) == kept(remat.remat(made(Block)))


def test_a_module_has_its_region_again_after_a_context_with_another() -> None:
    module = remat.nn.apply(made(Block), Block, policy=policies.save_only_these_names("hidden"))
    own, plain = kept(module), made(Block)
    with restored([module]):
        remat.nn.undo(module)
        assert kept(module) == kept(plain) != own
    with regions_within({module: Options(), plain: Options()}):
        assert kept(module) == kept(plain) == kept(made(Block)) - INSIDE != own
    assert kept(module) == own == kept(copy.deepcopy(module)) and vars(plain).keys() == vars(made(Block)).keys()


@every_way
def test_a_base_that_changes_its_subclasses(way: str) -> None:
    module, plain = WAYS[way](made(OfReplaced)), made(OfReplaced)
    for each in (module, *(make_copy(module) for make_copy in COPIES.values()), remat.remat(module)):
        check(each, plain, AGAIN)
        assert kept(each) == kept(plain) - INSIDE and isinstance(each, OfReplaced)
    with assert_freed_without_gc() as watch:
        watch(*module.modules(), *module.parameters())
        del each, module


@pytest.mark.parametrize("way", ["in place", "second", "second of in place"])
def test_the_region_is_around_a_forward_that_is_set_on_the_module(way: str) -> None:
    module, plain = made(Block), made(Block)
    for m in (module, plain):
        m.forward = lambda x, m=m: Block.forward(m, x.exp()).sin()
    module = WAYS[way](module)
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
    module.forward = lambda x: x * 2
    assert_same(remat.nn.undo(WAYS["in place"](module))(X), X * 2)


class Exp(nn.Module):
    """A parametrization that saves tensors itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sin() * x.cos()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x


ups = lambda model: [block.up for block in model.blocks]


def parametrize_all(model: Any) -> Any:
    for up in ups(model):
        parametrize.register_parametrization(up, "weight", Exp())
    return model


def unparametrize_all(model: Any) -> None:
    for up in ups(model):
        parametrize.remove_parametrizations(up, "weight")


@pytest.mark.parametrize("order, where", [("paur", nn.Linear), ("paru", nn.Linear), ("apur", nn.Linear),
                                          ("apru", nn.Linear), ("apauaru", (Block, nn.Linear)),
                                          ("papur", Block)])  # fmt: skip
def test_parametrizations_in_any_order(order: str, where: Any) -> None:
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


@pytest.mark.parametrize("where", [Block, (Block, nn.Linear)])
@pytest.mark.parametrize("inside", [True, False])
def test_cached_parametrizations(inside: bool, where: Any) -> None:
    """The backward runs inside `cached()`, or after it; the weight is first read in the region, or before."""
    results = []
    for wrap in (lambda model: remat.nn.apply(model, where), lambda model: model):
        for before in (True, False):
            model = parametrize_all(wrap(made()))
            with parametrize.cached():
                weights = [up.weight for up in ups(model)] if before else []
                loss = model(X).sum() + model(X * 2).sum()
                if inside:
                    loss.backward()
                assert all(up.weight is weight for up, weight in zip(ups(model), weights))
            if not inside:
                loss.backward()
            results.append([p.grad for p in model.parameters()])
    assert_same(results[1:], [results[0]] * 3)


class Doubles(type):
    """A metaclass that wraps the ``forward`` of each class, an inherited one too."""

    def __init__(cls, name: str, bases: tuple, namespace: dict) -> None:
        super().__init__(name, bases, namespace)
        forward = cls.forward  # type: ignore[attr-defined]
        cls.forward = lambda self, x: forward(self, x) * 2  # type: ignore[attr-defined]


class Doubled(nn.Module, metaclass=Doubles):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp()


def test_a_metaclass_wraps_forward_only_once() -> None:
    model = remat.nn.apply(nn.Sequential(Doubled()), Doubled)
    for region in (model, remat.remat(Doubled())):
        assert_same(region(X), X.sin().exp() * 2)
        assert remat.saved_residuals(region, X) == []


def test_cached_parametrizations_under_torch_func_are_refused() -> None:
    plain, model = parametrize_all(made()), remat.nn.apply(parametrize_all(made()), Block)
    params = {n: p.detach() for n, p in model.named_parameters()}
    loss = lambda params: functional_call(model, params, (X,)).sum()
    with parametrize.cached(), pytest.raises(RematError, match="Leave out the cache"):
        torch.func.grad(loss)(params)
    assert torch.func.grad(loss)(params).keys() == params.keys()
    assert_same(step(model), step(plain))


NORMS: dict[str, Callable] = {
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_weights_before_and_after_update_their_buffers_once(name: str) -> None:
    def normed(model: Any) -> Any:
        torch.manual_seed(1)
        for up in ups(model):
            NORMS[name](up)
        return model

    where = Block, nn.Linear
    for model in (remat.nn.apply(normed(made()), where), normed(remat.nn.apply(made(), where))):
        plain = normed(made())
        before = [b.clone() for b in plain.buffers()]
        for mode in (True, True, False):
            check(model.train(mode), plain.train(mode))
        assert ("spectral" in name) == any(not torch.equal(a, b) for a, b in zip(model.buffers(), before))


def test_a_compiled_model_with_nested_regions() -> None:
    torch._dynamo.reset()
    plain = made(Model, Quiet)
    model = remat.remat(remat.nn.apply(copy.deepcopy(plain), (Model, Block)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled), step(plain))
    assert_same(step(model), step(plain))


class ReadsItsClass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (type(self).forward is ReadsItsClass.forward)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode, disable_remat])
def test_a_compiled_layer_that_reads_the_forward_of_its_class(without: Callable) -> None:
    torch._dynamo.reset()
    model = remat.nn.apply(nn.Sequential(ReadsItsClass(4, 4)).double(), ReadsItsClass)
    with without():
        assert_same(torch.compile(model, backend="eager")(X), model(X))
        model[0].forward = torch.sin
        assert_same(torch.compile(model[0], backend="eager")(X), X.sin())


@every_way
def test_everything_is_freed_without_cycles_and_classes_are_made_once(way: str) -> None:
    model = regions(way)
    assert leaked_bytes(lambda model: torch.autograd.grad(model(X).sum(), list(model.parameters())), model) == 0
    assert len({type(block) for block in model.blocks}) == 1
    with assert_freed_without_gc() as watch:
        watch(*model.modules(), *model.parameters())
        del model


def test_a_class_that_a_library_puts_on_top_stays_there() -> None:
    """As FSDP2's."""
    module, plain = WAYS["in place"](made(Block)), made(Block)
    module.__class__ = type("Sharded", (type("Wrapper", (), {}), type(module)), {})
    check(WAYS["in place"](module), plain, AGAIN)
    assert type(module).__name__ == "Sharded"
    check(remat.nn.undo(module), plain, AGAIN[:1])
    assert type(module).__name__ == "Sharded" and type(module).__bases__[1] is Block


def test_a_module_of_fx_runs_its_new_code_after_an_edit() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = rand(3, 4).float()
    model = remat.nn.apply(traced, torch.fx.GraphModule)
    before = model(x)
    (tanh,) = (node for node in model.graph.nodes if node.target == "1")
    tanh.replace_all_uses_with(tanh.args[0])
    model.recompile()
    assert_same(model(x).tanh(), before)
    copied = copy.deepcopy(model)
    assert regions_of(copied) == regions_of(model) and copied.graph is not model.graph
    assert_same(copied(x).tanh(), before)
    assert remat.nn.undo(model) is model and type(model).__mro__[1] is torch.fx.GraphModule


def test_ranges_of_a_sequential_are_regions() -> None:
    calls, x = list[int](), rand(3)
    row: Any = [lambda x, i=i: (calls.append(i), x.sin())[1] for i in range(7)]
    y = segmented(row, Options(segments=((1, 4), (2, 4), (4, 6))))(x)
    assert calls == [*range(7)]
    grad = torch.autograd.grad(y.sum(), x)[0]
    assert calls[7:] == [4, 5, 1, 2, 3]
    assert_same(grad, torch.autograd.grad(repeated(torch.sin, 7)(x).sum(), x)[0])


def test_what_is_a_sequence() -> None:
    replaced = nn.Sequential(nn.Tanh())
    replaced.forward = torch.sin  # type: ignore[method-assign]
    own = type("Own", (nn.Sequential,), {"forward": lambda self, x: x})
    others = [replaced, own(), type("LooksAlike", (nn.Module,), {"forward": nn.Sequential.forward})(), nn.Tanh()]
    assert is_sequence(nn.Sequential()) and is_sequence(type("Named", (nn.Sequential,), {})())
    assert not any(map(is_sequence, others))
