"""Costs of models from popular libraries with remat, against the library's own checkpointing.

    python -m benchmarks.libraries [--json] [--output FILE]

The models are tiny, with random weights, on the CPU; nothing is downloaded. A row has the bytes that are saved between
forward and backward, the peak of live tensor bytes in a step, and the number of matrix products and convolutions that
the backward recomputes. The exit status is 1 if with `policy=None` one of them is more than with the library's own
checkpointing. `extra` bytes are allowed for what a region must save to be correct where torch's checkpoint isn't.

The last table has the peaks of libraries that take second derivatives or per-sample gradients
(`benchmarks.derivatives`).
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import remat.nn
from benchmarks.derivatives import USES, Peaks, peaks, peaks_table
from benchmarks.measure import OpCounter, PeakMemory, gc_disabled, held_bytes
from benchmarks.report import KIB, installed, parse, report, verdict

__all__ = ["LIBRARIES", "Costs", "Library", "costs", "main", "step", "watched"]

TOKENS = torch.arange(2 * 24).reshape(2, 24) * 7 % 64
PRODUCTS = "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution"


@dataclass(frozen=True)
class Library:
    """A model of a library, with functions that switch on the library's own checkpointing and remat's."""

    name: str
    package: str
    write: str  # what the user writes
    make: Callable[[], Any]
    loss: Callable[[Any], Tensor]
    own: Callable[[Any], Any]  # changes the model
    ours: Callable[[Any, Any], Any]  # the same, with a policy
    extra: Callable[[Any], int] = lambda model: 0  # bytes that regions save and torch's checkpoint doesn't


@dataclass(frozen=True)
class Costs:
    """The costs of one step."""

    kept: int
    peak: int
    products: int


def step(library: Library, model: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the parameters' gradients, with the same random numbers in each call."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = library.loss(model)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def watched(fn: Callable[..., Any], /, *args: Any) -> tuple[Any, int, int]:
    """The result of a call, its peak of live bytes, and the number of products that it runs."""
    with gc_disabled(), PeakMemory() as memory, OpCounter() as ops:
        result = fn(*args)
    return result, memory.peak, sum(ops[name] for name in PRODUCTS)


def costs(library: Library, model: Any) -> Costs:
    """The costs of a step, if the gradients are allocated already."""
    _, peak, products = watched(step, library, model)
    return Costs(held_bytes(lambda: library.loss(model)), peak, products)


# --- transformers -------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2,
              "n_head": 4, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "num_key_value_heads": 2}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 8}),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SIZES, **EXPERTS}),
    "T5": ("T5Config", "T5ForConditionalGeneration", {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64,
           "num_layers": 2, "num_heads": 4, "use_cache": False, "decoder_start_token_id": 0}),
    "ViT": ("ViTConfig", "ViTForImageClassification", {"hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}),
}  # fmt: skip


def transformer(name: str, **options: Any) -> Any:
    import transformers

    config, cls, sizes = CONFIGS[name]
    torch.manual_seed(0)
    return getattr(transformers, cls)(getattr(transformers, config)(**{**sizes, **options})).train()


def transformer_loss(name: str, model: Any) -> Tensor:
    if name == "ViT":
        images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
        loss: Tensor = model(pixel_values=images, labels=torch.tensor([0, 1])).loss
    else:
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    return loss


def own_transformer(model: Any) -> Any:
    model.activation_checkpointing_enable()
    return model


def enabled(model: Any, policy: Any) -> Any:
    return remat.integrations.transformers.enable(model, policy)


def applied(model: Any, policy: Any) -> Any:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return remat.nn.apply(model, GradientCheckpointingLayer, policy=policy)


def of_transformers(name: str, write: str, ours: Callable[[Any, Any], Any]) -> Library:
    make, loss = partial(transformer, name), partial(transformer_loss, name)
    extra = router_logits if name == "Mixtral" else Library.extra
    return Library(f"transformers {name}", "transformers", write, make, loss, own_transformer, ours, extra)


def router_logits(model: Any) -> int:
    """A region saves the contents of a list that it appends to, here the router logits of the layers before it."""
    return sum(logits.nbytes for logits in model(input_ids=TOKENS).router_logits[:-1])


# --- peft ---------------------------------------------------------------------------------------------------------


def lora() -> Any:
    import peft

    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformer("Llama"), config)


# --- diffusers ----------------------------------------------------------------------------------------------------


def unet() -> Any:
    import diffusers

    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(16, 32), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ).train()  # fmt: skip


def unet_loss(model: Any) -> Tensor:
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
    loss: Tensor = model(images, torch.tensor([3, 7])).sample.square().mean()
    return loss


def own_unet(model: Any) -> Any:
    model.enable_gradient_checkpointing()
    return model


def unet_with_regions(model: Any, policy: Any) -> Any:
    model.enable_gradient_checkpointing(partial(remat.compat.checkpoint, policy=policy))
    return model


# --- a model that calls torch's checkpoint itself, and one that FSDP's function wraps ---------------------------------


def statistics(model: nn.Module) -> int:
    """The bytes of batch norm's statistics, twice: a region saves a copy of them, and recomputes on another."""
    return 2 * sum(buffer.nbytes for buffer in model.buffers())


class Residual(nn.Module):
    """Two convolutions with batch norm around a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution, norm in zip(self.convolutions, self.norms):
            y = norm(convolution(y.relu()))
        return x + y


class ResidualNet(nn.Module):
    """A network that checkpoints its blocks, as timm's models do, if `checkpoints` is set."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 2)
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def residual_net() -> ResidualNet:
    torch.manual_seed(0)
    return ResidualNet()


def residual_loss(model: ResidualNet) -> Tensor:
    images = torch.linspace(-1, 1, 4 * 3 * 16 * 16).reshape(4, 3, 16, 16).sin()
    return nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 0, 1]))


def with_checkpoints(model: ResidualNet) -> ResidualNet:
    model.checkpoints = True
    return model


class Installed(nn.Module):
    """The model in a program that calls `remat.compat.install`."""

    def __init__(self, model: ResidualNet, policy: Any) -> None:
        super().__init__()
        self.model, self.policy = with_checkpoints(model), policy

    def forward(self, x: Tensor) -> Tensor:
        with remat.compat.install(self.policy):
            logits: Tensor = self.model(x)
            return logits


def is_residual(module: nn.Module) -> bool:
    return isinstance(module, Residual)


def torch_wrapped(model: ResidualNet) -> ResidualNet:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=is_residual)
    return model


def wrapped(model: ResidualNet, policy: Any) -> ResidualNet:
    remat.compat.apply_activation_checkpointing(model, check_fn=is_residual, policy=policy)
    return model


ENABLE = "remat.integrations.transformers.enable(model)"
LIBRARIES: list[Library] = [
    *(of_transformers(name, ENABLE, enabled) for name in CONFIGS),
    *(of_transformers(name, "remat.nn.apply(model, GradientCheckpointingLayer)", applied) for name in CONFIGS),
    Library("peft LoRA of Llama", "peft", ENABLE, lora, partial(transformer_loss, "Llama"), own_transformer, enabled),
    Library("diffusers UNet2DModel", "diffusers", "model.enable_gradient_checkpointing(remat.compat.checkpoint)",
            unet, unet_loss, own_unet, unet_with_regions),
    Library("calls torch's checkpoint", "torch", "remat.compat.install()",
            residual_net, residual_loss, with_checkpoints, Installed, statistics),
    Library("FSDP's wrapping", "torch", "remat.compat.apply_activation_checkpointing(model, check_fn=...)",
            residual_net, residual_loss, torch_wrapped, wrapped, statistics),
]  # fmt: skip


# --- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A row: costs without checkpointing, with the library's own, with remat, and with remat under `save_matmuls`."""

    name: str
    write: str
    extra: int
    plain: Costs
    own: Costs
    ours: Costs
    save_matmuls: Costs

    @property
    def passed(self) -> bool:
        ours, own, extra = self.ours, self.own, self.extra
        return ours.kept <= own.kept + extra and ours.peak <= own.peak + extra and ours.products <= own.products

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def measure(library: Library) -> Measurement:
    """Measure one row."""
    model = library.make()
    step(library, model)
    models = {
        "plain": model,
        "own": library.own(copy.deepcopy(model)),
        "ours": library.ours(copy.deepcopy(model), None),
        "save_matmuls": library.ours(copy.deepcopy(model), remat.policies.save_matmuls),
    }
    for each in models.values():
        step(library, each)
    measured = {key: costs(library, each) for key, each in models.items()}
    return Measurement(library.name, library.write, library.extra(model), **measured)


def table(rows: Sequence[Measurement]) -> str:
    """Three tables in Markdown. Products are counted beyond those of the plain model."""
    figures: dict[str, Callable[[Measurement, Costs], str]] = {
        "saved, KiB": lambda row, costs: f"{costs.kept / KIB:,.1f}",
        "peak, KiB": lambda row, costs: f"{costs.peak / KIB:,.1f}",
        "recomputed products": lambda row, costs: str(costs.products - row.plain.products),
    }
    lines = []
    for head, text in figures.items():
        lines += [f"| {head} | plain | its own | remat | `save_matmuls` |", "|---|---|---|---|---|"]
        for row in rows:
            each = [text(row, costs) for costs in (row.plain, row.own, row.ours, row.save_matmuls)]
            lines.append(f"| {row.name} | {' | '.join(each)} |")
        lines.append("")
    lines += [f"{row.name}, `{row.write}`: {verdict(row)}" for row in rows]
    return "\n".join(lines)


def tables(rows: Sequence[Measurement | Peaks]) -> str:
    """The tables of both kinds of rows."""
    models = [row for row in rows if isinstance(row, Measurement)]
    uses = [row for row in rows if isinstance(row, Peaks)]
    return f"{table(models)}\n\n{peaks_table(uses)}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argparse.ArgumentParser(description=__doc__), argv)
    rows: list[Measurement | Peaks] = [measure(each) for each in LIBRARIES if installed(each.package, each.name)]
    rows += [peaks(use) for use in USES if installed(use.package, use.name)]
    return report(options, rows, tables)


if __name__ == "__main__":
    sys.exit(main())
