"""The lowering for plain autograd: a region under the engine."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from . import _func
from ._arguments import take_apart
from ._around import Around
from ._hooks import hooks_are_allowed, is_hooks_refusal
from ._kept import Kept
from ._lowerings import go_back, lowered_by_func, mark
from ._memory import Memory
from ._options import Options
from ._recorder import recorder_for
from ._region import Region
from ._run import FirstRun
from ._saver import Saver
from ._state import own_work, state


def call(fn: Callable, options: Options, memory: Memory, args: tuple, kwargs: dict) -> Any:
    """Call ``fn`` as a region."""
    marks = mark()
    # Without hooks it can't be recomputed, and needn't be where nothing is differentiated: that shows there.
    if not lowered_by_func(memory.known.uses_func or not hooks_are_allowed()):
        try:
            if not state.interceptors:
                return _run(fn, options, memory, args, kwargs)
            with own_work():
                return _run(fn, options, memory, args, kwargs)
        except RuntimeError as error:
            if not is_hooks_refusal(error):
                raise
            memory.known.uses_func = True
            go_back(marks)
            lowered_by_func(True)
    return _func.call(fn, options, memory, args, kwargs)


def _run(fn: Callable, options: Options, memory: Memory, args: Any, kwargs: dict) -> Any:
    given, tensors = take_apart(args, kwargs)
    if state.interceptors:  # an argument may be a tensor that a region around has captured, and gets as another one
        known = list(map(state.interceptors[-1].resolve, tensors))
        if not all(map(is_, known, tensors)):
            args, kwargs = given.filled(known)
            given, tensors = take_apart(args, kwargs)
    around = Around()
    operands = Kept(tensors, given.name, memory.known.changing)
    around.take(operands, given.uses)
    region = Region(fn, given, tensors, options, memory, around)
    try:
        region.open(around=around)
        run = FirstRun(recorder_for(region))
        saver = Saver(region, operands, region.consts, around.hooks, run)
        try:
            return saver.run(region.first, args, kwargs)
        except RuntimeError as error:
            if is_hooks_refusal(error):
                # The function calls torch.func.grad or vjp, which refuse to run under saved-tensor hooks.
                operands.roll_back()
                region.restart()
            raise
    finally:
        region.forget()
