"""A memory budget for models of libraries, without naming their blocks."""

from typing import Any

import pytest
import torch
from cases import training_step
from torch import Tensor, nn

import remat
from benchmarks import autopilot
from benchmarks.models import CASES


def gpt2(**options: Any) -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 6, "n_head": 2, "vocab_size": 101, "n_positions": 64}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids, **options)).train()
    tokens = torch.randint(101, (4, 64), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": tokens, "labels": tokens}


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[Any], int, int]:
    return training_step(model, lambda: model(**batch).loss)


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_model_of_transformers_fits_in_less_than_with_its_own_checkpointing(use_cache: bool) -> None:
    model, batch = gpt2(use_cache=use_cache)
    expected, _plain, flops = step(model, batch)
    model.gradient_checkpointing_enable()
    _, its_peak, its_flops = step(model, batch)
    with pytest.raises(remat.RematError, match="own activation checkpointing is on"):
        remat.nn.budget(model, 0.5, **batch)
    model.gradient_checkpointing_disable()
    assert remat.integrations.transformers.enable(model, budget=its_peak + 20_000, batch=batch) is model
    found, peak, mine = step(model, batch)
    assert all(map(torch.equal, found, expected))
    assert peak <= its_peak + 20_000 and flops < mine < its_flops
    plan = remat.nn.budget(model, int(0.8 * its_peak), **batch)
    assert step(model, batch)[1] <= 0.8 * its_peak and "transformer.h" in str(plan) and "not a region" not in str(plan)
    with pytest.raises(TypeError, match="give a batch, and no policy"):
        remat.integrations.transformers.enable(model, budget="1GiB")


def test_the_plan_is_a_row_of_a_report() -> None:
    model, batch = gpt2(use_cache=False)
    report = remat.report(model, policies=[None, "budget 40%"], **batch)
    assert report.policies[1].label == "budget 40%"
    assert report.policies[1].peak_bytes <= 0.41 * report.rows[0].peak_bytes
    assert report.policies[1] in report.pareto
    assert "one region" not in str(remat.report(model, policies=["budget 40%"], **batch))
    with pytest.raises(TypeError, match="so 'budget 40%' takes no transform"):
        remat.report(model, policies=["budget 40%"], transform=torch.func.grad, **batch)


@pytest.mark.parametrize("make", [make for make in CASES if make.__name__ in ("gpt2", "vit", "mixed")])
def test_a_plan_recomputes_no_more_than_choices_by_hand_at_their_peaks(make: Any) -> None:
    if CASES[make]:
        pytest.importorskip(CASES[make])
    case = make()
    case.model.train()
    plain, model = autopilot.step(case), case.model
    block = tuple({type(module) for module in model.modules() if type(module).__name__ in case.blocks})
    for where, policy in ((block, None), (remat.nn.every(2, block), None), (block, remat.policies.save_matmuls)):
        remat.nn.apply(model, where, policy=policy)
        hand = autopilot.step(case)
        plan = remat.nn.budget(model, hand.peak, loss=case.loss, cost="flops", **case.batch)
        found = autopilot.step(case)
        assert found.peak <= hand.peak < plain.peak and found.flops - plain.flops == plan.flops
        assert found.flops <= hand.flops and autopilot.same(found.gradients, plain.gradients)
        remat.nn.undo(model)
