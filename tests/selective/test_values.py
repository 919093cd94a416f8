"""Values of a first run: their layouts, and the keys by which a recompute finds an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor

from remat import policies, remat
from remat._core.known import known_of
from remat._selective.values import Layout, place_of


@pytest.mark.parametrize(
    ("make", "fills"),
    [
        (lambda x: x, True),
        (lambda x: x[:, None], True),
        (lambda x: x.view(2, 1, 12), True),
        (lambda x: x[1:], False),
        (lambda x: x[:3], False),
        (lambda x: x.T, False),
        (lambda x: x[:, ::2], False),
        (lambda x: x.view(-1)[:6].view(2, 3), False),
    ],
)
def test_whether_a_contiguous_tensor_fills_its_storage(make: Callable[[Tensor], Tensor], fills: bool) -> None:
    storage, form = place_of(make(torch.zeros(4, 6)))
    assert Layout(0, form).fills(storage) is fills


def test_hooks_may_return_a_part_of_a_larger_tensor() -> None:
    """A saved value is then at an offset, and not the whole of a storage."""

    def pack(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(3), tensor.detach().flatten()])[3:].view(tensor.shape)

    def program(wrap: Callable) -> Any:
        x = rand(3, 3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = wrap(lambda x: ((x @ x).T.sin() @ x).exp())(x)
        return torch.autograd.grad(out.sum(), x)

    assert_same(program(remat(policy=policies.save_matmuls)), program(lambda f: f))


def test_constants_of_another_kind_are_another_operation() -> None:
    """Equal in Python, but not in torch: a recompute must not take one for the other."""

    def f(x: Tensor) -> Tensor:
        y = x.exp()
        parts = [torch.full((3,), value).to(x.dtype) for value in (1, True, 1.0, 0.0, -0.0)]
        return torch.stack([(y * part + 1 / (part + y)).sin() for part in parts])

    for policy in (
        policies.everything_saveable,
        policies.save_ops("aten.full", "aten.exp"),
        ~policies.save_ops("aten.exp"),
    ):
        x = rand(3)
        assert_same(torch.autograd.grad(remat(f, policy=policy)(x).sum(), x), torch.autograd.grad(f(x).sum(), x))


def test_values_that_are_computed_alike_are_overwritten_together() -> None:
    """A recompute may take one for the other, and must not overwrite the saved value of either."""

    def f(x: Tensor) -> Tensor:
        a, b, other = x.sin().exp(), x.sin().exp(), x.cos().exp()
        a.mul_(2)
        return a.sin() * b.cos() * other

    remat(f, policy=policies.everything_saveable)(rand(3))
    (program,) = known_of(f).programs.values()
    names = [step.facts.func.__name__ for step in program.steps]
    numbers = [i for i, step in enumerate(program.steps) if not program.overwritten.isdisjoint(step.outs)]
    assert [names[i] for i in numbers] == ["exp.default", "exp.default"]
    assert numbers == [i for i, name in enumerate(names) if name == "exp.default"][:2]


def test_few_plans_of_a_program_are_kept() -> None:
    f = lambda x: x.sin().exp()
    remat(f, policy=policies.everything_saveable)(rand(3))
    (program,) = known_of(f).programs.values()
    for number in range(200):
        program.plan([number], 2, [])
    assert 1 < len(program._plans) <= 64
