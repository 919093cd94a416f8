"""The mode under which a region runs for the first time, if it has a policy."""

from __future__ import annotations

from typing import Any

from ._ambient import Ambient
from ._facts import Facts, facts_of, tensors
from ._generators import is_capturing
from ._parts import is_wrapper_call
from ._program import Step
from ._ranges import Ranges
from ._record import Record, RegionMode
from ._state import state
from ._torch import without_torch_function


class Recorder(RegionMode):
    """Notes the operations of a first run in a record, which names belong to and regions inside know of."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.number = 0  # how many regions around have a record
        self.draws = 0
        self.ranges = Ranges()
        self.entered = False  # an operation on tensors made of others, which has been met

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        record = self.record
        step = record.step
        if (
            step.func is not func
            or step.guard is None
            or types
            or kwargs
            or not state.filling <= self.number < state.late
            or state.unseen
        ):
            return self._otherwise(func, types, args, kwargs or {})
        if step.is_view:
            shown = record.storages.shown(step, args) if record.follows else None
            if shown is None:
                return self._otherwise(func, types, args, {})
            record.step = step.next
            return shown
        result = step.call(*args)
        if not record.goes_on(step, args, result):
            self._note(step, args, {}, result)
        return result

    def _otherwise(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """An operation that isn't what is expected, or the first time that it is."""
        record, facts = self.record, facts_of(func)
        if types and is_wrapper_call(types):
            return self._on_others(func, facts, args, kwargs)
        if facts.marks:
            return self.ranges.mark(func, args, kwargs)
        if not state.filling <= self.number < state.late or state.unseen or self.ranges:
            record.storages.meet()
            return func(*args, **kwargs)
        step = record.due
        if step.func is func and step.is_simple:
            result = step.call(*args, **kwargs)
            self._note(step, args, kwargs, result)
            return result
        if facts.writes or facts.foreign:
            return self._carefully(func, facts, args, kwargs)
        if facts.reshapes:
            record.storages.meet()  # as the tensors lie now
        result = func(*args, **kwargs)
        with without_torch_function():
            record.ran(func, facts, args, kwargs, result, self._draw(facts, args, kwargs))
        return result

    def _on_others(self, func: Any, facts: Facts, args: tuple, kwargs: dict) -> Any:
        """An operation on tensors that are made of others: what it runs on these comes by, and is what is noted."""
        if self.entered or self.number < state.filling or state.unseen or self.ranges:
            self.entered = False
            return NotImplemented
        record, self.entered = self.record, True
        record.catch_up()
        start = len(record.log)
        record.outside.append(facts)
        RegionMode.__enter__(self)  # else what it runs would pass this mode
        try:
            result = func(*args, **kwargs)
        finally:
            RegionMode.__exit__(self, None, None, None)
            self.entered = False
            record.outside.pop()
        with without_torch_function():
            record.ran_outside(facts, args, kwargs, result, start)
        return result

    def _note(self, step: Step, args: tuple, kwargs: dict, result: Any) -> None:
        with without_torch_function():
            if not step.is_simple or not self.record.ran_as(step, args, kwargs, result):
                facts = facts_of(step.func)
                self.record.ran(step.func, facts, args, kwargs, result, self._draw(facts, args, kwargs))

    def _carefully(self, func: Any, facts: Facts, args: tuple, kwargs: dict) -> Any:
        """An operation that writes to what may be needed, or may draw without saying so."""
        record, generators = self.record, None
        with without_torch_function():
            record.before_writing(facts, args, kwargs)
            if facts.foreign and not is_capturing():
                generators = Ambient.capture({t.device for t in tensors((args, kwargs))}, [], True)
        result = func(*args, **kwargs)
        if generators is not None and generators.moved():
            record.drawing.add(facts)
        with without_torch_function():
            record.ran(func, facts, args, kwargs, result, self._draw(facts, args, kwargs))
        return result

    def _draw(self, facts: Facts, args: tuple, kwargs: dict) -> int | None:
        """The number of an operation among those that draw, None if it does not."""
        if facts not in self.record.drawing and not facts.draws(args, kwargs):
            return None
        self.draws += 1
        return self.draws - 1

    def __enter__(self) -> Recorder:
        self.number = len(state.records)
        state.records = *state.records, self.record
        state.policies = *state.policies, self.record.policy
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is not None:
            self.record.let_go()
        state.records = state.records[:-1]
        state.policies = state.policies[:-1]
