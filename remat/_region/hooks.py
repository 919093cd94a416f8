"""The stack of saved-tensor hooks: where they are disabled or refused, those of regions, and those around a region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from .._core import private
from .._core.passes import current_scope
from .._core.state import state, unseen
from .._core.tensors import is_plain, laid_out
from ..errors import MutationError, RematError
from .fingerprints import fingerprint, stride_of

_REFUSAL = "don't yet support saved tensor hooks"  # of torch.func
_NESTED = "Nested forward mode AD is not supported"  # of forward_ad
_DISABLE = disable_saved_tensors_hooks.__wrapped__.__code__  # type: ignore[attr-defined]


class hooks_allowed:
    """Within, saved-tensor hooks are allowed although torch.func, or the user, has disabled them in this thread.

    A recompute must run wherever the backward does; first runs `check_hooks_are_allowed` before.
    """

    __slots__ = ("lifted",)

    def __enter__(self) -> None:
        self.lifted = private.hooks_disabled_message()
        if self.lifted is not None:
            private.hooks_enable()

    def __exit__(self, *exception: Any) -> None:
        if self.lifted is not None:
            private.hooks_disable(self.lifted)


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
    """Check it before anything is changed. Raises RematError if the user has disabled saved-tensor hooks."""
    if not hooks_are_allowed():
        raise RematError(
            f"Regions and `saved_residuals` need saved-tensor hooks, which are disabled here with the message "
            f"{private.hooks_disabled_message()!r}. Call them outside of `disable_saved_tensors_hooks`, or call the "
            f"region as a plain function under `remat.disable_remat()`."
        )


def is_hooks_refusal(error: Exception) -> bool:
    """Whether an error means that the function can't run under saved-tensor hooks.

    That is so if the function calls torch.func.grad, vjp or ``disable_saved_tensors_hooks``, or runs a backward pass in
    a ``forward_ad`` level that it enters: the recompute would enter it too, and torch can't nest these levels. Errors
    are recognized by torch's text, as they may be raised again elsewhere, or by the code that raises them.
    """
    *_, (raised_in, _) = walk_tb(error.__traceback__)
    return _REFUSAL in str(error) or _NESTED in str(error) or raised_in.f_code is _DISABLE


def drop_gradient_hooks(tensors: Iterable[torch.Tensor | None], since: int) -> None:
    """Remove the hooks that were registered on tensors since ``RemovableHandle.next_id`` had this value."""
    if RemovableHandle.next_id == since:
        return
    for tensor in tensors:
        for hooks in () if tensor is None else private.gradient_hooks(tensor):
            for key in [key for key in hooks if key >= since]:
                del hooks[key]


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class RegionHooks:
    """The object whose methods are the saved-tensor hooks of a region, in its first run or in a recompute.

    Both have ``count``, the number of tensors saved so far, and ``go_back(count)``, which forgets all after these.
    """

    __slots__ = ()
    around: Any = None  # the hooks of the outer region, which get what this region's policy saves
    frame: Any  # of the region


def of_region(hooks: tuple | None) -> RegionHooks | None:
    """The region's hooks object that a pair of hooks belongs to, or None for other hooks."""
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, RegionHooks) else None


def positions() -> list[tuple[Any, int]]:
    """How far the outer regions have come: their logs and saved tensors, which can ``go_back`` to these numbers."""
    found: list[Any] = [*state.logs]
    region: Any = of_region(private.top_hooks(True))
    while region is not None:
        found.append(region)
        region = region.around
    return [(each, each.count) for each in found]


class Packed:
    """What a pack hook has made of a tensor. The user's hooks may change its values, not its shape, dtype or device."""

    __slots__ = ("_kind", "_stride", "_unpack", "contents")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks, of_region: bool = False) -> None:
        pack, self._unpack = hooks
        self._kind: Any = None
        if of_region:  # the hooks of an outer region return the tensor unchanged
            self.contents = pack(tensor)
            return
        self._kind, self._stride = fingerprint(tensor, "metadata"), stride_of(tensor) if is_plain(tensor) else None
        version = private.version(tensor)
        with torch.no_grad():  # as in autograd: operations of a hook are not recorded
            self.contents = pack(tensor)
        if private.version(tensor) != version:
            raise MutationError(
                f"The pack hook of the saved-tensor hooks around a region changed a tensor, {self._kind}, in place. "
                f"The same program raises an error without remat: let the hook change a copy, `.clone()`."
            )

    def get(self) -> torch.Tensor:
        """Unpack the tensor for one reader. RematError if it has another shape, dtype or device, or is no tensor."""
        if self._kind is None:
            return self._unpack(self.contents)
        of_checkpoint = getattr(self._unpack, "__module__", None) == "torch.utils.checkpoint"
        running = current_scope() if of_checkpoint else None
        if running is None:
            return self._unpacked()
        if self not in running.unpacked:  # torch's checkpoint unpacks a tensor once in a pass, or in a GraphExecGroup
            running.unpacked[self] = self._unpacked()
        return running.unpacked[self]

    def _unpacked(self) -> torch.Tensor:
        with torch.no_grad(), unseen():  # the first run may still be going on, and hooks are not part of the region
            tensor = self._unpack(self.contents)
            found = fingerprint(tensor, "metadata") if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            if found != self._kind:
                raise RematError(
                    f"The saved-tensor hooks around a region packed a tensor {self._kind} and unpacked {found}. The "
                    f"region is recomputed from it, so its shape, dtype and device must be those of the packed one: "
                    f"let the unpack hook convert it back, or the pack hook return it unchanged."
                )
            return tensor if self._stride is None else laid_out(tensor, self._stride)
