"""The stack of saved-tensor hooks: where hooks are disabled or refused. Also gradient hooks that a run registers."""

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
    """Within, saved-tensor hooks are allowed although torch.func has disabled them in this thread.

    With ``even_if_disabled`` also where the user has disabled them: a recompute must run wherever the backward does.
    """

    __slots__ = ("even_if_disabled", "lifted", "message")

    def __init__(self, even_if_disabled: bool = False) -> None:
        self.even_if_disabled = even_if_disabled
        self.message: str | None = None
        self.lifted: str | None = None

    def __enter__(self) -> None:
        self.message = message = private.hooks_disabled_message()
        if message is not None and (self.even_if_disabled or _REFUSAL in message):
            private.hooks_enable()
            self.lifted = message

    def __exit__(self, error: type | None, *rest: Any) -> None:
        if self.lifted is not None:
            private.hooks_disable(self.lifted)
        elif error is not None and self.message is None:
            private.hooks_enable()  # a compiled torch.func.grad that raises leaves them disabled


@contextmanager
def hooks_hidden() -> Iterator[None]:
    """Within, the stack of saved-tensor hooks is empty: for code that refuses to run under hooks."""
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
    """Whether saved-tensor hooks are enabled, or were disabled by torch.func only."""
    message = private.hooks_disabled_message()
    return message is None or _REFUSAL in message


def in_torch_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` encloses the code: its forward and its recompute can't be told apart."""
    hooks = private.top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def check_hooks_are_allowed() -> None:
    """Check it before anything is changed.

    Raises:
        RematError: the user has disabled saved-tensor hooks.
    """
    if not hooks_are_allowed():
        message = private.hooks_disabled_message()
        raise RematError(
            f"Regions and `saved_residuals` need saved-tensor hooks, which are disabled here with the message "
            f"{message!r}. Call them outside of `disable_saved_tensors_hooks`, or call the region as a plain function "
            f"under `remat.disable_remat()`."
        )


def is_hooks_refusal(error: Exception) -> bool:
    """Whether an error means that the function can't run under saved-tensor hooks.

    That is so if the function calls torch.func.grad, vjp or ``disable_saved_tensors_hooks``, or runs a backward pass in
    a ``forward_ad`` level that it enters: the recompute would enter it too, and torch can't nest these levels. Errors
    are recognized by torch's text, as they may be raised again elsewhere, or by the code that raises them.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return any(words in str(error) for words in (_REFUSAL, _NESTED)) or (
        last is not None and last.tb_frame.f_code is _DISABLE
    )


def drop_gradient_hooks(tensors: Iterable[torch.Tensor | None], since: int) -> None:
    """Remove the hooks that were registered on tensors since ``RemovableHandle.next_id`` had this value."""
    if RemovableHandle.next_id == since:
        return
    for tensor in tensors:
        for hooks in () if tensor is None else private.gradient_hooks(tensor):
            for key in [key for key in hooks if key >= since]:
                del hooks[key]
