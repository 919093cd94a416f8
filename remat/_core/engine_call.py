"""Find calls of autograd's engine on a thread's stack."""

from __future__ import annotations

from types import FrameType

from . import private

_ENGINE_CALL = private.engine_call.__code__


def nearest_engine_call(frame: FrameType | None, within: FrameType | None = None) -> FrameType | None:
    """The innermost call of autograd's engine from ``frame`` out, up to ``within``."""
    while frame is not within and frame is not None and frame.f_code is not _ENGINE_CALL:
        frame = frame.f_back
    return None if frame is within else frame
