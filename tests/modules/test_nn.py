"""`remat.nn.apply`: which submodules are chosen, the options of their regions, and which modules can't be regions."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import AGAIN, ALL, INSIDE, ROW, Base, Block, Model, X, check, in_place, kept, made, step
from cases import assert_same
from torch import Tensor, nn

import remat.nn
from remat import PolicyError, RecomputeMismatchError, RematError, policies

pytestmark = pytest.mark.usefixtures("collector_off")

BLOCKS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
TAIL = ROW + ROW // 2  # the result of tanh, and two numbers for each row

# `where`, the names of the chosen modules, by how many bytes less is saved, and how often blocks are recomputed.
WHERE: dict[str, tuple[Any, list[str], int, int]] = {
    "base": (Base, BLOCKS, 4 * INSIDE, 4),
    "types": ((Block, nn.Sequential), [*BLOCKS, "tail"], 4 * INSIDE + TAIL, 4),
    "name": (lambda name, module: name.endswith((".1", ".2")), ["blocks.1", "blocks.2", "tail.1", "tail.2"],
             2 * INSIDE - ROW, 2),  # without a region tanh saves its result, which the next region saves as its input
    "every second": (remat.nn.every(2, Block), ["blocks.0", "blocks.2"], 2 * INSIDE, 2),
    "every first": (remat.nn.every(1, (Block, nn.Sequential)), [*BLOCKS, "tail"], 4 * INSIDE + TAIL, 4),
    "the model itself": (lambda name, module: name == "", [""], 4 * INSIDE + TAIL + 4 * ROW, 4),
    "a module and its parent": ((Model, Block), ["", *BLOCKS], 4 * INSIDE + TAIL + 4 * ROW, 8),
}  # fmt: skip


def changed(model: nn.Module, plain: nn.Module | None = None) -> list[str]:
    """The names of the submodules whose class isn't that of the plain model."""
    plain = made() if plain is None else plain
    return [name for name, module in model.named_modules() if type(module) is not type(plain.get_submodule(name))]


@pytest.mark.parametrize("kind", WHERE)
def test_where_chooses_the_submodules_that_save_less(kind: str) -> None:
    where, names, saved, again = WHERE[kind]
    plain, model = made(), made()
    assert remat.nn.apply(model, where) is model and changed(model) == names
    check(model, plain, [False] * 4 + [True] * again)
    assert kept(model) == kept(plain) - saved


def test_a_predicate_sees_each_module_once_and_nothing_is_changed_if_it_raises() -> None:
    shared = Block()
    seen: list = []
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with pytest.raises(ValueError, match="chooses none"):
        remat.nn.apply(model, lambda name, module: seen.append((name, module)))
    assert seen == list(model.named_modules())
    with pytest.raises(ZeroDivisionError):
        remat.nn.apply(model := made(), lambda name, module: 1 // (name != "tail"))
    assert changed(model) == []


HIDDEN = policies.save_only_these_names("hidden")
OPTIONS: dict[str, tuple[dict[str, Any], int, int]] = {  # with the numbers of recomputes and of rows saved more
    "none": ({}, 4, 0),
    "policy": ({"policy": HIDDEN}, 4, 8),
    "list of operators": ({"policy": [torch.ops.aten.tanh.default]}, 4, 8),
    "everything": ({"policy": policies.everything_saveable}, 0, 20),
    "others": ({"preserve_rng_state": False, "determinism_check": "values", "early_stop": False, "debug": True}, 4, 0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, again, rows = OPTIONS[name]
    model = remat.nn.apply(made(), Block, **options)
    check(model, made(), [False] * 4 + [True] * again)
    assert kept(model) == kept(remat.nn.apply(made(), Block)) + rows * ROW


def test_a_second_apply_replaces_the_options() -> None:
    model = remat.nn.apply(made(), Block, policy=policies.everything_saveable)
    classes = [type(module) for module in model.modules()]
    check(remat.nn.apply(model, remat.nn.every(2, Block)), made(), [False] * 4 + [True] * 2)
    assert [type(module) for module in model.modules()] == classes
    check(remat.nn.apply(model, Block, policy=policies.everything_saveable), made(), [False] * 4)


def test_undo_makes_all_calls_plain_again() -> None:
    loss = (model := remat.nn.apply(made(), (Model, Block, nn.Linear)))(X).square().sum()
    remat.nn.undo(model.blocks[2])
    with pytest.raises(RecomputeMismatchError):
        loss.backward()  # of regions inside of regions, of which some are undone
    check(model, made(), [False] * 4 + [True] * 7)  # the model and three blocks are recomputed
    assert remat.nn.undo(model) is model and remat.nn.undo(model) is model
    assert changed(model) == []
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in made().modules()]
    check(model, made(), [False] * 4)
    assert kept(model) == kept(made())
    check(remat.nn.apply(model, Block), made(), ALL)
    assert kept(remat.nn.undo(remat.remat(remat.nn.apply(model, Model)))) == kept(remat.remat(model))
    with pytest.raises(TypeError, match=r"model comes first: `remat.nn.apply\(model, Block"):
        remat.nn.apply(Block, made())  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got <built-in"):
        remat.nn.undo(torch.sin)  # type: ignore[type-var]


@pytest.mark.parametrize("change", [remat.nn.undo, lambda m: remat.nn.apply(m, (Model, Block, nn.Linear))])
def test_changes_between_forward_and_backward_have_no_effect_on_that_backward(change: Callable) -> None:
    loss = (model := remat.nn.apply(made(), Block))(X).square().sum()
    change(model)
    loss.backward()
    assert_same([p.grad for p in model.parameters()], step(made()))


WRONG: list[tuple[Any, dict, type, str]] = [
    (nn.Conv2d, {}, ValueError, "chooses none of the model's modules.*Block, LayerNorm, Linear"),
    ("blocks.*", {}, TypeError, "where takes no names.*fnmatch.name, 'blocks.*for a class by name `lambda"),
    ((Block, "tail"), {}, TypeError, "where must be a type"),
    (lambda module: True, {}, TypeError, "with a name and a submodule, which .* doesn't accept"),
    (nn.ModuleList, {}, TypeError, "the ModuleList 'blocks' has no forward: use the modules in it"),
    (Block, {"policy": "dots"}, PolicyError, "dots"),
    (Block, {"early_stop": 1}, TypeError, "early_stop"),
]


@pytest.mark.parametrize("where, options, kind, text", WRONG)
def test_errors_of_apply_change_nothing(where: Any, options: dict, kind: type, text: str) -> None:
    model = made()
    with pytest.raises(kind, match=text):
        remat.nn.apply(model, where, **options)
    assert changed(model) == []


@pytest.mark.parametrize("model, hint", [(torch.sin, "For a function use `remat.remat"), ("model", "got 'model'")])
def test_what_is_not_a_module_is_an_error(model: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"must be a torch\.nn\.Module, .*{hint}"):
        remat.nn.apply(model, Block)


@pytest.mark.parametrize("n, of, kind, text", [(0, Block, ValueError, "at least 1"), (1.5, Block, TypeError, "integer"),
                                               (True, Block, TypeError, "integer"),
                                               (2, "Block", TypeError, "tuple of types")])  # fmt: skip
def test_errors_of_every(n: Any, of: Any, kind: type, text: str) -> None:
    with pytest.raises(kind, match=rf"every\(n, of\) takes .*{text}"):
        remat.nn.every(n, of)


class CallsNoForward(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return self.up(x).sin()


class CallsForward(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).sin()


traced = lambda: torch.jit.trace(nn.Linear(4, 4), X.float())
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "list": (lambda: nn.ModuleList([Block()]), "has no forward: use the modules in it"),
    "lazy": (lambda: nn.LazyLinear(3), "is lazy: call it once"),
    "TorchScript": (traced, "is TorchScript: use the module that calls it"),
    "call": (CallsNoForward, "has a `__call__` that doesn't call it: use the modules in it"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_cannot_be_regions_are_errors(name: str) -> None:
    make, text = REFUSED[name]
    model = nn.Sequential(Block(), module := make())
    with pytest.raises(TypeError, match=f"the {type(module).__name__} '1' {text}|but the .* '1' {text}"):
        remat.nn.apply(model, lambda name, module: name in ("0", "1"))
    assert type(model[0]) is Block
    for wrap in (remat.compat.checkpoint_wrapper, *([] if name == "TorchScript" else [remat.remat])):
        with pytest.raises(TypeError, match=f"a {type(module).__name__} .*{text.split(':')[0]}"):
            wrap(module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_can_be_regions_though_they_are_like_those_that_cannot() -> None:
    """Lazy ones that were called, those around TorchScript, and those whose forward or call is an object."""
    lazy, own = made(lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh())), made(nn.Module)
    lazy(X)
    around = nn.Sequential(traced(), nn.Tanh()).double()
    own.weight = nn.Parameter(X[0])
    own.forward = lambda x: (x * own.weight).sin().exp()
    call = made(type("CallsObject", (Block,), {"__call__": property(lambda self: self._call_impl)}))
    for module in (lazy, around, made(CallsForward), own, call):
        expected = step(module)
        assert_same(step(in_place(module)), expected)


class OfLibrary(Block):
    """A module that its library checkpoints if this flag is set."""

    gradient_checkpointing = False


@pytest.mark.parametrize("wrap", [in_place, remat.remat, remat.compat.checkpoint_wrapper])
def test_combination_with_the_librarys_own_checkpoint_is_an_error(wrap: Callable, monkeypatch: Any) -> None:
    module = made(OfLibrary)
    monkeypatch.delitem(sys.modules, "transformers.modeling_layers", raising=False)
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
