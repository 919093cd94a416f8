"""`remat.check` says whether a program has the same results, gradients and state with and without regions."""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from cases import Case, cases, rand, repeated
from measured import loss, per_sample, readme
from torch import Tensor, nn
from torch.func import functional_call, grad

import remat
from remat import check, is_recomputing, policies
from remat import is_disabled as off


class Net(nn.Module):
    """A module with a buffer and a generator, whose forward calls `update(module)`."""

    def __init__(self, update: Callable[[Any], object]) -> None:
        super().__init__()
        self.update, self.generator = update, torch.Generator()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, w: Tensor, x: Tensor, n: Tensor) -> Tensor:
        self.update(self)
        return x.sin()


BY_ONE, STATE = "3 of 3 numbers differ, by up to 1", "is in a different state after the run"
NONE = "a tensor of shape [3] without remat, None with it"
TYPES = "result: {}[3] on {} without remat, {}[3] on {} with it"
# Functions of two floating-point tensors and an integer one, and a difference between their runs.
DIFFERENT: dict[str, tuple[Callable[..., Any], str]] = {
    "values": (lambda w, x, n: x.sin() + off(), f"result: {BY_ONE}"),
    "a gradient": (lambda w, x, n: w * (x if off() else x.detach()), f"gradient of argument x: {NONE}"),
    "no gradient": (lambda w, x, n: x if off() else n, "gradient of argument w: exists only without remat"),
    "a key": (lambda w, x, n: {"a": x} | ({} if off() else {"b": x}), "result['b']: exists only with remat"),
    "a plain value": (lambda w, x, n: (x, off()), "result[1]: True without remat, False with it"),
    "a type": (lambda w, x, n: (x, 1 if off() else 1.0), "result[1]: 1 without remat, 1.0 with it"),
    "a dtype": (lambda w, x, n: x if off() else x.float(), TYPES.format("float64", "cpu", "float32", "cpu")),
    "a device": (lambda w, x, n: n if off() else n.to("meta"), TYPES.format("int64", "cpu", "int64", "meta")),
    "an argument": (lambda w, x, n: n.add_(1 + off()) * x, "argument n after the run: 3 of 3 numbers differ"),
    "a change": (Net(lambda m: off() and m.mean.add_(1)), "self.mean after the run: exists only without remat"),
    "a buffer": (Net(lambda m: m.mean.add_(1 + off())), f"self.mean after the run: {BY_ONE}"),
    "torch's generator": (Net(lambda m: off() and torch.rand(1)), f"torch's generator of the CPU: {STATE}"),
    "Python's generator": (Net(lambda m: off() and random.random()), f"Python's random: {STATE}"),
    "NumPy's generator": (Net(lambda m: off() and numpy.random.rand()), f"NumPy's random: {STATE}"),
    "a generator": (Net(lambda m: off() and torch.rand(1, generator=m.generator)), f"self.generator: {STATE}"),
}


@pytest.mark.parametrize(("fn", "text"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_difference_is_named(fn: Callable, text: str) -> None:
    result = check(fn, rand(3), rand(3, seed=1), torch.arange(3))
    assert not result.ok and not result and result.reproducible
    first, *lines = str(result).splitlines()
    assert first == "Different with remat:" and f"  {text}" in lines


# What is the same, and how many results, gradients and changed tensors are compared.
SAME: dict[str, tuple[Callable[..., Any], tuple[int, int, int]]] = {
    "a mask": (lambda w, x, n: x > 0, (1, 0, 0)),
    "plain values": (lambda w, x, n: (x.sum(), x.to(torch.complex64), "text", None, math.nan), (5, 2, 0)),
    "objects of a class": (lambda w, x, n: (x, object()), (2, 2, 0)),
    "not a number": (lambda w, x, n: x.sin().log(), (1, 2, 0)),
    "many paths": (lambda w, x, n: repeated(lambda x: x + x, 60)(x) * 2.0**-60, (1, 2, 0)),
    "noise": (lambda w, x, n: nn.functional.dropout(x).sin() * torch.rand(3), (1, 2, 0)),
    "an argument": (lambda w, x, n: n.add_(1) * x, (1, 2, 1)),
    "a buffer": (Net(lambda m: m.mean.add_(1)), (1, 2, 1)),
}


@pytest.mark.parametrize(("fn", "counts"), SAME.values(), ids=SAME)
def test_equal_programs_have_no_differences(fn: Callable, counts: tuple[int, int, int]) -> None:
    result = check(fn, rand(3), rand(3, seed=1), torch.arange(3))
    assert result.ok and result, result
    assert tuple(result.counts.values()) == counts


@cases()
@pytest.mark.sampled(3)
def test_every_case_is_the_same(case: Case) -> None:
    result = check(case.fn, *case.make_args(), policy=policies.save_matmuls)
    assert result.ok, str(result)


def test_models_and_transforms_of_them() -> None:
    for policy in (None, policies.save_matmuls):
        result = check(loss, *readme(), policy=policy)
        assert str(result) == "Identical with and without remat: 1 result, 9 gradients and the random generators."
        assert check(loss, *readme(), policy=policy, transform=grad).counts["result"] == 8
        assert check(loss, *readme(), policy=policy, transform=per_sample).ok
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LayerNorm(3))
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    by_parameters = lambda net: grad(lambda params, x: functional_call(net, params, (x,)).square().sum())
    assert check(net, params, torch.randn(4, 3), transform=by_parameters).counts["result"] == 4


def test_a_generator_among_the_arguments_is_restored() -> None:
    generator, state = torch.Generator(), torch.Generator().get_state()
    result = check(lambda x, generator: x.sin() * torch.rand(3, generator=generator), rand(3), generator)
    assert result and torch.equal(generator.get_state(), state)
    result = check(lambda x, generator: (off() and torch.rand(1, generator=generator), x)[1], rand(3), generator)
    assert [difference.what for difference in result.differences] == ["argument generator 0"]


def test_the_loss_of_a_result_is_differentiated() -> None:
    @dataclass
    class Output:
        loss: Tensor
        logits: Tensor

    result = check(lambda x: Output(x.sum(), x * (1 if off() else x.detach())), rand(3))
    assert [difference.what for difference in result.differences] == ["result.logits"]  # its gradient isn't asked for
    shapes = deque[torch.Size]()  # which isn't restored
    check(lambda x: x.sin(), rand(3), loss=lambda y: shapes.append(y.shape) or y.square().sum())
    assert [*shapes] == [(3,)] * 3  # plain, as it is, and as a region
    with pytest.raises(TypeError, match="loss is called with the result alone: write `loss=lambda out: criterion"):
        check(torch.sin, rand(3), loss=nn.functional.mse_loss)
    assert "calls `backward` itself" in str(check(lambda x: (y := x.sin().sum()).backward() or y, rand(3)))
    for wrong, text in ((lambda y: y, "a tensor of shape [3]"), (lambda y: 2.5, "2.5")):
        assert f"must return a tensor of one element, got {text}." in str(check(torch.sin, rand(3), loss=wrong))


ROUNDING = {"float64": (1e-14, 1e-9), "float32": (3e-7, 1e-4), "bfloat16": (1e-2, 0.1), "float16": (5e-3, 0.1)}


@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_is_not_a_difference(name: str) -> None:
    dtype = getattr(torch, name)
    for by, is_rounding in zip(ROUNDING[name], (True, False)):
        result = check(lambda x: x + by * off(), torch.ones(3, dtype=dtype))
        assert result.ok == (0 < result.rounding < 0.1) == is_rounding
        assert str(result).startswith("Equal with and without remat, within rounding (") == is_rounding


def test_a_program_that_is_not_differentiated_has_a_note() -> None:
    text, program = "Nothing was differentiated: the result depends on no", (lambda x: x + 1, torch.arange(3))
    assert text in str(check(*program)) and text in str(remat.report(*program))
    assert "Nothing" not in str(check(lambda x: x + 1, torch.ones(3)))
    assert "Nothing" not in str(check(*program, transform=lambda fn: fn))


@pytest.mark.filterwarnings("error")
def test_a_check_of_regions_with_a_policy_gives_no_warning() -> None:
    region = remat.remat(lambda x: x.sin().exp() @ x, policy=remat.policies.save_matmuls)
    assert check(lambda x: region(x) * 2, rand(3, 3))


def test_parameters_that_replace_those_of_a_module_are_differentiated() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Tanh())
    program = lambda p, x: functional_call(net, p, x).sum(), {n: p.detach() for n, p in net.named_parameters()}
    arguments = *program, torch.ones(2, 3)
    assert "5 gradients" in str(check(*arguments, policy=remat.policies.save_matmuls))
    plain, region = remat.report(*arguments, policies=[None]).rows
    assert plain.saved_bytes == 52 and region.saved_bytes == 4  # with the result
    assert sum(row.nbytes for row in remat.saved_residuals(*arguments)) == 48  # the results of both `tanh`
    assert remat.pareto(*arguments).points[-1].nbytes == 48
    plans = [remat.nn.budget(fn, 9999, *args, loss=torch.sum) for fn, *args in (arguments, (net, arguments[2]))]
    assert plans[0].peak == plans[1].peak + arguments[2].nbytes  # which has a gradient too


class Stored:
    last: Tensor


def test_a_region_that_the_program_has_is_compared_as_it_is() -> None:
    def stores(x: Tensor) -> Tensor:
        Stored.last = x.sin()
        return Stored.last.exp()

    region = remat.remat(stores)
    loss = lambda x: region(x).sum() + Stored.last.sum()  # which loses its derivative under torch.func
    assert not check(loss, rand(3), transform=torch.func.grad).ok
    assert check(loss, rand(3)) and check(loss, rand(3), transform=torch.func.grad, policy=remat.policies.save_matmuls)


def test_a_tensor_that_a_module_stores_in_a_transform_is_compared() -> None:
    class Keeps(nn.Module):
        last: Any = None

        def __init__(self, kept: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.kept = kept

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            self.last = self.kept(y)
            return y.exp().sum()

    same, per_sample = lambda y: y, lambda fn: torch.vmap(grad(fn))
    for kept, transform in ((same, torch.vmap), (torch.detach, grad), (torch.detach, per_sample)):
        result = check(Keeps(kept), rand(2, 3), transform=transform)
        assert result and result.counts == {"result": 1, "gradient": 0, "changed tensor": 1}
    result = check(Keeps(lambda y: y * (1 + off())), rand(2, 3), transform=torch.vmap)
    assert "self.last after the run: 6 of 6 numbers differ" in str(result)
    result = check(Keeps(lambda y: y), rand(3), transform=grad)
    assert isinstance(result.error, remat.CaptureError) and not result.fails_without_remat


@pytest.mark.parametrize("last", [4, 3])
def test_a_program_that_is_not_reproducible_without_remat(last: int) -> None:
    runs = deque[None]()  # which isn't restored

    def other_each_time(x: Tensor) -> Tensor:
        runs.append(None)
        if len(runs) > last:
            raise ValueError
        return x * len(runs)

    result = check(other_each_time, rand(3))
    assert not result.ok and not result.reproducible
    assert str(result).endswith("Two runs without remat differ too, so remat may not be the cause.")
    runs.clear()
    assert not check(lambda x: runs.append(None) or x * (len(runs) > 2), rand(3))  # the third run is that as a region


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
    for when in (is_recomputing, lambda: not off()):
        assert str(check(fails, rand(3), when)).startswith("Fails only with remat:\n  ValueError: mine\n")
    assert len(str(check(torch.mm, rand(3, 3), rand(2, 2))).splitlines()) == 2  # no line of the user's
    result = check(lambda x: (x * (1 + is_recomputing())).sin().sin(), rand(3))  # values are compared in the recompute
    assert isinstance(result.error, remat.RecomputeMismatchError) and not result.fails_without_remat


def test_an_optimizer_step_between_forward_and_backward_is_found() -> None:
    net = nn.Linear(3, 3)

    def train(fn: Callable) -> Callable:
        def step(x: Tensor) -> Any:
            loss = fn(x).sin().sum()
            with torch.no_grad():
                net.weight += 1
            return torch.autograd.grad(loss, net.weight)

        return step

    result = check(nn.Sequential(net, nn.Tanh()), torch.ones(2, 3), transform=train)
    assert isinstance(result.error, remat.MutationError) and not result.fails_without_remat


def test_what_can_be_no_region_is_an_error() -> None:
    with pytest.raises(remat.PolicyError):
        check(torch.sin, rand(3), policy="no such policy")
    with pytest.raises(TypeError, match="where= chooses modules, but the function captures and gets none"):
        check(torch.sin, rand(3), where=nn.Linear)
    with pytest.raises(ValueError, match="chooses none of the model's modules"):
        check(nn.Tanh(), rand(3), where=nn.Linear)


@pytest.mark.parametrize("train", [False, True])
def test_statistics_of_batch_norm_change_in_training_only(train: bool) -> None:
    result = check(nn.BatchNorm1d(3).train(train), torch.ones(2, 3))
    assert result.ok and result.counts["changed tensor"] == 3 * train
