"""What is asked of tensors at the levels of torch.func, and the operations of operators."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import rand
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks.measure import OpCounter
from remat._core import private, tensors
from remat._core.facts import flops
from remat._core.state import alias
from remat._core.versions import check_version

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.view(4, 6),
    "transposed": lambda x: x.view(4, 6).t(),
    "expanded": lambda x: x[:4].unsqueeze(1).expand(4, 3),
    "gaps": lambda x: x.view(4, 6)[:, ::2],
    "expanded, with gaps": lambda x: x.view(4, 6)[:, ::2].unsqueeze(1).expand(4, 2, 3),
}


def test_requires_grad_at_some_level() -> None:
    x, found = rand(3, grad=False), list[bool]()
    see = lambda x: (found.append(tensors.requires_grad_somewhere(x)), x.sin().sum())[1]
    grad(see)(x), grad(lambda x: vmap(see)(x).sum())(x), vmap(see)(x.clone().requires_grad_())
    vmap(see)(x), jvp(see, (x,), (x,))
    assert found == [True, True, True, False, False]


def test_what_is_followed_below_a_level() -> None:
    x, constant, found, left = rand(3), rand(3, grad=False), list[bool](), list[Tensor]()

    def fn(y: Tensor) -> Tensor:
        left.append(y)
        inner = grad(lambda z: (left.append(z), z.sin().sum())[1])(tensors.bare(y))
        candidates = x, constant, y, y.detach(), tensors.bare(y), left[-1]
        found.extend(tensors.is_followed_below(1, t) for t in candidates)
        return (y * inner).sum()

    grad(fn)(x)
    assert found == [True, False, False, False, True, True]
    assert [tensors.is_followed_below(1, t) for t in left] == [True, True]  # their levels have ended


def test_views_and_dtypes_that_autograd_does_not_follow() -> None:
    x = rand(3)
    with torch.no_grad():
        view = x[:2]
    assert [tensors.is_in_graph(t) for t in (x, x[:2], view, x.detach())] == [True, True, False, False]
    assert not torch.inference_mode()(tensors.is_in_graph)(view)
    can = [tensors.is_differentiable(torch.zeros(1, dtype=dtype)) for dtype in (torch.half, torch.cfloat, torch.int)]
    assert can == [True, True, False]
    special = torch.ones(3).as_subclass(type("Special", (Tensor,), {}))
    with OpCounter() as seen:
        assert [type(alias(t)) for t in (x, special)] == [Tensor, type(special)]
    assert seen["aten.detach"] == 1  # only a subclass may see it
    with private.FakeTensorMode():
        fake = torch.ones(3)
    assert [tensors.has_data(t) for t in (x, fake, torch.ones(3, device="meta"))] == [True, False, False]


def test_the_bottom_of_a_wrapper_and_what_vmap_has_left() -> None:
    x, kept = rand(3, 2, grad=False), list[Tensor]()

    def keep(row: Tensor) -> Tensor:
        kept.append(row)
        assert tensors.bottom(row) is tensors.bottom(x) and not tensors.is_left_from_vmap(row)
        return row * 2

    vmap(keep)(x)
    assert tensors.is_left_from_vmap(kept[0]) and not tensors.is_left_from_vmap(x)

    def at_another_level_with_its_number(x: Tensor) -> Tensor:
        assert tensors.is_left_from_vmap(kept[0])
        return x.sum()

    grad(at_another_level_with_its_number)(x)


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_keep_the_layout(name: str) -> None:
    tensor = LAYOUTS[name](torch.arange(24.0))
    for copy in (tensors.copied(tensor), tensors.laid_out(tensor.contiguous(), tensor.stride())):
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()
        assert copy.data_ptr() != tensor.data_ptr() or tensor.is_contiguous()
    made = [vmap(lambda x, copy=copy: copy(x.expand(2, 4)), 1)(torch.eye(4)) for copy in (tensors.copied, torch.clone)]
    assert torch.equal(*made)


def test_tensors_that_share_memory() -> None:
    rows = torch.zeros(4, 3)
    assert tensors.overlapping({3: rows[:2], 5: rows[1:], 7: torch.zeros(2), 9: torch.zeros(2).to_sparse()}) == {3, 5}
    assert tensors.overlapping({0: rows[:2], 1: rows[2:]}) == set() and tensors.copied(rows.to_sparse()).is_sparse
    assert tensors.overlapping({0: rows[:, 0], 1: rows[:, 1]}) == {0, 1}  # their elements alternate
    assert tensors.holder(rows[1:]) is rows.untyped_storage()
    for other in (rows.to_sparse(), rows.to_sparse_csr(), torch.nested.nested_tensor([rows])):
        assert tensors.holder(other) is other and tensors.copied(other).layout == other.layout


def test_tensors_that_are_made_of_others() -> None:
    rows = torch.zeros(4, 3)
    both = TwoTensor(rows[:2], rows[:2])
    assert tensors.parts(both) == [both.a, both.b] and tensors.parts(2) == []
    assert [tensors.is_wrapper_call((Tensor, cls)) for cls in (Tensor, TwoTensor)] == [False, True]
    assert tensors.overlapping({0: both, 1: rows[2:]}) == set() and tensors.overlapping({0: both, 1: rows}) == {0, 1}
    gaps = TwoTensor(rows[:, ::2], rows[:, ::2])
    with OpCounter() as seen:
        copy, _ = tensors.copied(gaps), tensors.copied(rows)
    assert type(copy) is TwoTensor and torch.equal(copy.a, gaps.a) and not seen["aten.as_strided"]


def test_a_wrapper_without_its_history_at_one_level() -> None:
    x = rand(3)
    assert tensors.bare(x) is x

    def fn(y: Tensor) -> Tensor:
        z, bare = y.sin(), tensors.bare(y.sin())
        assert z.requires_grad and not bare.requires_grad and tensors.requires_grad_somewhere(bare)
        return z.sum()

    grad(fn)(x)
    with fwAD.dual_level():
        assert [tensors.is_recorded(fwAD.make_dual(x.detach(), t)) for t in (x, x.detach())] == [True, False]
        assert [tensors.is_recorded(t) for t in (x, x.detach(), torch.eye(3).to_sparse())] == [True, False, False]
        for copy in (tensors.detached, tensors.as_leaf):
            assert tensors.is_dual(copy(fwAD.make_dual(x.detach(), x))) and not tensors.is_dual(copy(x))
        assert tensors.is_dual(fwAD.make_dual(torch.inference_mode()(torch.ones)(3), x))


def test_an_untested_version_of_torch_warns() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for version in ("2.10.2", "2.11.0", "2.15.1+cu130", "2.16.0a0", "3.0", "unknown"):
            check_version(version)
    texts = [str(each.message).partition("torch 2.11 to 2.15, and this is torch ")[2] for each in found]
    assert [text.partition(". ")[0] for text in texts] == ["2.10.2", "2.16.0a0", "3.0"]


def test_flops_of_attention_and_products() -> None:
    """The CPU's attention has no formula in torch, and gets numbers among its tensors."""
    q, aten = rand(2, 4, 8, 16, grad=False), torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    result = attention.default(q, q, q, 0.0, True)
    product = 2 * 2 * 4 * 8 * 8 * 16
    assert flops(attention.default, (q, q, q, 0.0, True), {}, result) == 2 * product
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops(backward, (q, q, q, q, *result, 0.0, True), {}, None) == 5 * product
    assert flops(aten.mm.default, (q[0, 0], q[0, 0].T), {}, q) == 2 * 8 * 8 * 16
    assert flops(aten.sin.default, (q,), {}, q) == 0
