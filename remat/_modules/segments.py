"""A ``Sequential`` some of whose modules are together in one region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import unwrap
from typing import Any

from torch import nn

from .._core.known import Known
from .._function import Remat
from .._region.options import Options

Range = tuple[int, int]


def is_sequence(module: Any) -> bool:
    """Whether it is a ``Sequential`` that only calls its modules one after another."""
    is_plain = isinstance(module, nn.Sequential) and "forward" not in vars(module)
    return is_plain and unwrap(type(module).forward) is nn.Sequential.forward


def segmented(module: nn.Sequential, options: Options) -> Any:
    """Return a forward with a region around each range of modules that the options name."""
    return partial(_called, tuple(module), options.segments, (0, len(module)), replace(options, segments=()))


def _called(modules: Sequence[nn.Module], segments: Sequence[Range], part: Range, options: Options, value: Any) -> Any:
    """Call a part of the modules, one after another. Ranges may be inside of one another."""
    at, end = part
    while at < end:
        longest = max((each for each in segments if each[0] == at), key=lambda each: each[1], default=None)
        if longest is None:
            value, at = modules[at](value), at + 1
        else:
            inside = [each for each in segments if at <= each[0] and each[1] <= longest[1] and each != longest]
            called = partial(_called, modules, inside, longest, options)
            value, at = Remat(called, options, Known())(value), longest[1]
    return value
