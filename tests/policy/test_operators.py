"""The operators that torch executes reach the presets, in every mode and under transforms."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import count_ops
from remat import policies
from remat._core.private import operator_names
from remat._policy import operators
from remat._policy.policy import Policy, Verdict
from remat._policy.predicates import Question

MATMULS, WITHOUT_BATCH = policies.save_matmuls, policies.save_matmuls_without_batch_dims
CONVOLVED, ATTENTION = policies.save_convolutions, policies.save_attention


class Kept(TorchDispatchMode):
    """Records the names of the operators that reach a dispatch mode and that a policy saves."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.policy.judge(Question(None, op, args, {}, {})) is Verdict.SAVE:
            self.names.append(operators.packet_name(op).partition("::")[2])
        return op(*args, **(kwargs or {}))


def kept(policy: Policy, fn: Callable, *args: Any) -> list[str]:
    """The names of the operators in a call that a policy saves."""
    with Kept(policy) as kept:
        fn(*args)
    return kept.names


rand = lambda *sizes: torch.randn(*sizes).requires_grad_()
einsum = lambda equation: functools.partial(torch.einsum, equation)
Calls = dict[str, tuple[Callable, tuple[Tensor, ...]]]
PRODUCTS: Calls = {
    "matrix @ matrix": (torch.matmul, (rand(4, 4), rand(4, 4))),
    "batch @ matrix": (torch.matmul, (rand(2, 4, 4), rand(4, 4))),
    "vector @ vector": (torch.matmul, (rand(4), rand(4))),
    "linear of 3-D with bias": (F.linear, (rand(2, 3, 4), rand(5, 4), rand(5))),
    "addmv": (torch.addmv, (rand(4), rand(4, 4), rand(4))),
    "vdot": (torch.vdot, (rand(4), rand(4))),
    "tensordot": (functools.partial(torch.tensordot, dims=1), (rand(4, 4), rand(4, 4))),
    "einsum of matrices": (einsum("ij,jk->ik"), (rand(4, 4), rand(4, 4))),
    "einsum with a weight": (einsum("bth,hf->btf"), (rand(2, 3, 4), rand(4, 5))),
    "multi_dot": (lambda *xs: torch.linalg.multi_dot(xs), (rand(4, 4), rand(4, 4), rand(4, 4))),
    "LSTM cell": (nn.LSTMCell(4, 4), (rand(2, 4),)),
}
BATCHED: Calls = {
    "batch @ batch": (torch.matmul, (rand(2, 4, 4), rand(2, 4, 4))),
    "baddbmm": (torch.baddbmm, (rand(2, 4, 4), rand(2, 4, 4), rand(2, 4, 4))),
    "bmm of one": (torch.bmm, (rand(1, 4, 4), rand(1, 4, 4))),
    "batched einsum": (einsum("bij,bjk->bik"), (rand(2, 4, 4), rand(2, 4, 4))),
    "bilinear": (F.bilinear, (rand(2, 3), rand(2, 4), rand(5, 3, 4))),
}
CONVOLUTIONS: Calls = {
    "conv1d": (functools.partial(F.conv1d, padding="same"), (rand(1, 2, 5), rand(3, 2, 3))),
    "conv2d": (F.conv2d, (rand(1, 2, 5, 5), rand(3, 2, 2, 2), rand(3))),
    "conv_transpose3d": (F.conv_transpose3d, (rand(1, 2, 5, 5, 5), rand(2, 3, 2, 2, 2))),
    "conv_tbc": (F.conv_tbc, (rand(5, 1, 2), rand(2, 2, 3), rand(3))),
}
CALLS = PRODUCTS | BATCHED | CONVOLUTIONS
NO_BATCHING_RULE = pytest.mark.filterwarnings("ignore:There is a performance drop")


@NO_BATCHING_RULE
@pytest.mark.parametrize("name", CALLS)
def test_a_preset_sees_products_and_convolutions(name: str) -> None:
    fn, args = CALLS[name]
    for ambient in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with ambient:
            seen = kept(MATMULS, fn, *args)
            assert seen
            assert kept(WITHOUT_BATCH, fn, *args) == (seen if name in PRODUCTS else [])
            assert kept(CONVOLVED, fn, *args) == (seen if name in CONVOLUTIONS else [])
    if name != "LSTM cell":
        assert kept(MATMULS, vmap(fn), *(torch.stack([x, x]) for x in args))


@NO_BATCHING_RULE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(3, 3).tril() == 1}], ids=str)
def test_fused_attention_is_seen(options: dict, dtype: torch.dtype) -> None:
    x = torch.randn(2, 2, 3, 4, dtype=dtype, requires_grad=True)
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    f = lambda x: F.scaled_dot_product_attention(x, x, x, **options)
    assert kept(ATTENTION, f, x) == kept(ATTENTION, torch.no_grad()(f), x) == [kernel]
    assert kept(ATTENTION, grad(lambda x: f(x).sum()), x.detach()) == [kernel]
    assert kept(ATTENTION, vmap(f), torch.stack([x, x])) == [kernel] * 2


WITHOUT_KERNEL = {
    "backend": sdpa_kernel(SDPBackend.MATH)(lambda x: F.scaled_dot_product_attention(x, x, x)),
    "dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "mask with gradient": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=rand(3, 3)),
}


@pytest.mark.parametrize("f", WITHOUT_KERNEL.values(), ids=WITHOUT_KERNEL)
def test_attention_without_a_kernel_is_batched_products(f: Callable) -> None:
    x = rand(2, 2, 3, 4)
    assert count_ops(f, x)["aten.bmm"] == 2
    assert [kept(policy, f, x) for policy in (ATTENTION, MATMULS, WITHOUT_BATCH)] == [[], ["bmm", "bmm"], []]


def test_composites_that_torch_does_not_decompose_are_seen() -> None:
    nested = torch.nested.nested_tensor([rand(2, 4), rand(3, 4)], layout=torch.jagged, requires_grad=True)
    assert kept(MATMULS, F.linear, nested, rand(5, 4)) == ["linear"]
    with torch.inference_mode():
        assert kept(MATMULS, F.linear, rand(3, 4), rand(5, 4)) == ["linear"]
        assert kept(MATMULS, F.conv2d, *CONVOLUTIONS["conv2d"][1]) == ["conv2d"]
        attention = kept(ATTENTION, F.scaled_dot_product_attention, *[rand(1, 2, 3, 4)] * 3)
        assert attention == ["scaled_dot_product_attention"]


def test_the_names_in_groups_exist() -> None:
    """A misspelled name would silently save nothing; names of other packages and of newer torch are few."""
    names = operators.MATMULS | operators.ATTENTION
    missing = {name for name in names if name.startswith(("aten::", "quantized::", "mkl"))} - known_names()
    newer = {"_scaled_mm_v2", "_scaled_grouped_mm_v2", "_foreach_mm", "_flash_attention_forward_no_dropout_inplace"}
    assert missing <= {f"aten::{name}" for name in newer}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")
def test_collectives_are_saved() -> None:
    names = {f"_c10d_functional::{name}" for name in ("all_reduce", "all_gather_into_tensor", "wait_tensor")}
    assert names <= known_names() & operators.COLLECTIVES
    assert policies.save_collectives.verdict_for(torch.ops._c10d_functional.all_reduce.default) is Verdict.SAVE


def known_names() -> set[str]:
    return {name.partition(".")[0] for name in operator_names()}
