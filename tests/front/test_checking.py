"""`remat.check` reports whether a program has the same results with rematerialization, and changes no state."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from careless import Careless, state_of
from cases import Case, cases, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import remat
from remat import is_recomputing, policies


def block(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ w["up"]) @ w["down"]


def loss(params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    for w in params:
        x = remat.remat(block)(w, x)
    return x.square().mean()


def readme() -> tuple[list[dict[str, Tensor]], Tensor]:
    return [{"up": rand(8, 32), "down": rand(32, 8, seed=1)} for _ in range(4)], rand(16, 8, seed=2)


def per_sample(fn: Callable) -> Callable:
    return vmap(grad(lambda params, sample: fn(params, sample[None])), in_dims=(None, 0))


# --- equal results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, policies.save_matmuls])
def test_the_model_of_the_readme(policy: Any) -> None:
    result = remat.check(loss, *readme(), policy=policy)
    assert result.ok and result
    assert str(result) == ("Identical with and without remat: 1 result, 9 gradients and the random generators.")
    assert remat.check(loss, *readme(), policy=policy, transform=grad).counts["result"] == 8
    assert remat.check(loss, *readme(), policy=policy, transform=per_sample).ok


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
    model, ids = transformers.GPT2LMHeadModel(config).train(), torch.randint(64, (2, 16))
    block = type(model.transformer.h[0])
    result = remat.check(model, input_ids=ids, labels=ids, where=block, policy=policies.save_matmuls)
    assert result.ok, result
    assert result.counts["gradient"] == len([*model.parameters()])
    assert type(model.transformer.h[0]) is block and model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@cases()
def test_every_case(case: Case) -> None:
    result = remat.check(case.fn, *case.make_args(), policy=policies.save_matmuls)
    assert result.ok, str(result)


def test_a_model_under_functional_call() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LayerNorm(3))
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    made = lambda net: grad(lambda params, x: functional_call(net, params, (x,)).square().sum())
    result = remat.check(net, params, torch.randn(4, 3), transform=made)
    assert result.ok, result
    assert result.counts == {"result": 4, "gradient": 0, "changed tensor": 0}


def test_the_loss_of_a_result_is_differentiated() -> None:
    @dataclass
    class Output:
        loss: Tensor
        logits: Tensor

    result = remat.check(lambda x: Output(loss=x.sin().sum(), logits=x.exp()), rand(3))
    assert result.ok and result.counts == {"result": 2, "gradient": 1, "changed tensor": 0}
    shown = []
    remat.check(lambda x: x.sin(), rand(3), loss=lambda y: shown.append(y.shape) or y.square().sum())
    assert shown == [(3,), (3,)]
    assert remat.check(lambda x: (x.sum(), x.to(torch.complex64), "text", None), rand(3)).ok
    assert remat.check(lambda x: x > 0, rand(3)).counts["gradient"] == 0


def test_rounding_is_not_a_difference() -> None:
    result = remat.check(lambda x: x * (1 + 1e-7 * is_recomputing()), rand(3).float().requires_grad_(), loss=square)
    assert result.ok
    result = remat.check(lambda x: x.sin() + 3e-7 * remat.is_disabled(), rand(3).float())
    assert result.ok and 0 < result.rounding < 1e-5
    assert str(result).startswith("Equal with and without remat, within rounding (")


def square(y: Tensor) -> Tensor:
    return y.square().sum()


# --- differences ------------------------------------------------------------------------------------------------------


def test_a_value_that_differs() -> None:
    result = remat.check(lambda x: x.sin() + remat.is_disabled(), torch.zeros(4))
    assert not result.ok and not result
    assert str(result) == "Different with remat:\n  result: 4 of 4 numbers differ, by up to 1"


def test_a_gradient_that_differs() -> None:
    result = remat.check(lambda w, x: w["a"] * (x if remat.is_disabled() else x.detach()), {"a": rand(3)}, rand(3))
    assert [difference.what for difference in result.differences] == ["gradient of argument x"]
    assert result.differences[0].how == "float64[3] without remat, None with it"


def test_other_structures_and_types_differ() -> None:
    result = remat.check(lambda x: {"a": x} if remat.is_disabled() else {"a": x, "b": x}, rand(3))
    assert "result['b']: exists only with remat" in map(str, result.differences)
    result = remat.check(lambda x: (x.sum(), remat.is_disabled()), rand(3))
    assert str(result.differences[0]) == "result[1]: True without remat, False with it"
    result = remat.check(lambda x: x.sum().to(torch.float64 if remat.is_disabled() else torch.float32), rand(3))
    assert str(result.differences[0]) == "result: float64[] on cpu without remat, float32[] on cpu with it"


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("torch's generator of the CPU", lambda: torch.rand(1)),
        ("Python's random", lambda: random.random()),
        ("NumPy's random", lambda: numpy.random.rand()),
    ],
)
def test_a_generator_with_another_state(name: str, draw: Callable) -> None:
    result = remat.check(lambda x: draw() and x.sin() if remat.is_disabled() else x.sin(), rand(3))
    assert str(result) == (f"Different with remat:\n  {name}: is in a different state after the run")


def test_a_buffer_that_differs() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.mean += 1 + remat.is_disabled()
            return x.sin()

    result = remat.check(Net(), torch.ones(2))
    assert str(result) == "Different with remat:\n  self.mean after the run: 2 of 2 numbers differ, by up to 1"


def test_a_program_that_is_not_reproducible_without_remat() -> None:
    system = random.SystemRandom()
    result = remat.check(lambda x: x * system.random(), rand(3))
    assert not result.ok and not result.reproducible
    assert str(result).endswith("Two runs without remat differ too, so remat may not be the cause.")


def test_values_are_checked_in_the_recompute() -> None:
    result = remat.check(lambda x: (x * (1 + is_recomputing())).sin().sin(), rand(3))
    assert not result.ok and not result.fails_without_remat
    assert isinstance(result.error, remat.RecomputeMismatchError)


# --- errors -----------------------------------------------------------------------------------------------------------


def fails(x: Tensor, when: Callable[[], bool]) -> Tensor:
    if when():
        raise ValueError("mine")
    return x.sin().sin()


def test_a_failure_is_a_result() -> None:
    line = fails.__code__.co_firstlineno + 2
    where = f"  ValueError: mine\n  at {__file__}:{line} (fails)"
    result = remat.check(fails, rand(3), lambda: True)
    assert not result.ok and result.fails_without_remat and isinstance(result.error, ValueError)
    assert str(result) == f"Fails without remat too:\n{where}"
    assert result.error.__traceback__ is None
    for when in (is_recomputing, lambda: not remat.is_disabled()):
        assert str(remat.check(fails, rand(3), when)).startswith("Fails only with remat:\n  ValueError: mine\n")


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

    result = remat.check(nn.Sequential(net, nn.Tanh()), torch.ones(2, 3), transform=train)
    assert isinstance(result.error, remat.MutationError) and not result.fails_without_remat
    assert torch.equal(net.weight, before) and net.weight.grad is None


def test_under_a_transform_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Pass it the transform instead: `remat.check\(fn, x, transform="):
        vmap(lambda x: remat.check(torch.sin, x) and x)(torch.ones(3))


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(remat.PolicyError):
        remat.check(torch.sin, rand(3), policy="no such policy")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        remat.check(torch.sin, rand(3), where=nn.Linear)
    with pytest.raises(ValueError, match="chooses none of the model's modules"):
        remat.check(nn.Tanh(), rand(3), where=nn.Linear)


# --- nothing is changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("where", [None, nn.BatchNorm1d])
def test_nothing_is_changed(fails: bool, where: Any) -> None:
    net = Careless()
    net.weight.grad = given = torch.ones(3)
    before = state_of(net)
    result = remat.check(net, torch.ones(2, 3), fails, where=where)
    assert state_of(net) == before and net.weight.grad is given
    if fails:
        assert str(result.error) == "mine"


def test_replaced_memory_is_restored() -> None:
    net = nn.Linear(3, 3)
    weight, pointer = net.weight.detach().clone(), net.weight.data_ptr()

    def fn(x: Tensor) -> Tensor:
        net.weight.data = torch.zeros(3, 3)
        net.bias.detach().resize_(0)
        return x.sin()

    assert remat.check(fn, rand(3)).ok
    assert net.weight.data_ptr() == pointer and torch.equal(net.weight, weight) and net.bias.shape == (3,)


def test_a_function_that_calls_itself() -> None:
    def deep(x: Tensor, n: int = 3) -> Tensor:
        return deep(x.sin(), n - 1) if n else x

    def later(x: Tensor) -> Tensor:
        return x if x.ndim else unbound

    assert remat.check(deep, rand(3)).ok and remat.check(later, rand(3)).ok
    if deep is None:
        unbound = rand(3)


def test_existing_regions_of_a_model_stay() -> None:
    net = remat.nn.apply(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear)
    cls = type(net[0])
    assert remat.check(net, torch.ones(2, 3), where=nn.Tanh).ok
    assert type(net[0]) is cls and type(net[1]) is nn.Tanh
    assert remat.check(net, torch.ones(2, 3), where=nn.Linear, policy=policies.save_matmuls).ok
    assert type(net[0]) is cls and net[0].__dict__["_remat"].policy is None
