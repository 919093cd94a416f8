"""Fine-tune a Hugging Face model: plain, with checkpointing enabled by one line, with a policy, and with a budget.

The model is a small Llama made from a config, so nothing is downloaded. The line is the same for a model from
`AutoModelForCausalLM.from_pretrained`. The example needs `transformers` (`pip install transformers`).

    python examples/finetune_huggingface.py    # about 20 seconds
"""

import sys

import torch
from torch import Tensor

import remat

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("This example needs transformers: pip install transformers")

STEPS, BATCH, LENGTH, VOCABULARY = 8, 8, 96, 128
WAYS = {
    "plain": lambda model: model,
    "remat": lambda model: remat.integrations.transformers.enable(model),
    "remat, save_matmuls": lambda model: remat.integrations.transformers.enable(
        model, policy=remat.policies.save_matmuls
    ),
    "remat, budget of 34 MiB": lambda model: remat.integrations.transformers.enable(
        model, budget="34MiB", batch=make_inputs(0)
    ),
}


def make_model() -> LlamaForCausalLM:
    """A Llama of six layers, in training mode, with the same weights in each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        max_position_embeddings=LENGTH, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def make_batch(step: int) -> Tensor:
    """Lines of a text of repeated words, as character codes."""
    text = "activation checkpointing saves the inputs of each layer and recomputes the rest; " * 8
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.tensor([[ord(c) for c in text[i : i + LENGTH]] for i in starts.tolist()])


def make_inputs(step: int) -> dict[str, Tensor | bool]:
    """Keyword arguments of the model."""
    tokens = make_batch(step)
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def finetune(model: LlamaForCausalLM) -> list[float]:
    """Train for a few steps; return the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(STEPS):
        loss = model(**make_inputs(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    found = {}
    print(f"{'one training step':24} {'saved, MiB':>11} {'peak, MiB':>11} {'loss at the end':>16}")
    for way, change in WAYS.items():
        model = change(make_model())
        report = remat.report(model, **make_inputs(0), policies=[])
        costs = report.as_written
        found[way] = finetune(model)
        saved, peak = costs.saved_bytes / 2**20, costs.peak_bytes / 2**20
        print(f"{way:24} {saved:11.2f} {peak:11.2f} {found[way][-1]:16.4f}")
    same = all(losses == found["plain"] for losses in found.values())
    print(f"\nlosses of {STEPS} steps: {'the same to the last bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
