"""The lowering for plain autograd: a region under the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._core.known import Known
from .._core.state import state
from .._region.arguments import take_apart
from .._region.around import Around
from .._region.error_context import with_region
from .._region.guards import Guards
from .._region.hooks import is_hooks_refusal
from .._region.options import Options
from .._region.region import Region
from .._region.run import FirstRun
from .._selective.recorder import recorder_for
from .saver import Saver


def call(fn: Callable, options: Options, known: Known, around: Around, args: Any, kwargs: dict) -> Any:
    """Call ``fn`` as a region, with the hooks ``around``.

    Raises:
        RuntimeError: ``fn`` raised it, or refuses to run under saved-tensor hooks; then its changes are undone.
    """
    arguments, tensors = take_apart(args, kwargs)
    if state.watch is not None:  # the arguments of a region are read by the region around it
        state.watch.reads(tensors)
    operands = Guards(tensors, arguments.name)
    around.take(operands, arguments.uses)
    region = Region(fn, arguments, tensors, options, known, around)
    try:
        region.open(around=around)
        run = FirstRun(recorder_for(region))
        saver = Saver(region, operands, region.captured_inputs, around.hooks, run, options.read_inside)
        try:
            return saver.run(region.first, args, kwargs)
        except RuntimeError as error:
            if is_hooks_refusal(error):
                # The function calls torch.func.grad or vjp, which refuse to run under saved-tensor hooks.
                operands.roll_back()
                region.restart()
            raise
    except Exception as error:
        raise with_region(error, region, recomputing=False)  # noqa: B904
    finally:
        region.forget()
