"""Training on a device by transformers' Trainer and by accelerate, on one device or two, with and without regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator import DEVICE, backend
from cases import assert_same
from torch import Tensor

from benchmarks.libraries import PRODUCTS, TOKENS, own_transformer, transformer
from benchmarks.measure import OpCounter
from remat import policies
from remat.integrations.transformers import enable

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.cuda, pytest.mark.integration, pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("collector_off"),
]  # fmt: skip

known = pytest.mark.skipif(DEVICE == "sim", reason="accelerate doesn't know this device")

STEPS = 3
IDS = TOKENS.repeat(4, 1)
Train = Callable[[Any], Any]


def llama() -> Any:
    return transformer("Llama", attention_dropout=0.1, num_hidden_layers=4)


def as_it_is(model: Any) -> Any:
    return model


def watched(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of a call, its peak of bytes on the devices, and the number of its products."""
    devices = range(backend.device_count())
    torch.accelerator.synchronize()
    before = sum(backend.memory_allocated(i) for i in devices)
    for i in devices:
        backend.reset_peak_memory_stats(i)
    with OpCounter() as ops:
        result = run()
    peak = sum(backend.max_memory_allocated(i) for i in devices) - before
    return result, peak, sum(ops[name] for name in PRODUCTS)


def compare(train: Train) -> None:
    """Results are those of the plain model; products and peak at most those of the library's own checkpointing."""
    expected, plain_peak, plain_products = train(as_it_is)
    its, its_peak, its_products = train(own_transformer)
    assert_same(its, expected)
    for policy in (None, policies.save_matmuls, policies.offload(policies.save_matmuls)):
        actual, peak, products = train(lambda model, policy=policy: enable(model, policy))
        assert_same(actual, expected)
        assert peak < plain_peak
        if policy is None:
            assert peak <= its_peak and plain_products < products <= its_products
        else:
            assert products == plain_products


def by_trainer(path: Any) -> Train:
    class Batches(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return STEPS * len(IDS)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            ids = IDS[0].roll(index)
            return {"input_ids": ids, "labels": ids}

    def train(change: Callable[[Any], Any]) -> Any:
        model = change(llama())
        arguments = transformers.TrainingArguments(
            output_dir=str(path), max_steps=STEPS, per_device_train_batch_size=4, report_to=[], save_strategy="no",
            seed=3, disable_tqdm=True,
        )  # fmt: skip
        arguments._n_gpu = 1  # otherwise it uses DataParallel, which sums gradients in no fixed order
        trainer = transformers.Trainer(model, arguments, train_dataset=Batches())
        _, peak, products = watched(trainer.train)
        assert next(model.parameters()).device.type == DEVICE
        return list(model.parameters()), peak, products

    return train


@known
def test_trainer(tmp_path: Any) -> None:
    compare(by_trainer(tmp_path))


@known
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(change: Callable[[Any], Any]) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it allows one precision per process
        accelerator = accelerate.Accelerator(mixed_precision=precision)
        model = change(llama())
        ready, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        ids = IDS.to(accelerator.device)
        losses = []

        def run() -> None:
            torch.manual_seed(1)
            for _ in range(STEPS):
                loss = ready(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())

        _, peak, products = watched(run)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        assert losses[0].device.type == DEVICE
        return (losses, [p.detach() for p in model.parameters()]), peak, products

    compare(train)


def test_llama_over_two_devices() -> None:
    """The second half of the model is on the second device, as with accelerate's `device_map`."""
    accelerate = pytest.importorskip("accelerate")
    if backend.device_count() < 2:
        pytest.skip("there is one device")
    where = {
        "model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1,
        **{f"model.layers.{i}": i // 2 for i in range(4)},
    }  # fmt: skip

    def train(change: Callable[[Any], Any]) -> Any:
        model = change(llama())
        torch.manual_seed(1)
        spread = accelerate.dispatch_model(model, {name: f"{DEVICE}:{i}" for name, i in where.items()})
        optimizer = torch.optim.SGD(spread.parameters(), 0.1)
        ids = IDS.to(f"{DEVICE}:0")

        def run() -> list[Tensor]:
            losses = []
            for _ in range(STEPS):
                loss = spread(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses

        losses, peak, products = watched(run)
        assert {p.device.index for p in spread.parameters()} == {0, 1}
        return (losses, [p.detach() for p in spread.parameters()]), peak, products

    compare(train)
