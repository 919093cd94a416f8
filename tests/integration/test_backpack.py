"""BackPACK: its hooks keep inputs and outputs of layers in attributes, and look up the exact class of a layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ROOT, assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat.nn
from benchmarks.libraries import watched
from benchmarks.measure import held_bytes, leaked_bytes

pytest.importorskip("backpack")
from backpack import backpack, extend
from backpack.extensions import KFAC, BatchGrad, BatchL2Grad, DiagGGNExact, DiagHessian, SumGradSquared, Variance

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collector_off")]
DOCS = ROOT / "docs" / "how-to" / "libraries.md"
X, LABELS = torch.linspace(-1, 1, 64 * 16).mul(7).sin().reshape(64, 16), torch.arange(64) * 3 % 4
FIRST_ORDER = [BatchGrad, BatchL2Grad, SumGradSquared, Variance]
SECOND_ORDER = [DiagGGNExact, DiagHessian, KFAC]


class Block(nn.Module):
    """A block with operations that are no modules: BackPACK doesn't keep their results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x).sin()).exp().sin())


class Layers(nn.Sequential):
    """A block of layers only, as second-order extensions require."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch_checkpoint(super().forward, x, use_reentrant=False)


def made(block: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(6)), nn.Linear(16, 4))


def loss_of(model: Any) -> Tensor:
    return extend(nn.CrossEntropyLoss())(model(X), LABELS)


def step(model: Any, extension: Any) -> list[Any]:
    """What the extension computes for each parameter."""
    for p in model.parameters():
        p.grad = None
        p.__dict__.pop(extension.savefield, None)
    torch.manual_seed(1)  # KFAC samples
    with backpack(extension):
        loss_of(model).backward()
    return [getattr(p, extension.savefield, None) for p in model.parameters()]


WAYS: dict[str, Callable[[Any], Any]] = {
    "before": lambda model: extend(remat.nn.apply(model, (Block, Layers))),
    "after": lambda model: remat.nn.apply(extend(model), (Block, Layers)),
    "the model": lambda model: remat.remat(extend(model)),
    "a policy": lambda model: remat.nn.apply(extend(model), (Block, Layers), policy=remat.policies.save_matmuls),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("extension", FIRST_ORDER + SECOND_ORDER)
def test_numbers(extension: Callable, way: Callable) -> None:
    block = Block if extension in FIRST_ORDER else Layers
    plain, model = extend(made(block)), way(made(block))
    for _ in range(2):
        expected = step(plain, extension())
        assert None not in expected
        assert_same(step(model, extension()), expected)


@pytest.mark.parametrize("order", ["before", "after"])
def test_regions_of_single_layers_are_not_found(order: str) -> None:
    """Second-order extensions say so; of the first-order ones the results are missing."""

    def model() -> Any:
        if order == "before":
            return extend(remat.nn.apply(made(Layers), nn.Linear))
        return remat.nn.apply(extend(made(Layers)), nn.Linear)

    with pytest.raises(NotImplementedError, match=r"does not have an extension for Module .*Linear"):
        step(model(), KFAC())
    assert step(model(), BatchGrad()) == [None] * len(list(model().parameters()))


def costs(model: Any, extension: Callable) -> tuple[int, int, int]:
    """The bytes that are alive after a forward, the peak of a step, and its products."""
    held = held_bytes(loss_of, model)
    step(model, extension())
    _, peak, products = watched(step, model, extension())
    return held, peak, products


@pytest.mark.parametrize("extension", FIRST_ORDER[1:])
def test_costs(extension: Callable) -> None:
    """The documentation has these numbers."""
    plain = costs(extend(made(Block)), extension)
    ours = costs(WAYS["after"](made(Block)), extension)
    torchs = costs(extend(made(Checkpointed)), extension)
    assert ours[0] <= torchs[0] < 0.6 * plain[0] and ours[1] < 0.8 * plain[1]
    assert ours[1] <= torchs[1] + 64 * 64 * 4  # a layer's input: the recompute doesn't replace what BackPACK keeps
    assert ours[2] == torchs[2] == plain[2] + 6
    row = " | ".join(f"{each / 1024:,.0f}" for each in (plain[0], ours[0], plain[1], ours[1], torchs[1]))
    assert f"| {extension.__name__} | {row} |" in DOCS.read_text(), row


@pytest.mark.parametrize("extension", SECOND_ORDER)
def test_second_order_saves_nothing(extension: Callable) -> None:
    """Nor does it need more: BackPACK keeps all inputs and outputs."""
    plain, ours = costs(extend(made(Layers)), extension), costs(WAYS["after"](made(Layers)), extension)
    assert ours[0] == plain[0] and ours[1] <= 1.05 * plain[1]


def test_everything_is_freed() -> None:
    model = WAYS["after"](made(Block))
    step(model, BatchGrad())
    leaked = leaked_bytes(step, model, BatchGrad())
    assert leaked == sum(p.grad.nbytes + p.grad_batch.nbytes for p in model.parameters())
