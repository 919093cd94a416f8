"""The mode under which a region runs for the first time, if it has a policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._ambient.ambient import Ambient
from .._core.devices import is_capturing
from .._core.facts import Facts, facts_of, tensors
from .._core.known import Known
from .._core.parts import is_wrapper_call, parts
from .._core.private import DispatchMode, FakeTensor, without_torch_function
from .._core.ranges import Ranges
from .._core.state import state
from .._policy.nested import within
from .._policy.policy import Policy, as_policy
from .record import Record
from .recording import Recording


class RegionMode(DispatchMode):
    """One that sees the operations of a region with a policy."""

    def __init__(self, policy: Policy, known: Known, drawing: set[Facts]) -> None:
        super().__init__()
        self._policy, self._known = policy, known
        self._drawing = drawing  # operations of other libraries that were seen to draw random numbers
        self.number = 0  # how many regions around have a record
        self.draws = 0
        self.ranges = Ranges()

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        self._known.compiles |= super().ignore_compile_internals()
        return self._known.compiles

    def draw(self, facts: Facts, args: tuple, kwargs: dict) -> int | None:
        """The number of an operation among those that draw random numbers, None if it does not."""
        if facts not in self._drawing and not facts.draws(args, kwargs):
            return None
        self.draws += 1
        return self.draws - 1

    def __enter__(self) -> Any:
        self.number = len(state.recordings)
        state.policies = *state.policies, self._policy
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.policies = state.policies[:-1]


class Recorder(RegionMode):
    """Notes the operations of a first run."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.policy, recording.known, recording.drawing)
        self.recording = recording
        self.entered = False  # an operation on tensors made of others, which has been met

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        recording, facts, kwargs = self.recording, facts_of(func), kwargs or {}
        if types and is_wrapper_call(types):
            return self._on_others(func, facts, args, kwargs)
        if facts.marks:
            return self.ranges.mark(func, args, kwargs)
        if self.number < state.filling or state.unseen or self.ranges:
            return func(*args, **kwargs)
        generators = None
        if facts.writes or facts.foreign:  # to what may be needed; or it may draw without saying so
            with without_torch_function():
                recording.before_writing(facts, args, kwargs)
                if facts.foreign and not is_capturing():
                    generators = Ambient.capture({t.device for t in tensors((args, kwargs))}, [], True)
        result = func(*args, **kwargs)
        if generators is not None and generators.moved():
            recording.drawing.add(facts)
        with without_torch_function():
            recording.ran(func, facts, args, kwargs, result, self.draw(facts, args, kwargs))
        return result

    def _on_others(self, func: Any, facts: Facts, args: tuple, kwargs: dict) -> Any:
        """An operation on tensors that are made of others: what it runs on these comes by, and is what is noted."""
        if self.entered or self.number < state.filling or state.unseen or self.ranges:
            self.entered = False
            return NotImplemented
        recording, self.entered = self.recording, True
        start = len(recording.log)
        recording.around.append(facts)
        DispatchMode.__enter__(self)  # else what it runs would pass this mode
        try:
            result = func(*args, **kwargs)
        finally:
            DispatchMode.__exit__(self, None, None, None)
            self.entered = False
            recording.around.pop()
        with without_torch_function():
            recording.ran_around(facts, args, kwargs, result, start)
        return result

    def __enter__(self) -> Recorder:
        super().__enter__()
        state.recordings = *state.recordings, self.recording
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is not None:
            self.recording.let_go()
        state.recordings = state.recordings[:-1]

    def bind(self, operands: Iterable[torch.Tensor]) -> None:
        """Note what comes in."""
        self.recording.bind(operands)

    def close(self, results: Iterable[torch.Tensor], slots_tell: bool = True) -> Record:
        """The first run has ended: the record of it. Without slots it isn't known what autograd has saved."""
        recording = self.recording
        recording.results = {recording.storages.find(part) for tensor in results for part in parts(tensor)}
        del self.recording  # it refers to what the operations read
        try:
            return Record(recording, slots_tell)
        except BaseException:  # the recompute of a region around may end here
            recording.let_go()
            raise


def recorder_for(region: Any) -> Recorder | None:
    """What notes the first run of a region that is about to run, unless it keeps nothing."""
    own, outer = region.options.policy, state.policies
    if own is None and not outer:
        return None
    own = own or as_policy(None)
    if outer and own.by_step:
        own = as_policy(None)  # the region around decides
    policy = within(outer[-1] if outer else None, own)
    tensors = *region.operands(), *region.consts.tensors
    if policy.saves_nothing or any(isinstance(t, FakeTensor) for t in tensors):
        return None
    return Recorder(Recording(policy, region.known, own, region.options.told))
