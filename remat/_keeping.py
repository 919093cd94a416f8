"""What is kept of a first run under a policy, and what that takes to run again.

A value may be kept if the policy says so, and is if it is needed: because autograd saved it, or because an operation
that has to run again reads it. Until the region ends that isn't known, so what may turn out to be needed is held.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._determinism import Line
from ._memory import Memory
from ._names import warn_of_unseen
from ._offload import Group
from ._plan import Plan, can_wait, plan
from ._policy import Policy, Verdict
from ._residual import Residual
from ._storages import Storages
from ._torch import is_shared
from ._values import Step, Value, layouts


class Keeping:
    """The steps of a first run, and which of their values are held and kept."""

    def __init__(self, policy: Policy, memory: Memory, own_names: Iterable[str]) -> None:
        self.policy = policy
        self.memory = memory
        self.own_names = own_names  # that the region's own policy mentions, not that of a region around
        self.outer: tuple | None = None  # the hooks around the region, which keep what it keeps
        self.open = True  # the first run has not ended
        self.slots_tell = True  # what autograd saved is known
        self.lazy = True  # what nothing needs may be left out of a run again
        self.steps: list[Step] = []
        self.wanted: list[Value] = []  # what autograd saved
        self.storages = Storages()
        self.named: dict[str, Line] = {}  # all names that were given in the region, each with the line
        self._slots: list[tuple[weakref.ref, Any]] = []  # with what they are of
        self._lent: dict[Value, Residual] = {}  # each is kept once, whether or not what owns it lives
        self._held: dict[Value, None] = {}
        self._enough = 12  # held values, before the next look which of them are needed
        self._siblings: dict[Value, torch.Tensor] = {}  # saved results of operations with several, if one gets a name
        self._group: Group | None = None

    def _hold(self, value: Value, tensor: torch.Tensor) -> None:
        """More than slots may need it: it may have to be kept, if the policy says so."""
        if not value.saveable:
            value.held = None
        elif value.held is None and value.overwritten is None:
            value.held = tensor
            self._held[value] = None

    def _lend(self, value: Value, tensor: torch.Tensor | None) -> Residual:
        """Keep a value, for whoever owns what this returns."""
        residual = value.kept()
        if residual is None:
            assert value.step is not None and tensor is not None
            if self._group is None:
                self._group = Group()
            offload = value.verdict is Verdict.OFFLOAD
            step = self.steps[value.step]
            layout = next((layout for layout in layouts(step.result) if step.outs[layout.i] is value), None)
            residual = Residual(tensor, step, layout, offload, self.outer, self._group)
            value.loan = weakref.ref(residual)
            self._lent[value] = residual
        return residual

    def _let_go_of_unneeded(self) -> None:
        """In the middle of a run: of what has been read, and whose readers have made nothing that is still there."""
        there = {value for value in self.storages.values() if value.held is None or _is_used(value)}
        saved = [value for ref, source in self._slots if ref() is not None for value in source.values]

        def may_be_kept(value: Value) -> bool:
            return _is_there(value) or (value in there and value.saveable)

        used = plan(self.steps, [*there, *saved, *self.wanted], may_be_kept, _always).used
        for value in [value for value in self._held if value not in used and not _is_used(value)]:
            value.held = None
            del self._held[value]
        self._enough = len(self._held) + max(4, len(self._held), len(self.steps) // 16)

    # --- the end of the first run -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Decide what else is kept, and let go of the rest."""
        self.open = False
        warn_of_unseen(self.own_names, self.named, self.memory)
        above = len(self.wanted)  # levels of torch.func that are above want these
        missing = []
        for ref, source in self._slots:
            slot = ref()
            if slot is None and self.outer is None:
                continue  # else what is handed over must not depend on it
            value = source.values[0] if source.layout is not None else None
            if value is not None and value not in self._lent and value.held is not None:
                self._lend(value, value.held)  # it was saved before it got its name
            if value is None or value not in self._lent:
                missing.append(source)
                continue
            self.wanted.append(value)
            if slot is not None and slot.residual is None:
                slot.residual = self._lent[value]
        self.wanted += [value for source in missing for value in source.values]
        end = max((source.after for source in missing), default=0) if self.slots_tell and not above else len(self.steps)
        needed = [value for source in missing for value in source.values] + self.wanted[:above]
        used = plan(self.steps[:end], needed, _is_there, _always if self.slots_tell else _never).used
        for step in self.steps:
            step.question = None
            for value in step.outs:
                if value in used:
                    value.residual = value.kept() or self._lend(value, value.held)
        if not missing and not above:  # then nothing will run again at first order
            for value in self.storages.values():
                value.constant = None
        self.let_go()
        self.storages = self.storages.outside()

    def let_go(self) -> None:
        """Drop what is only held: it has a history, which may lead to here."""
        for value in self._held:
            value.held = None
        for residual in self._lent.values():
            residual.settle()
        self._held.clear()
        self._lent.clear()
        self._siblings.clear()
        self._slots.clear()

    def close_without_slots(self) -> None:
        """The same where it isn't known what autograd saved: whatever has to run again may be needed."""
        self.lazy = self.slots_tell = False
        self.close()

    def keep_all(self) -> None:
        """The slots will be gone: keep what they own."""
        for value in self.wanted:
            value.residual = value.kept()

    # --- runs again ---------------------------------------------------------------------------------------------------

    def plan(self, slots: Iterable[Any] | None = None) -> Plan:
        """What runs again to fill these slots, or all that there were."""
        if slots is None:
            return self._plan(self.wanted, len(self.steps), Value.kept)
        sources = [slot.source for slot in slots]
        wanted = [value for source in sources for value in source.values]
        return self._plan(wanted, max(source.after for source in sources), Value.kept)

    def _plan(self, wanted: Iterable[Value], end: int, available: Callable[[Value], Any]) -> Plan:
        return plan(self.steps[:end], wanted, available, can_wait if self.lazy else _never)


def _always(step: Step) -> bool:
    return True


def _never(step: Step) -> bool:
    return False


def _is_used(value: Value) -> bool:
    """Whether a held tensor is there for others too."""
    return value.held is not None and (sys.getrefcount(value.held) > 2 or is_shared(value.held))


def _is_there(value: Value) -> bool:
    return value.held is not None or value.kept() is not None
