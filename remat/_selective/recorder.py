"""A region's first run under a policy: the dispatch mode that sees its operations, and the record that it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch

from .._ambient.ambient import Ambient
from .._core import private
from .._core.devices import is_capturing
from .._core.facts import Facts, facts_of, tensors
from .._core.known import Known
from .._core.private import DispatchMode, FakeTensor, without_torch_function
from .._core.state import state
from .._core.tensors import is_wrapper_call, parts
from .._policy.policy import Budget, as_policy, effective
from .._region.hooks import in_torch_checkpoint, of_region
from ..errors import RematError
from .mode import RegionMode
from .program import Plan
from .recording import Recording
from .saved import Source


class Record:
    """The record of a region's first run, made when the run has ended."""

    def __init__(self, recording: Recording, results: list[tuple[int | None, torch.Tensor]]) -> None:
        self.policy, self.known, self.saved_values = recording.judge.policy, recording.known, recording.saved_values
        self.inputs = recording.inputs  # the values of the operands and the captured tensors
        self.drawing = recording.log.drawing
        self.program = recording.program()
        self._has_slots = recording.has_slots
        self.one_output = sum(tensor.requires_grad for _, tensor in results) == 1
        self._end = len(self.program.steps)
        # The values that autograd saved: a full recompute makes them.
        self._wanted = recording.saves.roots(self._end, self.saved_values.hooks)
        warned = recording.judge.warned
        self.warns = warned.unmatched(recording)  # gives a warning when a backward pass begins
        warned.of_names(recording.judge, recording.known)
        self._choose(recording, {value for value, _ in results})
        self._decide_what_is_saved(recording, results)
        # Those of constants. A recompute gets the inputs as arguments.
        self.storages = recording.storages.copy(without={*recording.log.made, *self.inputs})

    def _choose(self, recording: Recording, results: Set[int | None]) -> None:
        """Save the results of the steps that a budget has chosen for this program, or choose for later runs."""
        choices = recording.choices
        if choices is None:
            return
        steps, made = choices.steps(self.program), recording.log.made
        self.saved_values.revoke([value for value in self.saved_values.allowed if made[value] not in (steps or ())])
        if steps is None:
            choices.close(self.program, self._wanted, results)

    def _decide_what_is_saved(self, recording: Recording, results: list[tuple[int | None, torch.Tensor]]) -> None:
        """Save the needed values, and release the candidates."""
        above, missing = recording.saves.above, list[Source]()
        for slot, source in recording.saves.slots(self.saved_values.hooks):
            residual = self.saved_values.of_slot(source)
            if residual is None:
                missing.append(source)
            elif slot is not None and slot.residual is None:
                slot.residual = residual
        needed = [value for source in missing for value in source.values]
        end = max((source.after for source in missing), default=0) if self._has_slots and not above else self._end
        used = self.program.used([*above, *needed], end, self.saved_values.available(), whole=not self._has_slots)
        self.saved_values.close(used, results)

    def in_backward(self) -> None:
        """Give the warning about unmatched operators, as a backward pass has begun."""
        if self.warns is not None:
            self.warns()
            self.warns = None

    def plan(self, slots: Iterable[Any] | None = None, whole: bool = False) -> Plan:
        """Return the plan of a recompute that fills these slots, or all slots. If it is ``whole``, it skips no step."""
        roots, end = [*self._wanted], self._end
        if slots is not None:
            roots, end = [], 0
            for slot in slots:
                roots += slot.source.values
                end = max(end, slot.source.after)
        return self.program.plan(roots, end, self.saved_values.available(), whole or not self._has_slots)


class Recorder(RegionMode):
    """The dispatch mode of a first run, which records the operations."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.judge.policy, recording.known, recording.log.drawing)
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        recording, facts, kwargs = self.recording, facts_of(func), kwargs or {}
        if facts.marks:
            return self.ranges.mark(func, args, kwargs)
        if self.number < state.filling or state.unseen or self.ranges:
            return facts.run(*args, **kwargs)
        if types and is_wrapper_call(types):
            return self._on_wrappers(func, facts, args, kwargs)
        if private.tracing():
            raise RematError(TRACES)
        generators = None
        if facts.writes or facts.foreign:  # it overwrites values that may be needed, or may draw without a tag for it
            with without_torch_function():
                recording.before_writing(facts, args, kwargs)
                if facts.foreign and not is_capturing():
                    generators = Ambient({t.device for t in tensors((args, kwargs))}, [], True)
        result = facts.run(*args, **kwargs)
        if generators is not None and generators.moved():
            recording.log.drawing.add(facts)
        with without_torch_function():
            recording.ran(facts, args, kwargs, result, self.draw(facts, args, kwargs))
        return result

    def _on_wrappers(self, func: Any, facts: Facts, args: tuple, kwargs: dict) -> Any:
        """Execute an operation on wrapper subclasses, and record the operations that it executes on inner tensors."""
        recording, around = self.recording, self.recording.judge.around
        if facts in around:  # it is dispatched again, or on the tensors inside
            return NotImplemented
        start = len(recording.log.steps)
        around.append(facts)
        DispatchMode.__enter__(self)  # else this mode would not see the operations on inner tensors
        try:
            result = func(*args, **kwargs)
        finally:
            DispatchMode.__exit__(self, None, None, None)
            around.pop()
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
            del self.recording  # it has references to tensors whose history may lead back to this object
        state.recordings = state.recordings[:-1]

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Record the inputs."""
        self.recording.bind(inputs)

    def close(self, results: Iterable[Any]) -> Record:
        """Return the record of the first run, which has ended."""
        recording = self.recording
        del self.recording  # it has references to operands
        return Record(recording, [(recording.storages.find(part), part) for t in results for part in parts(t)])


def recorder_for(region: Any) -> Recorder | None:
    """Return the recorder of a region that is about to run, or None if the region saves only its inputs."""
    own, outer = region.options.policy, state.policies
    if own is None and not outer:
        return None
    own, known, in_region = as_policy(own), region.known, of_region(private.top_hooks(True)) is not None
    if isinstance(own, Budget) and (outer or in_region or in_torch_checkpoint()):
        # In a recompute of the enclosing region it might choose something else, unless it has chosen before.
        own, known = own if own.chosen and not outer else as_policy(None), Known()
    policy = effective(outer[-1] if outer else None, own)
    if policy.saves_nothing:
        return None
    if FakeTensor in map(type, region.inputs.with_captured(region.inputs.operands)):
        known.warn_once("fake", FAKE)
        return None
    if in_region and not outer and not isinstance(own, Budget):
        known.warn_once("inside", INSIDE)
    return Recorder(Recording(policy, known, own, region.options.warned))


FAKE = "Under FakeTensorMode a policy saves nothing. On the device 'meta' it does: `with torch.device('meta')`."
INSIDE = (
    "A region with a policy is inside of a region without one, which saves only its own inputs. So its forward saves "
    "nothing; its policy applies only when the outer region is recomputed. Give the policy to the outer region: "
    "`remat.remat(fn, policy=...)`, or `remat.scan(step, ..., policy=...)` if the region is a step of a scan."
)
TRACES = (
    "A region with a policy traces a function, by torch.func.linearize or make_fx. A policy can't tell the operations "
    "of the trace from those of the region. Use torch.func.jvp, trace outside of the region, or leave out the policy."
)
