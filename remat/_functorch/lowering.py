"""The lowering under torch.func: calls a region at the active levels, and restarts its first run if necessary.

The rules of the levels are in ``_functorch/levels.py``, and what runs below all levels in ``_functorch/bottom.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._core import private
from .._core.known import Known
from .._core.state import own_work, state
from .._region.arguments import take_apart
from .._region.around import Around
from .._region.error_context import with_region
from .._region.hooks import drop_gradient_hooks, is_hooks_refusal
from .._region.intercept import given_as, made_inside
from .._region.options import Options
from .._region.region import Region
from .._region.watch import Abandoned, Watch
from .._selective.recorder import recorder_for
from .bottom import run_at_bottom
from .left_behind import check_left_behind
from .levels import apply
from .tape import Call


def call(fn: Callable, options: Options, known: Known, args: tuple, kwargs: dict) -> Any:
    """Call ``fn`` as a region. If a first run shows that it must be executed differently, it is started again."""
    kinds = tuple([interpreter.key().value for interpreter in private.interpreter_stack() or ()])
    if private.FUNCTIONALIZE in kinds:
        return fn(*args, **kwargs)  # the function is being traced
    region = Region(fn, *take_apart(args, kwargs), options, known, Around())
    region.kinds = kinds
    region.by_level = kinds in known.by_level
    try:
        while True:
            with own_work():  # an outer region must not treat these queries as its function's own
                region.open(follow=is_followed)
            shared, first_hook = Call(recorder_for(region), run_at_bottom), RemovableHandle.next_id
            used_func = known.uses_func  # an inner region may be of the same function, and set it
            try:
                return _first_run(region, shared)
            except Abandoned as abandoned:
                if abandoned.region is not region:
                    raise
            except Exception as error:
                if is_hooks_refusal(error) and not used_func:
                    known.uses_func = True
                elif not _adopts_captured(region, shared.watch):
                    raise
            with own_work():
                shared.guards.roll_back()
                drop_gradient_hooks((*shared.operands, *map(given_as, region.operands())), first_hook)
                region.restart()
    except Exception as error:
        raise with_region(error, region, recomputing=False)  # noqa: B904
    finally:
        region.forget()


def _first_run(region: Region, shared: Call) -> Any:
    operands = region.operands()
    with own_work():
        if state.interceptors:
            operands = [state.interceptors[-1].resolve(t) for t in operands]
        outs = apply(region, operands, shared)
        learned = _learns(region, shared.watch)
        check_left_behind(region, shared.watch, outs)
    if learned or _adopts_captured(region, shared.watch):
        raise Abandoned(region)
    shared.watch = shared.recorder = None  # a watch refers to its region
    made_inside(outs)
    return region.outputs.build(outs, operands)


def _adopts_captured(region: Region, watch: Watch | None) -> bool:
    """Whether a first run has read unknown captured tensors. They are operands from now on.

    False if it did not read those that the last run found: these were made inside, and each run makes others.
    """
    found = [] if watch is None or watch.unread else watch.remaining()
    region.adopt(found)
    region.guessed |= {*map(id, found)}
    return bool(found)


def _learns(region: Region, watch: Watch) -> bool:
    """Whether a first run has shown that the region must be executed differently under a ``grad`` level."""
    if private.GRAD not in region.kinds:
        return False
    known, learned = region.known, False
    if not known.graded and watch.tells_levels():
        known.graded = learned = True
    if not region.by_level and watch.needs_order():
        known.by_level.add(region.kinds)
        region.by_level = learned = True
    return learned


def is_followed(tensor: torch.Tensor) -> bool:
    """Whether some transform or autograd follows a captured tensor, so that it must be an operand."""
    return tensor.requires_grad or private.is_wrapped(tensor)
