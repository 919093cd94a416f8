"""Budgets: the choice is the best possible one, and its predictions of bytes and FLOPs are true."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.measure import PeakMemory, count_flops, count_ops, held_bytes
from remat import checkpoint_name, policies
from remat._compile import lowering
from remat._core.known import Known
from remat._function import call
from remat._region.options import Options
from remat._selective import choices
from remat._selective.search import Choice, Problem, best_of, corners, pareto

torch.manual_seed(0)
X = torch.randn(2, 8, 16)
W = torch.randn(16, 16) / 4
MEAN, VARIANCE = torch.zeros(8), torch.ones(8)


# --- the search -------------------------------------------------------------------------------------------------------


def chain(x: Tensor) -> Tensor:
    return ((x @ W).tanh() @ W).sin().exp()


def shared(x: Tensor) -> Tensor:
    h = x.sin()
    return (h.exp() * h.cos() + h[..., :4].mean()).tanh() * h


def noisy(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x.sin(), 0.3) @ W, 0.3).tanh()


def several(x: Tensor) -> Tensor:
    values, index = (x @ W).max(-1)
    first, second = x.exp().split(8, -1)
    return (first * second).sum() + (values.sin() * index).sum()


def in_place(x: Tensor) -> Tensor:
    h = (x @ W).sin()
    h.mul_(2).add_(x)
    return h.exp() * torch.zeros_like(h).add_(1)


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(F.batch_norm(x.transpose(1, 2), None, None, training=True).relu(), (8,)).sin()


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ W).abs().amax()
    return (x / scale).softmax(-1) @ W.tanh()


def in_evaluation(x: Tensor) -> Tensor:
    """Autograd saves two empty results of the batch norm, and the step that can't be skipped reads the third one."""
    y = F.batch_norm(x, MEAN, VARIANCE, training=False)
    y.detach().abs()
    return y + x.sin().exp()


SMALL = [chain, shared, noisy, several, in_place, without_grad]


def solved(fn: Callable, cost: Any = "roofline") -> tuple[Problem, Callable[[Choice], Choice], list[Choice]]:
    """The search problem of a function, a function that makes choices exact, and the options that the search finds."""
    found: list[Any] = []

    class Seen(choices.Choices):
        def _problem(self, program: Any, roots: Any, results: Any, lazy: bool) -> Problem:
            problem = super()._problem(program, roots, results, lazy)
            found.append((problem, lambda choice: choices._as_planned(choice, program, problem, self.flops, lazy)))
            return problem

    known, policy = Known(), policies.budget(0, cost=cost)
    x = X.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat._selective.recording.Choices", Seen)
        call(fn, Options(policy=policy), known, (x,), {})
    return *found[0], known.shared.choices[policy][0][0].options


@pytest.mark.parametrize(
    "cost", ["roofline", "flops", lambda op, args, kwargs, result: len(str(op))], ids=["roofline", "flops", "own"]
)
@pytest.mark.parametrize("fn", SMALL, ids=lambda fn: fn.__name__)
def test_no_choice_is_better(fn: Callable, cost: Any) -> None:
    """Compared with all subsets of the steps."""
    problem, planned, options = solved(fn, cost)
    steps = [i for i, step in enumerate(problem.steps) if any(value in problem.keepable for value in step.outs)]
    assert len(steps) <= 12
    subsets = itertools.chain.from_iterable(itertools.combinations(steps, n) for n in range(len(steps) + 1))
    best = best_of(planned(Choice(0, 0.0, frozenset(subset))) for subset in subsets)
    assert [(c.nbytes, pytest.approx(c.cost)) for c in best] == [(c.nbytes, c.cost) for c in options]


@pytest.mark.parametrize("fn", [*SMALL, normed], ids=lambda fn: fn.__name__)
def test_predictions_of_the_search_are_those_of_the_plans(fn: Callable) -> None:
    problem, planned, _ = solved(fn)
    for choice in pareto(problem):
        exact = planned(choice)
        assert (choice.nbytes, pytest.approx(choice.cost)) == (exact.nbytes, exact.cost)


def test_one_option_saves_nothing() -> None:
    """Also where the search expects that a choice saves 0 bytes, and its plan saves more."""
    problem, planned, options = solved(in_evaluation)
    assert problem.sizes and options[0].nbytes == 0
    choice = pareto(problem)[0]
    assert choice.nbytes == 0 < planned(choice).nbytes  # otherwise this test is about something else
    assert remat.check(in_evaluation, X.clone().requires_grad_(), policy=policies.budget(0))


@pytest.mark.parametrize("fn", [*SMALL, normed], ids=lambda fn: fn.__name__)
def test_corners_of_the_hull(fn: Callable) -> None:
    """They are optimal, and no other choice is below the lines between them."""
    problem, planned, options = solved(fn)
    found = best_of(map(planned, corners(problem)))
    assert found[0].nbytes == 0 and found[-1].cost == pytest.approx(options[-1].cost)
    assert {each.nbytes for each in found} <= {each.nbytes for each in options}
    for less, more in pairwise(found):
        price = (less.cost - more.cost) / (more.nbytes - less.nbytes)
        for other in options:
            assert other.cost + price * other.nbytes >= (less.cost + price * less.nbytes) * (1 - 1e-9)


def test_long_programs_have_only_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat._selective.search.MOST_WAYS", 4)
    curve = remat.pareto(shared, X)
    assert not curve.is_exact and "convex hull" in str(curve)
    assert curve.points[0].nbytes == 0 and curve.points[-1].cost == 0


# --- predictions are true ---------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 64, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


BLOCKS = {"encoder": Encoder, "encoder with dropout": lambda: Encoder(0.1), "conv": Residual, "chain": Chain}


def by_autograd(fn: Callable, at_end: Callable[[], Any]) -> Any:
    x = X.clone().requires_grad_()
    value = fn(x)
    at_end()
    return torch.autograd.grad(value.square().sum(), x)


def by_grad(fn: Callable, at_end: Callable[[], Any]) -> Any:
    def loss(x: Tensor) -> Tensor:
        value = fn(x)
        at_end()
        return value.square().sum()

    return grad(loss)(X)


def per_sample(fn: Callable, at_end: Callable[[], Any]) -> Any:
    def loss(x: Tensor) -> Tensor:
        value = fn(x[None])
        at_end()
        return value.square().sum()

    return vmap(grad(loss), randomness="different")(X)


@pytest.mark.parametrize("transform", [by_autograd, by_grad, per_sample])
@pytest.mark.parametrize("name", BLOCKS)
def test_bytes_and_flops_are_as_predicted(name: str, transform: Callable) -> None:
    module = BLOCKS[name]().requires_grad_(False)
    plain = lambda x: module(x)
    forward = lambda fn: lambda: transform(fn, lambda: None)
    torch.manual_seed(1)
    expected, without = forward(plain)(), count_flops(forward(plain))
    for amount in (0, 0.2, 0.5, 0.8, 1.0):
        policy = policies.budget(amount, cost="flops")
        fn = remat.remat(plain, policy=policy)
        held = held_at_end(fn, transform)
        known = fn._known.shared.choices[policy]
        tradeoff, choice = known[-1]  # under torch.func, a first run with random numbers starts over
        assert choice.nbytes <= policy.nbytes(tradeoff.whole)
        assert held == held_at_end(remat.remat(plain), transform)  # the first call saves nothing
        assert held_at_end(fn, transform) == held + choice.nbytes
        assert count_flops(forward(fn)) == without + choice.flops
        torch.manual_seed(1)
        torch.testing.assert_close(forward(fn)(), expected, rtol=1e-6, atol=1e-6)


def held_at_end(fn: Callable, transform: Callable) -> int:
    """The bytes that are alive at the end of the forward pass."""
    alive = []
    with PeakMemory() as memory:
        transform(fn, lambda: alive.append(memory.live))
    return alive[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_no_preset_is_better(name: str) -> None:
    """A choice that saves no more bytes than a preset recomputes no more FLOPs."""
    module = BLOCKS[name]().requires_grad_(False)
    curve = remat.pareto(module, X.clone().requires_grad_(), cost="flops")
    nothing = held_at_end(remat.remat(lambda x: module(x)), by_autograd)
    without = count_flops(lambda: by_autograd(module, lambda: None))
    for preset in (policies.save_matmuls, policies.save_matmuls_without_batch_dims, policies.save_attention):
        fn = remat.remat(lambda x: module(x), policy=preset)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flops = count_flops(lambda: by_autograd(fn, lambda: None)) - without
            saved = held_at_end(fn, by_autograd) - nothing
        assert min(point.flops for point in curve.points if point.nbytes <= saved) <= flops


def test_costs() -> None:
    fn = lambda x: (x @ W).sin()
    x = X.clone().requires_grad_()
    assert remat.pareto(fn, x, cost="flops").points[0].cost == 2 * 2 * 8 * 16 * 16
    measured = remat.pareto(fn, x, cost="time").points
    assert measured[0].cost > 0 == measured[-1].cost
    names = []
    custom = remat.pareto(fn, x, cost=lambda op, args, kwargs, result: names.append(str(op)) or 1).points
    assert custom[0].cost == 1 and len(names) == 2


@pytest.mark.parametrize("how", ["budget", "at"])
def test_an_operator_is_measured_once_for_each_form_of_its_arguments(how: str) -> None:
    m = nn.Sequential(nn.Linear(11, 11), nn.GELU(), nn.Linear(11, 11), nn.GELU())
    counts = []
    for size in (3, 5) if how == "budget" else (6, 7):
        x = torch.randn(size, 11)
        policy = policies.budget(0.5, cost="time")
        if how == "at":
            policy = remat.pareto(m, x, cost="time").at(200)
        fn = remat.remat(m, policy=policy)
        counts.append([count_ops(fn, x)["aten.addmm"] for _ in range(3)])
    assert counts == [[5, 2, 2] if how == "budget" else [2, 2, 2]] * 2


@pytest.mark.parametrize("recorded", [False, True])
def test_time_with_operations_on_meta_tensors(recorded: bool) -> None:
    """Forward mode decomposes dropout, and some operations of this run on meta tensors."""

    def run(wrap: Callable) -> Any:
        torch.manual_seed(1)
        x = X[0].clone().requires_grad_(recorded)
        out, tangent = jvp(wrap(lambda x: F.dropout((x @ W).tanh(), 0.5).sin()), (x,), (X[1],))
        return [out, tangent, *(torch.autograd.grad((out * tangent).sum(), x) if recorded else ())]

    region = lambda fn: remat.remat(fn, policy=policies.budget(300, cost="time"))
    for _ in range(2):
        assert_same(run(region), run(lambda fn: fn), exact=False)


def test_results_and_inputs_are_not_counted() -> None:
    curve = remat.pareto(lambda x: x.exp(), X.clone().requires_grad_())
    assert [(point.nbytes, point.cost) for point in curve.points] == [(0, 0)]


# --- programs ---------------------------------------------------------------------------------------------------------


def test_each_program_has_its_own_choice() -> None:
    """The first call of a program saves nothing; another size is another program."""
    fn = remat.remat(chain, policy=policies.budget(1.0, cost="flops"))
    products = lambda x: count_ops(lambda: torch.autograd.grad(fn(x).sum(), x))["aten.mm"]
    small, large = (torch.randn(n, 16, requires_grad=True) for n in (4, 8))
    assert [products(x) for x in (small, small, large, small, large)] == [6, 4, 6, 4, 4]


def test_a_program_that_deviates_from_a_known_one() -> None:
    """When it deviates, values of the known program are saved already."""
    turn = [0]

    def fn(x: Tensor) -> Tensor:
        h = (x @ W).tanh()
        return (h @ W).sin() if turn[0] else (h @ W).cos().exp()

    region = remat.remat(fn, policy=policies.budget(1.0))
    for turn[0] in (0, 1, 0, 1, 1, 0):
        x = X.clone().requires_grad_()
        expected = torch.autograd.grad(fn(x).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(region(x).sum(), x)[0], expected)
    assert len(region._known.shared.choices) == 1
    assert len(next(iter(region._known.shared.choices.values()))) == 2


def test_numbers_that_change_in_every_call_warn_once() -> None:
    f = remat.remat(lambda x, t: (x * t).sin().exp().sin(), policy=policies.budget(1.0))
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(40):
            f(x, 0.1 + t).sum().backward()
    assert [str(each.message).partition(",")[0] for each in caught] == [
        "A region under policies.budget(1.0) has executed 16 different programs"
    ]


def test_a_curve_gives_policies() -> None:
    curve = remat.pareto(chain, X.clone().requires_grad_(), cost="flops")
    policy = pickle.loads(pickle.dumps(curve.at(0.5)))
    assert policy == curve.at(0.5) and hash(policy) == hash(curve.at(0.5))
    fn, x = remat.remat(chain, policy=policy), X.clone().requires_grad_()
    best = [point for point in curve.points if point.nbytes <= policy.amount][-1]
    assert held_bytes(lambda: fn(x)) == held_bytes(lambda: remat.remat(chain)(x)) + best.nbytes  # in the first call too
    assert curve.points[1].kept[0].startswith("aten.tanh.default at ") and curve.points[1].kept[0].endswith("(chain)")


def test_a_policy_for_another_program_warns_once() -> None:
    policy = remat.pareto(chain, X.clone().requires_grad_(), cost="flops").at(1.0)
    fn = remat.remat(lambda x: (x @ W).sin().exp(), policy=policy)
    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="was chosen for a different sequence of operations"):
        fn(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_ops(lambda: fn(x).sum().backward())["aten.mm"] == 2  # a new choice


def test_inner_regions_are_a_part_of_the_program() -> None:
    inner = remat.remat(lambda x: (x @ W).tanh())
    fn = remat.remat(lambda x: inner(inner(x)).sin(), policy=policies.budget(1.0))
    x = X.clone().requires_grad_()
    for expected in (6, 4):
        assert count_ops(lambda: torch.autograd.grad(fn(x).sum(), x))["aten.mm"] == expected


def test_the_outer_policy_decides() -> None:
    inner = remat.remat(lambda x: checkpoint_name((x @ W).tanh(), "h") @ W, policy=policies.budget(1.0))
    fn = remat.remat(lambda x: inner(x).sin(), policy=policies.save_only_these_names("h"))
    x = X.clone().requires_grad_()
    for _ in range(2):
        assert torch.equal(
            torch.autograd.grad(fn(x).sum(), x)[0],
            torch.autograd.grad((((x @ W).tanh() @ W).sin()).sum(), x)[0],
        )


def test_a_new_program_does_not_save_the_choices_of_several() -> None:
    def fn(x: Tensor, number: int) -> Tensor:
        made = [(x @ W).sin() for _ in range(4)]
        return made[number].exp().sum() if number < 4 else sum(each.exp().sum() for each in made)

    g, x = remat.remat(fn, policy=policies.budget(X.nbytes, cost="flops")), X.clone().requires_grad_()
    for number in range(5):
        assert held_bytes(lambda x: g(x, number), x) <= X.nbytes + 4


def in_a_region(fn: Callable) -> Callable:
    return remat.remat(lambda x: fn(fn(x.sin()) * 2).cos())


def differentiated_in_a_region(fn: Callable) -> Callable:
    def with_gradient(x: Tensor) -> Tensor:
        y = fn(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    return remat.remat(with_gradient)


def in_a_checkpoint_of_torch(fn: Callable) -> Callable:
    return lambda x: checkpoint(lambda x: fn(fn(x.sin()) * 2).cos(), x, use_reentrant=False)


@pytest.mark.parametrize("around", [in_a_region, differentiated_in_a_region, in_a_checkpoint_of_torch])
@pytest.mark.parametrize("amount", [1.0, 0.5])
def test_an_outer_recompute_has_the_choices_of_its_first_run(around: Callable, amount: float) -> None:
    x = X.clone().requires_grad_()
    fn = eval("lambda x: x.sin().cos().tanh()")  # new code, without known programs
    expected = torch.autograd.grad(around(fn)(x).sum(), x)[0]
    inner = remat.remat(fn, policy=policies.budget(amount))
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(around(inner)(x).sum(), x)[0], expected)


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f)), lambda f: grad(lambda x: grad(f)(x).sum())])
def test_an_outer_recompute_has_the_choices_of_its_first_run_under_transforms(transform: Callable) -> None:
    inner = remat.remat(eval("lambda x: x.sin().cos().tanh()"), policy=policies.budget(1.0))
    plain = transform(lambda x: ((x.sin().cos().tanh() * 2).sin().cos().tanh()).sum())(X)
    for _ in range(3):
        found = transform(remat.remat(lambda x: inner(inner(x) * 2).sum()))(X)
        torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: policies.budget(-1), "must not be negative, got -1"),
        (lambda: policies.budget(2.0), r"must be a fraction in \(0, 1\]; got 2.0"),
        (lambda: policies.budget("many"), "must be a number and a unit"),
        (lambda: policies.budget(None), "must be a number of bytes"),
        (lambda: policies.budget(1, cost="money"), "The cost of a budget must be one of 'roofline', 'flops', 'time'"),
        (lambda: policies.budget(1) | policies.save_matmuls, "can't be combined with another policy"),
        (lambda: policies.save_matmuls & policies.budget(1), "can't be combined with another policy"),
        (lambda: policies.offload(policies.budget(1)), "can't be combined with another policy"),
        (lambda: ~policies.budget(1), "can't be combined with another policy"),
    ],
)
def test_errors(wrong: Callable, message: str) -> None:
    with pytest.raises(remat.PolicyError, match=message):
        wrong()


@pytest.mark.parametrize(
    "returned, message",
    [
        (float("nan"), "must return a finite number that is not negative; for aten.mm.default it returned nan"),
        (float("inf"), "must return a finite number that is not negative"),
        (-1.0, "must return a finite number that is not negative"),
        (None, "The cost function of a budget failed for aten.mm.default"),
    ],
)
def test_invalid_costs(returned: Any, message: str) -> None:
    with pytest.raises(remat.PolicyError, match=message):
        remat.pareto(lambda x: (x @ W).tanh(), X[0], cost=lambda op, args, kwargs, result: returned)


def test_choices_of_old_policies_are_forgotten() -> None:
    known = Known()
    for i in range(40):
        policy = policies.budget(i)
        choices.Choices(policy, known)
        assert policy in known.shared.choices
    assert len(known.shared.choices) <= 16


def test_nothing_to_choose_from() -> None:
    with pytest.raises(remat.RematError, match="There is nothing to choose"):
        remat.pareto(lambda x: x * 2, torch.arange(3))


def test_texts() -> None:
    assert repr(policies.budget("64MiB", cost="flops")) == "policies.budget('64MiB', cost='flops')"
    assert policies.budget("1KiB").nbytes(0) == 1024 and policies.budget("1.5kB").nbytes(0) == 1500
    assert policies.budget(0.5).nbytes(100) == 50


@pytest.mark.parametrize(("cost", "unit"), [("roofline", ", us"), ("flops", ", FLOP"), (lambda *args: 1, "")])
def test_plot(cost: Any, unit: str) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    curve = remat.pareto(chain, X.clone().requires_grad_(), cost=cost)
    assert curve.plot(axes) is axes and repr(curve) == str(curve)
    assert axes.get_xlabel() == "memory saved for the backward"
    assert axes.get_ylabel() == f"cost of the recompute{unit}"
    (line,) = axes.lines
    assert len(curve.points) > 1
    assert [*zip(*line.get_data())] == [(point.nbytes, point.cost) for point in curve.points]


# --- models -----------------------------------------------------------------------------------------------------------


def make(count: int = 6, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 64, dropout, batch_first=True) for _ in range(count)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


LAYER = nn.TransformerEncoderLayer
BATCH = torch.randn(4, 32, 16)


def step(model: nn.Module) -> tuple[Any, int]:
    """The gradients and the peak of a step."""
    model.zero_grad()
    with PeakMemory() as memory:
        model(BATCH).square().mean().backward()
    return [p.grad for p in model.parameters()], memory.peak


def squared(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("part", [0.8, 0.5, 0.35])
def test_the_peak_is_within_the_budget(part: float, dropout: float) -> None:
    model = make(dropout=dropout)
    torch.manual_seed(1)
    expected, plain = step(model)
    result = remat.nn.budget(model, LAYER, part, BATCH, loss=squared)
    torch.manual_seed(1)
    gradients, peak = step(model)
    assert all(map(torch.equal, gradients, expected))
    assert result.without == pytest.approx(plain, rel=0.01) and result.amount == int(part * result.without)
    assert peak <= result.amount and peak == pytest.approx(result.peak, rel=0.02)
    assert result.peak > 0.85 * result.amount  # and most of the budget is used
    assert [block.name for block in result.blocks] == [str(i) for i in range(6)]
    assert str(result).count("\n") == 7


def test_late_blocks_may_save_more() -> None:
    model = make(8)
    result = remat.nn.budget(model, LAYER, 0.35, BATCH, loss=squared, cost="flops")
    flops = [block.flops for block in result.blocks]
    uniform = remat.pareto(model[0], BATCH.clone().requires_grad_(), cost="flops")
    saved = max(p.nbytes for p in uniform.points if peak_with(make(8), uniform.at(p.nbytes)) <= result.amount)
    one_for_all = 8 * min(p.flops for p in uniform.points if p.nbytes <= saved)
    assert flops[-1] <= flops[0] and sum(flops) <= one_for_all


def peak_with(model: nn.Module, policy: Any) -> int:
    return step(remat.nn.apply(model, LAYER, policy=policy))[1]


def test_model_state_is_unchanged() -> None:
    model = make(2, dropout=0.1)
    model[0].self_attn.in_proj_weight.grad = torch.ones(48, 16)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(
        remat.RematError, match=r"needs at least .*, even if the chosen submodules save nothing, but the budget is 1 B"
    ):
        remat.nn.budget(model, LAYER, 1, BATCH, loss=squared)
    assert [type(module) for module in model.modules()] == classes
    remat.nn.budget(model, LAYER, 0.9, BATCH, loss=squared)
    remat.nn.undo(model)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model[0].self_attn.in_proj_weight.grad, torch.ones(48, 16))
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    assert model[1].linear1.weight.grad is None


def test_a_block_that_is_called_twice() -> None:
    block = LAYER(16, 2, 64, 0.0, batch_first=True)
    model = nn.Sequential(block, nn.Linear(16, 16), block)
    expected, _ = step(model)
    result = remat.nn.budget(model, LAYER, 0.7, BATCH, loss=squared)
    gradients, peak = step(model)
    assert peak <= result.amount and all(map(torch.equal, gradients, expected))


def _choose(rank: int, folder: str) -> None:
    """Run in one of two processes, whose batches have different sizes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        result = remat.nn.budget(make(4), LAYER, 0.6, torch.randn(8 - 4 * rank, 32, 16), loss=squared)
        torch.save([(block.name, block.nbytes, block.operators) for block in result.blocks], f"{folder}/{rank}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_all_processes_take_the_choice_of_the_first(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_choose, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert first == second and any(nbytes for _, nbytes, _ in first)


# --- skipped steps, and compiled code ---------------------------------------------------------------------------------


def test_placeholders_of_skipped_steps_share_memory() -> None:
    def f(x: Tensor) -> Tensor:
        values = [x]
        for _ in range(8):
            values.append(values[-1] + 1)  # all are alive until the end, and nothing needs them
        return checkpoint_name(values[-1] + 1, "h").sin().exp().sin()

    leaf, other = (torch.ones(256, 256, requires_grad=True) for _ in range(2))
    loss = remat.remat(f, policy=policies.save_only_these_names("h"))(leaf).sum()
    with PeakMemory() as memory:
        loss.backward()
    f(other).sum().backward()
    assert torch.equal(leaf.grad, other.grad)
    assert memory.peak <= 3 * leaf.nbytes + 64  # 10 if each placeholder had its own memory


@pytest.mark.parametrize("transform", [False, True])
def test_compiled_code_saves_nothing_and_warns(transform: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_warned", set())
    torch._dynamo.reset()
    f = remat.remat(chain, policy=policies.budget(0.5))

    def gradient(f: Callable) -> Callable:
        if transform:
            return grad(lambda x: f(x).sum())
        return lambda x: torch.autograd.grad(f(x.requires_grad_()).sum(), x)[0]

    compiled = torch.compile(gradient(f) if transform else f, backend="aot_eager", fullgraph=True)
    with pytest.warns(remat.RematWarning, match="A region with a budget saves nothing under torch.compile"):
        found = compiled(X) if transform else gradient(compiled)(X.clone())
    torch.testing.assert_close(found, gradient(chain)(X.clone()))
