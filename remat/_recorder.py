"""The mode under which a region runs for the first time, if it has a policy."""

from __future__ import annotations

from typing import Any

from ._ambient import Ambient
from ._facts import facts_of, tensors
from ._record import Record
from ._state import state
from ._torch import TorchDispatchMode, is_wrapper_call, without_torch_function


class Recorder(TorchDispatchMode):
    """Notes the operations of a first run in a record."""

    supports_higher_order_operators = True

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if is_wrapper_call(types):
            return NotImplemented  # what it runs on the tensors inside comes by
        kwargs = kwargs or {}
        record = self.record
        if state.filling or state.unseen:
            return func(*args, **kwargs)
        facts = facts_of(func)
        generators = None
        if facts.writes or facts.foreign:
            with without_torch_function():
                record.before_writing(func, args, kwargs)
                if facts.foreign:
                    generators = Ambient.capture({t.device for t in tensors((args, kwargs))}, [], True)
        result = func(*args, **kwargs)
        if generators is not None and generators.moved():
            record.drawing.add(func)
        draw = self.draws if func in record.drawing or facts.draws(args, kwargs) else None
        self.draws += draw is not None
        with without_torch_function():
            record.ran(func, args, kwargs, result, draw)
        return result

    def __enter__(self) -> Recorder:
        state.records.append(self.record)
        state.policies.append(self.record.policy)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is not None:
            self.record.let_go()
        state.records.pop()
        state.policies.pop()
