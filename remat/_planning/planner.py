"""Finds a plan for a model and an amount of memory: traces a forward, measures calls, searches, and measures steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._core.amounts import size_text
from .._core.processes import agreed
from .._core.state import disable_remat
from .._measure.allocated import Allocated
from .._measure.observer import gc_disabled
from .._measure.program import Program
from .._modules.eligible import check_module
from .._modules.region_class import change_back, regions, restored
from .._policy.policy import Budget
from ..errors import RematError
from .items import Item, Option, chain_of
from .measure import Measuring
from .plan import Plan, RegionPlan
from .solver import Solver
from .trace import Call, Trace

_ROUNDS = 6  # the most plans whose step is measured
_LEAST_PART = 0.002  # of what the model saves, that a call saves if a region of it is worth while


class _Candidates:
    """Which calls can be regions, and why others can't."""

    def __init__(self, trace: Trace, model: nn.Module) -> None:
        self.names = {id(module.__dict__): name for name, module in model.named_modules()}
        self.passed_over: dict[str, str] = {}
        self._model, self._trace = model, trace
        calls = [trace.root]
        for call in calls:
            calls += call.calls
        self._counts = Counter(id(call.module.__dict__) for call in calls if call.module is not None)
        self._whole = sum({id(memory): memory.nbytes for _, memory in trace.saved}.values())

    def __call__(self, call: Call) -> bool:
        module = call.module
        if module is None or module is self._model or not call.is_differentiated:
            return False
        times = self._trace.saved
        saved = sum({id(m): m.nbytes for time, m in times if call.start <= time < call.end}.values())
        given = sum(memory.nbytes for memory in call.given)
        if saved <= 1.1 * given or saved <= _LEAST_PART * self._whole:
            return False
        name = self.names.get(id(module.__dict__), "")
        if self._counts[id(module.__dict__)] > 1:
            self.passed_over[name] = "it is called more than once in a step"
            return False
        try:
            check_module(module, name)
        except (RematError, TypeError) as error:
            self.passed_over[name] = str(error)
            return False
        return True


class _Planner:
    """Plans for one model. All of it runs within ``program.preserved()``."""

    def __init__(self, program: Program, cost: Any) -> None:
        self._program, self._model, self._cost = program, program.fn, cost
        differentiated = [tensor for tensor in program.inputs() if program.every or tensor.requires_grad]
        trace = Trace(differentiated, cost)
        with disable_remat(), trace.of(self._model):
            program.forward(self._model)
        self._candidates = _Candidates(trace, self._model)
        self._items = chain_of(trace, self._candidates)
        self._every = [item for each in self._items for item in each.everything()]
        self.without = 0  # the peak without regions
        gradients = 0
        for item in reversed([item for item in self._every if not item.items]):
            self.without = max(item.forward, item.backward + gradients, item.keep + self.without)
            gradients += item.gradients
        self._operators: dict[tuple, tuple[str, ...]] = {}  # of the calls that were measured

    def measure(self, amount: int) -> None:
        """Run each distinct call alone, unless it would need more than the amount."""
        most = min(amount, self.without / 2)  # a larger region is of use only with regions in it
        items = [item for item in self._every if item.call and item.keep + item.waiting <= most]
        measuring = Measuring(items, self._cost)
        with measuring.of(self._model):
            self._program.forward(self._model)
        for item in self._every:
            measured = measuring.found.get(item.key)
            if item.call and measured is not None:
                self._operators[item.key] = measured.operators
                item.options = measured.options(item)
            elif item.call and item.key in measuring.failures:
                self._candidates.passed_over[self._name(item)] = measuring.failures[item.key]

    def _name(self, item: Item) -> str:
        assert item.call is not None
        return self._candidates.names[id(item.call.module.__dict__)]

    def plan(self, amount: int) -> Plan:
        """Return the plan with the lowest cost whose measured peak is within the amount.

        Raises:
            RematError: no plan is.
        """
        solver = Solver()
        items = solver.list_of(self._items)
        plans = solver.plans(items)
        chosen = [solver.chosen(items, i) for i in range(len(plans.peak))]
        flops = [sum(self._flops(item, option) for item, option in regions) for regions in chosen]
        aim, tried, best = amount, dict[int, int](), None
        for _ in range(_ROUNDS):
            number = agreed(max(0, int(torch.searchsorted(plans.peak, aim, right=True)) - 1))
            if number in tried:
                number -= 1
            if number < 0 or number in tried or (best is not None and number < best):
                break
            planned = tuple(self._region(item, option) for item, option in chosen[number])
            peak = agreed(self._peak(planned))
            if peak > amount and not tried:  # the first run of a kernel may take memory for later ones
                peak = agreed(self._peak(planned))
            tried[number] = peak
            if peak <= amount and (best is None or number > best):
                best, regions = number, planned
            aim = amount - (peak - int(plans.peak[number]))
        if best is None:
            raise RematError(self._too_little(amount, min(tried.values())))
        curve = tuple((int(peak), count) for peak, count in zip(plans.peak, flops))
        return Plan(
            amount, tried[best], self.without, flops[best], regions, curve, self._candidates.passed_over, self._cost
        )

    def _flops(self, item: Item, option: Option | None) -> int:
        return item.flops if option is None else option.flops

    def _region(self, item: Item, option: Option | None) -> RegionPlan:
        assert item.call is not None
        name, kind = self._name(item), type(item.call.module).__name__
        if option is None:
            return RegionPlan(name, kind, True, 0, item.flops, (), ())
        operators, steps = self._operators[item.key], tuple(sorted(option.steps))
        return RegionPlan(name, kind, False, option.nbytes, option.flops, operators, steps)

    def _peak(self, planned: Sequence[RegionPlan]) -> int:
        """Measure the peak of a step."""
        named = dict(self._model.named_modules())
        with regions({named[region.name]: region.options(self._cost) for region in planned}):
            with Allocated(self._program.inputs()) as memory:
                self._program.run(self._model)
        return memory.peak

    def _too_little(self, amount: int, least: int) -> str:
        return (
            f"A training step of this model needs at least {size_text(least)}, with any choice of its modules as "
            f"regions, but the budget is {size_text(amount)}. Choose a smaller batch, or a budget of {least} bytes "
            f"or more."
        )


def plan_for(program: Program, amount: Any, cost: Any) -> Plan:
    """Return a plan whose measured peak is within the amount. The model is left as it was.

    Raises:
        RematError: no plan is.
    """
    with program.preserved(), gc_disabled(), restored(program.fn.modules()):
        for module in program.fn.modules():
            change_back(module)
        planner = _Planner(program, cost)
        most = Budget(amount, cost).nbytes(planner.without)
        planner.measure(most)
        return planner.plan(most)
