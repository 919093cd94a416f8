"""The budget of a model: the peak stays below it, the plan is the best one, and the model is left as it was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned import LAYER, X, fitted, layer, layers, squared
from torch import Tensor, nn

import remat
from benchmarks.measure import held_bytes


def budget(model: nn.Module, amount: Any, where: Any = LAYER) -> Any:
    return remat.nn.budget(model, amount, X, where=where, loss=squared)


@pytest.mark.parametrize(("part", "dropout"), [(0.8, 0.0), (0.5, 0.1), (0.35, 0.0)])
def test_the_peak_is_within_the_budget(part: float, dropout: float) -> None:
    result = fitted(layers(6, dropout), part, where=LAYER, off=0.03)
    assert result.amount == int(part * result.without)
    assert result.peak > 0.85 * result.amount  # and most of the budget is used
    assert [block.name for block in result.blocks] == [str(i) for i in range(6)]
    assert str(result).count("\n") == 7


def test_blocks_inside_of_a_block_are_a_part_of_it() -> None:
    assert [block.name for block in fitted(layers(3), 0.6, where=(LAYER, nn.LayerNorm)).blocks] == ["0", "1", "2"]


def test_blocks_are_regions_though_the_model_fits_without() -> None:
    assert [block.name for block in budget(layers(2), 2**40).blocks] == ["0", "1"]


def test_a_block_that_is_called_twice() -> None:
    block = layer()
    fitted(nn.Sequential(block, nn.Linear(32, 32), block), 0.7, where=LAYER)


@pytest.mark.parametrize("before", [False, True])
def test_the_model_is_left_as_it_was(before: bool) -> None:
    """Also if its modules were regions before."""
    model = layers(2, 0.1)
    if before:
        remat.nn.apply(model, LAYER, policy=remat.policies.save_matmuls)
    weight = model[0].self_attn.in_proj_weight
    weight.grad = torch.ones_like(weight)
    state, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    now = lambda: [(type(module), module.__dict__.copy()) for module in model.modules()]
    modules = now()
    with pytest.raises(remat.RematError, match="the budget is 1 B"):
        budget(model, 1)
    assert now() == modules
    budget(model, 0.9)
    remat.nn.undo(model)
    if not before:
        assert now() == modules
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(weight.grad, torch.ones_like(weight)) and model[1].linear1.weight.grad is None
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


class Wide(nn.Module):
    """Most of the memory is taken outside of the blocks: before them, between them, or in a backward pass."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.first, self.last = place, nn.Linear(32, 32), nn.Linear(32, 32)

    def wide(self, place: str, x: Tensor) -> Tensor:
        if place != self.place:
            return x
        y = x.repeat(1, 1, 100)
        return (y.sin() if place == "in the backward" else y.detach()).view(*x.shape, 100).mean(-1) + x

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.wide("before", x))
        return self.last(self.wide("between", self.wide("in the backward", h)))


@pytest.mark.parametrize(
    ("place", "where"), [("before", "forward"), ("between", "forward"), ("in the backward", "backward")]
)
def test_a_budget_that_is_too_small_is_an_error_that_names_the_place_of_the_peak(place: str, where: str) -> None:
    model, text = Wide(place), f"needs at least .* The peak is in the {where} pass, where aten.repeat"
    with pytest.raises(remat.RematError, match=text) as error:
        budget(model, 1000, nn.Linear)
    least = int(str(error.value).split()[-4])
    assert budget(model, least, nn.Linear).peak <= least


def test_a_block_that_is_not_called_in_the_measured_step_has_the_budget_itself() -> None:
    model = layers(2)
    model.spare = layer()
    model.forward = lambda x: model[1](model[0](x))
    assert [block.name for block in budget(model, 0.9).blocks] == ["0", "1"]
    x = X.clone().requires_grad_()
    first, second = (held_bytes(model.spare, x) for _ in range(2))
    assert 0 < first < second < held_bytes(remat.nn.undo(model).spare, x)


def test_a_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [block.nbytes for block in budget(layers(2), 0.7).blocks]
    monkeypatch.setattr(torch, "distributed", SimpleNamespace(is_available=lambda: False))
    assert [block.nbytes for block in budget(layers(2), 0.7).blocks] == plan


def _choose(rank: int, folder: str, where: Any) -> None:
    """Run in one of two processes, whose batches have different sizes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        result = remat.nn.budget(layers(4), 0.6, X[: 8 - 4 * rank], where=where, loss=squared)
        torch.distributed.barrier()  # gloo aborts a process whose peer has left
        rows = result.blocks if where else result.regions
        torch.save([(row.name, row.nbytes, row.operators) for row in rows], f"{folder}/{rank}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("where", [LAYER, None], ids=["blocks", "any modules"])
def test_all_processes_take_the_choice_of_the_first(tmp_path: Path, where: Any) -> None:
    torch.multiprocessing.spawn(_choose, (str(tmp_path), where), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert first == second and any(nbytes for _, nbytes, _ in first)
