"""Per-sample gradients and Hessian-vector products of models of transformers whose layers are regions."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.libraries import applied, enabled, transformer, watched
from remat import policies

pytest.importorskip("transformers")

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collector_off")]

IDS = torch.arange(3 * 16).reshape(3, 16) * 7 % 64
LAYERS, PER_LAYER = 2, {"Llama": 9, "GPT-2": 6}  # products in the forward of a layer, including those of its attention


def made(model: str, attention: str) -> Any:
    return transformer(model, attn_implementation="eager" if attention == "eager" else "sdpa")


def loss(model: Any, parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The loss for some sentences; dropout draws the same numbers in each call."""
    torch.manual_seed(1)
    return functional_call(model, parameters, (), {"input_ids": ids, "labels": ids}).loss


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def direction(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.linspace(-1, 1, p.numel()).reshape(p.shape) for name, p in parameters.items()}


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def per_sample(model: Any) -> dict[str, Tensor]:
    of_one = grad(lambda parameters, ids: loss(model, parameters, ids[None]))
    return vmap(of_one, in_dims=(None, 0), randomness="different")(parameters_of(model), IDS)


def forward_over_reverse(model: Any) -> dict[str, Tensor]:
    parameters = parameters_of(model)
    return jvp(grad(lambda p: loss(model, p, IDS)), (parameters,), (direction(parameters),))[1]


def reverse_over_reverse(model: Any) -> dict[str, Tensor]:
    parameters = parameters_of(model)
    along = direction(parameters)
    return grad(lambda p: dot(grad(lambda p: loss(model, p, IDS))(p), along))(parameters)


Derivative = Callable[[Any], dict[str, Tensor]]


@cache
def of_plain(derivative: Derivative, model: str, attention: str) -> tuple[dict[str, Tensor], int, int]:
    return watched(derivative, made(model, attention))


# The greatest peak relative to that of the plain model, and how many forwards are recomputed, where a product with
# tangents counts as three: without a policy, and with the products saved.
LIMITS: dict[Derivative, tuple[tuple[float, int], tuple[float, int]]] = {
    per_sample: ((0.6, 1), (0.6, 0)),
    forward_over_reverse: ((0.6, 3), (0.75, 0)),
    reverse_over_reverse: ((0.6, 7), (0.75, 4)),
}
OF_SAMPLES = [(model, *way) for model in PER_LAYER for way in (("eager", applied), ("sdpa", enabled))]
# Torch's own kernel for the CPU has a first derivative only.
OF_PRODUCTS = [("Llama", "eager", enabled), ("Llama", "math", applied), ("GPT-2", "math", enabled)]


@pytest.mark.parametrize(
    ("derivative", "model", "attention", "ours"),
    [(each, *case) for each in LIMITS for case in (OF_SAMPLES if each is per_sample else OF_PRODUCTS)],
)
def test_derivatives(derivative: Derivative, model: str, attention: str, ours: Callable) -> None:
    """With ``grad`` of a product the terms of a sum have another order; otherwise results are equal bit for bit."""
    forward = LAYERS * (PER_LAYER[model] - 2 * (model == "Llama" and attention == "sdpa"))
    with sdpa_kernel(SDPBackend.MATH) if attention == "math" else nullcontext():
        expected, its_peak, its_products = of_plain(derivative, model, attention)
        for policy, (ratio, forwards) in zip((None, policies.save_matmuls), LIMITS[derivative]):
            regions = ours(made(model, attention), policy)
            per_sample(regions)  # the first run records that random numbers are drawn
            result, peak, products = watched(derivative, regions)
            assert_same(result, expected, exact=derivative is not reverse_over_reverse)
            assert peak < ratio * its_peak
            assert products <= its_products + forwards * forward


def test_after_the_librarys_own_switch() -> None:
    """This makes the embeddings' output require grad, within the transformed function."""
    model = enabled(made("Llama", "sdpa"), None)
    model.activation_checkpointing_enable()
    with pytest.raises(RuntimeError, match="requires_grad_"):
        per_sample(model)
    model.disable_input_require_grads()
    assert_same(per_sample(model), of_plain(per_sample, "Llama", "sdpa")[0])
