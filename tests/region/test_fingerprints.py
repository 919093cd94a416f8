"""What is compared between a tensor that a first run saved and the same one in a recompute."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerator import each_device
from cases import assert_same, gradient, rand
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from remat import RecomputeMismatchError, is_recomputing, policies, remat
from remat._region.fingerprints import checksum


def strided(shape: tuple[int, ...], *strides: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A function that saves a tensor with other strides in each run."""
    each = iter(strides)
    return lambda x: torch.empty_strided(shape, next(each), device=x.device, dtype=x.dtype).copy_(x.sin()).sin()


@each_device
def test_other_strides_are_a_mismatch(device: str) -> None:
    x = rand(4, 4).detach().to(device).requires_grad_()
    with pytest.raises(RecomputeMismatchError, match=r"with strides \(4, 1\) in the forward and .* \(1, 4\)"):
        gradient(remat(strided((4, 4), (4, 1), (1, 4))), x)
    gradient(remat(strided((4, 4), (4, 1), (1, 4)), determinism_check="none"), x)


@each_device
@pytest.mark.parametrize("shape, before, now", [((1, 4), (4, 1), (7, 1)), ((0, 4), (4, 1), (1, 7))], ids=str)
def test_strides_of_dimensions_without_extent_do_not_matter(shape: Any, before: Any, now: Any, device: str) -> None:
    x = rand(*shape).detach().to(device).requires_grad_()
    assert_same(gradient(remat(strided(shape, before, now)), x), x.sin().cos() * x.cos())


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda y: (y.view(torch.uint8) ^ torch.arange(y.nbytes).eq(0)).view(y.dtype),
    "the order": lambda y: y.flip(0),
    "another number": lambda y: y * 2,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.uint8], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_value_is_found(change: str, dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        y = (x.detach() * 9).to(dtype)  # a constant
        return (CHANGES[change](y) if is_recomputing() else y) * x

    x = torch.linspace(0.5, 1, 3).requires_grad_()
    with pytest.raises(RecomputeMismatchError, match=r"\[3\] with checksum [0-9a-f]+ in the forward and \S+ with"):
        remat(fn, determinism_check="values")(x).abs().sum().backward()
    remat(fn)(x).abs().sum().backward()  # by default values aren't compared
    assert checksum(x.detach().to("meta")) == checksum(FakeTensorMode().from_tensor(x)) == 0 != checksum(x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.parametrize("again", [True, False])
def test_a_sparse_tensor_in_one_of_the_runs_is_a_mismatch(again: bool, sparse: Callable) -> None:
    def fn(x: Tensor) -> Tensor:
        constant = torch.ones(3, 3, dtype=x.dtype) * 2
        return (sparse(constant) if is_recomputing() is again else constant) @ x

    with pytest.raises(RecomputeMismatchError, match=r"float64\[3, 3\]"):
        gradient(remat(fn), rand(3, 3))


def through_a_new_function(y: Tensor) -> Tensor:
    fns = {"forward": staticmethod(lambda ctx, y: y.clone()), "backward": staticmethod(lambda ctx, g: g)}
    return type("Own", (torch.autograd.Function,), fns).apply(y)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.t(),
    "conjugate": lambda y: torch.complex(y, y).conj().abs(),
    "negative": lambda y: torch.complex(y, y).conj().imag,
    "expanded": lambda y: y[:1].expand(3, 3),
    "empty": lambda y: y[:0],
    "copied in the recompute": lambda y: y.clone() if is_recomputing() else y.view(3, 3),
    "of a Function made in each run": through_a_new_function,
    "of a Function in the recompute": lambda y: through_a_new_function(y) if is_recomputing() else y,
    "of a Function in the forward": lambda y: y if is_recomputing() else through_a_new_function(y),
    "sparse": lambda y: torch.sparse.mm((y.detach() * 2).to_sparse(), y),
}  # fmt: skip


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("view", VIEWS)
def test_equal_values_in_any_layout_are_no_mismatch(view: str, check: str) -> None:
    x = rand(3, 3)
    fn = lambda x: (VIEWS[view](x.sin()) * VIEWS[view](x.cos())).exp()
    assert_same(gradient(remat(fn, determinism_check=check, early_stop=False), x), gradient(fn, x))


@pytest.mark.parametrize("factor", [1, 2])
def test_values_of_jagged_tensors_are_compared(factor: int) -> None:
    fn = lambda x: (torch.tanh(x.sin()) * (factor if is_recomputing() else 1) * x).sin().values()
    jagged = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged, requires_grad=True)
    with nullcontext() if factor == 1 else pytest.raises(RecomputeMismatchError, match="with checksum"):
        found = gradient(remat(fn, determinism_check="values"), jagged)
        assert_same(found.values(), gradient(fn, jagged).values())


@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.mkldnn_rnn_layer")], ids=str)
def test_values_of_an_lstm(policy: Any) -> None:
    """Its kernel for the CPU leaves a part of its workspace as it was."""
    lstm, x = nn.LSTM(6, 6, 2, bidirectional=True), rand(3, 4, 6, dtype=torch.float32)
    fn = lambda x: lstm(x * 2 if other and is_recomputing() else x)[0]
    other, inputs = False, [x, *lstm.parameters()]
    expected = torch.autograd.grad(fn(x).sum(), inputs)
    for _ in range(5):
        out = remat(fn, policy=policy, determinism_check="values")(x)
        del [torch.randn(n, n) for n in range(1, 60)][:]  # leaves bytes in the memory that later tensors get
        assert_same(torch.autograd.grad(out.sum(), inputs), expected)
    other = True
    with pytest.raises(RecomputeMismatchError, match="with checksum"):
        gradient(remat(fn, policy=policy, determinism_check="values"), x)


def test_values_of_attention() -> None:
    """CUDA's kernels leave the seeds of the dropout as they were if there is none."""
    numbers, other, attend = count(), False, torch.ops.aten._scaled_dot_product_efficient_attention

    def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
        scores = q @ k.mT
        return scores.softmax(-1) @ v, scores.logsumexp(-1), *(torch.tensor(next(numbers)) for _ in range(2))

    derivative = lambda g, q, k, v, *_, **__: (g * q, g * k, g * v, None)
    fn = lambda x: attend(x.sin(), x, x * 2 if other and is_recomputing() else x, None, True)[0].sin()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention", kernel, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", derivative, "CPU")
        x = rand(1, 2, 3, 4)
        region = remat(fn, determinism_check="values")
        assert_same(gradient(region, x), gradient(fn, x))
        other = True
        with pytest.raises(RecomputeMismatchError, match="with checksum"):
            gradient(region, x)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_values_of_distributed_tensors_are_compared(mesh: DeviceMesh) -> None:
    w, x = (distribute_tensor(rand(4, 4, seed=i).detach(), mesh, [Shard(i)]).requires_grad_() for i in range(2))
    fn = lambda x, drift: ((x @ w).sin() * (1 + drift * is_recomputing())).exp().tanh()
    region = remat(fn, determinism_check="values")
    assert_same(gradient(region, x, 0).to_local(), gradient(fn, x, 0).to_local())
    with pytest.raises(RecomputeMismatchError, match="with checksum"):
        region(x, 1e-6).sum().backward()
