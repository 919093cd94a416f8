"""What is kept of a first run under a policy, and what that takes to run again.

A value may be kept if the policy says so, and is if it is needed: because autograd saved it, or because an operation
that has to run again reads it. Until the region ends that isn't known, so what may turn out to be needed is held.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from ._bulk import gone
from ._calls import Calls
from ._determinism import Line
from ._judge import Judge, judge_of
from ._memory import Memory
from ._offload import Group
from ._plan import Plan, always, can_wait, never, plan
from ._policy import Policy, Verdict
from ._program import END, Entry, Known, Program, Programs, Step
from ._residual import Residual
from ._torch import is_shared
from ._values import Layout, layouts
from ._warnings import Told, Unmatched, unmatched, warn_of_names


class Source:
    """Where a tensor that autograd saved comes from: values, its layout if it may be kept, the steps so far.

    ``value`` is the one that may be kept, ``known`` what the tensor is known as. Such a source is true of the next run
    too, if the tensor is that again.
    """

    __slots__ = ("after", "guard", "known", "layout", "value", "values")

    def __init__(self, values: list[int], layout: Layout | None, after: int) -> None:
        self.values, self.layout, self.after = values, layout, after
        self.value = values[0] if layout is not None else None
        self.known: Known | None = None


NOWHERE = Source([], None, 0)


class Keeping:
    """The log of a first run, and which of its values are held and kept."""

    program: Program  # what follows from the log, when the first run has ended

    def __init__(self, policy: Policy, memory: Memory, own: Policy, told: Told) -> None:
        self.policy = policy
        self.memory = memory
        self.own, self.told = own, told  # the region's own policy, without that of a region around
        self.unmatched: Unmatched | None = None  # that policy has matched no operator
        self.outer: tuple | None = None  # the hooks around the region, which keep what it keeps
        self.in_region = False  # they are those of a region
        self.open = True  # the first run has not ended
        self.slots_tell = True  # what autograd saved is known
        self.inputs: list[int] = []  # of the operands and the captured tensors
        self.offsets: tuple[int, ...] = ()  # of these, if each has a storage of its own
        self.wanted: list[int] = []  # what autograd saved
        self.storages = Calls()
        self.log: list[Entry] = []
        self.made: dict[int, int] = {}  # for each value that an operation made, which one
        self.lines: dict[int, Line] = {}  # for operations, where they were called
        self.saveable: dict[int, Verdict] = {}  # what the policy lets be kept
        self.overwritten: set[int] = set()
        self.seen: set[int] = set()  # what Python code may have read in ways that can't be seen
        self.names: dict[int, dict[str, Line]] = {}  # those of values
        self.named: dict[str, Line] = {}  # all names that were given in the region
        self._judge = judge_of(policy)
        self._programs = _programs_of(memory, self._judge)
        self._slots: list[tuple[weakref.ref, Source]] = []
        self._last: Program | None = None  # what the last run did, if this one may do the same
        self._path: list[Step] = [END]  # its steps
        self.step: Step = END  # what comes next of these, or of the views between them
        self._sources: Iterator[Source] = iter(())  # what autograd saved of it
        self.follows = False  # so far it did what the last run did
        self._retold = False  # autograd saved other values than then
        self._loans: dict[int, weakref.ref[Residual]] = {}  # what is kept, as long as somebody owns it
        self._own: dict[int, Residual] = {}  # what more needs than the slots that own it
        self._lent: dict[int, Residual] = {}  # in the first run: each is kept once, whether or not what owns it lives
        self._held: dict[int, torch.Tensor] = {}
        self._enough = 12  # held values, before the next look which of them are needed
        self._group: Group | None = None

    @property
    def due(self) -> Step:
        """The step that should come next, views aside."""
        return self._path[self.step.number]

    def catch_up(self) -> None:
        """Note the steps that it went along."""
        start, end = len(self.log), self.step.number
        if self._last is None or start >= end:
            return
        if not start and end == len(self._path) - 1:
            self.log, self.made, self.lines = [*self._last.log], self._last.made.copy(), {**self._last.lines}
            self.saveable = self._last.saveable.copy()
            return
        for step in self._path[start:end]:
            self.log.append(step.entry)
            self.made.update(dict.fromkeys(step.outs, step.number))
            if step.entry.verdict is not None:
                self.saveable.update(dict.fromkeys(step.outs, step.entry.verdict))
                self.lines[step.number] = self._last.lines[step.number]

    def kept(self, value: int) -> Residual | None:
        """What is kept of a value, if it still is."""
        ref = self._loans.get(value)
        return None if ref is None else ref()

    def _hold(self, value: int, tensor: torch.Tensor) -> None:
        """More than slots may need it: it may have to be kept, if the policy says so."""
        if value not in self.saveable:
            self._held.pop(value, None)
        elif value not in self.overwritten:
            self._held.setdefault(value, tensor)

    def _lend(self, value: int, tensor: torch.Tensor, form: tuple | None = None) -> Residual:
        """Keep a value, for whoever owns what this returns: ``tensor`` is on its storage, in this form."""
        residual = self.kept(value)
        if residual is None:
            number = self.made[value]
            made = self.log[number]
            layout = made.result
            if type(layout) is not Layout:
                layout = next((layout for layout in layouts(made.result) if made.outs[layout.i] == value), None)
            elif form is None and self.storages.known.get(value, gone)() is tensor:
                form = layout.form
            residual = Residual(made.key[0], self.lines.get(number))
            if self.outer is None and self.saveable[value] is Verdict.SAVE:
                residual.stay(tensor, form)
            else:
                if self.outer is None and self._group is None:
                    self._group = Group()
                residual.go(tensor, form, layout, self.outer, self._group)
            self._loans[value] = weakref.ref(residual)
            self._lent[value] = residual
        return residual

    def _let_go_of_unneeded(self) -> None:
        """In the middle of a run: of what has been read, and whose readers have made nothing that is still there.

        What is handed to a region around must not depend on what is still there.
        """
        if self.in_region:
            return
        self.catch_up()
        held, count = self._held, len(self.log)
        there = {value for value in self.storages.values() if value not in held or _is_used(held, value)}
        saved = [value for ref, source in self._slots if ref() is not None for value in source.values]
        available = {value for value in self.saveable if value in there} | self._there()
        so_far = next((known for known in self._programs.known if known.log[:count] == self.log), None)
        so_far = so_far or Program(self.log, self.seen, self.lines)
        wanted = [*there, *saved, *self.wanted]
        used = plan(so_far.steps[:count], so_far.waiting, wanted, available, self._left(so_far)).used
        for value in [value for value in held if value not in used and not _is_used(held, value)]:
            del held[value]
        self._enough = len(held) + max(4, len(held), count // 16)

    def _there(self) -> Set[int]:
        """What is held, or kept as long as somebody owns it."""
        if not self._held and len(self._own) == len(self._loans):
            return self._own.keys()
        return {*self._held, *(value for value, ref in self._loans.items() if ref() is not None)}

    # --- the end of the first run -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Decide what else is kept, and let go of the rest."""
        self.open = False
        self.catch_up()
        try:
            complete = self._decide_what_is_kept()
        finally:  # the run again of a region around may end here
            self.let_go()
        self.storages = self.storages.outside({*self.made, *self.inputs})  # a run again brings its own inputs
        if complete:  # nothing will run again at first order
            self.storages.constants = dict.fromkeys(self.storages.constants)

    def _decide_what_is_kept(self) -> bool:
        """Whether that is all that autograd saved."""
        warn_of_names(self.own.mentioned_names, self.named, self.told, self.memory)
        self.unmatched = unmatched(self)
        above = len(self.wanted)  # levels of torch.func that are above want these
        missing = []
        if not self._lent and not self.names:
            missing = [source for ref, source in self._slots if self.outer is not None or ref() is not None]
        for ref, source in self._slots if self._lent or self.names else ():
            slot, value = ref(), source.value
            if slot is None and self.outer is None:
                continue  # else what is handed over must not depend on it
            if value in self._held and value not in self._lent:
                self._lend(value, self._held[value])  # it was saved before it got its name
            if value not in self._lent:
                missing.append(source)
                continue
            self.wanted.append(value)
            if slot is not None and slot.residual is None:
                slot.residual = self._lent[value]
        self._keep_what_is_needed(missing, above)
        return not missing and not above

    def _keep_what_is_needed(self, missing: list[Source], above: int) -> None:
        """Of what these slots, and levels above, are made from again."""
        self.program = program = self._programs.of(self.log, self.seen, self.lines)
        self.log, program.offsets = program.log, self.offsets
        if self._retold:
            program.sources = [source for _, source in self._slots]
        wanted, end = tuple(self.wanted[:above]), None if self.slots_tell and not above else len(self.log)
        plan = program.plan(tuple(missing), wanted, end, self._there(), self._left(program))
        self.wanted += chain.from_iterable(map(_values, missing))
        for value in sorted(plan.used):
            self._own[value] = self.kept(value) or self._lend(value, self._held[value])

    def _left(self, program: Program) -> Callable[[Step], bool]:
        """Of which steps that nothing needs no inputs are kept: of those that a run again leaves out."""
        if not self.slots_tell:
            return never
        # It leaves out none of what isn't lazy, which may be a lot.
        return can_wait if self._is_lazy(program) else always

    def _is_lazy(self, program: Program) -> bool:
        """Whether what seems dead may be left out; what is compiled may read it in ways that can't be seen."""
        return program.lazy and not self.memory.known.compiles

    def let_go(self) -> None:
        """Drop what is only held: it has a history, which may lead to here."""
        self._held.clear()
        for residual in self._lent.values():
            residual.settle()
        self._lent.clear()
        self._slots.clear()

    def close_without_slots(self) -> None:
        """The same where it isn't known what autograd saved: whatever has to run again may be needed."""
        self.slots_tell = False
        self.close()

    @property
    def tells(self) -> bool:
        """Whether it is known what ran, so that a run again can be spared some of it."""
        return not self.open

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """What hooks around the region keep is asked for once, now."""
        far = [each for ref in self._loans.values() if (each := ref()) is not None and each.is_elsewhere]
        for each in far:
            each.come()
        try:
            yield
        finally:
            for each in far:
                each.leave()

    def keep_all(self) -> None:
        """The slots will be gone: keep what they own."""
        for value in self.wanted:
            residual = self.kept(value)
            if residual is not None:
                self._own[value] = residual

    def in_backward(self) -> None:
        """A backward has begun."""
        if self.unmatched is not None:
            self.unmatched.warn()
            self.unmatched = None

    # --- runs again ---------------------------------------------------------------------------------------------------

    def plan(self, slots: Iterable[Any] | None = None) -> Plan:
        """What runs again to fill these slots, or all that there were."""
        leave = can_wait if self.slots_tell and self._is_lazy(self.program) else never
        if slots is None:
            return self.program.plan((), tuple(self.wanted), len(self.log), self._there(), leave)
        return self.program.plan(tuple(map(_source, slots)), (), None, self._there(), leave)


_source, _values = attrgetter("source"), attrgetter("values")


def _is_used(held: dict[int, torch.Tensor], value: int) -> bool:
    """Whether a held tensor is there for others too."""
    return sys.getrefcount(held[value]) > 2 or is_shared(held[value])


def _programs_of(memory: Memory, judge: Judge) -> Programs:
    """What the last first runs of a function did; under a predicate, which may be made for each of them, of none."""
    if judge.asks:
        return Programs()
    if len(memory.known.programs) >= _POLICIES and judge not in memory.known.programs:
        memory.known.programs.clear()
    return memory.known.programs.setdefault(judge, Programs())


_POLICIES = 16  # of one function, for which that is remembered
