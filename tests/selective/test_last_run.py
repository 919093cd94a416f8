"""What one call of a region records for the next: it makes them faster, and changes no result."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import rand
from torch import Tensor

from benchmarks.measure import OpCounter, gc_disabled, held_bytes, peak_bytes
from remat import checkpoint_name, policies, remat
from remat._core import known

NAMES = policies.save_only_these_names("a", "b")
POLICIES: dict[str, Any] = {
    "matmuls": policies.save_matmuls,
    "names": NAMES,
    "names and matmuls": NAMES | policies.save_ops("aten.mm"),
    "everything": policies.everything_saveable,
    "everything but": policies.save_anything_except_these_names("b"),
    "a predicate": policies.save_if(lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default),
    "offloaded": policies.offload(policies.save_matmuls),
}
BY_NAME_ALONE = ("names", "everything", "everything but")
every_policy = pytest.mark.parametrize("policy", POLICIES)


pytestmark = pytest.mark.filterwarnings("ignore:The policy of a rematerialized function mentions the name")


def forget() -> None:
    """Clear everything that is recorded for functions."""
    known._of_codes.clear()
    known._of_functions.clear()


def remembered() -> list[Any]:
    """The recorded programs of the last first runs."""
    return [program for _, each in known._of_codes.values() for program in each.programs.values()]


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    """Clears the records, as functions of tests share their code."""
    forget()
    yield
    forget()


def run(fn: Callable, *args: Any) -> tuple[list[Tensor], Counter[str]]:
    """The result and the gradients of a call, and the operations of its backward."""
    tensors = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    out = fn(*args)
    with OpCounter() as counter:
        grads = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
    return [out, *(g for g in grads if g is not None)], Counter({k: n for k, n in counter.counts.items() if n})


def check(fn: Callable, policy: str, calls: list[tuple]) -> None:
    """Each call gives the same as the plain function, and recomputes as much as without records.

    With names alone, the first call that saves less than the one before notices too late, and recomputes everything.
    """
    expected = []
    for args in calls:
        forget()
        expected.append(run(remat(fn, policy=POLICIES[policy]), *args)[1])
    forget()
    wrapped = remat(fn, policy=POLICIES[policy])
    more = []
    for args, counts in zip(calls, expected):
        values, again = run(wrapped, *args)
        for value, plain in zip(values, run(fn, *args)[0], strict=True):
            assert torch.equal(value, plain)
        if _work(again) != _work(counts):
            more.append(args)
    assert len(more) <= (policy in BY_NAME_ALONE)


def _work(counts: Counter[str]) -> Counter[str]:
    """Operations that aren't views."""
    views = {"aten.detach", "aten.t", "aten.view", "aten.alias"}
    return Counter({name: count for name, count in counts.items() if name not in views})


def layers(x: Tensor, w: Tensor) -> Tensor:
    h = checkpoint_name(torch.tanh(x @ w), "a")
    h = checkpoint_name(torch.sin(h @ w.t()), "b") * 2.0
    return torch.cos(h + x).exp()


@every_policy
def test_identical_calls(policy: str) -> None:
    args = rand(4, 4), rand(4, 4, seed=1)
    check(layers, policy, [args] * 4)


@every_policy
def test_other_sizes_strides_and_dtypes(policy: str) -> None:
    square, wide, other = rand(4, 4), rand(2, 4), rand(4, 4, seed=1)
    turned = rand(4, 4, seed=2).detach().t().requires_grad_()
    exact = square.detach().double().requires_grad_(), other.detach().double().requires_grad_()
    calls: list[tuple] = [(square, other), (wide, other), (turned, other), (square, turned), exact, (square, square)]
    check(layers, policy, calls * 2)


@every_policy
def test_other_tensors_are_differentiated(policy: str) -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)
    calls = [(x, w), (x.detach(), w), (x, w.detach()), (x, w)]
    check(layers, policy, calls * 2)


BRANCHES: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "another operation": lambda x, w, flag: torch.tanh(x @ w).sin() if flag else torch.sigmoid(x @ w).sin(),
    "another argument": lambda x, w, flag: torch.tanh(x @ w if flag else w @ x).sin(),
    "another constant": lambda x, w, flag: torch.tanh(x @ w * (2.0 if flag else 3.0)).sin(),
    "another zero": lambda x, w, flag: torch.tanh(x @ w + (0.0 if flag else -0.0)).sin(),
    "an int for a bool": lambda x, w, flag: torch.tanh(torch.add(x @ w, 1 if flag else True)).sin(),
    "another order": lambda x, w, flag: (
        torch.tanh(x @ w) * torch.sin(w @ x) if flag else torch.sin(w @ x) * torch.tanh(x @ w)
    ),
    "longer": lambda x, w, flag: torch.tanh(torch.tanh(x @ w) @ w) if flag else torch.tanh(x @ w),
    "a view of it": lambda x, w, flag: torch.tanh(x @ (w.t() if flag else w)).sin(),
    "part without grad": lambda x, w, flag: torch.tanh(no_grad(x, w, flag) * (x @ w)).sin(),
    "a name": lambda x, w, flag: (checkpoint_name(torch.tanh(x @ w), "a" if flag else "other") @ w).sin(),
    "a name for another": lambda x, w, flag: named(torch.tanh(x @ w), torch.sin(w @ x), flag),
    "in place": lambda x, w, flag: torch.tanh(x @ w).mul(2).add_(1 if flag else 2).sin().exp(),
    "in place or not": lambda x, w, flag: ((x @ w).mul_(2) if flag else (x @ w).mul(2)).exp(),
    "detached": lambda x, w, flag: ((x @ w).detach() if flag else x @ w).sin() * (x @ w).exp(),
    "several results": lambda x, w, flag: torch.cat([x @ w, torch.stack((x, w)).sum(0)][:: 1 if flag else -1]).sin(),
}


def no_grad(x: Tensor, w: Tensor, flag: bool) -> Tensor:
    with torch.set_grad_enabled(flag):
        return torch.sin(x @ w)


def named(x: Tensor, y: Tensor, flag: bool) -> Tensor:
    checkpoint_name(x if flag else y, "a")
    return torch.exp(x @ y) * x * y


@every_policy
@pytest.mark.parametrize("branch", BRANCHES)
def test_calls_that_differ(branch: str, policy: str) -> None:
    x, w = rand(3, 3), rand(3, 3, seed=1)
    calls = [(x, w, flag) for flag in (True, True, False, False, True, False, True)]
    check(BRANCHES[branch], policy, calls)


def test_the_default_dtype_changes() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).to(torch.float64) * (torch.arange(3) / 2).double().sum()

    x, w = rand(3, 3), rand(3, 3, seed=1)
    wrapped = remat(fn, policy=policies.save_matmuls)
    expected, _ = run(fn, x, w)
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for value, plain in zip(run(wrapped, x, w)[0], expected, strict=True):
                torch.testing.assert_close(value, plain)
        finally:
            torch.set_default_dtype(torch.float32)


# --- without a dispatch mode ------------------------------------------------------------------------------------------


def all_named(x: Tensor, w: Tensor, name: str = "a") -> Tensor:
    for _ in range(3):
        x = checkpoint_name(torch.tanh(x @ w), name)
    return x


def test_nothing_is_recomputed_where_every_value_is_named() -> None:
    x, w = rand(3, 3), rand(3, 3, seed=1)
    wrapped = remat(all_named, policy=NAMES)
    for _ in range(3):
        _, again = run(wrapped, x, w)
        assert again["aten.tanh"] == 0 and again["aten.mm"] == 6  # the derivatives
    with gc_disabled():
        assert held_bytes(wrapped, x, w) == held_bytes(all_named, x, w)


def test_a_name_that_is_missing_is_noticed() -> None:
    x, w = rand(3, 3), rand(3, 3, seed=1)
    expected, _ = run(all_named, x, w)
    wrapped = remat(all_named, policy=NAMES)
    counts = []
    for name in ("a", "a", "other", "other", "a", "a", "other", "other"):
        values, again = run(wrapped, x, w, name)
        assert all(map(torch.equal, values, expected))
        counts.append(again["aten.tanh"])
    # The last tanh is the result, so it isn't recomputed. In a second call of a kind the name is known to be missing.
    assert counts[:2] == [0, 0] == counts[4:6] and counts[3] == counts[6] == counts[7] > 0


def test_a_named_value_is_changed_in_place() -> None:
    def fn(x: Tensor, w: Tensor, change: bool) -> Tensor:
        h = checkpoint_name(torch.exp(x @ w), "a")
        if change:
            h = checkpoint_name(h.clone(), "b")
            h.mul_(2)
        return checkpoint_name(torch.tanh(checkpoint_name(h @ w, "a")), "b")

    x, w = rand(3, 3), rand(3, 3, seed=1)
    wrapped = remat(fn, policy=NAMES)
    for change in (False, False, True, True, False):
        for value, plain in zip(run(wrapped, x, w, change)[0], run(fn, x, w, change)[0], strict=True):
            assert torch.equal(value, plain)


def test_a_named_value_that_is_not_saved_is_released() -> None:
    peaks: list[int] = []

    def fn(x: Tensor) -> Tensor:
        for _ in range(20):
            x = checkpoint_name(x + 1, "a")  # saves nothing
        return checkpoint_name(x.exp(), "b")

    x = rand(64, 64)
    wrapped = remat(fn, policy=NAMES)
    for _ in range(2):
        peaks.append(peak_bytes(wrapped, x))
    assert peaks[1] <= peaks[0] and peaks[1] <= 4 * x.nbytes


def test_runs_with_opaque_arguments_are_not_recorded() -> None:
    def fn(x: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.sin(x) * torch.rand(3, generator=generator)

    x = rand(3)
    for generator, count in ((torch.Generator(), 0), (None, 1)):
        run(remat(fn, policy=policies.save_matmuls), x, generator)
        assert len(remembered()) == count


def test_one_run_is_recorded() -> None:
    x = rand(3)
    wrapped = remat(lambda x, factor: torch.sin(x) * factor, policy=policies.save_matmuls)
    for factor in range(30):
        run(wrapped, x, float(factor))
    assert len(remembered()) == 1


def test_dynamo_compiles_nothing_under_the_modes() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable:
        compiled.append(graph)
        return graph.forward

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(inner(x @ w))

    torch.compiler.reset()
    inner = torch.compile(lambda x: x.sin() * 2, backend=backend)
    x, w = rand(3, 3), rand(3, 3, seed=1)
    values, _ = run(remat(fn, policy=policies.save_matmuls), x, w)
    assert not compiled  # under a dispatch mode Dynamo is skipped; here it could only compile the mode itself
    assert all(map(torch.equal, values, run(fn, x, w)[0]))


# --- calls that are the same as the last one, then differ ---------------------------------------------------------


def in_turn(*kinds: tuple) -> list[tuple]:
    """Four calls of each kind, so that the next of that kind would only be compared; all kinds, then again."""
    return [args for kind in (*kinds, *kinds) for args in [kind] * 4]


def branches(x: Tensor, w: Tensor, which: int) -> Tensor:
    h = checkpoint_name(x @ w, "a")
    if which == 1:
        h = w @ x  # the same operation on the same tensors
    if which == 2:
        h.t_()
    if which == 3:
        h.mul_(2.0)
    if which == 4:
        h = h.detach()
    if which == 5:
        h = h.view(-1)[::2].view(2, 4).repeat(2, 1)
    h = checkpoint_name(torch.tanh(h), "b")
    with torch.set_grad_enabled(which != 6):
        h = h @ w if which != 7 else w @ h
    return torch.tanh(h).sin() @ x


@every_policy
def test_other_inputs_after_identical_calls(policy: str) -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)
    base = rand(8, 4, seed=2).detach()
    upper, lower = (part.requires_grad_() for part in base.detach().split(4))
    others = [(w, x), (x, x), (upper, w), (lower, w), (upper, lower), (x, w.detach()), (x.detach(), w)]
    check(layers, policy, in_turn((x, w), *others))
    double = rand(4, 4, dtype=torch.float32), rand(4, 4, seed=1, dtype=torch.float32)
    check(layers, policy, in_turn((x, w), double, (x.detach().t().requires_grad_(), w)))


def around(x: Tensor, w: Tensor) -> Tensor:
    """Reads more of a storage than its argument covers."""
    whole = x.as_strided((4, 4), (4, 1), 0)
    return torch.tanh(torch.tanh(whole @ w) @ x @ w)


@every_policy
def test_inputs_with_another_storage_offset(policy: str) -> None:
    base, w = rand(8, 4, grad=False), rand(4, 4, seed=1)
    check(around, policy, in_turn((base[:4], w), (base[4:], w)))


def through_views(x: Tensor, w: Tensor) -> Tensor:
    """Only views of the products remain."""
    h = torch.tanh((x @ w).view(2, 8).t().reshape(8, 2))
    return torch.tanh((h.reshape(4, 4) @ w).t()).exp()


@every_policy
def test_only_views_of_a_value_remain(policy: str) -> None:
    check(through_views, policy, in_turn((rand(4, 4), rand(4, 4, seed=1))))


def viewing(x: Tensor, w: Tensor, which: int) -> Tensor:
    h = checkpoint_name(x @ w, "a")
    turned = (w if which == 1 else h).t()
    if which == 2:
        h.view(8, 2)  # it isn't read
    wide = h.t().reshape(2, 8) if which == 3 else h.view(2, 8)
    part = wide[:, :4] if which == 4 else wide[:, 4:]
    if which == 5:
        h.mul_(2.0)
    if which == 6:
        part.mul_(2.0)
    if which == 7:
        h.detach().mul_(2.0)
    if which == 8:
        turned = turned.t_()
    if which == 9:
        turned, wide = wide.reshape(4, 4), turned.reshape(2, 8)
    with torch.set_grad_enabled(which != 10):
        whole = wide.view(4, 4) if which != 11 else wide.detach().view(4, 4)
    parts = (
        torch.tanh(part @ w),
        torch.sin(turned) @ x,
        torch.exp(checkpoint_name(whole, "b")),
        turned @ part.t() @ part,
    )
    return torch.cat(parts).sin()


OTHER_BRANCHES = [*((branches, which) for which in range(1, 8)), *((viewing, which) for which in range(1, 12))]


@pytest.mark.sampled(4)
@every_policy
@pytest.mark.parametrize("fn, which", OTHER_BRANCHES)
def test_another_branch_after_identical_calls(policy: str, fn: Callable, which: int) -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)
    check(fn, policy, in_turn((x, w, 0), (x, w, which)))


@every_policy
def test_other_slices_in_each_call(policy: str) -> None:
    def fn(x: Tensor, w: Tensor, start: int) -> Tensor:
        h = torch.tanh(x @ w)
        return (h[start : start + 2] @ w).sin() @ h[:, start : start + 2].exp()

    x, w = rand(4, 4), rand(4, 4, seed=1)
    check(fn, policy, [(x, w, start) for start in (0, 0, 0, 0, 1, 2, 1, 2, 2, 2, 2, 0, 0, 0)])


@every_policy
def test_inputs_of_other_sizes_with_equal_views(policy: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = torch.tanh(x.t().reshape(4, 4) @ w.view(4, 4).t())
        return torch.sin(h.view(16) * w.reshape(16)) * x.reshape(16)

    w = rand(4, 4, seed=1)
    xs = [rand(*sizes) for sizes in ((4, 4), (2, 8), (8, 2), (16, 1), (1, 16))]
    xs.append(rand(4, 4, seed=2).detach().t().requires_grad_())
    flat = rand(16, seed=3)
    check(fn, policy, in_turn(*[(x, w) for x in xs], (xs[0], flat), (xs[0].detach(), w), (xs[0], w.detach())))


@every_policy
def test_a_value_is_changed_through_a_view_after_others_were_made(policy: str) -> None:
    def fn(x: Tensor, w: Tensor, row: int | None) -> Tensor:
        h = x @ w
        before, rows = h.t(), h.unbind(0)
        if row is not None:
            h[row].mul_(2.0)
        after = h.t()
        return torch.tanh(before @ w) * torch.tanh(after @ w) + rows[0].detach() + torch.exp(h.view(4, 4))

    x, w = rand(4, 4), rand(4, 4, seed=1)
    check(fn, policy, in_turn((x, w, None), (x, w, 0), (x, w, 1), (x, w, None)))


def test_memory_of_identical_calls() -> None:
    """Later calls save and peak no higher than the first one."""
    x, ws = rand(64, 64), [rand(64, 64, seed=i) for i in range(8)]

    def chain(x: Tensor, *ws: Tensor) -> Tensor:
        for w in ws:
            x = checkpoint_name(torch.tanh(x @ w), "a").sin()
        return x

    for policy in ("matmuls", "names", "names and matmuls"):
        forget()
        wrapped = remat(chain, policy=POLICIES[policy])
        figures = []
        for _ in range(4):
            with gc_disabled():
                figures.append((peak_bytes(lambda: wrapped(x, *ws).sum()), held_bytes(lambda: wrapped(x, *ws))))
        first, *later = figures
        assert all(figure[0] <= first[0] and figure[1] <= first[1] for figure in later)


# --- records of one function don't apply to another one ---------------------------------------------------------------


def wrapped_sine(inner: Callable) -> Callable:
    return lambda x: inner(checkpoint_name(x.sin(), "o1")).sin()


def two_sines(x: Tensor) -> Tensor:
    return checkpoint_name(checkpoint_name(x.sin(), "a").sin(), "i2")


def sines(fn: Callable, *args: Any) -> int:
    return run(fn, *args)[1]["aten.sin"]


@pytest.mark.parametrize("calls", [1, 3])
def test_a_function_around_one_that_was_called(calls: int) -> None:
    policy, x = policies.save_only_these_names("a"), rand(3)
    for _ in range(calls):
        assert sines(wrapped_sine(remat(two_sines, policy=policy)), x) == 0
    whole = remat(wrapped_sine(two_sines), policy=policy)
    assert [sines(whole, x) for _ in range(3)] == [2, 2, 2]
    assert torch.equal(run(whole, x)[0][1], run(wrapped_sine(two_sines), x)[0][1])


def deeper(x: Tensor, deep: bool) -> Tensor:
    h = checkpoint_name(x.sin(), "a")
    return h.sin().sin() if deep else h


def test_another_path_in_the_same_function() -> None:
    fn, x = remat(deeper, policy=policies.save_only_these_names("a")), rand(3)
    assert [sines(fn, x, deep) for deep in (False, False, True, True, False, True)] == [0, 0, 1, 1, 0, 1]


def test_another_path_in_the_same_module() -> None:
    class Deeper(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return deeper(x, self.training)

    module = remat(Deeper(), policy=policies.save_only_these_names("a"))
    x = rand(3)
    found = [sines(module.train(training), x) for training in (False, False, True, True, False, True)]
    assert found == [0, 0, 1, 1, 0, 1]


def products(x: Tensor) -> Tensor:
    return (x.sin() @ x).exp() @ x


def inside_grad(fn: Callable) -> Callable:
    return lambda x: torch.func.grad(lambda y: fn(y).sum())(x) + x.sin()


def test_a_function_that_was_differentiated_inside_another_one() -> None:
    x = rand(3, 3)
    before = run(remat(products), x)[1]
    run(remat(inside_grad(products)), x)  # this recompute can't stop early
    assert run(remat(products), x)[1] == before


def test_a_module_that_was_differentiated_inside_another_one() -> None:
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)
    module, x = torch.nn.Sequential(linear, torch.nn.Tanh(), linear), rand(2, 3)
    before = run(remat(module), x)[1]
    run(remat(inside_grad(module)), x)
    assert run(remat(module), x)[1] == before == run(remat(lambda x: module(x)), x)[1]


def test_records_for_a_module_are_freed_with_it() -> None:
    def make() -> tuple[Any, Any]:
        module = torch.nn.Linear(3, 3, dtype=torch.float64)
        other = torch.nn.Sequential(module)  # which contains it
        run(remat(functools.partial(module.forward)), rand(3))
        run(remat(functools.partial(lambda first, second, x: first(x) + second(x), module, other)), rand(3))
        return weakref.ref(module), weakref.ref(other)

    with gc_disabled():
        module, other = make()
        assert module() is None and other() is None


def test_named_values_that_only_named_values_read_are_not_saved() -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(20):
            x = checkpoint_name(x + 1, "a")
        return checkpoint_name(x.exp(), "b").sin()

    x = rand(64, 64)
    assert peak_bytes(remat(fn, policy=NAMES), x) <= 4 * x.nbytes  # from the first call on
    assert held_bytes(remat(fn, policy=NAMES), x) == 2 * x.nbytes
    assert run(remat(fn, policy=NAMES), x)[1]["aten.add"] == 0
