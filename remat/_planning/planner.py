"""Finds a plan for a model and an amount of memory: traces a forward, measures calls, searches, and measures steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .._core import private
from .._core.amounts import size_text
from .._core.lines import warn
from .._core.state import disable_remat
from .._measure.allocated import Allocated, free_memory
from .._measure.observer import gc_disabled
from .._measure.program import NOT_DIFFERENTIATED, Program
from .._modules.region_class import change_back, is_sequence, regions, restored
from .._policy.policy import Budget
from ..errors import PolicyError, RematError
from .candidates import Candidates
from .items import Item, Option, chain_of
from .measure import Measuring
from .plan import Plan, RegionPlan, no_regions, options_of, parameters_of
from .solver import List, Solver
from .trace import Trace, hooked

_ROUNDS = 6  # the most plans whose step is measured
_TOO_MUCH = 2**62  # the peak of a step that runs out of memory
_ABOVE = 1.1  # times the amount: predicted peaks up to which plans are found, as predictions may be too high
_POINTS = 100  # of the curve


def _progress_bar(total: int) -> Any:
    """A bar, if tqdm is installed and the output is a terminal, for what takes longer than two seconds."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return SimpleNamespace(update=lambda: None, close=lambda: None)
    return tqdm(total=total, desc="remat: planning", delay=2, disable=None, leave=False)


def _not_compiled() -> AbstractContextManager:
    """A context in which compiled modules run as they are, as a plan is made from their operations."""
    return torch.compiler.set_stance("force_eager") if private.DYNAMO in sys.modules else nullcontext()


def _agreed(value: Any) -> Any:
    """Return the value of a distributed job's first process, as processes with different plans would deadlock."""
    found, distributed = [value], torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(found, src=0)
    return found[0]


class _Planner:
    """Plans for one model. Its methods run the program, within ``program.preserved()``."""

    def __init__(self, program: Program, cost: Any, only: Sequence[nn.Module] | None) -> None:
        self._program, self._cost, self._is_free = program, cost, only is None
        modules = (m for m in program.named_modules.values() if not isinstance(m, torch.jit.ScriptModule))
        self._modules = {id(module.__dict__): module for module in modules}.values()
        self._trace, loss = program.differentiated(self._traced)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            warn(NOT_DIFFERENTIATED)
        self._candidates = Candidates(self._trace, program.named_modules, only)
        self._items, self._every = chain_of(self._trace, self._candidates)
        longest = max([len(self._items), *(len(item.items) for item in self._every)])
        self._longest_row = 2 * math.isqrt(longest) + 1 if self._is_free else 0
        without = int(Solver().list_of([item for item in self._every if not item.items]).plans.peak)
        if isinstance(loss, torch.Tensor):
            without += 2 * loss.nbytes  # the loss and its gradient live until the end of the backward
        self.without = _agreed(without)  # the peak without regions
        self._measured: set[tuple] = set()  # the keys of calls that have run alone

    def _traced(self) -> tuple[Trace, Any]:
        """Trace the forward of the program without regions. Return also the loss."""
        program = self._program
        inputs = program.tensors if program.every else [t for t in program.inputs() if t.requires_grad]
        trace = Trace(inputs, self._cost)
        with disable_remat(), torch.enable_grad(), trace.of(self._modules):
            return trace, program.forward(program.fn)

    def measure(self, amount: int) -> bool:
        """Run each distinct call alone, unless it would need more than the amount. Return whether it ran any."""
        # A larger region is of use only with regions in it.
        most = min(amount, self.without / 2) if self._is_free else math.inf
        items = [
            item
            for item in self._every
            if item.can_be_region and item.keep + item.waiting <= most and item.key not in self._measured
        ]
        self._measured |= {item.key for item in items}
        bar = _progress_bar(len({item.key for item in items}))
        measuring = Measuring(items, self._cost, bar.update)
        with closing(bar), hooked(self._modules, measuring.starts), torch.no_grad():
            self._program.forward(self._program.fn)
        for item in self._every:
            if (measured := measuring.found.get(item.key)) is not None:
                item.operators = measured.tradeoff.operators
                item.regions = measured.options(item, self._candidates.is_shared(item.call))
            elif item.key in measuring.failures:
                if not self._is_free:
                    raise TypeError(f"{self._name(item)!r} can't be a region: {measuring.failures[item.key]}")
                self._candidates.passed_over[self._name(item)] = measuring.failures[item.key]
        return bool(items)

    def _with_options(self, shared: bool) -> list[Item]:
        """The items with the options of regions; calls of one module are all regions if ``shared``, or none."""
        for item in self._every:
            is_shared = self._candidates.is_shared(item.call)
            regions = item.regions if shared or not (is_shared and self._is_free) else []
            may_be_plain = not regions or (self._is_free and not is_shared)
            item.options = [*(item.plain if may_be_plain else []), *regions]
        return self._items

    def _name(self, item: Item) -> str:
        return self._candidates.names[id(item.call.module.__dict__)]

    def _searches(self, amount: int) -> Iterator[tuple[bool, List]]:
        """Find the plans up to the amount, without and with regions for shared modules: the better ones first.

        Then those that keep the least everywhere: of plans with equal predicted peaks they may need less than others.
        """
        found: dict[bool, tuple[tuple[bool, float], List]] = {}
        for shared in {False, self._is_free and any(self._candidates.is_shared(item.call) for item in self._every)}:
            items = Solver(self._longest_row, _ABOVE * amount).list_of(self._with_options(shared))
            number = items.cheapest(amount)
            cost = float(items.plans.cost[number] if number >= 0 else items.plans.peak[0])
            found[shared] = (number < 0, cost), items
        order = _agreed(sorted(found, key=lambda shared: found[shared][0]))
        yield from ((shared, found[shared][1]) for shared in order)
        yield from ((shared, Solver(self._longest_row, 0).list_of(self._with_options(shared))) for shared in order)

    def plan(self, amount: int, others: Sequence[Program]) -> Plan:
        """Return the plan with the lowest cost whose measured peak is within the amount, also for the others.

        Raises:
            RematError: no plan is.
        """
        # Without regions the step is the fastest, and its predicted peak may be too high.
        may_fit = self._is_free and self.without <= _ABOVE * amount
        if may_fit and (peak := _agreed(self._peak((), others))) <= amount:
            self.without = peak
            return self._made(amount, peak, (), (0, 0.0, 0.0), shared=False)
        while True:
            failures = []
            for shared, items in self._searches(amount):
                number, peak, planned = self._fitting(items, amount, others)
                if number >= 0:
                    plans, predicted = items.plans, max(0, items.cheapest(amount))
                    number = min(number, len(plans.peak) - 1)  # the plans of another process may be fewer
                    costs = int(plans.flops[number]), float(plans.cost[number]), float(plans.cost[predicted])
                    return self._made(amount, peak, planned, costs, shared)
                failures.append((peak, *items.largest(0, self._items)))
            least = min(failures, key=lambda failure: failure[0])
            if not self.measure(least[0]):  # calls that are too large for the amount may lower the least
                raise RematError(self._too_little(amount, *least))

    def _fitting(self, items: List, amount: int, others: Sequence[Program]) -> tuple[int, int, tuple[RegionPlan, ...]]:
        """Return the dearest plan that fits: its number, its measured peak, and its regions; or -1 and the least."""
        plans = items.plans
        last = len(plans.peak) - 1
        aim, low, high = amount, -1, last + 1  # the dearest plan that fits, the cheapest one that doesn't
        measured: dict[int, tuple[int, tuple[RegionPlan, ...]]] = {}
        for rounds in reversed(range(_ROUNDS)):
            number = _agreed(min(max(items.cheapest(aim), 0), high - 1) if rounds or low >= 0 else 0)
            if number <= low:
                break
            chosen = items.chosen(min(number, last), self._items)
            planned = _agreed(tuple(self._region(*each) for each in chosen))
            peak = _agreed(self._peak(planned, others))
            if peak > amount and not measured:  # the first run of a kernel may take memory for later ones
                peak = _agreed(self._peak(planned, others))
            measured[number] = peak, planned
            low, high = (number, high) if peak <= amount else (low, number)
            aim = amount - (peak - int(plans.peak[min(number, last)]))
        return (low, *measured[max(low, 0)])

    def _made(
        self, amount: int, peak: int, planned: tuple[RegionPlan, ...], costs: tuple[int, float, float], shared: bool
    ) -> Plan:
        curve = Solver(self._longest_row, most_plans=_POINTS).list_of(self._with_options(shared)).plans
        points = tuple(zip(curve.peak.tolist(), curve.flops.tolist()))
        size = parameters_of(self._program.named_modules)
        costs, points, over = _agreed((costs, points, self._candidates.passed_over))
        return Plan(amount, peak, self.without, *costs, planned, points, over, self._cost, size)

    def _region(self, calls: Sequence[Item], option: Option | None, has_regions: bool) -> RegionPlan:
        first, children = calls[0].call, None
        module: Any = first.module
        if len(calls) > 1:
            module, children = first.container, (first.index, first.index + len(calls))
        elif option is None and is_sequence(module):
            children = 0, len(module)
        name, kind = self._candidates.names[id(module.__dict__)], type(module).__name__
        if option is None:
            works = [call.work for call in calls]
            if not has_regions and calls[-1].plain:  # its recompute ends at the last value that the last call saves
                works[-1] = calls[-1].plain[0].ends
            cost, flops = (sum(each) for each in zip(*works))
            return RegionPlan(name, kind, children, has_regions, 0, cost, int(flops), (), ())
        steps = tuple(sorted(option.steps or ()))
        return RegionPlan(name, kind, None, False, option.nbytes, *option.recompute, calls[0].operators, steps)

    def _peak(self, planned: Sequence[RegionPlan], others: Sequence[Program]) -> int:
        """Measure the peak of a step, the highest one of these programs."""
        named, peak = self._program.named_modules, 0
        with regions({named[name]: options for name, options in options_of(planned, self._cost).items()}):
            for program in (self._program, *others):
                torch.clear_autocast_cache()  # of the run before
                torch.rand(())  # regions copy the state of a generator that has drawn since, as in a first step
                with nullcontext() if program is self._program else program.preserved():
                    try:
                        with Allocated(program.inputs()) as memory:
                            program.run(program.fn)
                        peak = max(peak, memory.peak)
                    except torch.OutOfMemoryError:
                        peak = _TOO_MUCH
        return peak

    def _too_little(self, amount: int, least: int, item: Item, in_backward: bool) -> str:
        choice = "with any plan that remat finds" if self._is_free else "even if the chosen modules save nothing"
        within = (m for m in self._trace.memory if item.call.start <= m.made < item.call.end)
        largest = max(within, key=lambda memory: memory.nbytes, default=None)
        place = f"The peak is in the {'backward' if in_backward else 'forward'} pass"
        if item.call.module is not None:
            place += f" of {self._name(item)!r}"
        if largest is not None:
            func, call = largest.by
            name = self._candidates.names.get(id(call.module.__dict__)) if call.module else None
            place += f", where {getattr(func, 'overloadpacket', func)} makes a tensor of {size_text(largest.nbytes)}"
            place += f" and the shape {list(largest.shape)}{f' in {name!r}' if name else ''}"
        other = f"{'' if self._is_free else 'smaller modules, '}a smaller batch, or "
        gradients = sum(nbytes for _, nbytes in self._trace.gradients.values())
        budget = size_text(amount) if size_text(amount) != size_text(least) else f"{amount} B"
        if 4 * gradients > 3 * least:
            place, other = f"{size_text(gradients)} of it are gradients of parameters, which no region reduces", ""
        return (
            f"A training step of this model needs at least {size_text(least)} "
            f"(about {size_text(max(least, self.without))} without remat), {choice}, but the budget is "
            f"{budget}. {place}. Choose {other}a budget of {least} bytes or more."
            + "".join(f"\n{line}" for line in no_regions(self._candidates.passed_over))
        )


def plan_for(
    program: Program, amount: Any, cost: Any, others: Sequence[Program] = (), only: Sequence[nn.Module] | None = None
) -> Plan:
    """Return a plan for the program that needs the most, whose measured peak is within the amount for all of them.

    The model is left as it was.

    ``only`` are the modules that are regions, each on its own; by default all may be, also inside one another.

    Raises:
        RematError: no plan is.
        PolicyError: there is no amount, and no device whose free memory it could be.
    """
    for each in (program, *others):
        each.check_has_data("A plan measures allocations")
    free = free_memory(program.inputs()) if amount is None or "%" in str(amount) else None
    if amount is None and free is None:
        raise PolicyError("On a CPU a budget needs an amount: give a number of bytes, '2GiB', or a part such as 0.5.")
    modules = list(program.named_modules.values())
    with gc_disabled(), restored(modules), _not_compiled():
        for module in modules:
            change_back(module)
        planners = []
        for each in (program, *others):
            with each.preserved() as overwritten:
                planners.append((_Planner(each, cost, only), overwritten, each))
        planner, overwritten, program = max(planners, key=lambda found: found[0].without)
        others = [each for _, _, each in planners if each is not program]
        whole = planner.without if free is None else _agreed(free)
        most = min(_TOO_MUCH - 1, Budget("100%" if amount is None else amount, cost).nbytes(whole))
        with program.preserved(overwritten):
            planner.measure(most)
            return planner.plan(most, others)
