"""`remat.nn.budget` without `where`, against what can be chosen by hand: recomputed FLOPs at the same peak.

    python -m benchmarks.autopilot [--quick] [--compile] [MODEL ...]

For each model, small and randomly initialized, each choice by hand is measured: (b) `nn.budget(where=C)` for each class
C of the model, (c) every k-th block as a region, and the blocks under presets, (d) the library's own checkpointing. The
amounts of (b) are parts of plain's peak, and the least that works. Of these choices, those that no other one beats are
kept, and `nn.budget(model, amount)` plans for exactly their measured peaks. `FLOPs` are those of the plan in parts of
those by hand: at most 1 in each row. Peaks are those of the allocator, with kernels' own memory, in a real step.

The exit status is 1 if a plan recomputes more than a choice by hand, if a step is above its amount, if promised FLOPs
are not the measured ones, if gradients differ from plain's, or if planning takes more than 15 steps (25 with
convolutions). With `--compile` torch's `activation_memory_budget` is shown beside, where the model compiles.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import remat
from benchmarks.measure import FlopCount
from remat import policies
from remat._measure.allocated import Allocated

PARTS = [0.8, 0.6, 0.4, 0.25]
STEPS, STEPS_OF_CONVOLUTIONS = 15, 25  # the most plain steps that planning may take
PRESETS = [policies.save_matmuls, policies.save_attention, policies.save_matmuls | policies.save_attention]


class Case(NamedTuple):
    """A model with its batch; its block's class; whether it has convolutions."""

    model: nn.Module
    batch: dict[str, Any]
    loss: Callable[[Any], Tensor] | None
    block: str
    has_convolutions: bool = False


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Mixed(nn.Module):
    """A stem of convolutions, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 2)]
        self.stem = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.GroupNorm(4, o), nn.GELU()) for i, o, s in sizes)
        )
        self.body, self.head = nn.ModuleList([Block(64) for _ in range(6)]), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.body:
            x = block(x)
        return self.head(x.mean(1))


def text(size: int, *shape: int) -> Tensor:
    return torch.randint(3, size, shape)


def squared(out: Any) -> Tensor:
    return out.square().mean()


def of_images(out: Any) -> Tensor:
    return F.cross_entropy(out.logits, torch.arange(len(out.logits)) % 10)


def gpt2() -> Case:
    import transformers as tf

    ids = text(200, 8, 128)
    sizes = {"n_embd": 64, "n_layer": 12, "n_head": 4, "vocab_size": 200, "n_positions": 128}
    config = tf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    return Case(tf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, None, "GPT2Block")


def llama() -> Case:
    import transformers as tf

    ids = text(200, 8, 128)
    config = tf.LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=128, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return Case(tf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, None, "LlamaDecoderLayer")


def mixtral() -> Case:
    import transformers as tf

    ids = text(200, 4, 128)
    config = tf.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=128, use_cache=False, num_local_experts=4, pad_token_id=0,
    )  # fmt: skip
    return Case(tf.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}, None, "MixtralDecoderLayer")


def t5() -> Case:
    import transformers as tf

    ids = text(200, 8, 96)
    sizes = {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_layers": 5, "num_heads": 4, "vocab_size": 200}
    config = tf.T5Config(**sizes, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    return Case(tf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, None, "T5Block")


def vit() -> Case:
    import transformers as tf

    config = tf.ViTConfig(
        hidden_size=64, num_hidden_layers=12, num_attention_heads=4, intermediate_size=256, image_size=64, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(16, 3, 64, 64)}
    return Case(tf.ViTForImageClassification(config), images, of_images, "ViTLayer")


def swin() -> Case:
    import transformers as tf

    config = tf.SwinConfig(
        image_size=64, patch_size=2, embed_dim=32, depths=[2, 2, 4], num_heads=[2, 4, 8], window_size=4, num_labels=10
    )
    return Case(
        tf.SwinForImageClassification(config), {"pixel_values": torch.randn(4, 3, 64, 64)}, of_images, "SwinLayer"
    )


def whisper() -> Case:
    import transformers as tf

    config = tf.WhisperConfig(
        d_model=64, encoder_layers=5, decoder_layers=5, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=200, num_mel_bins=20, max_source_positions=100,
        max_target_positions=64, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": torch.randn(8, 20, 200), "labels": text(200, 8, 64)}
    return Case(tf.WhisperForConditionalGeneration(config), batch, None, "WhisperEncoderLayer")


def resnet() -> Case:
    import transformers as tf

    config = tf.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128], depths=[2, 3, 2], num_labels=10)
    images = {"pixel_values": torch.randn(24, 3, 96, 96)}
    return Case(tf.ResNetForImageClassification(config), images, of_images, "ResNetBottleNeckLayer", True)


def convnext() -> Case:
    import transformers as tf

    config = tf.ConvNextConfig(hidden_sizes=[32, 64, 96], depths=[2, 2, 3], num_stages=3, num_labels=10, patch_size=2)
    images = {"pixel_values": torch.randn(24, 3, 64, 64)}
    return Case(tf.ConvNextForImageClassification(config), images, of_images, "ConvNextLayer", True)


def unet() -> Case:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=4,
        norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    states = torch.randn(4, 8, 32)
    batch = {"sample": torch.randn(4, 4, 32, 32), "timestep": torch.tensor(5), "encoder_hidden_states": states}
    return Case(model, batch, lambda out: squared(out.sample), "ResnetBlock2D", True)


def mixed() -> Case:
    return Case(Mixed(), {"x": torch.randn(8, 3, 32, 32)}, squared, "Block", True)


CASES = [gpt2, llama, mixtral, t5, vit, swin, whisper, resnet, convnext, unet, mixed]


class Step(NamedTuple):
    """A real step: its peak, its FLOPs, its gradients, and its seconds."""

    peak: int
    flops: int
    gradients: list[Tensor | None]
    seconds: float


def step(case: Case) -> Step:
    """Run a step a few times, and measure it."""
    loss = case.loss or (lambda out: out.loss)

    def run(count: Any = None) -> float:
        case.model.zero_grad()
        torch.manual_seed(1)
        start = time.perf_counter()
        if count is None:
            loss(case.model(**case.batch)).backward()
        else:
            with count:
                loss(case.model(**case.batch)).backward()
        return time.perf_counter() - start

    memory, flops = Allocated(()), FlopCount()
    run()
    run(flops)
    gradients = [p.grad for p in case.model.parameters()]
    run(memory)
    return Step(memory.peak, flops.flops, gradients, statistics.median(run() for _ in range(3)))


def classes(case: Case) -> list[type]:
    """The classes of the model whose modules have others in them, or are activations and norms."""
    leaves = (nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList)
    found = {type(module) for name, module in case.model.named_modules() if name}
    return sorted((cls for cls in found if not issubclass(cls, leaves)), key=lambda cls: cls.__name__)


def by_hand(case: Case, plain: Step, parts: list[float]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The choices by hand, each with what makes it."""
    model = case.model
    for cls in classes(case):
        yield f"(b) {cls.__name__} least", lambda cls=cls: remat.nn.apply(model, cls)
        for part in parts:
            amount = int(part * plain.peak)
            options = {"where": cls, "loss": case.loss, "cost": "flops", **case.batch}
            yield f"(b) {cls.__name__} {part}", lambda a=amount, o=options: remat.nn.budget(model, a, **o)
    block = next(type(module) for module in model.modules() if type(module).__name__ == case.block)
    for k in (2, 3, 4):
        yield f"(c) every {k}", lambda k=k: remat.nn.apply(model, remat.nn.every(k, block))
    for policy in PRESETS:
        yield f"(c) {policy}", lambda p=policy: remat.nn.apply(model, block, policy=p)
    for name in ("gradient_checkpointing_enable", "enable_gradient_checkpointing"):
        if hasattr(model, name) and getattr(model, "supports_gradient_checkpointing", True):
            yield "(d) its own", getattr(model, name)


def undo(model: Any) -> None:
    remat.nn.undo(model)
    for name in ("gradient_checkpointing_disable", "disable_gradient_checkpointing"):
        if hasattr(model, name):
            getattr(model, name)()
            break


def compiled(case: Case, part: float) -> str:
    """Torch's own budget for a compiled model, as text."""
    import torch._functorch.config as config

    torch._dynamo.reset()
    try:
        with config.patch(activation_memory_budget=part):
            called = torch.compile(case.model, backend="aot_eager_decomp_partition")
            found = step(case._replace(model=called))
    except Exception as error:
        return f"(e) does not compile: {type(error).__name__}"
    return f"(e) budget {part}: peak {found.peak / 2**20:.1f} MiB, {found.flops / 1e6:,.0f} MFLOP"


def compare(name: str, case: Case, parts: list[float], with_compile: bool) -> list[str]:
    """Print the rows of a model; return what falls short."""
    case.model.train()
    plain, short = step(case), list[str]()
    print(
        f"\n{name}: plain {plain.peak / 2**20:.1f} MiB, {plain.flops / 1e6:,.0f} MFLOP, {plain.seconds:.2f} s",
        flush=True,
    )
    hand: list[tuple[int, int, str]] = []
    for label, make in by_hand(case, plain, parts):
        try:
            make()
            found = step(case)
            hand.append((found.peak, found.flops - plain.flops, label))
        except Exception as error:
            if not isinstance(error, (remat.RematError, TypeError, ValueError)):
                print(f"  {label}: {type(error).__name__}: {str(error)[:100]}")
        undo(case.model)
    best = [row for i, row in enumerate(sorted(hand)) if all(row[1] < other[1] for other in sorted(hand)[:i])]
    for peak, flops, label in best:
        if peak >= plain.peak:
            continue
        start = time.perf_counter()
        try:
            plan = remat.nn.budget(case.model, peak, loss=case.loss, cost="flops", **case.batch)
        except remat.RematError as error:
            short.append(f"{name}: {label}: {str(error)[:150]}")
            print("  ", short[-1])
            continue
        steps = (time.perf_counter() - start) / plain.seconds
        found = step(case)
        mine = found.flops - plain.flops
        ratio = mine / flops if flops else (1.0 if not mine else float("inf"))
        print(
            f"  {label:40} peak {peak / plain.peak:.3f} -> {found.peak / plain.peak:.3f}; FLOPs {flops / 1e6:,.1f} -> "
            f"{mine / 1e6:,.1f} ({ratio:.2f}); planned in {steps:.1f} steps; least {plan.curve[0][0] / plain.peak:.3f}",
            flush=True,
        )
        most = STEPS_OF_CONVOLUTIONS if case.has_convolutions else STEPS
        same = [a is b is None or torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(found.gradients, plain.gradients)]
        wrong = {
            "more FLOPs": mine > flops, "above the amount": found.peak > peak, "other FLOPs": plan.flops != mine,
            "other gradients": not all(same), f"{steps:.1f} steps of planning": steps > most,
        }  # fmt: skip
        short += [f"{name}: {label}: {what}" for what, is_wrong in wrong.items() if is_wrong]
        remat.nn.undo(case.model)
    if best:
        least = min(peak for peak, _, _ in hand)
        plan = remat.nn.budget(case.model, least, loss=case.loss, **case.batch)
        print(
            f"  least peak: by hand {least / plain.peak:.3f}, predicted for plans {plan.curve[0][0] / plain.peak:.3f}"
        )
        remat.nn.undo(case.model)
    for part in parts if with_compile else ():
        print(f"  {compiled(case, part)}")
    return short


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    names = [each for each in arguments if not each.startswith("-")]
    quick = "--quick" in arguments
    short: list[str] = []
    for make in CASES[::7] if quick else CASES:
        if names and make.__name__ not in names:
            continue
        torch.manual_seed(0)
        try:
            case = make()
        except ImportError as error:
            print(f"\n{make.__name__}: absent: {error}")
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            short += compare(make.__name__, case, PARTS[1:3] if quick else PARTS, "--compile" in arguments)
    print("\n" + "\n".join(short or ["no row falls short"]))
    return bool(short)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
