"""Captured tensors that no known variable holds: found, and swapped for operands, where a torch function reads them.

The search of captured variables doesn't find all tensors, for example those read by a computed name. These are seen
only when a torch function is called on them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._core import private
from .._core.facts import mapped, tensors
from .._core.state import own_work, state
from ..errors import CaptureError, MutationError
from .watch import Abandoned, Watch


class Interceptor(TorchFunctionMode):
    """Swaps captured tensors for operands. With a watch, abandons the run at a captured tensor not known yet."""

    def __init__(
        self,
        own: Mapping[int, torch.Tensor],
        inherited: Mapping[int, torch.Tensor],
        watch: Watch | None = None,
        stale: Mapping[int, str] | None = None,
        stands_for: Mapping[int, torch.Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.inherited = inherited
        self.swaps = {**{key: own.get(id(tensor), tensor) for key, tensor in inherited.items()}, **own}
        self.unused = set(own)
        self.level: int | None = None
        self.watch = watch
        self.stale = stale or {}
        self.stands_for = stands_for or {}  # operand id -> the caller's tensor; None in a recompute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if state.own_work:
            return func(*args, **kwargs)
        if self.swaps:
            args, kwargs = self._swap(args), self._swap(kwargs)
        if func in _HOOKS and id(args[0]) in self.stands_for:
            return self._hook(func, *args, **kwargs)
        watch = self.watch
        if watch is not None:
            with own_work():  # else interceptors of outer regions would see the watch's own calls
                watch.calls(func, args, state.interceptors[-1].level or 0)
                for tensor in args if not kwargs and _TENSOR.issuperset(map(type, args)) else tensors((args, kwargs)):
                    if watch.note_read(tensor):
                        self._give_up(watch, tensor)
        result = func(*args, **kwargs)
        if self.stale and tensors(result):
            for tensor in tensors((args, kwargs)):
                if id(tensor) in self.stale:
                    raise MutationError(self.stale[id(tensor)])
        if watch is not None:
            watch.made([result] if type(result) is torch.Tensor else tensors(result))
        return result

    def __enter__(self) -> Interceptor:
        self.level = private.current_level()
        state.interceptors = *state.interceptors, self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.interceptors = state.interceptors[:-1]
        if self.watch is not None:
            self.watch.unread = bool(self.unused & self.watch.region.guessed)

    def _hook(self, func: Any, operand: torch.Tensor, hook: Any) -> Any:
        """Register a hook on the caller's tensor instead of the operand, so that it gets the whole gradient."""
        tensor = self.stands_for[id(operand)]
        if tensor is None:
            return RemovableHandle(OrderedDict())
        if self.watch is not None:
            self.watch.region.hooked = True
        return func(tensor, hook)

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that an operand of an inner region is in this region."""
        if id(tensor) in self.swaps:
            return self._swap(tensor)
        if self.watch is not None and self.watch.note_read(tensor):
            self._give_up(self.watch, tensor)
        return tensor

    def _give_up(self, watch: Watch, tensor: torch.Tensor) -> None:
        if self.unused - watch.region.guessed:
            raise CaptureError(
                f"A region under torch.func reads a tensor of shape {tuple(tensor.shape)} that is neither an argument "
                f"nor found in what the function captures, and it is a new tensor in each run. Pass it as an argument."
            )
        watch.region.adopt([tensor])
        raise Abandoned(watch.region)

    def _swap(self, value: Any) -> Any:
        return mapped(self._swapped, value)

    def _swapped(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.swaps:
            return tensor
        self.unused.discard(id(self.inherited.get(id(tensor), tensor)))
        return self.swaps[id(tensor)]


_TENSOR = {torch.Tensor}
# These must be registered on the caller's tensors: the gradient of an operand contains only its uses in the region.
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


def made_inside(tensors: Sequence[torch.Tensor]) -> None:
    """Note in all regions that run now that these tensors aren't captured."""
    for interceptor in state.interceptors:
        if interceptor.watch is not None:
            interceptor.watch.made(tensors)


def given_as(tensor: torch.Tensor) -> torch.Tensor:
    """The caller's tensor for an operand, outside of all regions that run for the first time under torch.func."""
    for interceptor in reversed(state.interceptors):
        tensor = interceptor.stands_for.get(id(tensor), tensor)
    return tensor
