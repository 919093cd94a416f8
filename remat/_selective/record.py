"""The record of a first run under a policy: what ran, and what is kept of it. It says what a recompute has to run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from .._policy.warnings import unmatched, warn_of_names
from .plan import Leave, Plan, always, can_be_left, never
from .recording import Recording
from .residual import Residual
from .saves import Source


class Record:
    """What is known of a region's first run when it has ended.

    Where the slots tell nothing, as there were none, whatever has to be recomputed may be needed.
    """

    def __init__(self, recording: Recording, slots_tell: bool) -> None:
        self.policy, self.known, self.keep = recording.policy, recording.known, recording.keep
        self.inputs = recording.inputs  # the values of the operands and the captured tensors
        self.drawing, self.views = recording.drawing, recording.views
        self.in_region = recording.in_region
        self.program = recording.program()
        self._slots_tell = slots_tell
        self._end = len(recording.log)
        self._wanted = [*recording.saves.above]  # the values that autograd saved
        self._unmatched = unmatched(recording)
        warn_of_names(recording.own.mentioned_names, recording.named, recording.told, recording.known)
        roots = recording.saves.roots(self._end, self.keep.hooks is not None)
        steps = None if recording.choices is None else recording.choices.steps(self.program)
        if recording.choices is not None:
            _keep_only(recording, recording.choices.so_far if steps is None else steps)
        complete = self._decide_what_is_kept(recording)
        if recording.choices is not None and steps is None:
            recording.choices.close(recording.log, self.program, roots, recording.results, slots_tell and self._is_lazy)
        # A recompute brings its own inputs.
        self.storages = recording.storages.outside({*recording.log.made, *self.inputs})
        if complete:  # nothing will be recomputed at first order
            self.storages.constants = dict.fromkeys(self.storages.constants)

    def _decide_what_is_kept(self, recording: Recording) -> bool:
        """Keep what is needed, and let go of the rest. Returns whether that is all that autograd saved."""
        above, missing = self._wanted[:], list[Source]()
        for slot, source in recording.saves.slots():
            if slot is None and self.keep.hooks is None:
                continue  # else what is handed over must not depend on it
            residual = self.keep.of_slot(source.value)
            if residual is None:
                missing.append(source)
                continue
            self._wanted.append(source.values[0])
            if slot is not None and slot.residual is None:
                slot.residual = residual
        needed = [value for source in missing for value in source.values]
        end = max((source.after for source in missing), default=0) if self._slots_tell and not above else self._end
        # A recompute leaves out none of what isn't lazy, which may be a lot.
        leave = (can_be_left if self._is_lazy else always) if self._slots_tell else never
        self.keep.close(self.program.plan([*above, *needed], end, self.keep.there(), leave).used)
        self._wanted += needed
        return not missing and not above

    @property
    def _is_lazy(self) -> bool:
        """Whether what seems dead may be left out; what is compiled may read it in ways that can't be seen."""
        return self.program.lazy and not self.known.compiles

    # --- recomputes ---------------------------------------------------------------------------------------------------

    def kept(self, value: int) -> Residual | None:
        """What is kept of a value, if it still is."""
        return self.keep.kept(value)

    def keep_all(self) -> None:
        """The slots will be gone: keep what they own."""
        self.keep.own(self._wanted)

    def at_hand(self) -> AbstractContextManager[None]:
        """What hooks around the region keep is asked for once, now."""
        return self.keep.at_hand()

    def in_backward(self) -> None:
        """A backward has begun."""
        if self._unmatched is not None:
            self._unmatched.warn()
            self._unmatched = None

    def plan(self, slots: Iterable[Any] | None = None) -> Plan:
        """What a recompute runs to fill these slots, or all that there were."""
        leave: Leave = can_be_left if self._slots_tell and self._is_lazy else never
        if slots is None:
            return self.program.plan(self._wanted, self._end, self.keep.there(), leave)
        sources = [slot.source for slot in slots]
        end = max((source.after for source in sources), default=0)
        roots = [value for source in sources for value in source.values]
        return self.program.plan(roots, end, self.keep.there(), leave)

    def whole_plan(self) -> Plan:
        """The same with nothing left out."""
        return self.program.plan(self._wanted, self._end, self.keep.there(), never)


def _keep_only(recording: Recording, steps: Collection[int]) -> None:
    """What other steps have made is not kept."""
    log = recording.log
    for value in [value for value in log.saveable if log.made[value] not in steps]:
        del log.saveable[value]
        recording.keep.forget(value)
    for slot, source in recording.saves.slots():
        if slot is not None and source.values and source.values[0] not in log.saveable:
            slot.residual = None
