"""The lowering under torch.func: calls a region at the active levels, and restarts its first run if necessary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core import private
from .._core.known import Known
from .._core.state import own_work, state
from .._core.tensors import is_dual
from .._region.arguments import take_apart
from .._region.error_context import with_region
from .._region.hooks import is_hooks_refusal
from .._region.options import Options
from .._region.region import Region
from .._selective.recorder import recorder_for
from ..errors import RematError
from .bottom import Call
from .levels import apply
from .watch import NeedsLevels


def call(fn: Callable, options: Options, known: Known, args: tuple, kwargs: dict, uses_func: bool = False) -> Any:
    """Call ``fn`` as a region; ``uses_func`` if it has been seen to call torch.func transforms."""
    kinds = tuple([interpreter.key().value for interpreter in private.interpreter_stack() or ()])
    if private.FUNCTIONALIZE in kinds:
        return fn(*args, **kwargs)  # the function is being traced
    if private.cached_weights()[0] and (private.GRAD in kinds or private.JVP in kinds):
        raise RematError(_CACHED)
    region = Region(fn, *take_apart(args, kwargs), options, known, kinds, uses_func)
    try:
        while True:
            with own_work():  # an outer region must not treat these queries as its function's own
                region.open(follow=_is_followed)
                operands, shared, needs_levels = region.inputs.operands, Call(recorder_for(region)), False
                try:
                    if state.watch is not None:
                        state.watch.reads(operands)
                    outs = apply(region, operands, shared)
                    kept = shared.watch.check_end(outs)
                    if state.watch is not None:
                        state.watch.made([*outs, *kept])
                        state.watch.limit(shared.watch.orders_below)
                    break
                except NeedsLevels:
                    if not kinds and state.watch is not None and not state.watch.region.graded:
                        raise  # the levels are those of the region around it
                    needs_levels = True
                except Exception as error:
                    if "INTERNAL ASSERT" in str(error) and shared.watch is not None:
                        shared.watch.check_captured()  # torch has met a wrapper that it can't place
                    if not is_hooks_refusal(error) or region.uses_func:
                        raise
                    uses_func = True
                shared.guards.roll_back()
                region.restart(uses_func, needs_levels)
        shared.watch = shared.recorder = None  # nodes own it, and a watch refers to its region
        return region.outputs.build(outs, operands)
    except Exception as error:
        raise with_region(error, region, recomputing=False)  # noqa: B904
    finally:
        region.forget()


def _is_followed(tensor: torch.Tensor) -> bool:
    """Whether some transform or autograd follows a captured tensor, so that it must be an operand."""
    return (content := private.unwrap_if_dead(tensor)).requires_grad or private.is_wrapped(content) or is_dual(content)


_CACHED = (
    "A region under torch.func is called within `parametrize.cached()`, whose cache would lose the derivatives of the "
    "weights that the region computes. Leave out the cache."
)
