"""Whether the graph that a node's backward would record can ever be read.

At a ``grad`` level the backward runs with ``create_graph=True``, and the graph that it records keeps every recompute's
inputs alive until the level ends. When ``torch.func.grad`` itself runs that backward, its results are unwrapped and the
level ends, so the graph is not reachable. Two cases look alike and must be recorded: a ``vjp`` whose level has ended,
and user code that calls ``torch.autograd.grad(..., create_graph=True)`` inside of a transformed function.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch

from .._core import private
from .._core.passes import nearest_engine_call

_FUNC_GRAD_CALL = private.func_grad_engine_call.__code__


def graph_is_unreachable(level: int, saved: Sequence[torch.Tensor], thread: int) -> bool:
    """Whether it is proved that no code can: the level is alive and on top, and torch.func itself runs this backward.

    ``saved`` are the operands of a node at ``level``. ``thread`` is the thread that ran its forward.
    """
    alive = any(private.level_of(t) == level and not private.is_dead(t) for t in saved)
    if not alive or not private.transforms_active():
        return False
    interpreter = private.top_interpreter()
    if interpreter.key().value != private.GRAD or interpreter.level() != level:
        return False
    call = nearest_engine_call(sys._getframe(1))
    if call is None and threading.get_ident() != thread:
        # A device thread: the thread that called the engine waits in that very call.
        call = nearest_engine_call(sys._current_frames().get(thread))
    if call is None or call.f_back is None or call.f_back.f_back is None:
        return False
    return call.f_back.f_back.f_code is _FUNC_GRAD_CALL
