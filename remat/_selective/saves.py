"""What autograd saved in a first run under a policy: the values, and the slots in place of the saved tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from .values import Layout


class Source(NamedTuple):
    """The origin of a tensor that autograd saved: its values, its layout if a policy may save it, the steps so far."""

    values: tuple[int, ...]
    layout: Layout | None
    after: int

    @property
    def value(self) -> int | None:
        """The value that the policy may save, or None."""
        return None if self.layout is None else self.values[0]


class Saves:
    """The tensors that autograd has saved so far."""

    def __init__(self) -> None:
        self.above: list[int] = []  # the values that autograd saved at torch.func levels above, which have no slots
        self._slots: list[tuple[weakref.ref, Source]] = []

    def add(self, slot: Any, source: Source) -> None:
        """Add a slot, and the origin of the tensor that it replaces."""
        slot.source = source
        self._slots.append((weakref.ref(slot), source))

    def slots(self) -> Iterator[tuple[Any, Source]]:
        """Iterate over the slots, None for freed ones, and their origins."""
        return ((ref(), source) for ref, source in self._slots)

    def roots(self, end: int, all_count: bool) -> dict[int, int]:
        """Return the values that a backward pass needs, each with the number of steps when autograd last saved it."""
        found = dict.fromkeys(self.above, end)
        for slot, source in self.slots():
            if slot is not None or all_count:
                found.update((value, max(source.after, found.get(value, 0))) for value in source.values)
        return found

    def has(self, value: int, since: int) -> bool:
        """Whether autograd has saved a value that step ``since`` has made."""
        later = takewhile(lambda slot: slot[1].after > since, reversed(self._slots))
        return value in self.above or any(value in source.values for _, source in later)

    def on_overwrite(self, number: int, written: dict[int, int]) -> None:
        """Replace values that were just overwritten: autograd may save an argument before it is filled (``rrelu``)."""
        self.above = [written.get(value, value) for value in self.above]
        for i in range(len(self._slots) - 1, -1, -1):
            ref, source = self._slots[i]
            slot = ref()
            if source.after < number:
                break
            if slot is not None and len(source.values) == 1 and source.values[0] in written:
                slot.source = Source((written[source.values[0]],), source.layout, number + 1)
                self._slots[i] = ref, slot.source
