"""Binds places to other values while something runs, and puts all back."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from types import CellType
from typing import Any

from ._errors import CaptureError
from ._places import CellPlace, Place


class rebound:
    """Binds places, and closure cells before them, to values; puts all back at exit.

    With `keep_changes`, what was written to a place meanwhile stays: for a first run, which counts.
    """

    __slots__ = ("_cells", "_keep", "_places", "_undo")

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
