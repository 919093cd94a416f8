"""The record of a first run under a policy: its program and its residuals, from which recomputes are planned."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from .._policy.warnings import unmatched, warn_of_names
from .plan import CanSkip, Plan, always, can_be_skipped, never
from .recording import Recording
from .residual import Residual
from .saves import Source


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
