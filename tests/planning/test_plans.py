"""``remat.nn.budget`` without ``where``: the peak is within the amount, FLOPs are as promised, numbers are equal."""

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import assert_same, training_step
from planned import LAYER, X, fitted, layer, layers, squared
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from benchmarks.measure import PeakMemory
from remat._planning.plan import Plan, RegionPlan
from remat._planning.planner import _Planner

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Decoder(nn.Module):
    """A list of blocks in a loop of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 32), nn.ModuleList([layer(0.1) for _ in range(6)])
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, ids: Tensor) -> dict[str, Any]:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return {"logits": self.head(h)}


class Convolutions(nn.Module):
    """A stem of convolutions with batch norm, then a residual part, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        stages = [(nn.Conv2d(i, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)) for i in (3, 16, 16, 16)]
        self.stem = nn.Sequential(*(nn.Sequential(*stage) for stage in stages))
        self.body = nn.ModuleList([layer() for _ in range(2)])
        self.join, self.head = nn.Conv2d(32, 32, 1), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.stem[0](x)
        h = self.join(torch.cat([self.stem[1:](skip), skip], 1)).flatten(2).transpose(1, 2)
        for block in self.body:
            h = block(h)
        return self.head(h.mean(1))


class Block(nn.Module):
    """A residual block, of complex numbers if ``dtype`` is complex."""

    def __init__(self, dtype: torch.dtype = torch.float32, dropout: float = 0.1) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Parameter(torch.randn(size, dtype=dtype) / 10) for size in ((32, 64), (64, 32)))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.inner
        return x + F.dropout(h * torch.sigmoid(h.abs()), self.dropout, self.training) @ self.outer


class Adapted(Block):
    """A block whose weights are frozen, with adapters of a low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(torch.tanh(self.down(x)))


class Consistent(nn.Module):
    """Compares its result with that of an earlier call of its modules, without gradients and with fewer samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = blocks(6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.body(x[:4])
        return self.body(x)[:4] - target


class Caching(nn.Module):
    """Its blocks add their inputs to a list, and read the sum of it."""

    class Attention(Block):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            cache.values.append(x.mean())
            return super().forward(x * torch.stack(cache.values).sum().sigmoid())

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Attention() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        cache = SimpleNamespace(values=[])
        for block in self.blocks:
            x = block(x, cache)
        assert len(cache.values) == 5
        return x


class Inside(nn.Module):
    """Calls a module in a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.mlp)(x)


def blocks(count: int = 5, *args: Any) -> nn.Module:
    return nn.Sequential(*(Block(*args) for _ in range(count)))


def kernels_of_different_sizes() -> nn.Module:
    model = nn.Sequential()
    for size in (3, 5, 1, 7, 3):
        first = nn.Conv2d(16 if model else 3, 16, size, padding=size // 2)
        model.append(nn.Sequential(first, nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1), nn.GELU()))
    return model


IDS = torch.randint(50, (8, 32), generator=torch.Generator().manual_seed(0))


decoder_loss = lambda out: F.cross_entropy(out["logits"].flatten(0, 1), IDS.flatten())
squared_size = lambda out: squared(out.abs())
# Models, each with its input, its loss, and the parts of the peak that are planned for.
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable, tuple[float, ...]]] = {
    "a sequence of blocks": (lambda: layers(8), X, squared, (0.7, 0.4, 0.3)),
    "a list of blocks": (Decoder, IDS, decoder_loss, (0.7, 0.4, 0.25)),
    "convolutions and blocks": (Convolutions, IMAGES, squared, (0.9, 0.7, 0.55)),
    "kernels of different sizes": (kernels_of_different_sizes, IMAGES, squared, (0.6, 0.5)),
    "complex numbers": (lambda: blocks(5, torch.complex64, 0.0), torch.complex(X, X.flip(0)), squared_size, (0.5,)),
    "a module that is called more than once": (lambda: nn.Sequential(*[layer()] * 6), X, squared, (0.5,)),
    "calls without gradients": (Consistent, X, squared, (0.55,)),
    "an argument that a call changes": (Caching, X, squared, (0.6,)),
    "frozen weights with adapters": (lambda: nn.Sequential(*(Adapted() for _ in range(5))), X, squared, (0.6,)),
    "calls in vmap": (lambda: nn.Sequential(layer(), Inside(), layer(), Inside()), X, squared, (0.7,)),
}
NAMES = {  # that the regions of a model have
    "a module that is called more than once": "0",
    "calls without gradients": "body.[0-5]",
    "calls in vmap": "(?!.*mlp).*",
}


def made(name: str) -> tuple[nn.Module, Tensor, Callable]:
    make, x, loss, *_ = MODELS[name]
    return make(), x, loss


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, row in MODELS.items() for part in row[3]])
def test_a_step_fits_and_its_numbers_are_equal(name: str, part: float) -> None:
    model, x, loss = made(name)
    plan = fitted(model, part, x, loss, off=0.1 if name.startswith("calls in ") else 0.05)
    assert plan.regions and all(re.fullmatch(NAMES.get(name, ".*"), region.name) for region in plan.regions)
    fresh, _, _ = made(name)
    _, *plain = training_step(fresh, lambda: loss(fresh(x)))
    remat.nn.undo(model)
    _, *undone = training_step(model, lambda: loss(model(x)))
    assert undone == plain


def test_the_curve_goes_from_the_least_peak_to_no_recompute_and_each_plan_costs_what_it_says() -> None:
    model, x, loss = made("a sequence of blocks")
    _, _, plain = training_step(model, lambda: loss(model(x)))
    plan = remat.nn.budget(model, 0.5, x, loss=loss, cost="flops")
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in zip(plan.curve, plan.curve[1:])) and plan.curve[-1][1] == 0
    for peak, flops in plan.curve[:: max(1, len(plan.curve) // 6)]:
        amount = int(1.05 * peak) + 10_000  # the prediction is not exact for small tensors
        tried = remat.nn.budget(model, amount, x, loss=loss, cost="flops")
        _, measured, recomputed = training_step(model, lambda: loss(model(x)))
        assert measured <= amount and recomputed - plain == tried.flops <= flops


def test_modules_of_a_sequence_are_together_in_regions_and_the_model_can_be_copied_and_compiled() -> None:
    model, x = layers(16, 0.1), X.repeat(4, 1, 1)
    expected, _, _ = training_step(model, lambda: squared(model(x)))
    hand = remat.nn.apply(copy.deepcopy(model), LAYER)
    alone = training_step(hand, lambda: squared(hand(x)))[1]
    least = remat.nn.budget(model, 0.5, x, loss=squared).curve[0][0]
    plan = remat.nn.budget(model, least + 10_000, x, loss=squared)
    assert plan.peak < 0.9 * alone
    assert any(region.name == "" and region.children for region in plan.regions) and "[" in str(plan)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found, peak, _ = training_step(other, lambda other=other: squared(other(x)))
        assert_same(found, expected)
        assert peak <= plan.amount
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(training_step(model, lambda: squared(compiled(x)))[0], expected)


def test_a_plan_is_saved_and_applied_to_the_same_model(tmp_path: Path) -> None:
    model, x, loss = made("a sequence of blocks")
    plan = remat.nn.budget(model, 0.3, x, loss=loss, cost="flops")
    plan.save(tmp_path / "plan.json")
    other, _, _ = made("a sequence of blocks")
    loaded = remat.nn.load(other, tmp_path / "plan.json")
    assert loaded == plan and str(loaded) == str(plan)
    assert training_step(other, lambda: loss(other(x)))[1:] == training_step(model, lambda: loss(model(x)))[1:]
    with pytest.raises(TypeError, match="cost is a function"):
        remat.nn.budget(model, 0.3, x, loss=loss, cost=lambda *_: 1.0).save(tmp_path / "plan.json")


def test_a_plan_that_cannot_be_applied_changes_nothing(tmp_path: Path) -> None:
    (model, x, loss), (checkpointed, _, _) = made("a sequence of blocks"), made("a sequence of blocks")
    path, sizes = tmp_path / "plan", "for another model.*its parameters have [0-9,]+ bytes, those of this one [0-9,]+"
    plan = remat.nn.budget(model, 0.3, x, loss=loss)
    plan.save(path)
    deeper = nn.Sequential(*made("a sequence of blocks")[0], nn.Linear(3, 3))
    checkpointed.get_submodule(plan.regions[-1].name).gradient_checkpointing = True
    wrong = [
        (nn.Sequential(layer()), path.read_text(), "for another model.*no module '1"),
        (nn.Sequential(nn.Linear(2, 2)), path.read_text(), "for another model.*0"),
        (deeper, path.read_text(), sizes),
        (made("a sequence of blocks")[0].double(), path.read_text(), sizes),
        (checkpointed, path.read_text(), "own activation checkpointing is on"),
        *((model, text, "no plan") for text in ("{}", "no JSON", "[1]")),
    ]
    for other, text, message in wrong:
        path.write_text(text)
        before = [type(module) for module in other.modules()]
        with pytest.raises(remat.RematError, match=message):
            remat.nn.load(other, path)
        assert [type(module) for module in other.modules()] == before


def least_of(model: nn.Module, amount: Any, x: Tensor, loss: Callable) -> int:
    """The least amount, by the error of a smaller one."""
    with pytest.raises(remat.RematError, match=r"a budget of [0-9]+ bytes or more") as error:
        remat.nn.budget(model, amount, x, loss=loss, cost="flops")
    return int(str(error.value).split("a budget of ")[1].split()[0])


def test_too_small_an_amount_is_an_error_that_says_what_takes_the_memory() -> None:
    model, x, loss = made("a list of blocks")
    before = [(type(module), module.__dict__.copy()) for module in model.modules()]
    with pytest.raises(remat.RematError, match=r"at least .* but the budget is 1 KiB.*(forward|backward) pass.*shape"):
        remat.nn.budget(model, "1KiB", x, loss=loss)
    assert [(type(module), module.__dict__) for module in model.modules()] == before
    least = least_of(model, 0.05, x, loss)
    assert remat.nn.budget(model, least, x, loss=loss).peak <= least
    for amount in (1000, least // 2):
        assert least_of(model, amount, x, loss) == pytest.approx(least, rel=0.02)
    with pytest.raises(remat.RematError, match=r"of it are gradients of parameters, .*\. Choose a budget of"):
        remat.nn.budget(layers(2), 0.5, X[:1, :1], loss=squared)
    with pytest.raises(remat.PolicyError):
        remat.nn.budget(model, -1, x, loss=loss)


@pytest.mark.parametrize("count", [4, 5, 6])
def test_the_least_amount_of_an_error_is_enough(count: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), Block(), nn.Linear(32, 32)) for _ in range(count)))
    least = least_of(model, 0.3, X[:2], squared)
    assert remat.nn.budget(model, least, X[:2], loss=squared, cost="flops").peak <= least


class Called(LAYER):
    """A module with a `__call__` that leads to `forward` by a detour."""

    __call__ = lambda self, x: self.detour(x)
    detour = nn.Module.__call__


def test_modules_that_cannot_be_regions_are_passed_over_with_the_reason() -> None:
    shared, called = layer(), Called(32, 2, 128, 0.0, batch_first=True)
    script = torch.jit.script(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU()))
    plan = fitted(nn.Sequential(layer(), shared, nn.Linear(32, 32), shared, script, layer(), called), 0.8)
    assert plan.passed_over["4"] == "it is TorchScript" and "not a region: 4: it is" in str(plan)
    assert set(plan.passed_over) == {"4", "6"} and "a `__call__` that doesn't call it" in plan.passed_over["6"]


def test_the_calls_of_a_module_that_is_called_more_than_once_are_all_regions_or_none() -> None:
    model, x, loss = made("a module that is called more than once")
    assert len(remat.nn.budget(model, 0.5, x, loss=loss).regions) == 6
    assert not remat.nn.budget(model, "4MiB", x, loss=loss).regions


def test_a_function_that_calls_modules() -> None:
    model, x, loss = made("a list of blocks")
    plan = fitted(lambda ids: loss(model(ids)), 0.4, x, lambda out: out, of=model)
    assert {region.name.split(".")[0] for region in plan.regions} == {"model"}
    with pytest.raises(TypeError, match="no modules that could be regions"):
        remat.nn.budget(torch.sin, 0.5, X)


def test_no_region_begins_with_a_module_that_overwrites_its_argument() -> None:
    block = lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Linear(256, 64))
    model, x = nn.Sequential(nn.Linear(64, 64), *(block() for _ in range(6))), torch.randn(512, 64)
    assert fitted(model, 0.8, x, squared, off=0.2).passed_over.keys() == {f"{i}" for i in range(1, 7)}
    with pytest.raises(remat.RematError, match=r"\nnot a region: 1 and 5 more: argument input .* was changed in place"):
        remat.nn.budget(model, 2000, x, loss=squared)
    with pytest.raises(TypeError, match=r"^'1' can't be a region: argument input requires grad and was changed"):
        remat.nn.budget(model, 0.8, x, where=lambda name, _: name == "1", loss=squared)


@pytest.mark.parametrize("mixed", [False, True])
def test_frozen_parts_and_mixed_precision(mixed: bool) -> None:
    model, x, loss = made("a list of blocks")
    model.blocks[:4].requires_grad_(False)

    def called(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return loss(model(ids))

    fitted(called, 0.5, x, lambda out: out, of=model)


def test_no_call_that_takes_more_than_the_amount_is_measured() -> None:
    encoder = layers(8)
    with PeakMemory() as memory:
        plan = remat.nn.budget(nn.Sequential(nn.Linear(32, 32), encoder, nn.Linear(32, 32)), 0.4, X, loss=squared)
    assert memory.peak < 0.6 * plan.without


def test_the_first_step_is_measured_again_if_it_takes_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a kernel may take memory for later ones."""
    measure, measured = _Planner._peak, list[Any]()

    def first_takes_more(planner: Any, planned: Any, others: Any) -> int:
        measured.append(planned)
        return measure(planner, planned, others) + (2**20 if len(measured) == 1 else 0)

    monkeypatch.setattr(_Planner, "_peak", first_takes_more)
    model, x, loss = made("a list of blocks")
    remat.nn.budget(model, 0.4, x, loss=loss)
    assert measured[0] == measured[1] and len({*measured}) == len(measured) - 1


def test_regions_that_the_model_has_are_replaced() -> None:
    (model, x, loss), (fresh, _, _) = made("a list of blocks"), made("a list of blocks")
    remat.nn.apply(model, nn.Linear)
    plans = [remat.nn.budget(each, 0.4, x, loss=loss) for each in (model, fresh)]
    assert plans[0].regions == plans[1].regions
    peaks = [training_step(each, lambda each=each: loss(each(x)))[1] for each in (model, fresh)]
    assert peaks[0] == pytest.approx(peaks[1], abs=6000)


def test_arguments_in_another_order_and_frozen_parameters() -> None:
    model, x, loss = made("a list of blocks")
    for wrong in ((model, LAYER, 0.6, x), ("4GiB", model, x), (model, x, 0.5)):
        with pytest.raises(TypeError, match=r"remat.nn.budget\(model, '8GiB', \*batch\)"):
            remat.nn.budget(*wrong, loss=loss)
    with pytest.raises(TypeError, match=r"Decoder needs a batch: `remat.nn.budget\(model"):
        remat.nn.budget(model, 0.6)
    frozen = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))).requires_grad_(False)
    with pytest.warns(remat.RematWarning, match="No parameter and no argument requires grad"):
        remat.nn.budget(frozen, 1.0, torch.randn(4, 8))
    with pytest.warns(remat.RematWarning, match="Nothing was differentiated"):
        remat.nn.budget(lambda x: frozen(x).sum().detach(), 2**30, torch.randn(4, 8, requires_grad=True))
    assert "No parameter and no argument requires grad" in str(remat.report(frozen, torch.randn(4, 8)))


def test_the_curve_is_drawn_with_the_policies_of_a_report() -> None:
    pytest.importorskip("matplotlib")
    model, x, loss = made("a list of blocks")
    report = remat.report(model, x, loss=loss, where=LAYER, policies=[None])
    plan = remat.nn.budget(model, 0.4, x, loss=loss)
    labels = [text.get_text() for text in plan.plot(report=report).get_legend().get_texts()]
    assert labels == ["without remat", "this plan", "policy=None"]


class Energy(nn.Module):
    def __init__(self, differentiated: Callable) -> None:
        super().__init__()
        self.body, self.differentiated = blocks(3, torch.float32, 0.0), differentiated

    def forward(self, x: Tensor) -> Any:
        return self.differentiated(self.body, x.requires_grad_())


@pytest.mark.parametrize(
    "differentiated",
    [
        lambda body, x: torch.autograd.grad(body(x).sum(), x, create_graph=True)[0].square().sum(),
        lambda body, x: torch.func.grad(lambda x: body(x).sum())(x).square().sum(),
        lambda body, x: body(x).sum().backward(),
    ],
    ids=["autograd", "func", "backward"],
)
def test_a_forward_that_differentiates_is_an_error_with_a_remedy(differentiated: Callable) -> None:
    with pytest.raises(
        remat.RematError, match=r"differentiates a part.*remat.nn.apply.*function that returns the loss"
    ):
        remat.nn.budget(Energy(differentiated), 0.5, X.clone())


def test_the_plan_is_for_the_batch_that_needs_the_most() -> None:
    model, large, small = blocks(), X, X[:2]
    figures = attrgetter("amount", "without", "flops", "regions")
    best = remat.nn.budget(model, 0.5, large, loss=squared, cost="flops")
    for first, more in ((small, [(large,)]), (large, [(small,)])):
        plan = remat.nn.budget(model, 0.5, first, loss=squared, cost="flops", more_batches=more)
        assert figures(plan) == figures(best)
    for wrong in (small, [small], (small,), {"x": small}, 3):
        with pytest.raises(TypeError, match=r"more_batches is a list of tuples or dicts.*`more_batches=\[\(x,\)\]`"):
            remat.nn.budget(model, 0.5, large, loss=squared, more_batches=wrong)


class Dropped(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize("seed", range(4))
def test_the_statistics_of_layers_that_are_dropped_at_random_are_left_as_they_were(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Dropped(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)))
    before = copy.deepcopy(dict(model.named_buffers()))
    with contextlib.suppress(remat.RematError):  # there may be no layer left to recompute
        remat.nn.budget(model, 0.8, torch.randn(16, 8))
    assert_same(dict(model.named_buffers()), before)


def test_a_batch_that_the_model_does_not_take_is_an_error() -> None:
    for batch, remedy in ([((X,),), r"\*batch"], [(X, X), "x, loss=lambda out: criterion"]):
        with pytest.raises(TypeError, match=f"doesn't take what was given.*Give what its forward takes: .*{remedy}"):
            remat.nn.budget(blocks(), 0.6, *batch)


def test_layers_that_are_not_worth_a_region_alone_are_regions_together() -> None:
    model = nn.Sequential(*(each for _ in range(16) for each in (nn.Linear(64, 64), nn.GELU())))
    plan, x = fitted(model, 0.6, torch.randn(2048, 64), squared, off=0.15), torch.randn(4, 64)
    assert any(region.children for region in plan.regions) and "regions inside" not in str(plan)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(input=x))
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
    fitted(nn.Sequential(*blocks), 0.6, torch.randn(2048, 64), squared, off=0.15)  # each ends in a value that it saves


@pytest.mark.filterwarnings("error")
def test_a_loss_outside_of_the_model_is_asked_for() -> None:
    model, ids = nn.Sequential(blocks(), nn.Linear(X.shape[-1], 512)), torch.arange(X[..., 0].numel())
    with pytest.warns(remat.RematWarning, match=r"takes the sum of the result.*`loss=lambda out: criterion") as found:
        low = remat.nn.budget(model, 1.0, X).peak
    plan = remat.nn.budget(model, 1.0, X, loss=lambda out: nn.functional.cross_entropy(out.flatten(0, -2), ids))
    remat.nn.budget(lambda x: model(x).mean(), 1.0, X)
    assert plan.peak > low + ids.numel() * 512 * 4 and len(found) == 1


def test_a_model_that_fits_has_no_regions() -> None:
    """Regions that recompute nothing would take time."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
    plan = remat.nn.budget(model, 2**80, X)
    assert not plan.regions and str(plan).startswith("no regions are needed\npeak ")
    assert not remat.nn.budget(model, plan.peak, X).regions


def test_a_model_that_is_compiled_is_planned_as_it_is_without() -> None:
    model = blocks()
    plain = remat.nn.budget(copy.deepcopy(model), 0.6, X, loss=squared)
    plan = remat.nn.budget(torch.compile(model, backend="aot_eager"), 0.6, X, loss=squared)
    assert plan.without == plain.without and len(plan.regions) == len(plain.regions) > 0
    halves = [nn.Sequential(torch.compile(Block(), backend="aot_eager"), Block()) for _ in range(2)]
    assert remat.nn.budget(nn.Sequential(*halves), 0.8, X, loss=squared).regions


@pytest.mark.parametrize("outside", [False, True])
def test_casts_of_autocast_live_as_long_as_in_a_step(outside: bool) -> None:
    class Mixed(nn.Sequential):
        """Blocks in autocast, which drops its copies of weights where it ends."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    model = Mixed(*(nn.Sequential(nn.Linear(32, 128), nn.Linear(128, 32)) for _ in range(6)))
    with torch.autocast("cpu", torch.bfloat16) if outside else contextlib.nullcontext():
        plan = remat.nn.budget(model, "1MiB", X[:2], loss=squared)
        torch.clear_autocast_cache()
        _, peak, _ = training_step(model, lambda: squared(model(X[:2])))
    assert plan.peak == pytest.approx(peak, abs=6000)


def test_a_plan_that_is_made_without_gradients_is_the_same() -> None:
    model, x, loss = made("a sequence of blocks")
    expected = remat.nn.budget(model, 0.5, x, loss=loss)
    with torch.no_grad():
        assert remat.nn.budget(model, 0.5, x, loss=loss) == expected


class Rotated(nn.Module):
    """A block that multiplies by an argument without a gradient, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, x: Tensor, angles: Tensor) -> Any:
        return x + self.second((self.first(x) * angles).exp() * angles)


class Returning(Rotated):
    """A block that returns its second argument too, as T5's return the bias of positions."""

    def forward(self, x: Tensor, angles: Tensor) -> Any:
        return super().forward(x, angles), angles


class Rotating(nn.Module):
    """A model that gives its blocks one tensor without a gradient."""

    def __init__(self, kind: type[Rotated]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.linspace(-1, 1, 256).cos().expand(*x.shape[:-1], 256).contiguous()
        for block in self.blocks:
            result = block(x, angles)
            x, angles = result if isinstance(result, tuple) else (result, angles)
        return x


@pytest.mark.parametrize("kind", [Rotated, Returning])
def test_arguments_that_all_blocks_get(kind: type[Rotated]) -> None:
    # A product saves each factor only for the gradient of the other one.
    predicted = remat.nn.budget(Rotating(kind), 0.9, X, where=kind, loss=squared, cost="flops").least
    found = remat.nn.budget(Rotating(kind), predicted + 10_000, X, where=kind, loss=squared, cost="flops")
    assert found.peak == pytest.approx(predicted, rel=0.01)


def test_a_printed_plan_has_one_row_for_equal_regions_with_the_range_of_their_numbers() -> None:
    names = ["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp", "head"]
    regions = tuple(RegionPlan(n, "Block", None, False, 1024, 1.0, 1000, ("aten.mm",), (0,)) for n in names)
    plan = Plan(4096, 2048, 8192, 5000, 5.0, 4.0, regions, (), {})
    nothing = replace(regions[0], nbytes=0, steps=())
    table, _, last = str(plan).rpartition("\n")
    assert "1 KiB, 1 operation" in table and "operation" not in str(replace(plan, regions=(nothing,)))
    rows = [line.split()[:3] for line in table.splitlines()[1:]]
    assert rows == [["h.0-2,5.mlp", "Block", "x4"], ["head", "Block", "1"]]
    assert last.endswith("recomputed, 5 us by roofline, 25% more than the best plan by prediction, which did not fit")
    for bound in (0.0, 5.0, 5.2):
        assert str(replace(plan, bound=bound)).endswith("; 5 kFLOP recomputed, 5 us by roofline")


def test_a_report_keeps_its_rows_if_no_plan_fits_and_says_how_a_plan_is_written() -> None:
    model = blocks()
    report = remat.report(model, X, policies=["budget 1%", "budget 60%"])
    assert [row.label for row in report.rows] == ["without remat", "budget 60%"]
    assert "budget 1%: A training step of this model needs at least" in str(report)
    plan = remat.nn.budget(model, "60%", X)  # the same one
    assert report.objective == plan.cost == "roofline" and report.policies[0].recomputed_flops == plan.flops
    written = "written 'budget 60%' or 'budget 8GiB'"
    for wrong, message in (("60%", written), ("budgets 60%", written), ("budget 60", "a number and a unit")):
        with pytest.raises(remat.PolicyError, match=message):
            remat.report(model, X, policies=[wrong])


class Branches(nn.Module):
    """Two regions of a block get one tensor, which autograd doesn't save in the plain model."""

    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x + 1)).exp().sin()

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = self.Branch(64, 64), self.Branch(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.left(x) + self.right(x)


def test_a_tensor_that_two_regions_keep_counts_once() -> None:
    model, x = nn.Sequential(*(Branches() for _ in range(6))), torch.randn(1024, 64)
    plan = remat.nn.budget(model, 0.6, x, cost="flops")
    assert {region.kind for region in plan.regions} == {"Branch"}
    assert plan.peak == pytest.approx(next(peak for peak, flops in plan.curve if flops == plan.flops), rel=0.01)


class Wide(nn.Linear):
    """Needs much more memory in its forward than it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.detach().unsqueeze(-1) * torch.ones(64)).sum(-1)
        return super().forward(x * 0.5) + scale


def test_a_peak_in_the_forward() -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(5)]
    model, x = nn.Sequential(*layers[:4], Wide(64, 64), layers[4]), torch.randn(256, 64)
    plan = remat.nn.budget(model, 1.0, x)
    (peak, flops), plain = plan.curve[-1], plan.without
    assert abs(peak - plain) <= 8 and flops == 0 and not plan.regions and plain > 64 * x.nbytes
    plan = remat.nn.budget(model, 64 * x.nbytes + 3 * x.nbytes, x)
    assert plan.regions and plan.peak <= plan.amount < plan.without


def test_a_plan_of_a_function_is_loaded_for_it(tmp_path: Path) -> None:
    model, head = layers(4), nn.Linear(32, 3)
    step = lambda x: head(model(x)).sum()
    saved = lambda: sum(residual.nbytes for residual in remat.saved_residuals(step, X))
    plain = saved()
    plan = remat.nn.budget(step, 0.6, X)
    plan.save(tmp_path / "plan.json")
    remat.nn.undo(model)
    assert saved() == plain and remat.nn.load(step, tmp_path / "plan.json") == plan
    assert saved() < plain
    with pytest.raises(remat.RematError, match="this one has no module 'model"):
        remat.nn.load(model, tmp_path / "plan.json")


def test_all_of_the_peak_is_enough_where_gradients_take_the_memory() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
    plan = remat.nn.budget(model, 1.0, torch.randn(4, 256))
    assert not plan.regions and plan.peak == plan.amount == plan.without == plan.curve[-1][0] + 8
