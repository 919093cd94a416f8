"""Captured tensors that have no place: found, and swapped for operands, where a torch function reads them.

A place is a spot in a closure, a module or the like. What is read from elsewhere, such as by a computed name, is seen
only when it is used.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from . import _torch
from ._bulk import gone
from ._errors import CaptureError, MutationError
from ._facts import mapped, tensors
from ._parts import is_followed_below, requires_grad_somewhere
from ._state import state


class FoundCaptured(BaseException):
    """Gives a first run up: this tensor must be an operand. Not an Exception, so that user code lets it through."""

    def __init__(self, region: Any, tensor: torch.Tensor) -> None:
        super().__init__()
        self.region = region
        self.tensor = tensor


class Watch:
    """What a first run must watch for: tensors that a transform follows, and that neither came in nor were made inside.

    A wrapper of a level that isn't on the stack is surely captured. Otherwise an inner transform may have made it, out
    of sight: inner levels have the numbers of the ones that were taken off the stack. What was made inside is gone when
    the run is over, so what is still there is taken to be captured.
    """

    __slots__ = ("asks", "cuts", "maps", "plain_too", "recorded", "region", "seen", "suspects", "unread", "wrappers")

    def __init__(
        self, region: Any, operands: list[torch.Tensor], inside: list[torch.Tensor], plain_too: bool, recorded: bool
    ) -> None:
        self.region = region
        self.recorded = recorded  # plain autograd, or forward mode, differentiates below all levels
        self.cuts = self.maps = False  # see ``needs_order``
        self.asks = False  # the function asks what autograd follows
        self.plain_too = plain_too  # a grad level is above, which does not see plain tensors that require grad
        self.seen: dict[int, weakref.ref] = {}
        self.made(inside)
        self.suspects: list[weakref.ref] = []  # made inside or captured
        self.unread = False  # the run has not read all that was taken to be captured after another run
        # Wrappers of the operands at the levels above the bottom: read inside the region, they are captured.
        self.wrappers: set[int] = set()
        while operands := list(filter(_torch.is_wrapped, operands)):
            self.wrappers.update(map(id, operands))
            operands = list(map(_torch.unwrap_once, operands))

    def made(self, tensors: Collection[torch.Tensor]) -> None:
        self.seen.update(zip(map(id, tensors), map(weakref.ref, tensors)))

    def _is_seen(self, tensor: torch.Tensor) -> bool:
        return self.seen.get(id(tensor), gone)() is tensor

    def has_lost(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made inside, and is differentiated there."""
        inside = self._is_seen(tensor) and all(suspect() is not tensor for suspect in self.suspects)
        # A dead wrapper may have had a tangent; of which kind its level was, it doesn't tell.
        dual = _torch.JVP in self.region.kinds and _torch.is_dead(tensor)
        return inside and (dual or requires_grad_somewhere(tensor))

    def tells_levels(self) -> bool:
        """Whether the function asks what autograd follows, and is told of more than its innermost ``grad`` level does.

        Below all levels one graph stands for all of them and for autograd itself, each of which may follow another
        operand. Without a region, only the innermost one is seen.
        """
        kinds = self.region.kinds
        if not self.asks or _torch.GRAD not in kinds:
            return False
        top = len(kinds) - kinds[::-1].index(_torch.GRAD)
        return any(is_followed_below(top, tensor) for tensor in self.region.operands())

    def needs_order(self) -> bool:
        """Whether the result depends on which ``grad`` level differentiates what, and in which order.

        ``detach_`` and the like cut a tensor from the graph of the innermost level alone, and hooks change the
        gradient of that level alone. And an autograd Function has rules for both ``vmap`` and gradients, and need not
        have one for the gradient of its ``vmap``.
        """
        kinds = self.region.kinds
        cuts = self.cuts and _torch.GRAD in kinds and (self.recorded or len(kinds) > 1)
        return cuts or (self.maps and _torch.VMAP in kinds and _torch.GRAD in kinds[kinds.index(_torch.VMAP) :])

    def is_captured(self, tensor: torch.Tensor) -> bool:
        if self._is_seen(tensor):
            return False
        if id(tensor) in self.wrappers:
            return True
        if _torch.is_wrapped(tensor):
            if _torch.is_dead(tensor):
                return False
            if _torch.level_of(tensor) > (_torch.current_level() or 0):
                return True
            if not any(map(self._is_seen, _chain(tensor))):
                self.suspects.append(weakref.ref(tensor))
        elif self.plain_too and tensor.requires_grad:
            self.suspects.append(weakref.ref(tensor))
        self.made([tensor])
        return False

    def remaining(self) -> list[torch.Tensor]:
        """After the run: the tensors that were not known then, and are still there."""
        found = [suspect() for suspect in self.suspects]
        return [tensor for tensor in found if tensor is not None and not _torch.is_dead(tensor)]


class Interceptor(TorchFunctionMode):
    """Swaps captured tensors for operands; with a watch, gives the run up at one that is not known yet."""

    def __init__(
        self,
        own: Mapping[int, torch.Tensor],
        inherited: Mapping[int, torch.Tensor],
        watch: Watch | None = None,
        stale: Mapping[int, str] | None = None,
        given: Mapping[int, torch.Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.inherited = inherited
        self.swaps = {**{key: own.get(id(tensor), tensor) for key, tensor in inherited.items()}, **own}
        self.unused = set(own)
        self.level: int | None = None
        self.watch = watch
        self.stale = stale or {}
        self.given = given or {}  # for the operands of this run what the region was given; None if it is run again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if state.own_work:
            return func(*args, **kwargs)
        if self.swaps:
            args, kwargs = self._swap(args), self._swap(kwargs)
        if func in _HOOKS and id(args[0]) in self.given:
            return self._hook(func, *args, **kwargs)
        watch = self.watch
        if watch is not None:
            seen = watch.seen
            if func is _torch.custom_function_call:
                watch.maps = True
            elif func in _ASKS:
                watch.asks = True
            elif func in _BY_LEVEL and _torch.level_of(args[0]) <= (state.interceptors[-1].level or 0):
                watch.cuts |= requires_grad_somewhere(args[0])
            read = args if not kwargs and _TENSOR.issuperset(map(type, args)) else tensors((args, kwargs))
            for tensor in read:
                if seen.get(id(tensor), gone)() is not tensor and watch.is_captured(tensor):
                    self._give_up(watch, tensor)
        result = func(*args, **kwargs)
        if self.stale and tensors(result):
            for tensor in tensors((args, kwargs)):
                if id(tensor) in self.stale:
                    raise MutationError(self.stale[id(tensor)])
        if watch is not None:
            if type(result) is torch.Tensor:  # most are, and each call of another function would be felt here
                seen[id(result)] = weakref.ref(result)
            else:
                watch.made(tensors(result))
        return result

    def __enter__(self) -> Interceptor:
        self.level = _torch.current_level()
        state.interceptors = *state.interceptors, self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.interceptors = state.interceptors[:-1]
        if self.watch is not None:
            self.watch.unread = bool(self.unused & self.watch.region.guessed)

    def _hook(self, func: Any, operand: torch.Tensor, hook: Any) -> Any:
        """A hook on an operand goes to the tensor that it stands for: it gets the gradient of all uses of that one."""
        tensor = self.given[id(operand)]
        if tensor is None:
            return RemovableHandle(OrderedDict())
        if self.watch is not None:
            self.watch.region.hooked = True
        return func(tensor, hook)

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """What an operand of a region inside of this one is here."""
        if id(tensor) in self.swaps:
            return self._swap(tensor)
        if self.watch is not None and self.watch.is_captured(tensor):
            self._give_up(self.watch, tensor)
        return tensor

    def _give_up(self, watch: Watch, tensor: torch.Tensor) -> None:
        if self.unused - watch.region.guessed:
            raise CaptureError(
                f"A region under torch.func reads a tensor of shape {tuple(tensor.shape)} that is neither an argument "
                f"nor found in what the function captures, and it is another one each time. Pass it as an argument."
            )
        raise FoundCaptured(watch.region, tensor)

    def _swap(self, value: Any) -> Any:
        return mapped(self._swapped, value)

    def _swapped(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.swaps:
            return tensor
        self.unused.discard(id(self.inherited.get(id(tensor), tensor)))
        return self.swaps[id(tensor)]


_TENSOR = {torch.Tensor}
# What acts on the graph of one level alone, and what has a rule for each kind of level.
_BY_LEVEL = {
    torch.detach_,
    torch.Tensor.detach_,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.register_hook,
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    _torch.custom_function_call,
}
# What depends on which tensors autograd follows.
_ASKS = {
    torch.autograd.grad,
    torch.autograd.backward,
    torch.Tensor.backward,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
}
# What tensors that a region is given must get themselves: the gradients of others are those of the region alone.
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}


def made_inside(tensors: Collection[torch.Tensor]) -> None:
    """Tell all regions that run now that these tensors aren't captured."""
    for interceptor in state.interceptors:
        if interceptor.watch is not None:
            interceptor.watch.made(tensors)


def given_as(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that stands for this one outside of the regions that run for the first time under torch.func."""
    for interceptor in reversed(state.interceptors):
        tensor = interceptor.given.get(id(tensor), tensor)
    return tensor


def _chain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, what it wraps, what that wraps, down to the plain tensor."""
    chain = [tensor]
    while _torch.is_wrapped(chain[-1]):
        chain.append(_torch.unwrap_once(chain[-1]))
    return chain
