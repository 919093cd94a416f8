"""One budget for a model: what each block saves, so that the peak of a training step stays below the budget.

The model runs once with blocks that save nothing. The memory alive at each moment limits what the blocks that have run
by then save together. Late blocks can save more, as their values are freed before the backward pass of early blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .._core import trees
from .._core.amounts import aligned, flops_text, size_text
from .._core.known import known_of
from .._core.state import disable_remat
from .._measure.observer import PeakMemory, gc_disabled
from .._measure.program import Program
from .._modules.region_class import change_in_place
from .._policy.policy import Budget, Chosen
from .._region.options import Options
from .._selective.choices import Tradeoff
from .._selective.search import Choice, best_of
from ..errors import RematError

Plan = Mapping[nn.Module, Choice]
_ROUNDS = 8  # the most plans that are tried
_WAYS = 500  # the most ways that are continued at each block


class BlockChoice(NamedTuple):
    """What one block saves and recomputes: its name, saved bytes, cost, recomputed FLOPs, and saved operations."""

    name: str
    nbytes: int
    cost: float
    flops: int
    operators: tuple[str, ...]


@dataclass(frozen=True)
class BlockBudget:
    """What :func:`remat.nn.budget` has chosen.

    Attributes:
        amount: the budget in bytes.
        peak: the measured peak of a step with this choice.
        least: the measured peak of a step if the blocks save nothing.
        without: the measured peak of a step without rematerialization.
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


class _Trace(PeakMemory):
    """The peak memory, by the number of block calls whose saved values are alive.

    In the backward pass these are the calls before the current one, whose own values the recompute makes anyway.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[nn.Module] = []
        self.peaks: dict[tuple[int, bool], int] = {}  # the peak, by the number and whether it is the backward pass
        self._moment = 0, False
        self._depth = 0

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        super().after(func, args, kwargs, result)
        self.peaks[self._moment] = max(self.peaks.get(self._moment, 0), self.total)

    def starts(self, module: nn.Module, args: Any) -> None:
        """Count a call that starts: a forward pre-hook."""
        self._depth += 1
        if self._depth == 1:  # blocks inside of a block are a part of it
            self.calls.append(module)
            self._moment = len(self.calls), self._moment[1]

    def ends(self, module: nn.Module, args: Any, result: Any) -> None:
        """Have the backward pass show when it reaches this call: a forward hook."""
        self._depth -= 1
        if self._depth == 0:
            before = len(self.calls) - 1
            for leaf in trees.flatten(result)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._in_backward(before))

    def _in_backward(self, before: int) -> None:
        self._moment = before, True


def chosen_by_budget(program: Program, named: Sequence[tuple[str, nn.Module]], budget: Budget) -> BlockBudget:
    """Make the modules regions that save what the budget allows.

    Raises:
        RematError: the model needs more than the budget even if the modules save nothing. No module is changed then.
    """
    names = {module: name for name, module in named}
    with disable_remat():
        without = _agreed(_measured(program, {}).peak)
    amount = budget.nbytes(without)
    nothing = Budget(0, budget.cost)
    trace = _measured(program, dict.fromkeys(names, Options(policy=nothing)), watch=True)
    least = _agreed(trace.peak)
    if least > amount:
        called = [names[module] for module in trace.calls]
        raise RematError(_too_little(amount, least, *max(trace.peaks, key=trace.peaks.__getitem__), called))
    tradeoffs = {module: known_of(module).choices.pop(nothing, []) for module in dict.fromkeys(trace.calls)}
    blocks = {module: found[-1][0] for module, found in tradeoffs.items() if found}
    plan, peak = _fitting(program, trace, blocks, amount, budget)
    for module in names:
        change_in_place(module, _options(plan, blocks, budget).get(module, Options(policy=budget)))
    saved = []
    for module, each in plan.items():
        operators = tuple(blocks[module].operators[i] for i in sorted(each.steps))
        saved.append(BlockChoice(names[module], each.nbytes, each.cost, each.flops, operators))
    return BlockBudget(amount, peak, least, without, tuple(saved))


def _fitting(
    program: Program, trace: _Trace, blocks: Mapping[nn.Module, Tradeoff], amount: int, budget: Budget
) -> tuple[Plan, int]:
    """Return the best plan whose measured peak is within the amount, and this peak. Each run corrects the aim."""
    options = {module: tradeoff.options for module, tradeoff in blocks.items()}
    nothing = _agreed_plan({module: each[0] for module, each in options.items()})
    best, aim, tried = (nothing, _agreed(trace.peak)), amount, [nothing]
    for _ in range(_ROUNDS):
        plan = _agreed_plan(planned(trace.calls, options, trace.peaks, aim) or nothing)
        if plan in tried:
            break
        tried.append(plan)
        peak = _agreed(_measured(program, _options(plan, blocks, budget)).peak)
        if peak <= amount and _cost(plan) < _cost(best[0]):
            best = plan, peak
        aim += amount - peak
    return best


def _cost(plan: Plan) -> float:
    return sum(choice.cost for choice in plan.values())


def planned(
    calls: Sequence[nn.Module],
    options: Mapping[nn.Module, Sequence[Choice]],
    peaks: Mapping[tuple[int, bool], int],
    amount: int,
) -> Plan | None:
    """Return the plan with the least cost whose memory stays within the amount at each moment, or None."""
    times = Counter(calls)
    first = {module: i for i, module in reversed(list(enumerate(calls)))}
    order = [module for module in dict.fromkeys(calls) if module in options]
    starts = [first[module] for module in order] + [len(calls)]
    ways: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for module, start, end in zip(order, starts, starts[1:]):
        counts = range(start + 1, end + 1)
        limit = amount - max(peaks.get((count, False), 0) for count in counts)
        later = amount - max([0, *(peaks.get((count, True), 0) for count in counts if count < end)])
        own = amount - peaks.get((start, True), 0)  # in the block's own backward pass
        ways = [
            (nbytes + times[module] * choice.nbytes, cost + times[module] * choice.cost, (choice, before))
            for nbytes, cost, before in ways
            for choice in options[module]
            if nbytes + times[module] * choice.nbytes <= min(limit, later) and nbytes + choice.beside <= own
        ]
        if not ways:
            return None
        ways = best_of(ways)
        if len(ways) > _WAYS:  # only the cheapest in each of many equal ranges of bytes, and the smallest one
            size = ways[-1][0] // _WAYS + 1
            ways = [ways[0], *{way[0] // size: way for way in ways}.values()]
    _, _, chosen = min(ways, key=lambda way: (way[1], way[0]))
    plan = {}
    for module in reversed(order):
        plan[module], chosen = chosen
    return dict(reversed(plan.items()))


def _measured(program: Program, options: Mapping[nn.Module, Options], watch: bool = False) -> _Trace:
    """Run the program with these modules as regions, watch their calls, and restore what the program has changed."""
    trace = _Trace()
    with program.preserved(), gc_disabled(), trace, regions(options):
        for module in options if watch else ():
            module.register_forward_pre_hook(trace.starts)
            module.register_forward_hook(trace.ends)
        program.run(program.fn)
    return trace


@contextmanager
def regions(options: Mapping[nn.Module, Options]) -> Iterator[None]:
    """Make these modules regions within the context, in which their attributes are preserved."""
    before = [(module, type(module)) for module in options]
    try:
        for module, each in options.items():
            change_in_place(module, each)
        yield
    finally:
        for module, cls in before:
            module.__class__ = cls


def _options(plan: Plan, blocks: Mapping[nn.Module, Tradeoff], budget: Budget) -> dict[nn.Module, Options]:
    return {
        module: Options(policy=Budget(choice.nbytes, budget.cost, Chosen(blocks[module].operators, choice.steps)))
        for module, choice in plan.items()
    }


def _too_little(amount: int, least: int, count: int, in_backward: bool, names: Sequence[str]) -> str:
    if in_backward:
        place = f"in the backward pass of {names[count]!r}, or of modules before it"
    else:
        place = f"in or after {names[count - 1]!r}" if count else "before the first of the chosen submodules"
    return (
        f"A training step of this model needs at least {size_text(least)}, even if the chosen submodules save "
        f"nothing, but the budget is {size_text(amount)}. The peak is {place}. Choose smaller submodules, a smaller "
        f"batch, or a budget of {least} bytes or more."
    )


def _agreed(value: Any) -> Any:
    """Return the value of a distributed job's first process, as processes with different plans would deadlock."""
    found, distributed = [value], torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(found, src=0)
    return found[0]


def _agreed_plan(plan: Plan) -> Plan:
    return dict(zip(plan, _agreed(list(plan.values()))))
