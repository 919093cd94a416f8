"""The dispatch mode of a region's first run under a policy, and the record that it leaves for recomputes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from .._ambient.ambient import Ambient
from .._core import private
from .._core.devices import is_capturing
from .._core.facts import Facts, facts_of, mapped, tensors
from .._core.known import Known
from .._core.private import DispatchMode, FakeTensor, without_torch_function
from .._core.ranges import Ranges
from .._core.state import state
from .._core.tensors import is_wrapper_call, parts
from .._policy.policy import Policy, as_policy, within
from .._policy.warnings import unmatched, warn_of_names
from .._region.hooks import in_torch_checkpoint
from ..errors import RematError
from .program import CanSkip, Plan, always, can_be_skipped, never
from .recording import Recording
from .saved import Residual, Source


class Record:
    """The record of a region's first run, made when the run has ended."""

    def __init__(self, recording: Recording) -> None:
        self.policy, self.known, self.saved_values = recording.policy, recording.known, recording.saved_values
        self.inputs = recording.inputs  # the values of the operands and the captured tensors
        self.drawing, self.views = recording.drawing, recording.views
        self.in_region = recording.in_region
        self.program = recording.program()
        self._has_slots = recording.has_slots
        self._end = len(recording.log)
        self._wanted = [*recording.saves.above]  # the values that autograd saved: a full recompute makes them
        self._unmatched = unmatched(recording)
        warn_of_names(recording.own.mentioned_names, recording.named, recording.warned, recording.known)
        roots = recording.saves.roots(self._end, self.saved_values.hooks is not None)
        steps = None if recording.choices is None else recording.choices.steps(self.program)
        if recording.choices is not None:
            _save_only(recording, recording.choices.so_far if steps is None else steps)
        complete = self._decide_what_is_saved(recording)
        if recording.choices is not None and steps is None:
            lazy = self._has_slots and self._is_lazy
            recording.choices.close(recording.log, self.program, roots, {value for value, _ in recording.results}, lazy)
        # A recompute gets the inputs as arguments.
        self.storages = recording.storages.outside({*recording.log.made, *self.inputs})
        if complete:  # a first-order backward pass recomputes nothing, so that copies of constants aren't needed
            self.storages.constants = dict.fromkeys(self.storages.constants)

    def _decide_what_is_saved(self, recording: Recording) -> bool:
        """Save the needed values, and release the candidates. Return whether all that autograd saved is saved."""
        above, missing = self._wanted[:], list[Source]()
        for slot, source in recording.saves.slots():
            if slot is None and self.saved_values.hooks is None:
                continue  # what is handed to outer hooks, however, must not depend on which slots are alive
            residual = self.saved_values.of_slot(source.value)
            if residual is None:
                missing.append(source)
                continue
            self._wanted.append(source.values[0])
            if slot is not None and slot.residual is None:
                slot.residual = residual
        needed = [value for source in missing for value in source.values]
        end = max((source.after for source in missing), default=0) if self._has_slots and not above else self._end
        # If the program isn't lazy, a recompute skips nothing, but to save the operands of all steps may be too much.
        leave = (can_be_skipped if self._is_lazy else always) if self._has_slots else never
        used = self.program.plan([*above, *needed], end, self.saved_values.there(), leave).used
        self.saved_values.close(used, recording.results)
        self._wanted += needed
        return not missing and not above

    @property
    def _is_lazy(self) -> bool:
        """Whether steps that nothing seems to need can be skipped: compiled code may read their results undetected."""
        return self.program.lazy and not self.known.compiles

    # --- recomputes ---------------------------------------------------------------------------------------------------

    def residual(self, value: int) -> Residual | None:
        """Return the residual of a value, or None if the value is not saved or its residual was freed."""
        return self.saved_values.residual(value)

    def keep_all(self) -> None:
        """Own the residuals that only slots own so far, before the slots are freed."""
        self.saved_values.own(self._wanted)

    def in_backward(self) -> None:
        """Give the warning about unmatched operators, as a backward pass has begun."""
        if self._unmatched is not None:
            self._unmatched.warn()
            self._unmatched = None

    def plan(self, slots: Iterable[Any] | None = None) -> Plan:
        """Return the plan of a recompute that fills these slots, or all slots of the first run."""
        leave: CanSkip = can_be_skipped if self._has_slots and self._is_lazy else never
        if slots is None:
            return self.program.plan(self._wanted, self._end, self.saved_values.there(), leave)
        sources = [slot.source for slot in slots]
        end = max((source.after for source in sources), default=0)
        roots = [value for source in sources for value in source.values]
        return self.program.plan(roots, end, self.saved_values.there(), leave)

    def whole_plan(self) -> Plan:
        """Return the plan of a recompute of all values that autograd saved, in which no step is skipped."""
        return self.program.plan(self._wanted, self._end, self.saved_values.there(), never)


def _save_only(recording: Recording, steps: Collection[int]) -> None:
    """Drop what was saved of all other steps."""
    log = recording.log
    for value in [value for value in log.saveable if log.made[value] not in steps]:
        del log.saveable[value]
        recording.saved_values.forget(value)
    for slot, source in recording.saves.slots():
        if slot is not None and source.values and source.values[0] not in log.saveable:
            slot.residual = None


class RegionMode(DispatchMode):
    """The base class of the dispatch modes of a region with a policy."""

    def __init__(self, policy: Policy, known: Known, drawing: set[Facts]) -> None:
        super().__init__()
        self._policy, self._known = policy, known
        self._drawing = drawing  # operations of other libraries that have drawn random numbers
        self.number = 0  # of enclosing regions in a first run under a policy
        self.draws = 0  # operations so far that have drawn random numbers
        self.noting = False  # it is no log of ``debug=True``
        self.ranges = Ranges()

    @property
    def count(self) -> Any:
        """How far the run has come, for `go_back`."""
        return self.draws

    def go_back(self, count: Any) -> None:
        """Forget later draws: an inner run was abandoned, which draws the same numbers when it starts again."""
        self.draws = count

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        self._known.compiles |= super().ignore_compile_internals()
        return self._known.compiles

    @staticmethod
    def with_memory(facts: Facts, args: tuple) -> tuple:
        """A call's arguments with memory for the zeros of forward mode, which may crash torch under a dispatch mode."""
        return mapped(_with_memory, args) if private.dual_level_active() and not facts.views else args

    def draw(self, facts: Facts, args: tuple, kwargs: dict) -> int | None:
        """Return the index of an operation among those that draw random numbers, or None if it does not draw."""
        if facts not in self._drawing and not facts.draws(args, kwargs):
            return None
        self.draws += 1
        return self.draws - 1

    def __enter__(self) -> Any:
        self.number = len(state.recordings)
        state.policies, state.logs = (*state.policies, self._policy), (*state.logs, self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.policies, state.logs = state.policies[:-1], state.logs[:-1]


class Recorder(RegionMode):
    """The dispatch mode of a first run, which records the operations."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.policy, recording.known, recording.drawing)
        self.recording = recording
        self.entered = False  # whether an operation on wrapper subclasses has been seen and is dispatched again

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        recording, facts, kwargs = self.recording, facts_of(func), kwargs or {}
        args = self.with_memory(facts, args)
        if types and is_wrapper_call(types):
            return self._on_wrappers(func, facts, args, kwargs)
        if facts.marks:
            return self.ranges.mark(func, args, kwargs)
        if self.number < state.filling or state.unseen or self.ranges:
            return func(*args, **kwargs)
        if private.tracing():
            raise RematError(TRACES)
        generators = None
        if facts.writes or facts.foreign:  # it overwrites values that may be needed, or may draw without a tag for it
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

    def _on_wrappers(self, func: Any, facts: Facts, args: tuple, kwargs: dict) -> Any:
        """Execute an operation on wrapper subclasses, and record the operations that it executes on inner tensors."""
        if self.entered or self.number < state.filling or state.unseen or self.ranges:
            self.entered = False
            return NotImplemented
        recording, self.entered = self.recording, True
        start = len(recording.log)
        recording.around.append(facts)
        DispatchMode.__enter__(self)  # else this mode would not see the operations on inner tensors
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
            self.recording.release()
        state.recordings = state.recordings[:-1]

    @property
    def count(self) -> Any:
        return self.draws, self.recording.saved_values.count

    def go_back(self, count: Any) -> None:
        """Forget later draws, and what was handed to the hooks around the region since."""
        self.draws, saved = count
        self.recording.saved_values.go_back(saved)

    def bind(self, operands: Iterable[torch.Tensor]) -> None:
        """Record the inputs."""
        self.recording.bind(operands)

    def close(self, results: Iterable[torch.Tensor]) -> Record:
        """Return the record of the first run, which has ended."""
        recording = self.recording
        recording.results = [(recording.storages.find(part), part) for tensor in results for part in parts(tensor)]
        del self.recording  # it has references to operands
        try:
            return Record(recording)
        except BaseException:  # the recompute of an enclosing region may be stopped here
            recording.release()
            raise


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(tensor.shape) if private.has_no_memory(tensor) else tensor


def recorder_for(region: Any) -> Recorder | None:
    """Return the recorder of a region that is about to run, or None if the region saves only its inputs."""
    own, outer = region.options.policy, state.policies
    if own is None and not outer:
        return None
    own = as_policy(own)
    if own.is_budget and (outer or region.around.region is not None or in_torch_checkpoint()):
        own = as_policy(None)  # in a recompute of the enclosing region it might choose something else
    policy = within(outer[-1] if outer else None, own)
    tensors = *region.operands(), *region.captured_inputs.tensors
    if policy.saves_nothing or any(isinstance(t, FakeTensor) for t in tensors):
        return None
    return Recorder(Recording(policy, region.known, own, region.options.warned))


TRACES = (
    "A region with a policy traces a function, by torch.func.linearize or make_fx. A policy can't tell the operations "
    "of the trace from those of the region. Use torch.func.jvp, trace outside of the region, or leave out the policy."
)
