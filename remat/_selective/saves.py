"""What autograd saved in a first run under a policy: which values, and the slots that stand for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from .values import Layout


class Source(NamedTuple):
    """Where a tensor that autograd saved comes from: values, its layout if it may be kept, the steps so far."""

    values: tuple[int, ...]
    layout: Layout | None
    after: int

    @property
    def value(self) -> int | None:
        """The value that may be kept."""
        return None if self.layout is None else self.values[0]


class Saves:
    """What autograd saved so far."""

    def __init__(self) -> None:
        self.above: list[int] = []  # the values that levels of torch.func above saved; no slots stand for these
        self._slots: list[tuple[weakref.ref, Source]] = []

    def add(self, slot: Any, source: Source) -> None:
        """A slot stands for what autograd saved."""
        slot.source = source
        self._slots.append((weakref.ref(slot), source))

    def slots(self) -> Iterator[tuple[Any, Source]]:
        """The slots, None for those that are gone, and what they stand for."""
        return ((ref(), source) for ref, source in self._slots)

    def has(self, value: int, since: int) -> bool:
        """Whether autograd has saved a value, which the step ``since`` has made."""
        later = takewhile(lambda slot: slot[1].after > since, reversed(self._slots))
        return value in self.above or any(value in source.values for _, source in later)

    def are_filled(self, number: int, written: dict[int, int]) -> None:
        """Autograd may save an argument before the operation fills it (``rrelu``): then it is what was written."""
        self.above = [written.get(value, value) for value in self.above]
        for i in range(len(self._slots) - 1, -1, -1):
            ref, source = self._slots[i]
            slot = ref()
            if source.after < number:
                break
            if slot is not None and len(source.values) == 1 and source.values[0] in written:
                slot.source = Source((written[source.values[0]],), source.layout, number + 1)
                self._slots[i] = ref, slot.source
