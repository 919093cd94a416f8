"""Modules whose calls are regions: a second module that shares all state with the first, or the module itself."""

from __future__ import annotations

from typing import Any

from .._region.options import Options
from .region_class import IN_PLACE, as_one_of, class_with, regions_of, set_regions


def second_module(module: Any, options: Options) -> Any:
    """A module that shares all state with ``module``, the calls of which are regions."""
    return as_one_of(class_with(module, (*regions_of(module), options)), module)


def change_in_place(module: Any, options: Options) -> None:
    """Make each later call of ``module`` a region; if it was changed before, then with these options."""
    regions = regions_of(module)
    set_regions(module, regions if None in regions else (*regions, None), options)


def change_back(module: Any) -> None:
    """Undo ``change_in_place``, if that was done."""
    if module.__dict__.pop(IN_PLACE, None) is not None:
        module.__class__ = class_with(module, tuple(filter(None, regions_of(module))))
