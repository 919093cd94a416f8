"""Training by lightning, by accelerate and by transformers' Trainer, on the CPU and on devices, with regions.

Results are compared with those of the plain model, and costs with those of torch's or the library's checkpointing.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerator import DEVICE, backend
from cases import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat.nn
from benchmarks import libraries
from benchmarks.libraries import PRODUCTS, TOKENS, enabled, own_transformer, transformer
from benchmarks.measure import OpCounter
from remat import policies

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collector_off")]
known = pytest.mark.skipif(DEVICE == "sim", reason="accelerate doesn't know this device")
on_device = partial(pytest.param, DEVICE, marks=[pytest.mark.cuda, known])

STEPS, EVERY = 4, 2  # the optimizer steps after every second batch
WIDTH = 16
# A recomputed value and the gradient of a bias are alive together until the node ends; torch frees it earlier.
BIAS = 64
# On a device a region has copies of small inputs that need no gradient, until it is known not to change them: for each
# of four layers positions, cosines and sines, which CUDA's allocator rounds up.
COPIES = 4 * 3 * 512
DATA = torch.linspace(-1, 1, STEPS * 8 * WIDTH).sin().reshape(-1, WIDTH)
IDS = torch.arange(STEPS * 8 * 16).reshape(-1, 16) * 7 % 64


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """Checkpoints its blocks if `checkpoints` is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch_checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def with_checkpoints(model: Any) -> Any:
    model.checkpoints = True
    return model


def of_language(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def llama() -> Any:
    pytest.importorskip("transformers")
    return transformer("Llama", attention_dropout=0.1, num_hidden_layers=4)


# It trains a model after a change, and returns losses and parameters, the peak, and the number of products.
Train = Callable[[Callable[[Any], Any]], tuple[Any, int, int]]


def compare(train: Train, own: Callable[[Any], Any], ours: Callable[[Any, Any], Any], extra: int = BIAS) -> None:
    """Results are those of the plain model, and costs at most those of the model's own checkpointing."""
    expected, plain_peak, plain_products = train(lambda model: model)
    its, its_peak, its_products = train(own)
    assert_same(its, expected)
    for policy in (None, policies.save_matmuls, policies.offload(policies.save_matmuls)):
        found, peak, products = train(lambda model, policy=policy: ours(model, policy))
        assert_same(found, expected)
        assert peak < plain_peak
        if policy is None:
            assert peak <= its_peak + extra
            assert plain_products < products <= its_products
        else:
            assert products == plain_products


def watched(run: Callable[[], Any], device: str = "cpu") -> tuple[Any, int, int]:
    """The result of a call, its peak of bytes on the CPU or on all devices, and the number of its products."""
    if device == "cpu":
        return libraries.watched(run)
    gc.collect()  # the memory of earlier trainings
    devices = range(backend.device_count())
    torch.accelerator.synchronize()
    before = sum(backend.memory_allocated(i) for i in devices)
    for i in devices:
        backend.reset_peak_memory_stats(i)
    with OpCounter() as ops:
        result = run()
    peak = sum(backend.max_memory_allocated(i) for i in devices) - before
    return result, peak, sum(ops[name] for name in PRODUCTS)


def fitted(
    make: Callable[[], Any],
    data: Tensor,
    change: Callable[[Any], Any] = lambda model: None,
    stages: int = 1,
    **options: Any,
) -> tuple[Any, int, int]:
    """A module of lightning with this model, trained in stages, each of which calls `configure_model`; the costs."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = make(), list[Tensor]()

        def configure_model(self) -> None:
            change(self.model)

        def training_step(self, batch: Tensor, index: int) -> dict[str, Tensor]:
            loss = self.model(batch).square().mean()
            self.log("loss", loss, on_epoch=True)
            if not remat.is_recomputing():
                self.losses.append(loss.detach())
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()

    def run() -> None:
        torch.manual_seed(1)
        for _ in range(stages):
            trainer = lightning.Trainer(
                accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, **options,
            )  # fmt: skip
            trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=len(data) // STEPS))
            module.losses.append(trainer.callback_metrics["loss_epoch"])

    return module, *watched(run)[1:]


@pytest.mark.parametrize(("precision", "stages"), [("32-true", 1), ("bf16-mixed", 1), ("32-true", 2)])
def test_lightning(precision: str, stages: int) -> None:
    def train(change: Callable[[Any], Any]) -> Any:
        module, peak, products = fitted(Net, DATA, change, stages, precision=precision, accumulate_grad_batches=EVERY)
        return (module.losses, [p.detach() for p in module.parameters()]), peak, products

    compare(train, with_checkpoints, lambda model, policy: remat.nn.apply(model, Block, policy=policy))


def test_a_callback_of_lightning_plans_with_the_first_batch() -> None:
    pytest.importorskip("lightning")

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 64, 0.1, batch_first=True) for _ in range(4)))

    train = partial(fitted, model, torch.ones(16, 16, 16), precision="bf16-mixed")
    callback = remat.integrations.lightning.budget_callback(0.5)
    (plain, *_), (module, *_) = train(), train(callbacks=[callback])
    assert callback.plan.peak <= callback.plan.amount and callback.plan.regions
    assert_same(list(module.parameters()), list(plain.parameters()))
    assert_same(module.losses[-len(plain.losses) :], plain.losses)


@pytest.mark.parametrize("device, precision", [("cpu", "no"), ("cpu", "bf16"), *map(on_device, ("no", "bf16", "fp16"))])
def test_accelerate(device: str, precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(change: Callable[[Any], Any]) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it allows one precision per process
        accelerator = accelerate.Accelerator(
            cpu=device == "cpu", mixed_precision=precision, gradient_accumulation_steps=EVERY
        )
        model = change(llama())
        batches = torch.utils.data.DataLoader(IDS, batch_size=len(IDS) // STEPS)
        ready, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), batches)
        losses = []

        def run() -> None:
            torch.manual_seed(1)
            for batch in batches:
                with accelerator.accumulate(ready):
                    found = of_language(ready, batch)
                    accelerator.backward(found)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(found.detach())

        _, peak, products = watched(run, device)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        assert losses[0].device.type == device
        return (losses, [p.detach() for p in model.parameters()]), peak, products

    compare(train, own_transformer, enabled, BIAS if device == "cpu" else COPIES)


@pytest.mark.parametrize("device", ["cpu", on_device()])
@pytest.mark.parametrize(("name", "switch"), [("Llama", True), ("Llama", False), ("GPT-2", True)])
def test_trainer(name: str, switch: bool, device: str, tmp_path: Any) -> None:
    """Regions stay, whether or not the Trainer enables the library's checkpointing."""
    transformers = pytest.importorskip("transformers")
    data = [{"input_ids": ids, "labels": ids} for ids in IDS]

    def train(change: Callable[[Any], Any]) -> Any:
        model = change(transformer(name, attention_dropout=0.1, num_hidden_layers=4))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], save_strategy="no",
            seed=3, use_cpu=device == "cpu", disable_tqdm=True,
            gradient_checkpointing=switch and model.is_gradient_checkpointing,
        )  # fmt: skip
        arguments._n_gpu = 1  # otherwise it uses DataParallel, which sums gradients in no fixed order
        _, peak, products = watched(transformers.Trainer(model, arguments, train_dataset=data).train, device)
        assert next(model.parameters()).device.type == device
        return list(model.parameters()), peak, products

    compare(train, own_transformer, enabled)


@pytest.mark.cuda
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
            for _ in range(3):
                loss = of_language(spread, ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses

        losses, peak, products = watched(run, DEVICE)
        assert {p.device.index for p in spread.parameters()} == {0, 1}
        return (losses, [p.detach() for p in spread.parameters()]), peak, products

    compare(train, own_transformer, enabled, COPIES)


def held(model: Any) -> tuple[int, list[Tensor]]:
    """The bytes on the device between forward and backward, and the gradients."""
    ids = TOKENS.to(DEVICE)
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        before = backend.memory_allocated()
        loss = of_language(model, ids)
        torch.accelerator.synchronize()
        after: int = backend.memory_allocated()
        loss.backward()
        del loss
    return after - before, [p.grad for p in model.parameters()]


@pytest.mark.cuda
def test_offload_of_transformers() -> None:
    """Regions follow the library's switch `offload=True`."""
    pytest.importorskip("transformers")
    plain = transformer("Llama", num_hidden_layers=4).to(DEVICE)
    kept_by_plain, expected = held(plain)
    its = {}
    for offload in (False, True):
        model = transformer("Llama", num_hidden_layers=4).to(DEVICE)
        model.activation_checkpointing_enable(offload=offload)
        its[offload], _ = held(model)
    hidden_states = len(plain.model.layers) * TOKENS.numel() * plain.config.hidden_size * 4
    for policy in (None, policies.save_matmuls):
        kept = {}
        for offload in its:
            model = enabled(transformer("Llama", num_hidden_layers=4).to(DEVICE), policy)
            model.activation_checkpointing_enable(offload=offload)
            kept[offload], found = held(model)
            assert_same(found, expected)
            if policy is None:
                assert kept[offload] <= its[offload] + COPIES < kept_by_plain
        assert kept[True] <= kept[False] - hidden_states
