"""Tensors that are made of other tensors or wrap one, and the memory layout of tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import assert_same
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from remat._core import private, tensors

X = torch.arange(12.0).view(3, 4)


def test_parts_are_the_plain_tensors_below_all_levels() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    two, plain = TwoTensor(a, b), [a, b]
    nested = TwoTensor(two, TwoTensor(b, a))
    assert [id(t) for t in tensors.parts(nested)] == [*map(id, (a, b, b, a))] and tensors.parts("text") == []
    assert tensors.is_plain(a) and not tensors.is_plain(two) and tensors.is_wrapper_call((TwoTensor, Tensor))
    assert [*map(id, tensors.all_parts(plain))] == [*map(id, plain)] and len(tensors.all_parts([a, two])) == 3

    def at_a_level(x: Tensor) -> Tensor:
        (part,) = tensors.all_parts([x])
        assert not private.is_wrapped(part) and part.shape[-1] == 4
        return x.sum()

    torch.vmap(torch.func.grad(at_a_level))(X)


def test_levels_of_a_tensor() -> None:
    kept: list[Tensor] = []

    def outer(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            level, lifted = private.level_of(y), tensors.lift(X)
            assert private.level_of(lifted) == level and tensors.bottom(lifted) is X
            bare = tensors.bare(x * y)
            followed = [tensors.is_followed_below(level, t) for t in (x, y, X, x * y, bare)]
            assert followed == [True, False, False, False, True] and not bare.requires_grad
            assert [tensors.requires_grad_somewhere(t) for t in (x, y, X)] == [True, True, False]
            return (x * y).sum()

        return torch.func.grad(inner)(X).sum()

    def mapped(x: Tensor) -> Tensor:
        kept.append(x * 2)
        assert not tensors.is_left_from_vmap(kept[-1])
        return x

    torch.func.grad(outer)(X)
    torch.vmap(mapped)(X)
    torch.func.grad(lambda x: mapped(x).sum())(X)
    assert [tensors.is_left_from_vmap(t) for t in (*kept, X)] == [True, False, False] and tensors.lift(X) is X


def test_whether_autograd_follows_a_tensor_or_its_tangent() -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        view = x[0]
    assert [tensors.is_in_graph(t) for t in (x, x[0], view, X)] == [True, True, False, False]
    with fwAD.dual_level():
        recorded = fwAD.make_dual(X, torch.ones_like(X).requires_grad_())
        assert [tensors.is_recorded(t) for t in (x, recorded, X)] == [True, True, False]
        assert [tensors.is_dual(t) for t in (tensors.as_leaf(recorded), tensors.as_leaf(X))] == [True, False]


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": X.clone,
    "transposed": lambda: X.view(4, 3).t(),
    "with gaps": lambda: torch.zeros(3, 8)[:, ::2].copy_(X),
    "expanded": lambda: X[:, :1].expand(3, 4),
    "empty": lambda: X[:0],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_have_the_same_values_and_strides(name: str) -> None:
    tensor = LAYOUTS[name]()
    for copy in (tensors.copied(tensor), tensors.laid_out(tensor.contiguous(), tensor.stride())):
        assert_same(copy, tensor)
        assert copy.stride() == tensor.stride()
    assert tensors.laid_out(tensor, tensor.stride()) is tensor
    assert tensors.memory(tensor).numel() == {"with gaps": 23, "expanded": 9, "empty": 0}.get(name, 12)
