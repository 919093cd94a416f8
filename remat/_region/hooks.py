"""The stack of saved-tensor hooks: who refuses to run under it, who forbids it; and hooks that recomputes leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from .._core import private
from ..errors import RematError

_REFUSAL = "don't yet support saved tensor hooks"  # of torch.func
_NESTED = "Nested forward mode AD is not supported"  # of forward_ad
_DISABLE = disable_saved_tensors_hooks.__wrapped__.__code__  # type: ignore[attr-defined]


class hooks_allowed:
    """Lift the switch by which torch.func forbids saved-tensor hooks in a thread, and put it back.

    A user's own ``disable_saved_tensors_hooks`` is lifted only for a recompute, which has been promised.
    """

    __slots__ = ("lifted", "whoever_forbids")

    def __init__(self, whoever_forbids: bool = False) -> None:
        self.whoever_forbids = whoever_forbids
        self.lifted: str | None = None

    def __enter__(self) -> None:
        message = private.hooks_disabled_message()
        if message is not None and (self.whoever_forbids or _REFUSAL in message):
            private.hooks_enable()
            self.lifted = message

    def __exit__(self, *exception: Any) -> None:
        if self.lifted is not None:
            private.hooks_disable(self.lifted)


@contextmanager
def hooks_hidden() -> Iterator[None]:
    """Take all saved-tensor hooks off the stack, and put them back: for what refuses to run under hooks."""
    hidden = []
    while (hooks := private.top_hooks(True)) is not None:
        hidden.append(hooks)
        private.pop_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hidden):
            private.push_hooks(pack, unpack)


def hooks_are_allowed() -> bool:
    """Whether the user has not disabled saved-tensor hooks; torch.func does it too."""
    message = private.hooks_disabled_message()
    return message is None or _REFUSAL in message


def check_hooks_are_allowed() -> None:
    """Before anything has been changed.

    Raises:
        RematError: the user has disabled saved-tensor hooks.
    """
    if not hooks_are_allowed():
        message = private.hooks_disabled_message()
        raise RematError(
            f"Regions and `saved_residuals` work by saved-tensor hooks, which are disabled here with the message "
            f"{message!r}. Call them outside of `disable_saved_tensors_hooks`, or the region as a plain function under "
            f"`remat.disable_remat()`."
        )


def is_hooks_refusal(error: Exception) -> bool:
    """Whether a region can't run under saved-tensor hooks: torch.func.grad, vjp, or the user can't disable them.

    The words of torch.func are known, whoever raises them again. Of the user's own the place is known. Nor can a region
    under hooks enter a ``forward_ad`` level and run a backward pass inside: a recompute for it would enter the level
    too, and torch has no levels in levels.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return any(words in str(error) for words in (_REFUSAL, _NESTED)) or (
        last is not None and last.tb_frame.f_code is _DISABLE
    )


def drop_gradient_hooks(tensors: Iterable[torch.Tensor | None], since: int) -> None:
    """Take off the hooks that were registered on tensors since ``RemovableHandle.next_id`` had this value."""
    if RemovableHandle.next_id == since:
        return
    for tensor in tensors:
        for hooks in () if tensor is None else private.gradient_hooks(tensor):
            for key in [key for key in hooks if key >= since]:
                del hooks[key]
