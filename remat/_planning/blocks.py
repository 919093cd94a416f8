"""One budget for given blocks of a model: what each saves, as a plan has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from .._core.amounts import aligned, flops_text, size_text
from .._measure.program import Program
from .._modules.region_class import change_in_place
from .._policy.policy import Budget
from .._region.options import Options
from .planner import plan_for


class BlockChoice(NamedTuple):
    """What one block saves and recomputes: its name, saved bytes, cost, recomputed FLOPs, and saved operations."""

    name: str
    nbytes: int
    cost: float
    flops: int
    operators: tuple[str, ...]


@dataclass(frozen=True)
class BlockBudget:
    """What :func:`remat.nn.budget` has chosen for blocks.

    Attributes:
        amount: the budget in bytes.
        peak: the measured peak of a step with this choice.
        least: the peak of a step if the blocks save nothing, as predicted.
        without: the peak of a step without rematerialization, as predicted.
        blocks: what each block saves.
    """

    amount: int
    peak: int
    least: int
    without: int
    blocks: tuple[BlockChoice, ...]

    @property
    def flops(self) -> int:
        """The FLOPs that are recomputed."""
        return sum(block.flops for block in self.blocks)

    def __str__(self) -> str:
        rows = [(b.name, size_text(b.nbytes), flops_text(b.flops), f"{len(b.operators)}") for b in self.blocks]
        head = ("block", "saves", "recomputes", "operations saved")
        peak = (
            f"peak {size_text(self.peak)} of {size_text(self.amount)}; {size_text(self.without)} without remat, "
            f"{size_text(self.least)} if nothing is saved"
        )
        return "\n".join([*aligned([head, *rows], "<"), peak])


def chosen_by_budget(program: Program, named: Sequence[tuple[str, nn.Module]], budget: Budget) -> BlockBudget:
    """Make the modules regions that save what the budget allows.

    Raises:
        RematError: the model needs more than the budget even if the modules save nothing. No module is changed then.
    """
    plan = plan_for(program, budget.amount, budget.cost, only=[module for _, module in named])
    options = plan.options()
    for name, module in named:
        change_in_place(module, options.get(name, Options(policy=budget, name=name)))
    blocks = [
        BlockChoice(each.name, each.nbytes, each.cost, each.flops, tuple(each.operators[i] for i in each.steps))
        for each in plan.regions
    ]
    return BlockBudget(plan.amount, plan.peak, plan.curve[0][0], plan.without, tuple(blocks))
