"""Small models of libraries with random weights, for benchmarks: nothing is downloaded. A step takes 0.1 to 0.5 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    """A model with its batch, its loss, and the classes of its blocks."""

    model: Any
    batch: dict[str, Any]
    loss: Callable[[Any], Tensor]
    blocks: tuple[str, ...]


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        linear = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), linear[0], nn.GELU(), linear[1])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [batch, length, width]."""
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Mixed(nn.Module):
    """A stem of convolutions, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 2)]
        stages = [[nn.Conv2d(i, o, 3, stride, 1), nn.GroupNorm(4, o), nn.GELU()] for i, o, stride in sizes]
        self.stem = nn.Sequential(*(nn.Sequential(*stage) for stage in stages))
        self.body, self.head = nn.ModuleList([Block(64) for _ in range(6)]), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shape [batch, 3, height, width]."""
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.body:
            x = block(x)
        return self.head(x.mean(1))


TEXT = {"vocab_size": 200, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**TEXT, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
WHISPER = {"encoder_layers": 5, "decoder_layers": 5, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
T5 = {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_layers": 5, "num_heads": 4, "decoder_start_token_id": 1}
VIT = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 256}
UNET = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 4}
DOWN, UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")


def text(*shape: int) -> dict[str, Tensor]:
    """A batch for a language model."""
    ids = torch.randint(3, 200, shape)
    return {"input_ids": ids, "labels": ids}


def of_images(out: Any) -> Tensor:
    """The loss of a classifier."""
    logits = getattr(out, "logits", out)
    return F.cross_entropy(logits, torch.arange(len(logits)) % 10)


def transformer(name: str, head: str, batch: dict[str, Tensor], *blocks: str, **sizes: Any) -> Case:
    """A model of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes))
    return Case(model, batch, (lambda out: out.loss) if "labels" in batch else of_images, blocks)


def gpt2() -> Case:
    sizes = {"n_embd": 64, "n_layer": 12, "n_head": 4, "n_positions": 128}
    return transformer("GPT2", "LMHeadModel", text(8, 128), "GPT2Block", **TEXT, **sizes)


def llama() -> Case:
    sizes = {"intermediate_size": 172, "num_hidden_layers": 12}
    return transformer("Llama", "ForCausalLM", text(12, 128), "LlamaDecoderLayer", **LLAMA, **sizes)


def mixtral() -> Case:
    sizes = {"intermediate_size": 128, "num_hidden_layers": 6, "num_local_experts": 4}
    return transformer("Mixtral", "ForCausalLM", text(16, 128), "MixtralDecoderLayer", **LLAMA, **sizes)


def t5() -> Case:
    return transformer("T5", "ForConditionalGeneration", text(8, 96), "T5Block", **TEXT, **T5)


def vit() -> Case:
    batch = {"pixel_values": torch.randn(24, 3, 64, 64)}
    sizes = {**VIT, "image_size": 64, "patch_size": 8, "num_labels": 10}
    return transformer("ViT", "ForImageClassification", batch, "ViTLayer", **sizes)


def swin() -> Case:
    batch = {"pixel_values": torch.randn(10, 3, 64, 64)}
    sizes = {"image_size": 64, "patch_size": 2, "embed_dim": 32, "depths": [2, 2, 4], "num_heads": [2, 4, 8]}
    return transformer("Swin", "ForImageClassification", batch, "SwinLayer", **sizes, window_size=4, num_labels=10)


def whisper() -> Case:
    batch = {"input_features": torch.randn(16, 20, 200), "labels": text(16, 64)["labels"]}
    sizes = {**WHISPER, "d_model": 64, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "num_mel_bins": 20}
    lengths = {"max_source_positions": 100, "max_target_positions": 64, "decoder_start_token_id": 1}
    blocks = "WhisperEncoderLayer", "WhisperDecoderLayer"
    return transformer("Whisper", "ForConditionalGeneration", batch, *blocks, **TEXT, **sizes, **lengths)


def resnet() -> Case:
    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64, 128], "depths": [2, 3, 2], "num_labels": 10}
    batch = {"pixel_values": torch.randn(80, 3, 96, 96)}
    return transformer("ResNet", "ForImageClassification", batch, "ResNetBottleNeckLayer", **sizes)


def convnext() -> Case:
    sizes = {"hidden_sizes": [32, 64, 96], "depths": [2, 2, 3], "num_stages": 3, "num_labels": 10, "patch_size": 2}
    batch = {"pixel_values": torch.randn(24, 3, 64, 64)}
    return transformer("ConvNext", "ForImageClassification", batch, "ConvNextLayer", **sizes)


def torchvision_resnet() -> Case:
    import torchvision  # type: ignore[import-not-found]

    return Case(
        torchvision.models.resnet18(num_classes=10), {"x": torch.randn(16, 3, 64, 64)}, of_images, ("BasicBlock",)
    )


def timm_convnext() -> Case:
    import timm  # type: ignore[import-not-found]

    model = timm.create_model("convnext_atto", num_classes=10)
    return Case(model, {"x": torch.randn(20, 3, 64, 64)}, of_images, ("ConvNeXtBlock",))


def unet() -> Case:
    import diffusers

    sizes: Any = {**UNET, "sample_size": 16, "norm_num_groups": 8, "down_block_types": DOWN, "up_block_types": UP}
    batch = {"sample": torch.randn(4, 4, 32, 32), "encoder_hidden_states": torch.randn(4, 8, 32)}
    loss, blocks = lambda out: out.sample.square().mean(), ("ResnetBlock2D", "Transformer2DModel")
    return Case(diffusers.UNet2DConditionModel(**sizes), {**batch, "timestep": torch.tensor(5)}, loss, blocks)


def mixed() -> Case:
    return Case(Mixed(), {"x": torch.randn(24, 3, 32, 32)}, lambda out: out.square().mean(), ("Block",))


CASES: dict[Callable[[], Case], str | None] = {  # each with its package
    **dict.fromkeys([gpt2, llama, mixtral, t5, vit, swin, whisper, resnet, convnext], "transformers"),
    torchvision_resnet: "torchvision", timm_convnext: "timm", unet: "diffusers", mixed: None,
}  # fmt: skip
