"""Binds places to other values while something runs, and puts all back."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from types import CellType
from typing import Any

from ._contents import Contents
from ._copies import Copy, Staying, with_containers
from ._errors import CaptureError
from ._places import MISSING, CellPlace, Place, TupleItem


class rebound:
    """Binds places, and closure cells before them, to values; puts all back at exit.

    A `Copy` among the values stands for a container, and as the holder of a place for the container that it became.
    With `keep_changes`, what was written to a place meanwhile stays: for a first run, which counts.
    """

    __slots__ = ("_cells", "_containers", "_keep", "_places", "_undo")

    def __init__(
        self,
        places: Iterable[tuple[Place, Any]],
        cells: Iterable[tuple[CellType, Any]] = (),
        *,
        keep_changes: bool = False,
    ) -> None:
        self._places = places
        self._cells = cells
        self._keep = keep_changes
        self._undo: list[tuple[Place, Any, Any]] = []
        self._containers: dict[Copy, Any] = {}

    def __enter__(self) -> None:
        try:
            for cell, value in self._cells:
                self._bind(CellPlace(cell, "", None), value)
            for place, value in self._places:
                self._bind(place, value)
        except BaseException:
            self.__exit__()
            raise

    def _bind(self, place: Place, value: Any) -> None:
        place = self._located(place)
        if type(value) is Copy:
            value = self._container(value, place.get())
        elif type(place) is Contents:
            value = place.key = with_containers(value, self._container, place.holder)
        spot = place.spot
        before = bound = spot.get()
        if (before if spot is place else place.get()) is not value:
            if place.settable:
                place.set(value)
            bound = spot.get()
            if (bound if spot is place else place.get()) is not value:
                self._undo.append((spot, before, bound))
                raise CaptureError(
                    f"captured {place.path} now holds something else than when the region ran first, and could not be "
                    f"bound again to what it held. Pass it to the region as an argument, or leave it as it is until "
                    f"the backward is done."
                )
        self._undo.append((spot, before, bound))

    def _located(self, place: Place) -> Place:
        up = self._located(place.up) if type(place) is TupleItem else place.up
        holder = self._container(place.holder, MISSING) if type(place.holder) is Copy else place.holder
        return place if up is place.up and holder is place.holder else type(place)(holder, place.key, up)

    def _container(self, copy: Copy, now: Any) -> Any:
        """What stands for the container: itself where it is there ``now``, with what it held."""
        if copy not in self._containers:
            kept = copy.is_of(now)
            container = self._containers[copy] = now if kept else copy.make()
            if kept and copy.may_stay(held := now.copy()):
                self._undo.append((Staying(now, held, None), held, held))
            else:
                self._bind(Contents(container, copy.items, None), copy.items)
        return self._containers[copy]

    def __exit__(self, *exception: object) -> None:
        # Backwards: a tuple is rebuilt once per item, and the first one kept is the original.
        for spot, before, bound in reversed(self._undo):
            now = spot.get()
            if now is not before and (not self._keep or _same(now, bound)):
                spot.set(before)
        self._undo.clear()


def _same(now: Any, bound: Any) -> bool:
    """What a set holds comes as another tuple each time."""
    if type(now) is tuple and type(bound) is tuple:
        return len(now) == len(bound) and all(map(is_, now, bound))
    return now is bound
