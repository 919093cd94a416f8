"""Finds a plan for a model and an amount of memory: traces a forward, measures calls, searches, and measures steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .._core.amounts import size_text
from .._core.processes import agreed
from .._core.state import disable_remat
from .._measure.allocated import Allocated, free_memory
from .._measure.observer import gc_disabled
from .._measure.program import Program
from .._modules.eligible import check_module
from .._modules.region_class import change_back, regions, restored
from .._modules.segments import is_sequence
from .._policy.policy import Budget
from ..errors import PolicyError, RematError
from .bound import lower_bound
from .items import Item, Option, chain_of
from .measure import Measuring
from .plan import Plan, RegionPlan, options_of
from .solver import Solver
from .trace import Call, Trace

_ROUNDS = 6  # the most plans whose step is measured
_TOO_MUCH = 2**62  # the peak of a step that runs out of memory
_LEAST_PART = 0.002  # of what the model saves, that a call saves if a region of it is worth while


def _progress_bar(total: int) -> Any:
    """A bar, if tqdm is installed and the output is a terminal, for what takes longer than two seconds."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return SimpleNamespace(update=lambda: None, close=lambda: None)
    return tqdm(total=total, desc="remat: planning", delay=2, disable=None, leave=False)


class _Candidates:
    """Which calls can be regions, and why others can't."""

    def __init__(self, trace: Trace, named: Mapping[str, nn.Module]) -> None:
        self.names = {id(module.__dict__): name for name, module in reversed(list(named.items()))}
        scripts = {name for name, module in named.items() if isinstance(module, torch.jit.ScriptModule)}
        outermost = (name for name in scripts if name.rpartition(".")[0] not in scripts)
        self.passed_over = dict.fromkeys(outermost, "it is TorchScript")
        calls = [trace.root]
        for call in calls:
            calls += call.calls
        self._counts = Counter(id(call.module.__dict__) for call in calls if call.module is not None)
        self._saved = trace.saved
        self._times = [time for time, _ in trace.saved]
        self._whole = self._bytes_saved(trace.root)

    def _bytes_saved(self, call: Call) -> int:
        i, j = (bisect_left(self._times, time) for time in (call.start, call.end))
        return sum({id(memory): memory.nbytes for _, memory in self._saved[i:j]}.values())

    def __call__(self, call: Call) -> bool:
        module = call.module
        if module is None or not call.is_differentiated or not (name := self.names.get(id(module.__dict__))):
            return False  # the whole model has the name "", and needs as much as a region
        saved, given = self._bytes_saved(call), sum(memory.nbytes for memory in call.given)
        if saved <= 1.1 * given or saved <= _LEAST_PART * self._whole:
            return False
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
    """Plans for one model. Its methods run the program, within ``program.preserved()``."""

    def __init__(self, program: Program, cost: Any) -> None:
        self._program, self._cost = program, cost
        modules = (m for m in program.named_modules.values() if not isinstance(m, torch.jit.ScriptModule))
        self._modules = {id(module.__dict__): module for module in modules}.values()
        differentiated = [tensor for tensor in program.inputs() if program.every or tensor.requires_grad]
        trace = self._trace = Trace(differentiated, cost)
        with disable_remat(), trace.of(self._modules):
            program.forward(program.fn)
        self._candidates = _Candidates(trace, program.named_modules)
        self._items = chain_of(trace, self._candidates)
        self._every = [item for each in self._items for item in each.everything()]
        self.without = 0  # the peak without regions
        gradients = 0
        for item in reversed([item for item in self._every if not item.items]):
            as_it_is = item.options[0]
            self.without = max(as_it_is.forward, as_it_is.backward + gradients, item.keep + self.without)
            gradients += item.gradients
        self._operators: dict[tuple, tuple[str, ...]] = {}  # of the calls that were measured

    def measure(self, amount: int) -> None:
        """Run each distinct call alone, unless it would need more than the amount."""
        most = min(amount, self.without / 2)  # a larger region is of use only with regions in it
        items = [item for item in self._every if item.call and item.keep + item.waiting <= most]
        bar = _progress_bar(len({item.key for item in items}))
        measuring = Measuring(items, self._cost, bar.update)
        with closing(bar), measuring.of(self._modules):
            self._program.forward(self._program.fn)
        for item in self._every:
            measured = measuring.found.get(item.key)
            if item.call and measured is not None:
                self._operators[item.key] = measured.operators
                item.options += measured.options(item)
            elif item.call and item.key in measuring.failures:
                self._candidates.passed_over[self._name(item)] = measuring.failures[item.key]

    def _name(self, item: Item) -> str:
        assert item.call is not None
        return self._candidates.names[id(item.call.module.__dict__)]

    def plan(self, amount: int, others: Sequence[Program]) -> Plan:
        """Return the plan with the lowest cost whose measured peak is within the amount, also for the others.

        Raises:
            RematError: no plan is.
        """
        solver = Solver(2 * math.isqrt(len(self._items)) + 1)
        items = solver.list_of(self._items)
        plans = solver.plans(items)
        aim, low, high = amount, -1, len(plans.peak)  # the dearest plan that fits, the cheapest one that doesn't
        measured: dict[int, tuple[int, tuple[RegionPlan, ...]]] = {}
        for rounds in reversed(range(_ROUNDS)):
            within = int(torch.searchsorted(plans.peak, aim, right=True)) - 1
            number = agreed(min(max(within, 0), high - 1) if rounds or low >= 0 else 0)
            if number <= low:
                break
            planned = tuple(self._region(*each) for each in solver.chosen(items, number, self._items))
            peak = agreed(self._peak(planned, others))
            if peak > amount and not measured:  # the first run of a kernel may take memory for later ones
                peak = agreed(self._peak(planned, others))
            measured[number] = peak, planned
            low, high = (number, high) if peak <= amount else (low, number)
            aim = amount - (peak - int(plans.peak[number]))
        if low < 0:
            raise RematError(self._too_little(amount, measured[0][0], *solver.largest(items, 0, self._items)))
        peak, planned = measured[low]
        curve = tuple(zip(plans.peak.tolist(), plans.flops.tolist()))
        passed_over = self._candidates.passed_over
        bound = lower_bound(self._items, lambda item: int(solver.plans(solver.list_of([item])).peak[0]), amount)
        cost = float(plans.cost[low])
        return Plan(
            amount, peak, self.without, int(plans.flops[low]), cost, bound, planned, curve, passed_over, self._cost
        )

    def _region(self, calls: Sequence[Item], option: Option | None) -> RegionPlan:
        first = calls[0].call
        assert first is not None
        name, module, children = self._name(calls[0]), first.module, None
        if len(calls) > 1:
            module, children = first.container, (first.index, first.index + len(calls))
            name = self._candidates.names[id(module.__dict__)]
        elif option is None and isinstance(module, nn.Sequential) and is_sequence(module):
            children = 0, len(module)
        kind = type(module).__name__
        if option is None:
            return RegionPlan(name, kind, children, True, 0, sum(call.work.flops for call in calls), (), ())
        operators, steps = self._operators[calls[0].key], tuple(sorted(option.steps or ()))
        return RegionPlan(name, kind, None, False, option.nbytes, option.recompute.flops, operators, steps)

    def _peak(self, planned: Sequence[RegionPlan], others: Sequence[Program]) -> int:
        """Measure the peak of a step, the highest one of these programs."""
        named, memories = self._program.named_modules, list[Allocated]()
        with regions({named[name]: options for name, options in options_of(planned, self._cost).items()}):
            for program in (self._program, *others):
                torch.rand(())  # regions copy the state of a generator that has drawn since, as in a first step
                with nullcontext() if program is self._program else program.preserved():
                    with Allocated(program.inputs()) as memory, suppress(torch.OutOfMemoryError):
                        program.run(program.fn)
                        memories.append(memory)
        return max(each.peak for each in memories) if len(memories) == 1 + len(others) else _TOO_MUCH

    def _too_little(self, amount: int, least: int, item: Item, in_backward: bool) -> str:
        within = (m for m in self._trace.memory if item.start <= m.made < item.end)
        largest = max(within, key=lambda memory: memory.nbytes, default=None)
        place = f"The peak is in the {'backward' if in_backward else 'forward'} pass"
        if item.call:
            place += f" of {self._name(item)!r}"
        if largest is not None:
            func, call = largest.by
            name = self._candidates.names.get(id(call.module.__dict__)) if call.module else None
            place += f", where {getattr(func, 'overloadpacket', func)} makes a tensor of {size_text(largest.nbytes)}"
            place += f" and the shape {list(largest.shape)}{f' in {name!r}' if name else ''}"
        return (
            f"A training step of this model needs at least {size_text(least)}, whichever of its modules are regions, "
            f"but the budget is {size_text(amount)}. {place}. Choose a smaller batch, or a budget of {least} bytes or "
            f"more."
        )


def plan_for(program: Program, amount: Any, cost: Any, others: Sequence[Program] = ()) -> Plan:
    """Return a plan whose measured peak is within the amount, also for the others. The model is left as it was.

    Raises:
        RematError: no plan is.
    """
    modules = list(program.named_modules.values())
    with gc_disabled(), restored(modules):
        for module in modules:
            change_back(module)
        with program.preserved() as overwritten:
            planner = _Planner(program, cost)
        free = free_memory(program.inputs()) if amount is None or "%" in str(amount) else None
        if amount is None and free is None:
            raise PolicyError(
                "On a CPU a budget needs an amount: give a number of bytes, '2GiB', or a part such as 0.5."
            )
        most = Budget("100%" if amount is None else amount, cost).nbytes(planner.without if free is None else free)
        with program.preserved(overwritten):
            planner.measure(most)
            return planner.plan(most, others)
