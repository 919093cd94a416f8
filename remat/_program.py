"""Programs: what the first run of a region did, in numbers, and what follows from that.

A first run only writes a log. What follows from a log (which values change later, what can be put off, which operations
have to run again) is the same for equal logs, so it is found once for all calls of a function that do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ._determinism import Line
from ._facts import Facts, facts_of
from ._plan import Plan, plan
from ._policy import Verdict
from ._torch import OpOverload, TensorGuards, direct_call, guard_of
from ._values import UNTOLD, Layout

if TYPE_CHECKING:
    from ._keeping import Source


class Entry(NamedTuple):
    """What an operation of a first run did."""

    key: tuple  # what it has in common with others that make the same
    reads: tuple[int, ...]  # the values that it read,
    outs: tuple[int, ...]  # those that it made, of new storages, then of those that it wrote to,
    overwritten: tuple[int, ...]  # those that it overwrote,
    tracked: tuple[int, ...]  # and those of its own that are differentiated
    result: Any  # a description
    under: tuple[bool, bool]  # whether it read what requires grad, whether grad mode was on
    verdict: Verdict | None  # what becomes of what it made, as long as that has no names

    @property
    def holds(self) -> bool:
        """Whether what may be kept of its inputs may be needed: it isn't kept itself, or only if something reads it."""
        return self.verdict is None or not self.tracked


NO_ENTRY = Entry((None, None, None), (), (), (), (), None, (True, True), None)

_KNOWN = 8  # programs of a function that are remembered
_PLANS = 64  # plans of a program
_LEARNS = 3  # as calls may take turns


def _picking(positions: list[int]) -> Callable[[tuple], tuple]:
    start, end = (positions[0], positions[-1] + 1) if positions else (0, 0)
    return itemgetter(*([slice(start, end)] if end - start == len(positions) else positions))


def _layouts(result: Any, count: int) -> Sequence[Layout]:
    """Those of a result of so many tensors, in order; none if it isn't these and nothing else."""
    found = [result] if type(result) is Layout else result if type(result) in (tuple, list) else ()
    return found if [item.i if type(item) is Layout else None for item in found] == [*range(count)] else ()


class Step:
    """An operation of a first run that made or changed a value; views aren't noted."""

    __slots__ = (
        "call", "can_wait", "constants", "count", "draws", "entry", "facts", "func", "graded", "guard", "is_bare",
        "is_simple", "key", "layouts", "next", "number", "operands", "outs", "pick", "reads", "result", "sees",
        "to_hold",
    )  # fmt: skip
    is_view = False

    def __init__(self, number: int, entry: Entry) -> None:
        self.number = number
        self.entry = entry
        self.key, self.reads, self.outs, self.result = entry.key, entry.reads, entry.outs, entry.result
        self.func = self.key[0]
        self.facts = facts_of(self.func)
        self.draws = self.key[1] is not None
        acts = self.facts.writes or self.facts.observes or self.facts.foreign or self.draws
        self.operands: list[tuple[int, int, tuple | None]] = []  # position, value, form
        self.constants: list[tuple[int, Any]] = []  # position, pattern
        self.count = 0
        rest = iter(self.key[3:])
        for item in rest:
            if type(item) is int:
                self.operands.append((self.count, item, next(rest)))
            else:
                self.constants.append((self.count, item))
            self.count += 1
        # It has tensors for arguments, and else constants; it makes tensors, each on its own, and does nothing else.
        told = not acts and len(self.operands) == len(self.reads) and type(self.func) is OpOverload
        self.is_simple = told and type(self.result) is Layout  # one tensor
        told &= self.key[2] is None and all(form is not None for _, _, form in self.operands)
        self.layouts = _layouts(self.result, len(self.outs)) if told else ()
        self.call = direct_call(self.func) if told else self.func
        self.guard: TensorGuards | None = None  # of its operands and its results, if it reads nothing but known tensors
        self.sees: list[Known] = []  # these
        self.is_bare = self.is_simple and not self.constants
        self.pick = _picking([position for position, _, _ in self.operands])  # of the arguments those that are tensors
        self.next: Step = self  # and then, in its program
        self.to_hold: list[tuple[int, int]] = []  # by position: what may be kept that it reads
        self.graded = entry.under[1]  # whether grad mode was on
        self.can_wait = False  # it can be put off where nothing seems to need it, and be made up for if that was wrong


END = Step(-1, NO_ENTRY)  # no operation is this step


class View(Step):
    """A view that was made of an original, or of such a view, after so many steps.

    The same function with the same arguments makes the same view of it, so that the tensor is known too.
    """

    __slots__ = ("form", "rest", "source", "value")
    is_view = True

    def __init__(self, func: OpOverload, args: tuple, source: Known, value: int, form: tuple, following: Step) -> None:
        self.func, self.call = func, direct_call(func)
        self.source, self.rest, self.value, self.form = source, args[1:], value, form
        self.number, self.next = following.number, following
        self.guard = guard_of(args[0])


Known: TypeAlias = int | View  # what a tensor is known as: the original of a value, or a view


class Program:
    """A log, and what follows from it.

    Python code may have read the values ``seen`` in ways that can't be seen. Operations were called at the ``lines``.
    """

    def __init__(self, log: list[Entry], seen: set[int], lines: Mapping[int, Line]) -> None:
        self.log = log
        self.lines = lines
        self.seen = seen
        self.steps = [Step(number, entry) for number, entry in enumerate(log)]
        self.path = [*self.steps, Step(len(log), NO_ENTRY)]
        self.start = Step(-1, NO_ENTRY)  # before the first one
        self.start.next = self.path[0]
        self.learns = _LEARNS  # in so many runs views are noted, between the steps
        self.offsets: tuple[int, ...] = ()  # of the inputs of the last run
        self.lazy = all(entry.under[1] for entry in log)  # else user code reads tensors in ways that can't be seen
        self.overwritten = {number for entry in log for number in entry.overwritten}
        if self.overwritten:  # a recompute may take any of equal steps for the one whose result it then overwrites
            outs = [(step.key, i, value) for step in self.steps for i, value in enumerate(step.outs)]
            equal = {(key, i) for key, i, value in outs if value in self.overwritten}
            self.overwritten |= {value for key, i, value in outs if (key, i) in equal}
        # If not differentiated, or detached, user code may read it in ways that can't be seen.
        self.waiting = {number for entry in log for number in entry.tracked if number not in seen}
        self.made: dict[int, int] = {}  # for each value that an operation made, which one
        self.saveable: dict[int, Verdict] = {}  # what the policy lets be kept, names aside
        for step in self.steps:
            step.next = self.path[step.number + 1]
            self.made.update(dict.fromkeys(step.outs, step.number))
            if step.entry.verdict is not None:
                self.saveable.update(dict.fromkeys(step.outs, step.entry.verdict))
            if step.entry.holds:
                step.to_hold = [(i, value) for i, value, _ in step.operands if value in self.saveable]
            step.can_wait = (
                step.result is not UNTOLD
                and not (step.facts.writes or step.facts.observes or step.draws)
                and self.overwritten.isdisjoint(step.reads)
                and self.waiting.issuperset(step.outs)
            )
        self._plans: dict[tuple, Plan] = {}
        self.sources: list[Source] = []  # what autograd saved of the last run

    def note(self, func: Any, number: int, args: tuple, source: Known, value: int, form: tuple) -> View:
        """A view was made before a step, after those that are noted there."""
        before = self.path[number - 1] if number else self.start
        while before.next.is_view:
            before = before.next
        view = View(func, args, source, value, form, before.next)
        before.next = view
        return view

    @functools.cached_property
    def makers(self) -> frozenset[Facts]:
        """The operations that are steps."""
        return frozenset(step.facts for step in self.steps)

    @functools.cached_property
    def by_key(self) -> dict[tuple, list[Step]]:
        """The steps by what they have in common with others that make the same."""
        found: dict[tuple, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.key, []).append(step)
        return found

    def plan(
        self,
        sources: tuple[Source, ...],
        wanted: tuple[int, ...],
        end: int | None,
        available: Collection[int],
        leave: Callable[[Step], bool],
    ) -> Plan:
        """What it takes to have these again after the first ``end`` steps, or when the last source was saved."""
        asked = sources, wanted, end, frozenset(available), leave
        found = self._plans.get(asked)
        if found is None:
            roots = frozenset(chain(wanted, *(source.values for source in sources)))
            if end is None:
                end = max((source.after for source in sources), default=0)
            question = end, roots, *asked[3:]
            found = self._plans.get(question)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            if found is None:
                found = self._plans[question] = plan(self.steps[:end], self.waiting, *question[1:])
            self._plans[asked] = found
        return found

    @property
    def lasts(self) -> bool:
        """Whether it may be remembered: it has plain values alone, and not a function that holds who knows what."""
        return all(isinstance(step.func, OpOverload) and _is_plain(step.key[1:]) for step in self.steps)


class Programs:
    """What the last first runs of a function did under a policy."""

    def __init__(self) -> None:
        self.known: list[Program] = []  # the last one first

    def of(self, log: list[Entry], seen: set[int], lines: Mapping[int, Line]) -> Program:
        """The program of a log: one that is known, else a new one. It is the first from now on."""
        for i, program in enumerate(self.known):
            if program.log == log and program.seen == seen:
                if i:
                    self.known.insert(0, self.known.pop(i))
                return program
        program = Program(log, seen, lines)
        if program.lasts:
            self.known.insert(0, program)
            del self.known[_KNOWN:]
        return program


_PLAIN = (int, float, str, bool, type, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_plain(item: Any) -> bool:
    return all(map(_is_plain, item)) if isinstance(item, tuple) else isinstance(item, _PLAIN)
