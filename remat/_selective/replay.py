"""The operations of a recompute: each is restored from saved values, skipped if nothing needs its result, or run.

An operation is restored only from the values of a step that is the same function of the same values. If the result of a
skipped operation is needed after all, the recompute starts over, and skips nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from .._core.devices import make_readable, streams_for
from .._core.facts import Facts, facts_of, tensors
from .._core.private import without_torch_function
from .._core.state import state, unseen
from .._core.tensors import all_parts, as_bytes, holder, is_wrapper_call
from .._region.hooks import positions
from .._region.placeholders import Placeholders, Restart
from .._region.region import Run
from ..errors import RecomputeMismatchError
from .mode import RegionMode
from .program import Plan, Step
from .recorder import Record
from .saved import with_form
from .values import Argument, Layout


class Replay(RegionMode):
    """The dispatch mode of a recompute, which matches operations with the steps of the first run."""

    def __init__(self, record: Record, plan: Plan | None = None, last: bool = False) -> None:
        super().__init__(record.policy, record.known, record.drawing)
        self.record = record
        self.whole = plan is None  # it skips no step
        self.plan = record.plan(whole=True) if plan is None else plan
        self.last = last  # values that are saved only for this recompute can be released as they are restored
        self.position = 0  # of the step that is expected next
        self.placeholders = Placeholders()
        # An operation that draws random numbers was restored, so drew none: this, and the recordings at the first time.
        self.undrawn: tuple[Any, ...] = ()
        self.begun_undrawn = False  # whether regions inside that draw began after it, with other generators
        self.storages = record.storages.copy()
        self.inputs: list[Any] = []  # alive without the run, so they don't escape
        # The values of the restored steps, as slots that own them may be freed in this run; fetched before it.
        self.kept: dict[int, torch.Tensor] = {}

    def bind(self, inputs: Iterable[torch.Tensor]) -> None:
        """Begin, with these inputs of the region."""
        record = self.record
        restored = [value for number in sorted(self.plan.restored) for value in record.program.steps[number].outs]
        with without_torch_function():
            for value in restored:
                if (residual := record.saved_values.residual(value)) is not None:
                    self.kept[value] = residual.get()
            self.home = streams_for(self.kept.values())  # the streams for which they are readable
        self.inputs = list(map(holder, all_parts([*inputs])))
        for value, storage in zip(record.inputs, self.inputs):
            self.storages.put(storage, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        facts, kwargs = facts_of(func), kwargs or {}
        if types and is_wrapper_call(types):
            return NotImplemented
        if facts.marks:
            return self.ranges.mark(func, args, kwargs)
        filling = self.number < state.filling  # a region inside is recomputed, which the first run's log doesn't have
        if filling:
            with without_torch_function():
                self.placeholders.read(tensors((args, kwargs)))
        if filling or state.unseen or self.ranges:
            return self.placeholders.mark(facts.run(*args, **kwargs))
        record, storages = self.record, self.storages
        if facts.views and facts not in record.program.makers:
            return self._view(func, args, kwargs)
        with without_torch_function():
            read: list[torch.Tensor] = []
            draw = self.draw(facts, args, kwargs)
            number = self._match(facts, draw, args, kwargs, read)
            step = None if number is None else record.program.steps[number]
            if step is not None:
                is_restored = number in self.plan.restored and not (self.whole and step.draws)
                if is_restored and self._fits(step, args, kwargs):
                    return self._restore(step, args, kwargs, read)
                if number in record.program.skippable and number not in self.plan.run:
                    return self._rebuild(step, args, kwargs, read, [None] * len(step.outs))
            if draw is not None and self.undrawn:
                self.placeholders.restart()
            if not facts.reads_nothing:
                self.placeholders.read(read)
            written = facts.written(args, kwargs)
            self._check_writes(written)
        result = facts.run(*args, **kwargs)
        with without_torch_function():
            changed = [*[storage for _, storage, _ in storages.new(result)], *map(holder, written)]
            for storage, value in zip(changed, repeat(None) if step is None else step.outs):
                storages.put(storage, value)
        return result

    def _check_writes(self, written: list[torch.Tensor]) -> None:
        """Raise an error for a write to the saved tensor itself. Values that the first run overwrites are copies."""
        for tensor in written:
            record, value = self.record, self.storages.find(tensor)
            if value is not None and value not in record.program.overwritten and record.saved_values.residual(value):
                raise RecomputeMismatchError(
                    "The region changed a tensor in place in the recompute, but not in its first run. A region's "
                    "function must be deterministic: look for Python state that changed between the runs."
                )

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Execute an operation that only returned views in the first run. It can be applied to placeholders, too."""
        result = func(*args, **kwargs)
        if not self.placeholders:
            return result
        with without_torch_function():
            if self.storages.new(result):
                self.placeholders.read(tensors((args, kwargs)))
        return self.placeholders.mark(result)

    def _match(self, facts: Facts, draw: int | None, args: tuple, kwargs: dict, read: list) -> int | None:
        """Return the number of the step that is the same function of the same values, or None."""
        key, program, found = self.storages.key(facts, draw, args, kwargs, read), self.record.program, self.position
        if found >= len(program.steps) or program.steps[found].key != key:
            if (numbers := program.by_key.get(key)) is None:
                return None
            found = next((number for number in numbers if number >= found), numbers[0])
        self.position = found + 1
        return found

    def _content(self, value: int) -> torch.Tensor | None:
        """Return a tensor that contains a saved value."""
        if value in self.kept:
            return self.kept[value]
        residual = self.record.saved_values.residual(value)
        return None if residual is None else residual.get()

    def _fits(self, step: Step, args: tuple, kwargs: dict) -> bool:
        """Whether the tensors that a step writes to have as much memory as in the first run.

        The tangents that torch makes have as much as their primals, which may be copies in the recompute.
        """
        written = step.facts.written(args, kwargs)
        contents = map(self._content, step.outs[len(step.outs) - len(written) :])
        return all(c is None or len(as_bytes(c)) == len(as_bytes(tensor)) for c, tensor in zip(contents, written))

    def _restore(self, step: Step, args: tuple, kwargs: dict, read: list) -> Any:
        """Return the result of an operation, from its saved values."""
        if step.draws:
            self.undrawn = self.undrawn or (*state.recordings, self)
            self.begun_undrawn |= not {*state.recordings}.issubset(self.undrawn)
        saved: list[torch.Tensor | None] = []
        for value in step.outs:
            content = self._content(value)
            self.kept.pop(value, None)
            if content is not None:
                make_readable(content, self.home)
                if value in self.record.program.overwritten:  # later the region changes it in place
                    content = as_bytes(content).clone()
            saved.append(content)
            if self.last:
                self.record.saved_values.release(value)
        return self._rebuild(step, args, kwargs, read, saved)

    def _rebuild(self, step: Step, args: tuple, kwargs: dict, read: list, contents: list) -> Any:
        """Return a result without running the operation, with these contents, or placeholders where they are None."""
        count = len(step.outs)
        if step.facts.writes:
            written = step.facts.written(args, kwargs)
            count -= len(written)
            for value, tensor, content in zip(step.outs[count:], written, contents[count:]):
                if content is None:
                    self.placeholders.add(tensor)  # the tensor, which may be the region's own, is the placeholder
                else:
                    as_bytes(tensor).copy_(as_bytes(content))  # outer regions see it, as the write itself
                    self.placeholders.mark_filled(tensor)
                self.storages.put(holder(tensor), value)
        return self.placeholders.mark(self._build(step.result, step, contents, read))

    def _build(self, item: Any, step: Step, contents: list, read: list) -> Any:
        if isinstance(item, Layout):
            content = contents[item.i]
            if content is None:
                with unseen():
                    contents[item.i] = tensor = self.placeholders.placeholder(item.form)
            else:
                tensor = with_form(content, item.form)
            self.storages.put(tensor.untyped_storage(), step.outs[item.i])
            return tensor
        if isinstance(item, Argument):
            return read[item.i]
        if type(item) in (tuple, list):
            return type(item)([self._build(part, step, contents, read) for part in item])
        return item

    def escaped(self, result: Any = None) -> bool:
        """Whether placeholders of skipped values are still alive after the run, other than those in the result."""
        with without_torch_function():
            return self.placeholders.escaped(but=[*map(holder, all_parts(tensors(result))), *self.inputs])


@dataclass(slots=True)
class Recompute(Run):
    """A recompute that fills no slots."""

    root: Any = None  # the region

    def carry_out(self, operands: Sequence[torch.Tensor], go: Callable[[Run], Any]) -> Any:
        record: Record | None = self.root.record
        if record is None:
            return go(self)
        before = positions()
        # If the region overwrites its operands, a second attempt would get operands that the first has changed.
        changes = not record.program.overwritten.isdisjoint(record.inputs[: len(all_parts([*operands]))])
        plan = record.plan() if self.root.options.may_skip and not changes else None
        replay = Replay(record, plan)
        try:
            result = go(Run(self.log, replay=replay))
            # Regions inside may be recomputed when this run has ended.
            if not (replay.placeholders.is_read or replay.escaped(result) or replay.begun_undrawn):
                return result
            del result
        except (Restart, Exception):
            if not replay.placeholders.is_read:
                raise
        for each, position in before:  # outer regions forget the abandoned attempt
            each.go_back(position)
        return go(Run(self.log, replay=Replay(record)))
