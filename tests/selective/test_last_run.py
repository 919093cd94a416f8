"""What one call of a region records for the next: it makes them faster, and changes no result."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor

from benchmarks.measure import OpCounter, held_bytes, peak_bytes
from remat import checkpoint_name, policies, remat
from remat._core import known

MATMULS, NAMES = policies.save_matmuls, policies.save_only_these_names("a", "b")
POLICIES: dict[str, Any] = {
    "matmuls": MATMULS,
    "names": NAMES,
    "names and matmuls": NAMES | policies.save_ops("aten.mm"),
    "everything": policies.everything_saveable,
    "everything but": policies.save_anything_except_these_names("b"),
    "a predicate": policies.save_if(lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default),
    "offloaded": policies.offload(MATMULS),
}
VIEWS = {"aten.detach", "aten.t", "aten.view", "aten.alias"}
pytestmark = [pytest.mark.filterwarnings("ignore:The policy"), pytest.mark.usefixtures("collector_off")]


def forget() -> None:
    """Clear everything that is recorded for functions, which share their code."""
    known._of_code.cache_clear()
    known._of_modules.clear()


def run(fn: Callable, *args: Any) -> tuple[list[Tensor], Counter[str]]:
    """The result and the gradients of a call, and the operations of its backward, without views."""
    tensors = [t for t in args if isinstance(t, Tensor) and t.requires_grad]
    out = fn(*args)
    with OpCounter() as counter:
        grads = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
    return [out, *(g for g in grads if g is not None)], Counter(
        {name: count for name, count in counter.counts.items() if count and name not in VIEWS}
    )


def layers(x: Tensor, w: Tensor) -> Tensor:
    h = checkpoint_name(torch.tanh(x @ w), "a")
    h = checkpoint_name(torch.sin(h @ w.t()), "b") * 2.0
    return torch.cos(h + x).exp()


def around(x: Tensor, w: Tensor) -> Tensor:
    """Reads more of a storage than its argument covers."""
    return torch.tanh(torch.tanh(x.as_strided((4, 4), (4, 1), 0) @ w) @ x @ w)


X, W, TURNED = rand(4, 4), rand(4, 4, seed=1), rand(4, 4, seed=2, grad=False).t().requires_grad_()
UPPER, LOWER = (part.requires_grad_() for part in rand(8, 4, seed=3, grad=False).split(4))
FLOATS = rand(4, 4, dtype=torch.float32), rand(4, 4, seed=1, dtype=torch.float32)
INPUTS: dict[str, tuple[Callable, list[tuple]]] = {
    "sizes": (layers, [(X, W), (rand(2, 4), W)]),
    "strides and dtypes": (layers, [(X, W), (TURNED, W), (X, TURNED), FLOATS]),
    "tensors that share memory": (layers, [(X, W), (W, X), (X, X), (UPPER, W), (LOWER, W), (UPPER, LOWER)]),
    "what is differentiated": (layers, [(X, W), (X.detach(), W), (X, W.detach())]),
    "storage offset": (around, [(UPPER.detach(), W), (LOWER.detach(), W)]),
}


def part_without_grad(x: Tensor, w: Tensor, flag: bool) -> Tensor:
    with torch.set_grad_enabled(flag):
        y = torch.sin(x @ w)
    return torch.tanh(y * (x @ w)).sin()


def ends_with(last: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, bool], Tensor]:
    def fn(x: Tensor, w: Tensor, flag: bool) -> Tensor:
        e = x @ w + w
        y = (checkpoint_name(torch.tanh(e * 3.0), "a") @ w).sin()
        if flag:
            last(e)
        return y

    return fn


def row_changed(x: Tensor, w: Tensor, flag: bool) -> Tensor:
    h = x @ w
    before, rows = h.t(), h.unbind(0)
    if flag:
        h[0].mul_(2.0)
    return torch.tanh(before @ w) * torch.tanh(h.t() @ w) + rows[0].detach() + torch.exp(h.view(4, 4))


BRANCHES: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "operation": lambda x, w, flag: torch.tanh(x @ w).sin() if flag else torch.sigmoid(x @ w).sin(),
    "argument": lambda x, w, flag: torch.tanh(x @ w if flag else w @ x).sin(),
    "constant": lambda x, w, flag: torch.tanh(x @ w * (2.0 if flag else 3.0)).sin(),
    "int for a bool": lambda x, w, flag: torch.tanh(torch.add(x @ w, 1 if flag else True)).sin(),
    "keyword": lambda x, w, flag: torch.add(x @ w, w, alpha=2 if flag else 3).sin().exp(),
    "length": lambda x, w, flag: torch.tanh(torch.tanh(x @ w) @ w) if flag else torch.tanh(x @ w),
    "view": lambda x, w, flag: torch.tanh(x @ (w.t() if flag else w)).sin(),
    "slice": lambda x, w, flag: (lambda h: (h[flag : flag + 2] @ w).sin() @ h[:, : 3 - flag].exp())(torch.tanh(x @ w)),
    "without grad": part_without_grad,
    "name": lambda x, w, flag: (checkpoint_name(torch.tanh(x @ w), "a" if flag else "other") @ w).sin(),
    "written through a view": row_changed,
    "overwritten at the end": ends_with(lambda e: e.mul_(2.0)),
    "detached at the end": ends_with(Tensor.detach),
    "detached": lambda x, w, flag: ((x @ w).detach() if flag else x @ w).sin() * (x @ w).exp(),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*INPUTS, *BRANCHES])
def test_inputs_and_branches_that_differ(name: str, policy: str) -> None:
    """Each call has the result of the plain function, and recomputes as much as without records."""
    fn, kinds = INPUTS.get(name) or (BRANCHES[name], [(X, W, True), (X, W, False)])
    calls = [args for kind in (*kinds, *kinds) for args in [kind] * 2]
    expected = []
    for args in calls:
        forget()
        expected.append(run(remat(fn, policy=POLICIES[policy]), *args)[1])
    forget()
    region = remat(fn, policy=POLICIES[policy])
    for args, counts in zip(calls, expected):
        values, again = run(region, *args)
        assert_same(values, run(fn, *args)[0])
        assert again == counts


def test_later_calls_take_no_more_memory() -> None:
    x, ws = rand(64, 64), [rand(64, 64, seed=i) for i in range(8)]

    def chain(x: Tensor, *ws: Tensor) -> Tensor:
        for w in ws:
            x = checkpoint_name(torch.tanh(x @ w), "a").sin()
        return x

    for policy in ("matmuls", "names", "names and matmuls"):
        forget()
        region = remat(chain, policy=POLICIES[policy])
        peaks = [peak_bytes(lambda: region(x, *ws).sum()) for _ in range(3)]
        held = [held_bytes(region, x, *ws) for _ in range(3)]
        assert max(peaks) == peaks[0] and len(set(held)) == 1


def test_a_function_around_one_that_was_called_before() -> None:
    two_sines = lambda x: checkpoint_name(checkpoint_name(x.sin(), "a").sin(), "i2")
    wrapped_sine = lambda inner: lambda x: inner(checkpoint_name(x.sin(), "o1")).sin()
    calls = [wrapped_sine(remat(two_sines, policy=NAMES)), remat(wrapped_sine(two_sines), policy=NAMES)]
    assert [run(fn, X)[1]["aten.sin"] for fn in (calls[0], calls[0], calls[1], calls[1])] == [0, 0, 2, 2]


def test_few_programs_of_a_function_are_remembered() -> None:
    fn = lambda x: checkpoint_name(x.sin(), "a").cos()
    for i in range(40):
        run(remat(fn, policy=policies.save_only_these_names("a", f"b{i}")), X)
    assert 1 < len(known.known_of(fn).programs) <= 16
