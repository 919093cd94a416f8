"""The choices of a budget: each is the best possible one, its predictions are true, and each program has its own."""

import itertools
import pickle
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import assert_same, gradient
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.measure import PeakMemory, count_flops, count_ops, held_bytes
from remat import policies
from remat._compile import lowering
from remat._core import known
from remat._core.known import Known
from remat._function import call
from remat._region.options import Options
from remat._selective import choices, search
from remat._selective.search import Choice, Problem, best_of, corners, pareto

torch.manual_seed(0)
X = torch.randn(2, 8, 16)
W = torch.randn(16, 16) / 4
Cost = Any


def leaf(*shape: int) -> Tensor:
    return (torch.randn(shape) if shape else X.clone()).requires_grad_()


def products(fn: Callable, *args: Any) -> int:
    """How many matrix products a step runs; without remat one for each product and derivative."""
    return count_ops(gradient, fn, *(args or [leaf()]))["aten.mm"]


def chain(x: Tensor) -> Tensor:
    return ((x @ W).tanh() @ W).sin().exp()


def shared(x: Tensor) -> Tensor:
    h = x.sin()
    return (h.exp() * h.cos() + h[..., :4].mean()).tanh() * h


def noisy(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x.sin(), 0.3) @ W, 0.3).tanh()


def drawn(x: Tensor) -> Tensor:
    return (x.sin() + torch.rand_like(x[..., :1])).tanh().exp()  # the random numbers are small


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


SMALL = [chain, shared, noisy, drawn, several, in_place, without_grad]
functions = pytest.mark.parametrize("fn", [*SMALL, normed], ids=lambda fn: fn.__name__)


def solved(fn: Callable, cost: Cost = "roofline") -> tuple[Problem, Callable[[Choice], Choice], list[Choice]]:
    """The search problem of a function, a function that makes choices exact, and the options that the search finds."""
    found: list[Any] = []
    known, policy, planned = Known(), policies.budget(0, cost=cost), choices._as_planned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "_as_planned", lambda *args: (found.append(args), planned(*args))[1])
        call(fn, Options(policy=policy), known, (leaf(),), {})
    _, problem, flops = found[0]
    return problem, lambda choice: planned(choice, problem, flops), known.choices[policy][0][0].options


@pytest.mark.parametrize(
    ("fn", "cost"), [*((fn, lambda op, *_: len(str(op))) for fn in SMALL), (several, "flops"), (noisy, "roofline")]
)
def test_no_choice_is_better(fn: Callable, cost: Cost) -> None:
    """Compared with all subsets of the steps."""
    problem, planned, options = solved(fn, cost)
    steps = [i for i, step in enumerate(problem.program.steps) if any(value in problem.keepable for value in step.outs)]
    assert len(steps) <= 12
    subsets = itertools.chain.from_iterable(itertools.combinations(steps, n) for n in range(len(steps) + 1))
    best = best_of(planned(Choice(0, 0.0, frozenset(subset))) for subset in subsets)
    assert [(c.nbytes, pytest.approx(c.cost)) for c in best] == [(c.nbytes, c.cost) for c in options]


@functions
def test_predictions_of_the_search_are_those_of_the_plans(fn: Callable) -> None:
    problem, planned, _ = solved(fn)
    for choice in pareto(problem):
        exact = planned(choice)
        assert (choice.nbytes, pytest.approx(choice.cost)) == (exact.nbytes, exact.cost)


@functions
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
    monkeypatch.undo()
    whole = remat.pareto(shared, X)
    assert whole.is_exact and "hull" not in str(whole)


def test_a_value_that_the_program_overwrites_can_be_saved() -> None:
    """It is copied before the write."""

    def fn(x: Tensor) -> Tensor:
        h = x @ W
        y = h.tanh()
        h.relu_()
        return (y * 2).exp() + h.sin()

    curve = remat.pareto(fn, X, cost="flops")
    nothing, product = curve.points
    assert (nothing.nbytes, product.nbytes, product.flops) == (0, X.nbytes, 0)
    assert [products(remat.remat(fn, policy=curve.at(p.nbytes or 1))) for p in curve.points] == [3, 2]


def test_results_and_inputs_are_not_counted() -> None:
    (point,) = remat.pareto(lambda x: x.exp(), leaf()).points
    assert (point.nbytes, point.cost) == (0, 0)


def scaled_encoder() -> Callable:
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.1, batch_first=True).requires_grad_(False)

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return layer(x / scale)

    return fn


def residual() -> Callable:
    first, second = (nn.Conv1d(8, 8, 3, padding=1).requires_grad_(False) for _ in range(2))
    return lambda x: F.relu(x + second(F.relu(F.group_norm(first(x), 2))))


TRANSFORMS: dict[str, Callable[[Callable], Any]] = {
    "autograd": lambda loss: gradient(loss, leaf()),
    "grad": lambda loss: grad(loss)(X),
    "vmap(grad)": lambda loss: vmap(grad(lambda x: loss(x[None])), randomness="different")(X),
}


def transformed(fn: Callable, transform: str, at_end: Callable[[], Any] = lambda: None) -> Any:
    """The gradient of a loss, with a call at the end of its forward pass."""

    def loss(x: Tensor) -> Tensor:
        value = fn(x)
        at_end()
        return value.square().sum()

    return TRANSFORMS[transform](loss)


def held_at_end(fn: Callable, transform: str) -> int:
    """The bytes that are alive at the end of the forward pass."""
    alive = []
    with PeakMemory() as memory:
        transformed(fn, transform, lambda: alive.append(memory.live))
    return alive[0]


@pytest.mark.parametrize(
    ("make", "transform"),
    [(scaled_encoder, "autograd"), (scaled_encoder, "vmap(grad)"), (residual, "autograd"), (residual, "grad")],
)
def test_bytes_and_flops_are_as_predicted(make: Callable, transform: str) -> None:
    known._of_code.cache_clear()  # of other blocks
    plain = make()
    torch.manual_seed(1)
    expected, without = transformed(plain, transform), count_flops(transformed, plain, transform)
    for amount in (0, 0.4, 0.8):
        policy = policies.budget(amount, cost="flops")
        fn = remat.remat(plain, policy=policy)
        held = held_at_end(fn, transform)
        tradeoff, choice = fn._known.choices[policy][-1]  # under torch.func, a first run may start over
        assert choice.nbytes <= policy.nbytes(tradeoff.whole)
        assert held == held_at_end(remat.remat(plain), transform)  # the first call saves nothing
        assert held_at_end(fn, transform) == held + choice.nbytes
        assert count_flops(transformed, fn, transform) == without + choice.flops
        torch.manual_seed(1)
        assert_same(transformed(fn, transform), expected, exact=False)


def test_the_cost_of_an_operation() -> None:
    fn, x = lambda x: (x @ W).sin().reshape(-1), leaf()
    cost = lambda how, fn=fn, x=x: remat.pareto(fn, x, cost=how).points[0].cost
    flops, moved = 2 * 2 * 8 * 16 * 16, 4 * (2 * x.numel() + W.numel())
    assert cost("flops") == flops
    assert cost("roofline") == pytest.approx(max(flops / 50e9, moved / 20e9) * 1e6)
    wide = torch.randn(512, 512, requires_grad=True)
    assert cost("roofline", lambda x: (x @ x).sin(), wide) == pytest.approx(2 * 512**3 / 50e9 * 1e6)
    names = []
    assert cost(lambda op, args, kwargs, result: names.append(str(op)) or 1) == 1
    assert [name for name in names if "view" not in name] == ["aten.mm.default", "aten.sin.default"]


@torch.library.custom_op("remat_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    return x.cos()


counted.register_autograd(lambda ctx, grad: grad.sin())


def test_operations_that_must_not_run_again_are_not_measured() -> None:
    fn = lambda x: counted(F.dropout((x @ W).mul_(2), 0.5)).sin()
    counts = count_ops(lambda: remat.remat(fn, policy=policies.budget(0, cost="time"))(leaf(3, 16)))
    names = "aten.mm", "aten.mul_", "aten.native_dropout", "aten.bernoulli_", "remat_tests.counted"
    assert [counts[name] for name in names] == [4, 1, 0, 1, 1]


def test_an_operator_is_measured_once_for_each_form_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    m = nn.Sequential(nn.Linear(11, 11), nn.GELU(), nn.Linear(11, 11), nn.GELU())
    budget = lambda x: policies.budget(0.5, cost="time")
    choice = lambda x: remat.pareto(m, x, cost="time").at(200)
    for size, make, counts in [(3, budget, [5, 2, 2]), (5, budget, [5, 2, 2]), (6, choice, [2, 2, 2])]:
        fn = remat.remat(m, policy=make(x := torch.randn(size, 11)))
        assert [count_ops(fn, x)["aten.addmm"] for _ in range(3)] == counts
    monkeypatch.setattr(search, "_MOST_TIMES", 1)
    remat.pareto(m, torch.randn(7, 11), cost="time")
    assert len(search._times) == 1  # few are remembered


def test_each_program_has_its_own_choice() -> None:
    """The first call of a program saves nothing; another size is another program."""
    fn = remat.remat(chain, policy=policies.budget(1.0, cost="flops"))
    small, large = leaf(4, 16), leaf(8, 16)
    assert [products(fn, x) for x in (small, small, large, small, large)] == [6, 4, 6, 4, 4]


def test_a_program_that_deviates_from_a_known_one() -> None:
    """When it deviates, values of the known program are saved already."""

    def fn(x: Tensor, turn: int) -> Tensor:
        h = (x @ W).tanh()
        return (h @ W).sin() if turn else (h @ W).cos().exp()

    region = remat.remat(fn, policy=policies.budget(1.0))
    for turn in (0, 1, 0, 1, 1, 0):
        assert torch.equal(gradient(region, leaf(), turn), gradient(fn, leaf(), turn))
    (known,) = region._known.choices.values()
    assert len(known) == 2


def test_a_new_program_does_not_save_the_choices_of_several() -> None:
    def fn(x: Tensor, number: int) -> Tensor:
        made = [(x @ W).sin() for _ in range(4)]
        return made[number].exp().sum() if number < 4 else sum(each.exp().sum() for each in made)

    g, x = remat.remat(fn, policy=policies.budget(X.nbytes, cost="flops")), leaf()
    for number in range(5):
        assert held_bytes(lambda x: g(x, number), x) <= X.nbytes + 4


def test_numbers_that_change_in_every_call_warn_once() -> None:
    f = remat.remat(lambda x, t: (x * t).sin().exp().sin(), policy=policies.budget(1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(40):
            gradient(f, leaf(), 0.1 + t)
            assert len(caught) == (t > 15)
    assert str(caught[0].message).startswith("A region under policies.budget(1.0) has executed 16 different programs")


def test_few_policies_of_a_function_are_remembered() -> None:
    fns = [remat.remat(chain, policy=policies.budget(1.0, cost=lambda *_, i=i: 1 + i)) for i in range(20)]
    known._of_code.cache_clear()
    assert [products(fns[i]) for i in (*range(20), *range(4, 20), 0)] == [6] * 20 + [4] * 16 + [6]


def test_inner_regions_are_a_part_of_the_program() -> None:
    inner = remat.remat(lambda x: (x @ W).tanh())
    fn = remat.remat(lambda x: inner(inner(x)).sin(), policy=policies.budget(1.0))
    assert [products(fn) for _ in range(2)] == [6, 4]


twice = lambda fn: lambda x: fn(fn(x.sin()) * 2).cos()
AROUND: dict[str, Callable[[Callable], Callable]] = {
    "a region": lambda fn: remat.remat(twice(fn)),
    "a region that differentiates": lambda fn: remat.remat(
        lambda x: (y := fn(x)) + torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    ),
    "torch's checkpoint": lambda fn: lambda x: checkpoint(twice(fn), x, use_reentrant=False),
    "vmap(grad)": lambda fn: lambda x: vmap(grad(lambda x: remat.remat(twice(fn))(x).sum()))(x),
}


@pytest.mark.parametrize("amount", [1.0, 0.5])
@pytest.mark.parametrize("around", AROUND)
def test_an_outer_recompute_has_the_choices_of_its_first_run(around: str, amount: float) -> None:
    fn = eval("lambda x: x.sin().cos().tanh()")  # new code, without known programs
    expected = gradient(AROUND[around](fn), leaf())
    inner = remat.remat(fn, policy=policies.budget(amount))
    for _ in range(3):
        assert_same(gradient(AROUND[around](inner), leaf()), expected, exact=False)


@pytest.mark.parametrize("transform", [False, True])
def test_compiled_code_saves_nothing_and_warns(transform: bool) -> None:
    lowering._warn.cache_clear()
    torch._dynamo.reset()
    f = remat.remat(chain, policy=policies.budget(0.5))
    compiled = torch.compile(grad(lambda x: f(x).sum()) if transform else f, backend="aot_eager", fullgraph=True)
    with pytest.warns(remat.RematWarning, match="A region with a budget saves nothing under torch.compile"):
        found = compiled(X) if transform else gradient(compiled, leaf())
    assert_same(found, gradient(chain, leaf()), exact=False)


@pytest.mark.parametrize(
    ("fn", "counts"),
    [
        (lambda x: (x @ W).sin().exp(), [3, 2]),
        (lambda x: chain(x).sin(), [6, 4]),
        (lambda x: ((x @ W).tanh() @ W).sin(), [6, 4]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_policy_for_another_program_warns_once_and_chooses_again(fn: Callable, counts: list[int]) -> None:
    """The first call saves nothing."""
    region = remat.remat(fn, policy=remat.pareto(chain, leaf(), cost="flops").at(1.0))
    with pytest.warns(UserWarning, match="was chosen for a different sequence of operations"):
        first = products(region)
    assert [first, products(region)] == counts
    assert torch.equal(gradient(region, leaf()), gradient(fn, leaf()))


@pytest.mark.parametrize(("cost", "unit"), [("roofline", ", us"), ("flops", ", FLOP"), (lambda *args: 1, "")])
def test_a_curve_is_drawn_and_printed_in_its_unit(cost: Cost, unit: str) -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    curve = remat.pareto(chain, leaf(), cost=cost)
    assert curve.plot(axes) is axes and repr(curve) == str(curve) and f"cost{unit}  " in str(curve)
    assert axes.get_xlabel() == "memory saved for the backward"
    assert axes.get_ylabel() == f"cost of the recompute{unit}" and len(curve.points) > 1
    assert [*zip(*axes.lines[0].get_data())] == [(point.nbytes, point.cost) for point in curve.points]


@pytest.mark.parametrize("returned", [float("nan"), float("inf"), -1.0, None])
def test_errors(returned: Any) -> None:
    message = f"must be finite and not negative; the function returned {returned}"
    if returned is None:
        message = "The cost function of a budget failed for aten.mm.default"
    with pytest.raises(remat.PolicyError, match=message):
        remat.pareto(lambda x: (x @ W).tanh(), X[0], cost=lambda op, args, kwargs, result: returned)


def test_nothing_to_choose_is_an_error() -> None:
    for fn, x in [(torch.sin, torch.ones(4, dtype=torch.int64)), (torch.ones, 2)]:
        with pytest.raises(remat.RematError, match="There is nothing to choose"):
            remat.pareto(fn, x)
    with remat.disable_remat(), pytest.raises(remat.RematError, match="Call it outside"):
        remat.pareto(torch.sin, X)
    assert len(remat.pareto(grad(lambda x: x.sin().exp().sum()), X).points) == 1


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_policies_of_a_curve_save_what_it_says(requires_grad: bool) -> None:
    """If no tensor requires grad, all that can be differentiated are."""
    frozen = nn.Linear(16, 16).requires_grad_(False)

    def fn(x: Tensor) -> Tensor:
        return frozen(torch.tanh(x @ W)).sin()

    curve = remat.pareto(fn, X.clone().requires_grad_(requires_grad), cost="flops")
    assert curve.points[1].kept[0].startswith("aten.tanh.default at ") and curve.points[1].kept[0].endswith("(fn)")
    assert [point.nbytes for point in curve.points] == sorted({point.nbytes for point in curve.points})
    assert curve.points[0].flops > curve.points[-1].flops == 0
    for point in curve.points:
        policy, x = pickle.loads(pickle.dumps(curve.at(point.nbytes))), leaf()
        assert policy == curve.at(point.nbytes) and hash(policy) == hash(curve.at(point.nbytes))
        region = remat.remat(fn, policy=policy)
        assert held_bytes(region, x) == held_bytes(remat.remat(fn), x) + point.nbytes  # in the first call too
        assert sum(row.nbytes for row in remat.saved_residuals(region, x)) == point.nbytes
