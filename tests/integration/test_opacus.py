"""opacus: its hooks count calls on parameters, and run again when a region is recomputed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import ROOT, assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.data import DataLoader, TensorDataset

import remat.nn
from benchmarks.libraries import watched
from benchmarks.measure import held_bytes, leaked_bytes
from remat import policies

pytest.importorskip("opacus")
from opacus import GradSampleModule, PrivacyEngine
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers import DPMultiheadAttention
from opacus.utils.batch_memory_manager import BatchMemoryManager

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("collector_off")]
DOCS = ROOT / "docs" / "how-to" / "libraries.md"
WIDTH, LENGTH, BATCH, WORDS = 16, 64, 4, 20
TOKENS = torch.arange(16 * LENGTH).reshape(16, LENGTH) * 7 % WORDS
LABELS = torch.arange(16) * 3 % 5


class Block(nn.Module):
    """A layer of a transformer, of layers that opacus supports."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = DPMultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch_checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens)).mean(1))


class Tied(Classifier):
    """Two blocks share a weight, and another block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight
        self.blocks[3] = self.blocks[0]


KINDS: dict[str, Callable[[Any], Any]] = {
    "hooks": GradSampleModule,
    "functorch": partial(GradSampleModule, force_functorch=True),
    "fast gradient clipping": partial(GradSampleModuleFastGradientClipping, use_ghost_clipping=False),
    "ghost clipping": GradSampleModuleFastGradientClipping,
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def with_checkpoints(model: Any) -> Any:
    for block in model.blocks:
        block.checkpoints = True
    return model


def loss_of(model: Any, tokens: Tensor = TOKENS[:BATCH], labels: Tensor = LABELS[:BATCH]) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), labels)


def step(model: Any, *data: Tensor) -> list[Any]:
    """Per-sample gradients, or their norms under ghost clipping, of one step."""
    model.zero_grad()
    for p in model.parameters():
        p.grad_sample = p.grad = None
    torch.manual_seed(1)
    loss_of(model, *data).backward()
    assert {p._forward_counter for p in model.parameters()} == {0}
    return [getattr(p, "_norm_sample", p.grad_sample) for p in model.parameters()]


@every_kind
@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.budget(0.5)], ids=str)
def test_per_sample_gradients(kind: Callable, policy: Any) -> None:
    """They are those of the plain model, whether the regions are made before opacus sees the model or later."""
    plain = kind(Classifier())
    first = kind(remat.nn.apply(Classifier(), Block, policy=policy))
    last = remat.nn.apply(kind(Classifier()), Block, policy=policy)
    for data in ((), (TOKENS[5:7], LABELS[5:7])):
        expected = step(plain, *data)
        assert all(isinstance(each, Tensor) for each in expected)
        assert_same(step(first, *data), expected)
        assert_same(step(last, *data), expected)


@pytest.mark.parametrize("make", [Classifier, Tied])
def test_several_passes(make: Callable) -> None:
    """Gradients accumulate over backward passes, and two forwards can have one backward."""
    plain, model = GradSampleModule(make()), GradSampleModule(remat.nn.apply(make(), Block))
    for each in (plain, model):
        torch.manual_seed(1)
        (loss_of(each) + loss_of(each, TOKENS[4:8])).backward()
        loss_of(each).backward()
    found, expected = ([p.grad_sample for p in each.parameters()] for each in (model, plain))
    assert all(len(each) == 2 for each in expected)
    assert_same(found, expected)


@pytest.mark.parametrize("regions", ["linear layers", "the model", "the model of opacus"])
def test_other_regions(regions: str) -> None:
    """Opacus takes the class of a region for one that it doesn't know, and differentiates it by functorch."""
    expected = step(GradSampleModule(Classifier()))
    if regions == "linear layers":
        model = GradSampleModule(remat.nn.apply(Classifier(), nn.Linear))
    else:
        model = GradSampleModule(Classifier() if "opacus" in regions else remat.remat(Classifier()))
        model = remat.remat(model) if "opacus" in regions else model
    assert_same(step(model), expected, exact=regions != "linear layers")


def test_torch_checkpoint_loses_gradients() -> None:
    model = with_checkpoints(Classifier())
    loss_of(GradSampleModule(model)).backward()
    lost = [name for name, p in model.named_parameters() if p.grad_sample is None]
    assert lost == [name for name, _ in model.named_parameters() if "blocks" in name]


def trained(mode: str, change: Callable[[Any], Any], physical_batch: int) -> list[Tensor]:
    """The weights after an epoch of DP-SGD with Poisson sampling; with small physical batches, steps are virtual."""
    model = change(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(TOKENS, LABELS), batch_size=8),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    private, optimizer, criterion, loader = made if mode == "ghost" else (*made[:2], nn.CrossEntropyLoss(), made[2])
    torch.manual_seed(1)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical_batch, optimizer=optimizer) as batches:
        for tokens, labels in batches:
            optimizer.zero_grad()
            criterion(private(tokens), labels).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("physical_batch", [3, 16])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_make_private(mode: str, physical_batch: int) -> None:
    expected = trained(mode, lambda model: model, physical_batch)
    assert not torch.equal(expected[0], next(Classifier().parameters()))
    assert_same(trained(mode, lambda model: remat.nn.apply(model, Block), physical_batch), expected)


def costs(kind: Callable, change: Callable[[Any], Any]) -> tuple[int, int, int]:
    """The bytes that are alive after a forward, the peak of a step, and its products."""
    model = kind(change(Classifier()))
    step(model)
    _, peak, products = watched(step, model)
    return held_bytes(loss_of, model), peak, products


@pytest.mark.parametrize("name", KINDS)
def test_costs(name: str) -> None:
    """The documentation has these numbers. Opacus keeps the inputs of layers, with regions and without."""
    kind = KINDS[name]
    plain = costs(kind, lambda model: model)
    ours = costs(kind, lambda model: remat.nn.apply(model, Block))
    assert ours[0] < 0.4 * plain[0] and ours[1] < 0.65 * plain[1]
    assert ours[0] <= held_bytes(loss_of, kind(with_checkpoints(Classifier())))
    assert ours[2] == plain[2] + 4 * 8  # the products of a block
    row = " | ".join(f"{each / 1024:,.0f}" for each in (plain[0], ours[0], plain[1], ours[1]))
    assert f"| {name} | {row} |" in DOCS.read_text(), row


def test_everything_is_freed() -> None:
    """Except for the gradients."""
    model = GradSampleModule(remat.nn.apply(Classifier(), Block))
    step(model)
    assert leaked_bytes(step, model) == sum(p.grad.nbytes + p.grad_sample.nbytes for p in model.parameters())
    assert all(module.activations == [] for module in model.modules() if hasattr(module, "activations"))
