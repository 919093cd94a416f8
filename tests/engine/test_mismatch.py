"""A recompute that takes another path than the first run: what notices it, what the error says, and logs of `debug`."""

import inspect
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases import OldSquare, assert_same, gradient, rand
from torch import Tensor
from torch.profiler import record_function

from remat import RecomputeMismatchError, is_recomputing, policies, remat
from remat._core.state import state

ADVICE = (
    "A region's function must be deterministic. Look for Python state that changed between the runs, a branch on "
    "values that are random or not reproducible, a cache, or saved-tensor hooks around the region that change values."
)
DEBUG = "`remat(..., debug=True)` shows the first operation that differs."
numbers = partial(rand, 3, dtype=torch.float32)
backward = lambda f, x=None: gradient(f, numbers() if x is None else x)


def line_of(fn: Callable, text: str) -> str:
    """``file:line (name)`` of the line of `fn` that has `text`."""
    lines, first = inspect.getsourcelines(fn)
    (i,) = (i for i, line in enumerate(lines) if text in line)
    return f"{fn.__code__.co_filename}:{first + i} ({fn.__name__})"


def saves_more(x: Tensor) -> Tensor:
    y = x.sin().exp()
    return y.cos().sin() if is_recomputing() else y.cos()


def other_dtype(x: Tensor) -> Tensor:
    return (x.sin().double() if is_recomputing() else x.sin()).exp()


saves_less = lambda x: x.sin().cos() if is_recomputing() else x.sin().exp().cos()
saves_nothing = lambda x: x + 1 if is_recomputing() else x.sin().exp()
SAVED = r"Tensor 1 that the region saved for its backward was {} in the forward and {} in the recompute, at LINE\. "
FEWER = "The region saved {} tensors for its backward in the forward, and only {} in the recompute. "
ERRORS: dict[str, tuple[Callable, dict, str, str]] = {
    "one more": (
        saves_more, {"early_stop": False},
        "The region saved 3 tensors for its backward in the forward, and one more in the recompute, at LINE",
        "return y.cos().sin() if",
    ),
    # There is no value to continue with, so these are errors whatever the check.
    "none, without early stop": (saves_nothing, {"early_stop": False}, FEWER.format(2, 0), ""),
    "none, without check": (saves_nothing, {"determinism_check": "none"}, FEWER.format(2, 0), ""),
    "fewer, without check": (saves_less, {"determinism_check": "none"}, FEWER.format(3, 2), ""),
    "another operation": (
        saves_less, {}, SAVED.format(r"float32\[3\] of ExpBackward0", r"float32\[3\] of SinBackward0"), "sin().cos() if"
    ),
    "another shape, and then an error": (
        lambda x: (x[:2] if is_recomputing() else x).sin().exp() * x.exp(), {},
        SAVED.format(r"float32\[3\] of ExpBackward0", r"float32\[2\] of ExpBackward0"), "x[:2] if",
    ),
    "an input": (
        lambda x: (x.sin() if is_recomputing() else x.exp()).sigmoid(), {},
        r"Tensor 0 .* was float32\[3\] of ExpBackward0 in the forward and float32\[3\] of no recorded operation "
        r"\(such as an input\) in the recompute, at LINE\. ",
        "x.sin() if",
    ),
    "another dtype, with checksums": (
        other_dtype, {"determinism_check": "values"}, SAVED.format(r"float32\[3\].*", r"float64\[3\].*"), "exp()"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_says_what_differs_and_where(name: str) -> None:
    fn, options, text, line = ERRORS[name]
    with pytest.raises(RecomputeMismatchError) as raised:
        backward(remat(fn, **options))
    message = str(raised.value)
    pattern = text.replace("LINE", re.escape(line_of(fn, line)) if line else "")
    assert re.match(pattern, message), message
    assert ADVICE in message and DEBUG in message and raised.value.logs is None


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("fn", [saves_more, other_dtype], ids=lambda fn: fn.__name__)
def test_without_a_check_or_after_the_early_stop_nothing_is_compared(fn: Callable, early_stop: bool) -> None:
    assert backward(remat(fn, determinism_check="none", early_stop=early_stop)).shape == (3,)
    moved = lambda x: x.sin().as_strided((3, 1), (1, 1 + is_recomputing())).exp()  # of a dimension without extent
    cut = lambda x: x * (x.sin().detach() if is_recomputing() else x.sin())  # as a backward pass inside may do
    for f in (moved, cut):
        assert_same(backward(remat(f)), backward(f))
    stops = remat(lambda x: (x.sin().exp(), fn(x).detach())[0])
    assert_same(backward(stops), backward(lambda x: x.sin().exp()))


# Two runs, the log of the second when it is found to differ, and the text about it.
KINDS: dict[str, tuple[Callable, Callable, list[str], str]] = {
    "another operation": (lambda x: x.sin().exp(), lambda x: x.cos().exp(), ["cos"], "aten.cos"),
    "another shape": (lambda x: x.sin().exp(), lambda x: x[:1].sin().exp(), ["slice"], "aten.slice"),
    "one more": (lambda x: x.sin().exp(), lambda x: x.sin().exp().exp(), ["sin", "exp", "exp"], "there was none"),
    "one less": (lambda x: x.sin().exp(), lambda x: x.sin(), ["sin"], "there is none"),
    "another operand": (lambda x: (x * 2).exp(), lambda x: (x * 3).exp(), ["mul"], "aten.mul.Tensor(3)"),
    "another keyword": (
        lambda x: (x.sum(0, dtype=torch.float64) * x).exp(), lambda x: (x.sum(0, dtype=torch.float32) * x).exp(),
        ["sum"], "dtype=torch.float32",
    ),
    "another constant": (
        lambda x: (x * torch.full((), 3.0, dtype=x.dtype, device=x.device)).exp(),
        lambda x: (x * torch.full((), 2.0, dtype=x.dtype, device=x.device)).exp(),
        ["full"], "aten.full.default(2.0, dtype=torch.float32, pin_memory=False) -> float32[]",
    ),
    "one without a save": (lambda x: x.sin().exp(), lambda x: (x.detach() * 2, x.sin().exp())[1], ["mul"], "aten.mul"),
    "several results": (
        lambda x: x.sort().values.exp(), lambda x: x.sort(descending=True).values.exp(), ["sort"], "float32[3], int"
    ),
    "another tree": (lambda x: x.sin().exp(), lambda x: [x.sin().exp()], ["sin", "exp"], "structure"),
    "a value": (
        lambda x: (x * torch.from_numpy(np.ones(3))).exp(), lambda x: (x * torch.from_numpy(np.zeros(3))).exp(),
        ["lift_fresh", "mul", "exp"], "Tensor 0 that",
    ),
}  # fmt: skip
OPERATIONS = {  # of first runs
    "another operand": ["mul", "exp"], "another keyword": ["sum", "mul", "exp"], "several results": ["sort", "exp"],
    "another constant": ["full", "mul", "exp"], "a value": ["lift_fresh", "mul", "exp"],
}  # fmt: skip


@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=str)
@pytest.mark.parametrize("transform", ["autograd", "func.grad", "in a region"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:The policy")
def test_debug_shows_the_first_operation_that_differs_and_both_logs(kind: str, transform: str, policy: Any) -> None:
    first, again, log, text = KINDS[kind]
    runs = deque[bool]()  # which isn't restored
    options: dict[str, Any] = {"debug": True, "early_stop": False, "determinism_check": "values"}
    region = remat(lambda x: (again if runs else first)(x), policy=policy, **options)
    outer = remat(lambda x: region(x), **options) if transform == "in a region" else region

    def loss(x: Tensor) -> Tensor:
        out = outer(x).sum()
        runs.append(True)
        return out

    with pytest.raises(RecomputeMismatchError) as raised:
        torch.func.grad(loss)(torch.ones(3)) if transform == "func.grad" else loss(numbers()).backward()
    message, logs = str(raised.value), raised.value.logs
    assert not state.logs
    assert text in message and DEBUG not in message and logs is not None
    entry = re.compile(r"aten\.(\w+)\.\w+(\(.*\))? -> .* at \S+test_mismatch\.py:\d+ \(<lambda>\)")
    found = [[entry.fullmatch(line)[1] for line in lines] for lines in logs]  # type: ignore[index]
    assert found == [OPERATIONS.get(kind, ["sin", "exp"]), log]
    if kind not in ("another tree", "a value"):
        i = len(log) if kind == "one less" else len(log) - 1
        before, now = logs[0][i:] or ["there was none"], logs[1][i:] or ["there is none"]
        assert message.startswith(
            f"Operation {i} of the region differs between its runs.\n"
            f"  In the forward: {before[0]}\n  In the recompute: {now[0]}\n"
            f"A region's function must be deterministic: look at what decides between these two lines."
        )


POLICIES = [None, policies.save_matmuls, policies.everything_saveable, policies.offload(policies.save_matmuls)]


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_log_has_only_the_operations_of_the_function(policy: Any, check: str) -> None:
    """Not those that compare and save tensors, nor those of a recompute in the middle of the first run.

    The hooks that an autograd Function calls run under modes.
    """
    w = torch.randn(3, 3)

    def fn(x: Tensor) -> Tensor:
        y = OldSquare.apply((x @ w).sin(), 1.0) @ w
        with record_function("FSDP::pre_forward"):
            w.clone() if is_recomputing() else w  # gathered already
        (g,) = torch.autograd.grad(y.cos().sum(), x, create_graph=True)
        return (y.tanh() if other and is_recomputing() else y.sigmoid()).cos() * g

    x, other = rand(2, 3, dtype=torch.float32), False
    assert_same(backward(remat(fn, policy=policy, determinism_check=check, debug=True), x), backward(fn, x))
    other = True
    if policy is not policies.everything_saveable:
        with pytest.raises(RecomputeMismatchError, match=r"Operation \d+ .*\n.*aten.sigmoid.*\n.*aten.tanh"):
            backward(remat(fn, policy=policy, determinism_check=check, debug=True, early_stop=False), x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_that_is_optimized_between_the_runs_is_an_error_with_a_remedy() -> None:
    @torch.jit.script
    def product(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * y + x.sum(-1, keepdim=True) / (1 + y * y))

    f = lambda x: product(numbers(), x).sin()
    with torch.jit.optimized_execution(False):
        assert_same(backward(remat(f)), backward(f))
    with pytest.raises(RecomputeMismatchError, match=r"under `torch.jit.optimized_execution\(False\)`"):
        backward(remat(f))
