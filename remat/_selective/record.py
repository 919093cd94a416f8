"""The record that a first run under a policy leaves for recomputes."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch

from .program import Plan, Skip
from .recording import Recording
from .saved import Source


class Record:
    """The record of a region's first run, made when the run has ended."""

    def __init__(self, recording: Recording, results: list[tuple[int | None, torch.Tensor]]) -> None:
        self.policy, self.known, self.saved_values = recording.verdicts.policy, recording.known, recording.saved_values
        self.inputs = recording.inputs  # the values of the operands and the captured tensors
        self.drawing, self.views = recording.log.drawing, recording.log.views
        self.program = recording.program()
        self._has_slots = recording.has_slots
        self.one_output = sum(tensor.requires_grad for _, tensor in results) == 1
        self._end = len(self.program.steps)
        self._wanted = [*recording.saves.above]  # the values that autograd saved: a full recompute makes them
        warned = recording.verdicts.warned
        self._unmatched = warned.unmatched(recording)
        warned.of_names(recording.verdicts, recording.known)
        self._choose(recording, {value for value, _ in results})
        self._decide_what_is_saved(recording, results)
        # A recompute gets the inputs as arguments.
        self.storages = recording.storages.outside({*recording.log.made, *self.inputs})

    def _choose(self, recording: Recording, results: Set[int | None]) -> None:
        """Save the results of the steps that a budget has chosen for this program, or choose for later runs."""
        choices = recording.choices
        if choices is None:
            return
        steps, made = choices.steps(self.program), recording.log.made
        only = choices.so_far if steps is None else steps
        self.saved_values.save_only([value for value in self.saved_values.allowed if made[value] in only])
        if steps is None:
            roots = recording.saves.roots(self._end, self.saved_values.hooks is not None)
            choices.close(self.program, roots, results, self._is_lazy)

    def _decide_what_is_saved(self, recording: Recording, results: list[tuple[int | None, torch.Tensor]]) -> None:
        """Save the needed values, and release the candidates."""
        above, missing = self._wanted[:], list[Source]()
        for slot, source in recording.saves.slots():
            if slot is None and self.saved_values.hooks is None:
                continue  # what is handed to outer hooks, however, must not depend on which slots are alive
            residual = self.saved_values.of_slot(source)
            if residual is None:
                missing.append(source)
                continue
            self._wanted.append(source.values[0])
            if slot is not None and slot.residual is None:
                slot.residual = residual
        needed = [value for source in missing for value in source.values]
        end = max((source.after for source in missing), default=0) if self._has_slots and not above else self._end
        # If the program isn't lazy, a recompute skips nothing, but to save the operands of all steps may be too much.
        skip = (Skip.SAFE if self._is_lazy else Skip.ALL) if self._has_slots else Skip.NONE
        used = self.program.plan([*above, *needed], end, self.saved_values.available(), skip).used
        self.saved_values.close(used, results)
        self._wanted += needed

    @property
    def _is_lazy(self) -> bool:
        """Whether steps that nothing seems to need can be skipped: compiled code may read their results undetected."""
        return self.program.lazy and not self.known.compiles

    def keep_all(self) -> None:
        """Own the residuals that only slots own so far, before the slots are freed."""
        self.saved_values.own(self._wanted)

    def in_backward(self) -> None:
        """Give the warning about unmatched operators, as a backward pass has begun."""
        if self._unmatched is not None:
            self._unmatched()
            self._unmatched = None

    def plan(self, slots: Iterable[Any] | None = None, whole: bool = False) -> Plan:
        """Return the plan of a recompute that fills these slots, or all slots. If it is ``whole``, it skips no step."""
        skip = Skip.SAFE if self._has_slots and self._is_lazy and not whole else Skip.NONE
        roots, end = self._wanted, self._end
        if slots is not None:
            sources = [slot.source for slot in slots]
            roots, end = [v for each in sources for v in each.values], max((each.after for each in sources), default=0)
        return self.program.plan(roots, end, self.saved_values.available(), skip)
