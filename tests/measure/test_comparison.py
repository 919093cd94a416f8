"""`remat.check` says whether a program has the same results, gradients and state with and without regions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from cases import Case, cases, rand
from measured import loss, per_sample, readme
from torch import Tensor, nn
from torch.func import functional_call, grad

import remat
from remat import check, is_recomputing, policies
from remat import is_disabled as plain_run


class Mean(nn.Module):
    """A module with a buffer, whose update `update(module)` may differ between the runs, and a generator."""

    def __init__(self, update: Callable[[Any], object]) -> None:
        super().__init__()
        self.update, self.generator = update, torch.Generator()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, w: Tensor, x: Tensor, n: Tensor) -> Tensor:
        self.update(self)
        return x.sin()


class Thing:
    pass


# Functions of two floating-point tensors and an integer one.
DIFFERENT: dict[str, tuple[Callable[..., Any], str]] = {
    "values": (lambda w, x, n: x.sin() + plain_run(), "result: 3 of 3 numbers differ, by up to 1"),
    "integers": (lambda w, x, n: n + plain_run(), "result: 3 of 3 numbers differ"),
    "sparse values": (lambda w, x, n: (x.exp() + plain_run()).to_sparse(), "result: 3 of 3 numbers differ, by up to 1"),
    "a gradient": (
        lambda w, x, n: w * (x if plain_run() else x.detach()),
        "gradient of argument x: float64[3] without remat, None with it",
    ),
    "a key": (lambda w, x, n: {"a": x} | ({} if plain_run() else {"b": x}), "result['b']: exists only with remat"),
    "no gradient": (lambda w, x, n: x if plain_run() else n, "gradient of argument w: exists only without remat"),
    "a plain value": (lambda w, x, n: (x, plain_run()), "result[1]: True without remat, False with it"),
    "the type of a value": (lambda w, x, n: (x, 1 if plain_run() else 1.0), "result[1]: 1 without remat, 1.0 with it"),
    "a long text": (
        lambda w, x, n: (x, "long" * 20 if plain_run() else x.detach()),
        f"result[1]: '{('long' * 20)[:56]}... without remat, float64[3] with it",
    ),
    "a dtype": (
        lambda w, x, n: x.to(torch.float64 if plain_run() else torch.float32),
        "result: float64[3] on cpu without remat, float32[3] on cpu with it",
    ),
    "an argument": (
        lambda w, x, n: n.add_(1 + plain_run()) * x,
        "argument n after the run: 3 of 3 numbers differ",
    ),
    "a buffer": (
        Mean(lambda self: plain_run() and self.mean.add_(1)),
        "self.mean after the run: exists only without remat",
    ),
    "a value of a buffer": (
        Mean(lambda self: self.mean.add_(1 + plain_run())),
        "self.mean after the run: 3 of 3 numbers differ, by up to 1",
    ),
    "another buffer": (
        Mean(lambda self: setattr(self, "mean", self.mean + 1 + plain_run())),
        "self.mean after the run: 3 of 3 numbers differ, by up to 1",
    ),
    "torch's generator": (
        Mean(lambda self: plain_run() and torch.rand(1)),
        "torch's generator of the CPU: is in a different state after the run",
    ),
    "Python's generator": (
        Mean(lambda self: plain_run() and random.random()),
        "Python's random: is in a different state after the run",
    ),
    "NumPy's generator": (
        Mean(lambda self: plain_run() and numpy.random.rand()),
        "NumPy's random: is in a different state after the run",
    ),
    "an own generator": (
        Mean(lambda self: plain_run() and torch.rand(1, generator=self.generator)),
        "self.generator: is in a different state after the run",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_named(what: str) -> None:
    fn, text = DIFFERENT[what]
    result = check(fn, rand(3), rand(3, seed=1), torch.arange(3))
    assert not result.ok and not result and result.reproducible
    first, *lines = str(result).splitlines()
    assert first == "Different with remat:" and f"  {text}" in lines


# What is the same, and how many results, gradients and changed tensors are compared.
SAME: dict[str, tuple[Callable[..., Any], tuple[int, int, int]]] = {
    "a mask": (lambda w, x, n: x > 0, (1, 0, 0)),
    "plain values": (lambda w, x, n: (x.sum(), x.to(torch.complex64), "text", None, math.nan), (5, 2, 0)),
    "objects of a class": (lambda w, x, n: (x, Thing()), (2, 2, 0)),
    "not a number": (lambda w, x, n: x.sin().log(), (1, 2, 0)),
    "an infinite number": (lambda w, x, n: torch.cat([x / 0, x]) + 1e-14 * plain_run(), (1, 2, 0)),
    "noise": (lambda w, x, n: nn.functional.dropout(x).sin() * torch.rand(3), (1, 2, 0)),
    "an argument": (lambda w, x, n: n.add_(1) * x, (1, 2, 1)),
    "a buffer": (Mean(lambda self: self.mean.add_(1)), (1, 2, 1)),
}


@pytest.mark.parametrize("what", SAME)
def test_equal_programs_have_no_differences(what: str) -> None:
    fn, counts = SAME[what]
    result = check(fn, rand(3), rand(3, seed=1), torch.arange(3))
    assert result.ok and result, result
    assert tuple(result.counts.values()) == counts


@cases()
@pytest.mark.sampled(3)
def test_every_case_is_the_same(case: Case) -> None:
    result = check(case.fn, *case.make_args(), policy=policies.save_matmuls)
    assert result.ok, str(result)


@pytest.mark.parametrize("policy", [None, policies.save_matmuls])
def test_the_model_of_the_readme(policy: Any) -> None:
    result = check(loss, *readme(), policy=policy)
    assert str(result) == "Identical with and without remat: 1 result, 9 gradients and the random generators."
    assert check(loss, *readme(), policy=policy, transform=grad).counts["result"] == 8
    assert check(loss, *readme(), policy=policy, transform=per_sample).ok


def test_a_model_under_functional_call() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LayerNorm(3))
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    made = lambda net: grad(lambda params, x: functional_call(net, params, (x,)).square().sum())
    result = check(net, params, torch.randn(4, 3), transform=made)
    assert result.ok and result.counts == {"result": 4, "gradient": 0, "changed tensor": 0}


def test_the_loss_of_a_result_is_differentiated() -> None:
    @dataclass
    class Output:
        loss: Tensor
        logits: Tensor

    result = check(lambda x: Output(x.sum(), x * (1 if plain_run() else x.detach())), rand(3))
    assert [difference.what for difference in result.differences] == ["result.logits"]  # its gradient isn't asked for
    shapes = []
    check(lambda x: x.sin(), rand(3), loss=lambda y: shapes.append(y.shape) or y.square().sum())
    assert shapes == [(3,), (3,)]


@pytest.mark.parametrize(
    ("dtype", "off", "same"),
    [
        (torch.float64, 1e-14, True),
        (torch.float64, 1e-9, False),
        (torch.float32, 3e-7, True),
        (torch.float32, 1e-4, False),
        (torch.bfloat16, 1e-2, True),
        (torch.float16, 1e-1, False),
    ],
)
def test_rounding_is_not_a_difference(dtype: torch.dtype, off: float, same: bool) -> None:
    result = check(lambda x: x + off * plain_run(), torch.ones(3, dtype=dtype))
    assert result.ok == same and (0 < result.rounding < 1e-1) == same
    assert str(result).startswith("Equal with and without remat, within rounding (") == same


def test_a_program_that_is_not_differentiated_has_a_note() -> None:
    text = "Nothing was differentiated: no argument or captured tensor requires grad or is floating-point."
    assert str(check(lambda x: x + 1, torch.arange(3))).endswith(text)
    assert str(remat.report(lambda x: x + 1, torch.arange(3))).endswith(text)
    assert "Nothing" not in str(check(lambda x: x + 1, torch.ones(3)))
    assert "Nothing" not in str(check(lambda x: x + 1, torch.arange(3), transform=lambda fn: fn))


@pytest.mark.parametrize("last", [3, 2])
def test_a_program_that_is_not_reproducible_without_remat(last: int) -> None:
    runs: list[None] = []

    def other_each_time(x: Tensor) -> Tensor:
        runs.append(None)
        if len(runs) > last:
            raise ValueError
        return x * len(runs)

    result = check(other_each_time, rand(3))
    assert not result.ok and not result.reproducible
    assert str(result).endswith("Two runs without remat differ too, so remat may not be the cause.")


# --- errors -----------------------------------------------------------------------------------------------------------


def fails(x: Tensor, when: Callable[[], bool]) -> Tensor:
    if when():
        raise ValueError("mine") from KeyError()
    return x.sin().sin()


def test_a_failure_is_a_result() -> None:
    line = fails.__code__.co_firstlineno + 2
    result = check(fails, rand(3), lambda: True)
    assert not result.ok and result.fails_without_remat and isinstance(result.error, ValueError)
    assert str(result) == f"Fails without remat too:\n  ValueError: mine\n  at {__file__}:{line} (fails)"
    assert result.error.__traceback__ is None
    for when in (is_recomputing, lambda: not plain_run()):
        assert str(check(fails, rand(3), when)).startswith("Fails only with remat:\n  ValueError: mine\n")
    assert len(str(check(torch.mm, rand(3, 3), rand(2, 2))).splitlines()) == 2  # no line of the user's


def test_values_are_compared_in_the_recompute() -> None:
    result = check(lambda x: (x * (1 + is_recomputing())).sin().sin(), rand(3))
    assert isinstance(result.error, remat.RecomputeMismatchError) and not result.fails_without_remat


def test_an_optimizer_step_between_forward_and_backward_is_found() -> None:
    net = nn.Linear(3, 3)
    before = net.weight.detach().clone()

    def train(fn: Callable) -> Callable:
        def step(x: Tensor) -> Any:
            loss = fn(x).sin().sum()
            with torch.no_grad():
                net.weight += 1
            loss.backward()
            return net.weight.grad

        return step

    result = check(nn.Sequential(net, nn.Tanh()), torch.ones(2, 3), transform=train)
    assert isinstance(result.error, remat.MutationError) and not result.fails_without_remat
    assert torch.equal(net.weight, before) and net.weight.grad is None


def test_what_can_be_no_region_is_an_error() -> None:
    with pytest.raises(remat.PolicyError):
        check(torch.sin, rand(3), policy="no such policy")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        check(torch.sin, rand(3), where=nn.Linear)
    with pytest.raises(ValueError, match="chooses none of the model's modules"):
        check(nn.Tanh(), rand(3), where=nn.Linear)
