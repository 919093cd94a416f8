"""The memory layout and the type of tensors in a recompute: as in the forward, on every device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerator import DEVICE
from cases import assert_same
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import grad, vmap

from remat import MutationError, RecomputeMismatchError, policies, remat

W = torch.randn(3, 3, dtype=torch.double, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def arange(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def on(device: str, tensor: Tensor) -> Tensor:
    """Copy a tensor to a device, with the same layout."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def gradient(fn: Callable, x: Tensor, *args: Any, around: Any = nullcontext) -> Tensor:
    with around():
        out = fn(x, *args)
    return torch.autograd.grad(out.sum(), x)[0]


def check(fn: Callable, device: str, *make: Callable[[], Tensor], around: Any = nullcontext) -> None:
    """Check that the gradient is the same as without a region, with and without a policy."""
    results = []
    for wrap in (lambda f: f, remat, lambda f: remat(f, policy=policies.save_only_these_names("none"))):
        x = torch.arange(1.0, 4, device=device, requires_grad=True)
        results.append(gradient(wrap(fn), x, *(on(device, each()) for each in make), around=around))
    assert_same(results[1:], [results[0]] * 2)


def changed(s: Tensor) -> Tensor:
    with torch.no_grad():
        return s.add_(1)


def kept(s: Tensor) -> Tensor:
    return s


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "gaps": lambda: arange(4, 6)[:, :3],
    "one column": lambda: arange(3, 6)[:, 1],
    "transposed": lambda: arange(3, 4).t(),
    "transposed, gaps": lambda: arange(6, 4).t()[:, ::2],
    "offset": lambda: arange(5, 3)[2:4],
    "every third": lambda: arange(9)[::3],
}
EXPANDED: dict[str, Callable[[], Tensor]] = {
    "row": lambda: arange(1).add(2).expand(3),
    "matrix": lambda: arange(3).add(2).expand(2, 3),
    "large": lambda: torch.full((1,), 2.0).expand(50_000, 3),
}


@pytest.mark.parametrize("change", [kept, changed])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_small_argument_has_the_same_layout(device: str, layout: str, change: Callable) -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        change(s)
        mine = s.as_strided((2,), (s.stride(0),))  # of the argument's own elements
        return (x[:2] * mine).sin() if s.stride() == strides else x[:2].cos().exp()

    strides = LAYOUTS[layout]().stride()
    check(fn, device, LAYOUTS[layout])


@pytest.mark.parametrize("change", [kept, changed])
def test_values_in_the_gaps_are_unchanged(device: str, change: Callable) -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        change(s)
        return (x * (s.as_strided((2, 3), (6, 1)) + s.as_strided((3,), (1,), 3))).sin()

    check(fn, device, lambda: arange(4, 6)[:, :3])


@pytest.mark.parametrize("layout", EXPANDED)
def test_an_expanded_argument_stays_expanded(device: str, layout: str) -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        return x.sin().exp() if s.is_contiguous() else (x * s).cos().exp()

    check(fn, device, EXPANDED[layout])


@pytest.mark.parametrize("change", [kept, changed])
def test_arguments_on_the_same_memory(device: str, change: Callable) -> None:
    def fn(x: Tensor, a: Tensor) -> Tensor:
        first, second = a[:3], a[1:]
        change(first)
        return inner(x, first, second)

    def inner(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        change(first)
        return (x * second).sin() * (x * first).cos()

    check(fn, device, lambda: arange(4))
    x, a = torch.arange(1.0, 4, device=device, requires_grad=True), arange(4).to(device)
    with pytest.raises(MutationError, match="share memory") if change is changed else nullcontext():
        remat(inner)(x, a[:3], a[1:])


# --- what a small argument is -----------------------------------------------------------------------------------------


def test_an_attribute_of_an_argument(device: str) -> None:
    def fn(x: Tensor, s: Any) -> Tensor:
        return (x * s * s.scale).sin()

    x, s = torch.arange(1.0, 4, device=device, requires_grad=True), arange(3).to(device)
    s.scale = 2.0
    assert_same(gradient(remat(fn), x, s), gradient(fn, x, s))


def test_a_frozen_parameter_stays_a_parameter(device: str) -> None:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        return (x * s).sin() if isinstance(s, nn.Parameter) else (x + s).cos().exp()

    x = torch.arange(1.0, 4, device=device, requires_grad=True)
    s = nn.Parameter(arange(3).to(device), requires_grad=False)
    assert_same(gradient(remat(fn), x, s), gradient(fn, x, s))


def test_an_argument_is_the_same_object(device: str) -> None:
    seen = []

    def fn(x: Tensor, s: Tensor) -> Tensor:
        seen.append((id(s), id(buffer)))
        return (x * s).sin() * buffer

    given, buffer = arange(3).to(device), arange(3).to(device)
    x = torch.arange(1.0, 4, device=device, requires_grad=True)
    gradient(remat(fn), x, given)
    assert seen == [(id(given), id(buffer))] * 2


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_special_values_do_not_count_as_changed(value: float) -> None:
    seen = []

    def fn(x: Tensor, s: Tensor) -> Tensor:
        seen.append(id(s))
        return (x * s).sin()

    given = torch.full((3,), value, device=DEVICE)
    gradient(remat(fn), torch.ones(3, device=DEVICE, requires_grad=True), given)
    assert seen == [id(given)] * 2


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.float8_e4m3fn, torch.cdouble]
)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    seen = []

    def fn(x: Tensor, s: Tensor) -> Tensor:
        seen.append(id(s))
        return (x * s.to(torch.cfloat).real).sin()

    given = torch.ones(3).to(dtype).to(device)
    gradient(remat(fn), torch.ones(3, device=device, requires_grad=True), given)
    assert seen == [id(given)] * 2


def test_statistics_that_change_without_a_version_counter(device: str) -> None:
    """Batch norm changes those that it gets as arguments."""

    def fn(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        y = F.batch_norm(x.sin(), mean, var, training=True)
        return (y * mean.exp()).cos()

    results = []
    for wrap in (lambda f: f, remat):
        torch.manual_seed(0)
        x, mean, var = (torch.randn(n).to(device) for n in ((8, 3), 3, 3))
        x.requires_grad_()
        results.append((gradient(wrap(fn), x, mean, var.exp()), mean))
    assert_same(*results)


# --- transforms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["expanded", "gaps"])
def test_derivatives_inside_of_a_region(device: str, layout: str) -> None:
    """The tensors that the backward of a product saves depend on strides."""
    w = W.to(device)
    s = torch.ones((), dtype=torch.double).expand(2, 3)
    s = on(device, s if layout == "expanded" else torch.ones(3, 4, dtype=torch.double).T[:2])

    def f(x: Tensor, s: Tensor) -> Tensor:
        return (torch.tanh((s * x) @ w) @ w.T).sin()

    def inner(x: Tensor, s: Tensor) -> Tensor:
        return grad(lambda x: f(x, s).sum())(x)

    x = torch.randn(2, 3, dtype=torch.double).to(device).requires_grad_()
    assert_same(gradient(remat(inner), x, s), gradient(inner, x, s))


@pytest.mark.parametrize("through", [grad, lambda f: grad(lambda x: vmap(grad(f))(x).sin().sum())])
def test_a_small_captured_tensor_under_transforms(device: str, through: Callable) -> None:
    w, scale = W.to(device), torch.full((1,), 2.0, dtype=torch.double).to(device).expand(3)

    def f(x: Tensor) -> Tensor:
        h = torch.tanh((scale * x) @ w)
        return (h * h.sin() @ w.T).sum()

    x = torch.randn(2, 3, dtype=torch.double).to(device).requires_grad_()
    assert_same(*(gradient(lambda x: through(each)(x).sin(), x) for each in (remat(f), f)), exact=False)


# --- hooks around a region --------------------------------------------------------------------------------------------


def dense_copies() -> AbstractContextManager:
    return saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)


@pytest.mark.parametrize("around", [dense_copies, save_on_cpu])
@pytest.mark.parametrize(
    "lay",
    [
        lambda p: p.expand(4, 3, 3),
        lambda p: torch.stack([p] * 4).mul(2)[:, :2],
        lambda p: p.t().expand(2, 3, 3).transpose(0, 1),
        lambda p: p.unfold(0, 2, 1),
    ],
    ids=["expanded", "gaps", "transposed", "windows"],
)
def test_hooks_that_lose_strides(device: str, lay: Callable, around: Any) -> None:
    w = torch.ones(1, device=device)

    def f(a: Tensor) -> Tensor:
        return (a * w).sin().exp() if a.is_contiguous() else (a * w).tanh().sin().exp()

    results = []
    for wrap in (lambda f: f, remat):
        p = arange(3, 3).div(9).to(device).requires_grad_()
        with around():
            out = wrap(f)(lay(p)).sum()
        results.append(torch.autograd.grad(out, p)[0])
    assert_same(*results)


# --- the comparison of saved tensors ----------------------------------------------------------------------------------


def test_other_strides_are_a_mismatch(device: str) -> None:
    x = torch.randn(4, 4, device=device, requires_grad=True)

    def other(x: Tensor) -> Tensor:
        return torch.empty_strided((4, 4), next(strides), device=device).copy_(x.sin()).exp()

    strides = iter([(4, 1), (1, 4)])
    out = remat(other, determinism_check="metadata")(x)
    with pytest.raises(RecomputeMismatchError, match=r"with strides \(4, 1\) in the forward and .* \(1, 4\)"):
        out.sum().backward()
    strides = iter([(4, 1), (1, 4)])
    remat(other, determinism_check="none")(x).sum().backward()


def test_strides_of_dimensions_without_extent_are_no_mismatch(device: str) -> None:
    strides = iter([(4, 1), (7, 1)])

    def other(x: Tensor) -> Tensor:
        return torch.empty_strided((1, 4), next(strides), device=device).copy_(x.sin()).exp()

    x = torch.randn(1, 4, device=device, requires_grad=True)
    assert_same(gradient(remat(other), x), x.sin().exp() * x.cos())
