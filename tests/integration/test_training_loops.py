"""Training by lightning's Trainer and by accelerate, with blocks that are regions, compared with torch's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat.nn
from benchmarks.libraries import enabled, own_transformer, transformer, watched
from remat import policies

pytestmark = [
    pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collector_off"),
]  # fmt: skip

STEPS, EVERY = 4, 2  # the optimizer steps after every second batch
WIDTH, BIAS = 16, 64
DATA = torch.linspace(-1, 1, STEPS * 8 * WIDTH).sin().reshape(-1, WIDTH)


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


def as_it_is(model: Any) -> None:
    pass


def that_checkpoints(model: Any) -> None:
    model.checkpoints = True


def with_regions(policy: Any = None) -> Callable[[Any], Any]:
    return lambda model: remat.nn.apply(model, Block, policy=policy)


Trained = tuple[tuple[list[Tensor], list[Tensor]], int, int]  # losses and parameters, the peak, products


def compare(trained: Callable[[Any], Trained], plain: Any, own: Any, ours: Callable[[Any], Any]) -> None:
    """Results are those of the plain model, and costs at most those of torch's checkpoint."""
    expected, _, plain_products = trained(plain)
    its, its_peak, its_products = trained(own)
    assert_same(its, expected)
    result, peak, products = trained(ours(None))
    assert_same(result, expected)
    # A recomputed value and the gradient of a bias are alive together until the node ends; torch frees it earlier.
    assert peak <= its_peak + BIAS
    assert plain_products < products <= its_products
    result, _, products = trained(ours(policies.save_matmuls))
    assert_same(result, expected)
    assert products == plain_products


def fit(precision: str, stages: int = 1) -> Callable[[Callable[[Any], Any]], Trained]:
    """Training by lightning's Trainer; `ready` prepares the model of the module."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, ready: Callable[[Any], Any]) -> None:
            super().__init__()
            self.model, self.ready, self.losses = Net(), ready, []

        def configure_model(self) -> None:
            self.ready(self.model)

        def training_step(self, batch: Tensor) -> Tensor:
            loss = self.model(batch).square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fitted(ready: Callable[[Any], Any]) -> Trained:
        module = Module(ready)

        def run() -> None:
            torch.manual_seed(1)
            for _ in range(stages):
                lightning.Trainer(
                    accelerator="cpu", precision=precision, max_epochs=1, accumulate_grad_batches=EVERY, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, barebones=False,
                ).fit(module, torch.utils.data.DataLoader(DATA, batch_size=8))  # fmt: skip

        _, peak, products = watched(run)
        return (module.losses, [p.detach() for p in module.parameters()]), peak, products

    return fitted


@pytest.mark.parametrize(("precision", "stages"), [("32-true", 1), ("bf16-mixed", 1), ("32-true", 2)])
def test_lightning(precision: str, stages: int) -> None:
    """Each stage calls `configure_model`."""
    compare(fit(precision, stages), as_it_is, that_checkpoints, with_regions)


def prepared(precision: str, loss: Callable[[Any, Tensor], Tensor], data: Tensor) -> Callable[[Any], Trained]:
    """Training by a loop with accelerate."""
    accelerate = pytest.importorskip("accelerate")

    def trained(model: Any) -> Trained:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it allows one precision per process
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=EVERY)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = torch.utils.data.DataLoader(data, batch_size=len(data) // STEPS)
        ready, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        losses = []

        def run() -> None:
            torch.manual_seed(1)
            for batch in batches:
                with accelerator.accumulate(ready):
                    found = loss(ready, batch)
                    accelerator.backward(found)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(found.detach())

        _, peak, products = watched(run)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return (losses, [p.detach() for p in model.parameters()]), peak, products

    return trained


def square(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def of_language(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def made(change: Callable[[Any], Any]) -> Any:
    model = Net()
    return change(model) or model


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str) -> None:
    compare(prepared(precision, square, DATA), Net(), made(that_checkpoints), lambda policy: made(with_regions(policy)))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_of_a_transformer(precision: str) -> None:
    pytest.importorskip("transformers")
    data = torch.arange(STEPS * 2 * 16).reshape(-1, 16) * 7 % 64
    compare(
        prepared(precision, of_language, data),
        transformer("Llama"),
        own_transformer(transformer("Llama")),
        lambda policy: enabled(transformer("Llama"), policy),
    )
