"""Outputs that transformers collects in lists, through a context variable: nothing of a step stays alive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.measure import held_bytes, leaked_bytes
from remat import policies
from remat.compat import checkpoint

transformers = pytest.importorskip("transformers")
GradientCheckpointingLayer = pytest.importorskip("transformers.modeling_layers").GradientCheckpointingLayer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("collector_off"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


def mixtral(function: Callable | None) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        output_router_logits=True, router_aux_loss_coef=0.1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).train()
    if function is not None:
        model.gradient_checkpointing_enable()
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        assert len(layers) == 3
        for each in layers:
            each._gradient_checkpointing_func = function
    return model


@pytest.mark.parametrize("collects", [False, True], ids=["logits", "all"])
@pytest.mark.parametrize("loss", ["loss", "logits", "none"])
@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=["nothing", "matmuls"])
def test_mixtral(policy: Any, loss: str, collects: bool) -> None:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))

    def run(model: nn.Module) -> Any:
        return model(tokens, labels=tokens, output_attentions=collects, output_hidden_states=collects)

    def step(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        out = run(model)
        target = {"loss": out.loss, "logits": out.logits.sum(), "none": None}[loss]
        gradients = () if target is None else torch.autograd.grad(target, parameters, allow_unused=True)
        counts = [len(out.router_logits), len(out.attentions or ()), len(out.hidden_states or ())]
        return out.loss.detach(), [t.detach() for t in out.router_logits], gradients, counts

    ours = mixtral(partial(checkpoint, use_reentrant=False, policy=policy))
    torchs = mixtral(partial(torch_checkpoint, use_reentrant=False))
    torch.testing.assert_close(step(ours), step(mixtral(None)), rtol=0, atol=0)
    assert step(ours)[3] == [3, 3 * collects, 4 * collects]
    for model in ours, torchs:
        leaked_bytes(step, model)  # objects made in the first step may stay alive
        assert leaked_bytes(step, model) == 0
    if policy is None:
        assert held_bytes(run, ours) <= held_bytes(run, torchs) < held_bytes(run, mixtral(None))
