"""Attributes of parameters and buffers, such as a hook's counter of calls, are state of the module that owns them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat.nn
from benchmarks.measure import count_ops
from remat import policies
from remat import remat as rematerialized

X = torch.linspace(-1, 1, 12).reshape(4, 3)
Wrap = Callable[[Any], Any]
WAYS: dict[str, Wrap] = {
    "no policy": rematerialized,
    "a policy": rematerialized(policy=policies.save_matmuls),
    "all saved": rematerialized(policy=policies.everything_saveable),
    "checksums": rematerialized(determinism_check="values"),
    "nested": lambda fn: rematerialized(rematerialized(fn)),
    "in a closure": lambda fn: rematerialized(lambda x: fn(x)),
}
every_way = pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)


def count_calls(module: nn.Module, args: Any, result: Any) -> None:
    """A forward hook that counts on the parameters, as opacus does; the first call makes the attribute."""
    for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        each.calls = getattr(each, "calls", 0) + 1


def counted() -> Any:
    """Layers that a recompute runs except for the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
    model[0].weight.calls = 7
    model[2].eval()  # under `torch.func` its statistics can't change
    for layer in model:
        layer.register_forward_hook(count_calls)
    return model


def calls(model: Any) -> list[int]:
    return [each.calls for each in model.state_dict(keep_vars=True).values()]


def by_backward(f: Callable, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).square().sum(), x)


def by_two_backwards(f: Callable, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    loss = f(x).square().sum()
    return [torch.autograd.grad(loss, x, retain_graph=True) for _ in range(2)]


def by_grad(f: Callable, x: Tensor) -> Any:
    return torch.func.grad(lambda x: f(x).square().sum())(x)


def by_second_grad(f: Callable, x: Tensor) -> Any:
    return torch.func.grad(lambda x: by_grad(f, x).sin().sum())(x)


@every_way
@pytest.mark.parametrize("way", [by_backward, by_two_backwards, by_grad, by_second_grad])
def test_a_hook_counts_each_call_once(way: Callable, wrap: Wrap) -> None:
    model, plain = counted(), counted()
    for step in range(1, 3):
        assert_same(way(wrap(model), X), way(plain, X), exact=False)
        assert calls(model) == calls(plain)
        assert calls(model)[:2] == [7 + step, step]


def test_torch_checkpoint_counts_twice() -> None:
    model = counted()
    by_backward(lambda x: torch_checkpoint(model, x, use_reentrant=False), X)
    assert calls(model)[:2] == [9, 2]


def test_layers_that_are_recomputed_do_run_again() -> None:
    model, plain = counted(), counted()
    runs = [count_ops(by_backward, each, X)["aten.addmm"] for each in (rematerialized(model), plain)]
    assert runs == [4, 2]


class Scaled(nn.Module):
    """It reads attributes of its parameter and of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("center", torch.zeros(3))
        self.weight.scale, self.center.shift = 2.0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight * self.weight.scale + self.center.shift
        return (h * getattr(self.center, "late", 1.0)).sin().exp()


def replaced(module: Any) -> None:
    module.weight.scale, module.center.shift = 3.0, 4.0


def deleted_and_added(module: Any) -> None:
    del module.weight.scale
    module.center.late = 3.0


@every_way
@pytest.mark.parametrize("change", [replaced, deleted_and_added])
def test_a_recompute_reads_the_attributes_of_the_first_run(change: Callable, wrap: Wrap) -> None:
    module, plain = Scaled(), Scaled()
    xs = [X.clone().requires_grad_() for _ in range(2)]
    results = [wrap(module)(xs[0]), plain(xs[1])]
    change(module)
    after = dict(vars(module.weight)), dict(vars(module.center))
    found, expected = (torch.autograd.grad(result.sum(), x) for result, x in zip(results, xs))
    assert_same(found, expected)
    assert (vars(module.weight), vars(module.center)) == after


@every_way
def test_tensors_in_attributes_are_left_alone(wrap: Wrap) -> None:
    """A gradient that a backward has stored, as opacus and Megatron do: no region saves it, or loses it."""
    module = Scaled()
    module.weight.old, module.weight.none = torch.ones(1000), None
    old = weakref.ref(module.weight.old)
    loss = wrap(module)(X.clone().requires_grad_()).sum()
    del module.weight.old
    assert old() is None
    new = module.weight.none = module.center.new = torch.ones(1000)
    module.weight.list = [new]
    loss.backward()
    assert module.weight.none is new and module.center.new is new and module.weight.list[0] is new
    assert not hasattr(module.weight, "old")


def test_an_exception_in_the_recompute_leaves_the_attributes() -> None:
    model = counted()
    model[3].register_forward_pre_hook(lambda module, args: 1 / (1 - remat.is_recomputing()) and None)
    loss = rematerialized(model)(X.clone().requires_grad_()).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert calls(model)[:2] == [8, 1]


def test_a_parameter_of_two_regions_of_one_model() -> None:
    """The recompute of the second region sees the count of the first one, and both leave the last count."""

    def model() -> Any:
        first, second = counted(), counted()
        second[0].weight = first[0].weight
        return nn.Sequential(first, second)

    ours, plain = model(), model()
    by_backward(remat.nn.apply(ours, lambda name, module: name in ("0", "1")), X)
    by_backward(plain, X)
    assert calls(ours) == calls(plain) and ours[0][0].weight.calls == 9
