"""The rules that policies promise, by counting: what is saved, what is recomputed, and that results stay the same."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cases import assert_same, cases, copied, rand, tensor_leaves, total
from jax_counts import NAMED_RESULT, PROGRAMS, ROWS, Program, Row, built, made
from torch import Tensor, exp, sin
from torch.autograd.graph import get_gradient_edge
from torch.func import grad, vjp, vmap

from benchmarks.measure import OpCounter, PeakMemory, assert_freed_without_gc, count_ops, held_bytes
from remat import checkpoint_name, policies, remat

Fn = Callable[..., Any]
only, aten = policies.save_only_these_names, torch.ops.aten
MATMULS, EVERY, N = policies.save_matmuls, policies.everything_saveable, only("n")
pytestmark = [pytest.mark.filterwarnings("ignore:The policy"), pytest.mark.usefixtures("collector_off")]

KINDS = {"matmul": ("mm", "bmm"), "maximum": ("maximum", "relu")} | {k: (k,) for k in ("sin", "exp", "tanh", "mul")}


def kinds(ops: Counter[str]) -> Counter[str]:
    """Operations by the names that `jax_counts` uses."""
    return Counter({kind: sum(ops[f"aten.{op}"] for op in names) for kind, names in KINDS.items()})


class Alive(PeakMemory):
    """Counts storages instead of bytes."""

    @property
    def live(self) -> int:
        return len(self.storages())


class Run(NamedTuple):
    """The values saved for the backward (without arguments), the operations, and results with their derivatives."""

    kept: int | None
    ops: Counter[str]
    result: Any


def by_autograd(program: Program, fn: Fn) -> Run:
    args = program.args()
    with Alive() as alive:
        outs = tensor_leaves(fn(*args))
        edges, cts = [get_gradient_edge(t) for t in outs], [copied(t) for t in outs]
        del outs
        kept = alive.live - len(cts)
    with OpCounter() as counter:
        grads = torch.autograd.grad(edges, args, cts, allow_unused=True)
    return Run(kept, counter.counts, (cts, grads))


def by_vjp(fn: Fn, *args: Tensor) -> Run:
    with Alive() as alive:
        out, pull = vjp(fn, *args)
        kept = alive.live - len(tensor_leaves(out))  # `pull` owns them
    with OpCounter() as counter:
        grads = pull(out)
    return Run(kept, counter.counts, (out, grads))


def by_vmap_vjp(program: Program, fn: Fn) -> Run:
    args, in_dims = program.batch()
    runs = []

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        runs.append(by_vjp(fn, *args))
        return tuple(tensor_leaves(runs[-1].result))

    result = vmap(call, in_dims)(*args)
    return runs[0]._replace(result=result)


def by_vmap_grad(program: Program, fn: Fn) -> Run:
    args, in_dims = program.batch()
    gradient = grad(lambda *args: total(fn(*args)), tuple(range(len(args))))
    with OpCounter() as counter:
        result = vmap(gradient, in_dims)(*args)
    return Run(None, counter.counts, result)


TRANSFORMS: dict[str, Callable[[Program, Fn], Run]] = {
    "autograd": by_autograd,
    "vjp": lambda program, fn: by_vjp(fn, *program.plain_args()),
    "vmap(vjp)": by_vmap_vjp,
    "vmap(grad)": by_vmap_grad,
}


@functools.cache
def plain(function: str, transform: str) -> Run:
    return TRANSFORMS[transform](PROGRAMS[function], built(function))


def again(run: Run, expected: Run, words: Iterable[str]) -> dict[str, int]:
    """How often operations of these kinds are recomputed; also checks the results."""
    assert_same(run.result, expected.result)
    now, before = kinds(run.ops), kinds(expected.ops)
    return {kind: now[kind] - before[kind] for kind in words}


REFERENCE = {(row.function, row.policies): row for row in [*ROWS, *NAMED_RESULT]}

# Where torch has other figures than JAX, and better ones: it saves the argument of `sin`, not its cosine, and the
# derivative of `maximum` does not read its result.
OURS = {
    ("sin_sin", ("everything_saveable",)): (1, {"sin": 0}),
    **{(f"nested_{i}_{3 - i}", ("everything_saveable", "none")): (4, {"sin": 0}) for i in range(4)},
    ("mlp_maximum", ("only h",)): (1, {"tanh": 1, "maximum": 0, "matmul": 2}),
}

# Without a policy operations are not recorded: a recompute stops early, but skips nothing before that.
DEAD_BRANCHES = {"pair": {"sin": 2}}

# The recompute also runs to its end where the cotangents have a batch dimension that the operands do not have.
TO_THE_END = {
    **{f: {"sin": 3} for f in ("three", "three_pre", "three_each", "vmap_x", "vmap_all", "in_vmap_x")},
    **{f: {"sin": 3} for f in ("pair_first", "pair")},
    **{f: {"matmul": 3} for f in ("mlp_maximum", "mlp_relu")},
    "block": {"matmul": 8},
    "dead_linear": {"sin": 2, "matmul": 1},
    "named_linear": {"sin": 2},
}

# Policies judge the operations that torch runs. In those of `vmap` every operand has the batch dimension.
BATCHED = {(f, t): {"matmul": 3} for f in ("in_vmap_x", "in_vmap_all") for t in TRANSFORMS}


def figures(row: Row, transform: str) -> tuple[int, dict[str, int]]:
    """The most values that a program may save, and the number of operations that it recomputes."""
    kept, ran = OURS.get((row.function, row.policies), (row.kept, row.again))
    assert kept <= row.kept and all(count <= row.again[kind] for kind, count in ran.items())
    if row.policies == ("none",):
        ran = ran | DEAD_BRANCHES.get(row.function, {})
        if transform in ("vmap(vjp)", "vmap(grad)"):
            ran = ran | TO_THE_END.get(row.function, {})
    if row.policies == ("dots_with_no_batch_dims_saveable",):
        ran = ran | BATCHED.get((row.function, transform), {})
    return kept, ran


def combinations() -> Iterator[Any]:
    for row in REFERENCE.values():
        for transform in TRANSFORMS:
            # Some programs only have derivatives in `vmap`.
            if PROGRAMS[row.function].in_dims is None or transform.startswith("vmap"):
                yield pytest.param(row, transform, id=f"{row.function}-{'-'.join(row.policies)}-{transform}")


@pytest.mark.parametrize("row, transform", list(combinations()))
def test_no_more_is_saved_or_recomputed_than_by_jax(row: Row, transform: str) -> None:
    run = TRANSFORMS[transform](PROGRAMS[row.function], built(row.function, *map(made, row.policies)))
    most, ran = figures(row, transform)
    assert again(run, plain(row.function, transform), row.again) == ran
    if transform == "autograd":
        assert run.kept == most
    elif run.kept is not None:  # there results that are saved aren't counted
        assert run.kept <= most


def partly_needed(wrap: Callable, a: Tensor) -> tuple[Tensor, ...]:
    pair = wrap(lambda a, b: (sin(a), sin(sin(b))))
    return wrap(lambda a: sin(sin(a).detach()) * sin(a))(a), sum(pair(a, a)), pair(a, a)[0] + pair(a, a)[1]


# The numbers of sines in the backward; with a policy they are those of JAX.
@pytest.mark.parametrize("policy, counts", [(MATMULS, (2, 1, 1)), (None, (3, 2, 2))], ids=["policy", "no policy"])
def test_results_that_no_derivative_needs(policy: Any, counts: tuple) -> None:
    """Only a policy knows which operations in the middle of a region are needed; otherwise all run until the last."""
    a = rand(3)
    outs = partly_needed(functools.partial(remat, policy=policy), a)
    assert tuple(count_ops(torch.autograd.grad, out.sum(), a)["aten.sin"] for out in outs) == counts


POLICIES = {
    "none": None,
    "everything": EVERY,
    "matmuls": MATMULS,
    "without batch": policies.save_matmuls_without_batch_dims,
    "not matmuls": ~MATMULS,
    "names": only("*"),
    "other names": policies.save_any_names_but_these("a", "q"),
    "all but names": policies.save_anything_except_these_names("b", "h", "n", "k"),
    "matmuls or names": MATMULS | only("a", "n", "mid"),
    "offloaded": policies.offload(MATMULS),
    "predicate": lambda ctx, op, *args, **kwargs: op in (aten.mm.default, aten.bmm.default, aten.exp.default),
}
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)


def of_kind(function: str, policy: str) -> Fn:
    """A program with a policy, and with the next policy for the regions inside it."""
    names = list(POLICIES)
    return built(function, POLICIES[policy], POLICIES[names[(names.index(policy) + 1) % len(names)]])


@pytest.mark.sampled(2)
@EVERY_POLICY
@pytest.mark.parametrize("function", [f for f, program in PROGRAMS.items() if program.in_dims is None])
def test_each_pass_recomputes_the_same_and_saves_nothing_more(function: str, policy: str) -> None:
    program, fn, one = PROGRAMS[function], of_kind(function, policy), torch.ones((), dtype=torch.float64)
    args = program.args()
    expected = torch.autograd.grad(total(built(function)(*args)), args, allow_unused=True)
    with Alive() as alive:
        edge = get_gradient_edge(total(fn(*args)))
        pull = vjp(lambda *args: total(fn(*args)), *program.plain_args())[1]
        kept, passes = alive.live, []
        for retain in (True, True, True, False):
            with OpCounter() as counter:
                grads = torch.autograd.grad(edge, args, one, retain, allow_unused=True)
                assert_same(grads, expected)
            with OpCounter() as counter_of_vjp:
                del grads
                pull(one)
            passes.append((kinds(counter.counts), kinds(counter_of_vjp.counts)))
            assert alive.live == kept or not retain
    assert passes == passes[:1] * 4


def held(fn: Fn, args: Sequence[Tensor]) -> int:
    """The bytes saved for the backward beyond arguments; results count only if they are saved."""
    return held_bytes(lambda: [get_gradient_edge(t) for t in tensor_leaves(fn(*args)) if t.requires_grad])


def held_under_vjp(fn: Fn, args: Sequence[Tensor]) -> int:
    """The same under `torch.func.vjp`, whose pullback owns the results."""
    args = [t.detach() for t in args]
    return held_bytes(lambda: vjp(fn, *args)[1]) - sum(t.nbytes for t in tensor_leaves(fn(*args)))


# The numbers of elements that `block` saves; the last product is not needed.
BLOCK = {
    "none": 0, "save_matmuls": 5 * 6 * 4 + 6 * 6 + 6 * 8, "only q,k,v": 3 * 6 * 4, "only q,hidden": 6 * 4 + 6 * 8,
    "only unknown": 0,
}  # fmt: skip


@pytest.mark.parametrize("policy", BLOCK)
def test_bytes_are_those_of_the_saved_values(policy: str) -> None:
    program, fn = PROGRAMS["block"], built("block", made(policy))
    args, in_dims = program.batch()
    assert held(fn, program.args()) == held_under_vjp(fn, program.args()) == 8 * BLOCK[policy]
    assert held_under_vjp(vmap(fn, in_dims), args) == 3 * 8 * BLOCK[policy]


def unused_names(x: Tensor, w: Tensor) -> Tensor:
    checkpoint_name(x.exp(), "unused")
    return checkpoint_name(x @ w, "product") + checkpoint_name(x.sum(), "sum")


def two_results(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return sin(x @ w), sin(sin(w) @ w)


@torch.no_grad()
def unseen(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(20):
        x = (x @ w).relu()
    return x


@pytest.mark.parametrize(
    "fn, policy, kept",
    [
        (lambda x, w: sin(x @ w) @ w, MATMULS, 1),
        (unused_names, only("*"), 0),
        (unused_names, EVERY, 0),
        (two_results, MATMULS, 2),
        (lambda x, w: two_results(x, w)[0], MATMULS, 1),
        (lambda x, w: checkpoint_name(x, "x") @ checkpoint_name(w, "w").t(), only("*") | EVERY, 0),
        (lambda x, w: checkpoint_name(sin(x.t()), "view").t() @ w, only("*"), 1),
        (lambda x, w: unseen(x, w) * x, MATMULS, 1),  # of 20 products, the recompute reads the last
    ],
)
def test_a_saveable_value_that_the_backward_does_not_need_is_not_saved(fn: Fn, policy: Any, kept: int) -> None:
    args, region = (rand(3, 3), rand(3, 3, seed=1)), remat(fn, policy=policy)
    assert held(region, args) == held_under_vjp(region, args) == kept * 72


@cases(stateful=False)  # a region that changes buffers saves their old values
def test_everything_saveable_saves_no_more_than_the_plain_function(case: Any) -> None:
    kept = []
    for fn in (case.fn, remat(case.fn, policy=EVERY)):
        with case.state():
            kept.append(held(fn, case.make_args()))
    unseen = 24 if case.name == "indexing" else 0  # its list of indices becomes a tensor, which no operation makes
    assert kept[1] <= kept[0] + unseen


def dead_write(x: Tensor, w: Tensor) -> Tensor:
    a = x @ x
    b = a + a
    a.sin_()  # it isn't read
    e = (b * 0.1).exp()
    return e.sin() @ (e @ b)


def test_operands_of_what_is_not_needed_are_saved_where_it_must_run() -> None:
    """User code may read it unseen. Otherwise a policy that saves more could recompute more."""
    fn, args, bytes_held = dead_write, (rand(64, 64), rand(64, 64, seed=1)), []
    for policy in (MATMULS, MATMULS | policies.save_ops("aten.mul"), EVERY):
        region = remat(fn, policy=policy)
        bytes_held.append(held_bytes(region, *args))
        outs = fn(*args).sum(), region(*args).sum()
        derive = functools.partial(torch.autograd.grad, inputs=args, allow_unused=True)
        derivative, now = (count_ops(derive, out)["aten.mm"] for out in outs)
        assert now == derivative
    assert bytes_held[0] < bytes_held[1] < held_bytes(fn, *args)


def levels(*given: Any) -> Fn:
    """A named value between two products, in regions with these policies, outermost first; each adds two sines."""

    fn = lambda x, w: checkpoint_name(exp(x @ w), "n") @ w
    for policy in reversed(given):
        fn = (lambda fn: lambda x, w: sin(fn(sin(x), w)))(fn)
        fn = fn if policy == "plain" else remat(fn, policy=policy)
    return fn


@pytest.mark.parametrize(
    "given, kept, ran",
    [
        ((None, None), 0, {"exp": 2, "matmul": 4}), ((None, EVERY), 0, {"exp": 1, "matmul": 2}),
        ((None, MATMULS), 0, {"exp": 2, "matmul": 2}), ((None, N), 0, {"exp": 1, "matmul": 3}),
        ((N, None), 1, {"exp": 0, "matmul": 2}), ((N, MATMULS), 1, {"exp": 0, "matmul": 1}),
        ((MATMULS, N), 2, {"exp": 1, "matmul": 0}), ((None, N, None), 0, {"exp": 1, "matmul": 4}),
        ((None, None, N), 0, {"exp": 2, "matmul": 5}),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("transform", ["autograd", "vjp"])
def test_the_outermost_policy_decides_and_the_inner_ones_act_in_recomputes(
    given: tuple, kept: int, ran: dict, transform: str
) -> None:
    program = Program(lambda: None, lambda: (rand(3, 3) / 3, rand(3, 3, seed=1)))
    run = TRANSFORMS[transform](program, levels(*given))
    expected = TRANSFORMS[transform](program, levels(*["plain"] * len(given)))
    assert (run.kept, again(run, expected, ran)) == (kept, ran)


@pytest.mark.sampled(2)
@EVERY_POLICY
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", ["block", "nested_2_1"])
def test_nothing_leaks(function: str, transform: str, policy: str) -> None:
    with assert_freed_without_gc() as watch, PeakMemory() as memory:
        fn = of_kind(function, policy)
        watch(fn, *tensor_leaves(TRANSFORMS[transform](PROGRAMS[function], fn)))
        del fn
        assert memory.live == 0
