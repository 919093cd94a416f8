"""A forward as a chain of items: calls of modules that can be regions, and what lies between these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from .candidates import Candidates
from .trace import Call, Memory, Operation, Trace


class Work(NamedTuple):
    """The cost of operations, and their floating-point operations."""

    cost: float
    flops: int


NO_WORK = Work(0.0, 0)


@dataclass(frozen=True)
class Option:
    """How an item can run without inner regions: as it is, or as a region that saves some of its values.

    Attributes:
        keep: the bytes that it keeps from its forward to its backward.
        forward, backward: the most bytes that it needs then, beyond those at its start.
        recompute: the work of its own recompute.
        ends: the work of its forward up to the last value that it keeps.
        nbytes: the bytes of the saved values, if it is a region.
        steps: the numbers of the operations whose results are saved; None if it is no region.
    """

    keep: int
    forward: int
    backward: int
    recompute: Work
    ends: Work
    nbytes: int = 0
    steps: frozenset[int] | None = None


@dataclass(eq=False)
class Item:
    """A part of a chain. Bytes are beyond those that earlier items keep.

    Attributes:
        call: the call of a module that can be a region, or a part of one around several calls; or what is between two.
        can_be_region: whether a region around this call alone is worth while.
        work: that of its forward.
        keep: the bytes that it keeps until its backward, if it runs as it is.
        gradients: the bytes of gradients of parameters that its backward makes.
        waiting: the bytes of the gradients that its backward starts with.
        beside: of these, those of other values than its results.
        held: the bytes that only its callers hold during its forward, without its arguments.
        given: the bytes of its arguments that nothing before it keeps.
        bare: the most bytes that its forward needs if it keeps only its arguments.
        key: equal for calls that do the same.
        items: the chain inside of its call.
        options: those of ``plain`` and ``regions`` that the search tries.
        plain: how it runs as it is; empty if items are inside of it, whose options say so.
        regions: how it can run as a region without regions inside of it.
        operators: the names of its operations, if it can be a region.
    """

    call: Call
    items: list[Item] = field(default_factory=list)
    can_be_region: bool = True
    options: list[Option] = field(default_factory=list)
    work: Work = NO_WORK
    keep: int = 0
    gradients: int = 0
    waiting: int = 0
    beside: int = 0
    held: int = 0
    given: int = 0
    bare: int = 0
    key: tuple = ()
    plain: list[Option] = field(default_factory=list)
    regions: list[Option] = field(default_factory=list)
    operators: tuple[str, ...] = ()

    @property
    def signature(self) -> tuple:
        """Equal for items that the search can't tell apart."""
        numbers = self.keep, self.gradients, self.waiting, self.held, self.given
        place = self.call.container is not None, self.call.overwrites
        return self.key, numbers, place, tuple(self.options), tuple(item.signature for item in self.items)

    def follows(self, other: Item) -> bool:
        """Whether a ``Sequential`` calls it just after another one, with the other's result."""
        container = self.call.container
        return container is not None and container is other.call.container and self.call.index == other.call.index + 1

    def everything(self) -> Iterator[Item]:
        """This item and those inside of it."""
        yield self
        for item in self.items:
            yield from item.everything()


def chain_of(trace: Trace, candidates: Candidates) -> tuple[list[Item], list[Item]]:
    """Return the items of the whole forward, with their costs and bytes, and these together with all inside of them."""
    items = _chain(trace, trace.root, candidates)
    every = [item for each in items for item in each.everything()]
    memory = _Lifetimes(trace, [item.call for item in every])
    for item in every:
        memory.fill(item)
    return items, every


def _chain(trace: Trace, call: Call, candidates: Candidates) -> list[Item]:
    """Return the items of a call, in order."""
    found: list[Item] = []
    for inner in call.calls:
        if candidates.is_shared(inner):
            inner.container = None  # it can't be in a region with the next ones
        items = _chain(trace, inner, candidates)
        calls = [item for item in items if item.call.module is not None]
        if candidates(inner):
            found.append(Item(inner, items if calls and not candidates.is_whole(inner) else []))
        elif not calls and candidates.is_in_row(inner, call):
            found.append(Item(inner, can_be_region=False))
        else:
            found += calls
    starts = [call.start, *(item.call.end for item in found)]
    ends = [*(item.call.start for item in found), call.end]
    between = [
        Item(Call(None, start, end), can_be_region=False)
        for start, end in zip(starts, ends)
        if trace.index(start) < trace.index(end)
    ]
    return sorted([*found, *between], key=lambda item: item.call.start)


class _Lifetimes:
    """What of the forward's memory is alive at which time, kept for the backward, or has a gradient there."""

    def __init__(self, trace: Trace, calls: Sequence[Call]) -> None:
        self._trace = trace
        self._set_keepers(calls)
        self._alive = self._spans([(memory.made, memory.freed, memory) for memory in trace.memory])
        with_gradient = [(memory.made, memory.last, memory) for memory in trace.memory if memory.has_gradient]
        self._gradients = self._spans(with_gradient)

    def _set_keepers(self, calls: Sequence[Call]) -> None:
        """Decide what keeps each memory: the first operation or call that does.

        A call that can be a region does not keep its result, if something after it does.
        """
        for call in calls:
            for memory in call.results:
                memory.returned = max(memory.returned, call.end)
        keepers = [(time, time, memory) for time, memory in self._trace.saved]
        keepers += [(call.start, call.end, memory) for call in calls for memory in call.given]
        keepers.sort(key=lambda keeper: (keeper[0] < keeper[2].returned, keeper[1]))
        for _, end, memory in reversed(keepers):
            memory.kept = end

    def _spans(self, spans: Sequence[tuple[int, float, Memory]]) -> list[list[Memory]]:
        """For each number of operations that have run: the memory whose span includes the start of the next one."""
        found: list[list[Memory]] = [[] for _ in (None, *self._trace.operations)]
        for start, end, memory in spans:
            for i in range(self._trace.index(start + 1), self._trace.index(end) + 1):
                found[i].append(memory)
        return found

    def fill(self, item: Item) -> None:
        """Compute the costs and bytes of an item."""
        call = item.call
        first, last = self._trace.index(call.start), self._trace.index(call.end)
        operations, saves = self._trace.operations[first:last], self._trace.saved_in(call)
        # What it saves, with the first time.
        saved = {memory: time for time, memory in reversed(saves) if memory.kept >= call.start}
        item.work = _work(operations)
        item.keep = sum(memory.nbytes for memory in saved if memory.kept < call.end)
        made = [each for each in self._trace.gradients.values() if call.start <= each[0] < call.end]
        item.gradients = sum(nbytes for _, nbytes in made)
        # The gradients that are alive when the backward has come back to its end.
        waiting = {m.gradient_at(call.end) for m in self._gradients[last] if m.made < call.end <= m.last}
        item.waiting = sum(memory.nbytes for memory in waiting)
        item.beside = sum(memory.nbytes for memory in waiting.difference(call.results))
        item.given = sum(memory.nbytes for memory in call.given if memory.kept >= call.start)
        before = [memory for memory in self._alive[first] if memory.kept >= call.start]
        item.held = sum(memory.nbytes for memory in before if memory not in call.given)
        own = [memory for operation in operations for memory in operation.made]
        item.bare = item.given + _most([(memory.made, memory.freed, memory.nbytes) for memory in own], item)
        if not item.items:
            spans = [(m.made, math.inf if m in saved else m.freed, m.nbytes) for m in (*before, *own)]
            forward = max(item.keep, _most(spans, item))
            backward = max(item.keep + item.waiting, self._backward(operations, saved, made))
            end = saves[-1][0] if saves else call.start
            ends = _work([operation for operation in operations if operation.time < end])
            item.plain = item.options = [Option(item.keep, forward, backward, NO_WORK, ends)]
        parameters = () if call.module is None else call.module.parameters()
        item.key = (
            type(call.module),
            tuple((p.nbytes, p.requires_grad) for p in parameters),
            tuple((memory.nbytes, memory.has_gradient) for memory in call.given),
            call.differentiable,
            hash(tuple((op.func, op.flops, *(memory.nbytes for memory in op.made)) for op in operations)),
        )

    def _backward(
        self, operations: Sequence[Operation], saved: Mapping[Memory, int], made: Sequence[tuple[int, int]]
    ) -> int:
        """The most bytes in the backward: what is still saved, and gradients."""
        most = 0
        for operation in operations:
            time = operation.time
            now = sum(m.nbytes for m, when in saved.items() if when < time or m in operation.made)
            now += sum(nbytes for when, nbytes in made if when >= time)
            now += operation.backward_kernel
            spans = self._gradients[self._trace.index(time)]
            near = [m for m in spans if m.made <= time and m.last > time] + operation.made + operation.reads
            wholes = {memory.gradient_at(time) for memory in near if memory.has_gradient}
            most = max(most, now + sum(memory.nbytes for memory in wholes))
        return most


def _work(operations: Sequence[Operation]) -> Work:
    return Work(sum(operation.cost for operation in operations), sum(operation.flops for operation in operations))


def _most(spans: Iterable[tuple[int, float, int]], item: Item) -> int:
    """The most bytes that are alive at a time of the item, of memory with these spans."""
    changes: dict[float, int] = defaultdict(int)
    for start, end, nbytes in spans:
        changes[max(start, item.call.start)] += nbytes
        changes[end + 1] -= nbytes
    return max([0, *accumulate(changes[time] for time in sorted(changes) if time < item.call.end)])
