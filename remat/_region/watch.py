"""Checks during a first run under torch.func, which is abandoned if they show that it must run in another way."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .._core import private
from .._core.devices import wait_for_backward_threads
from .._core.parts import is_followed_below, is_in_graph, is_left_from_vmap, requires_grad_somewhere


class Abandoned(BaseException):
    """Abandons a first run, as the region now knows more. Not an Exception, so that user code doesn't catch it."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region = region


class Watch:
    """Finds tensors that a transform follows and that are neither operands nor made inside: they are captured.

    A wrapper of a level that isn't on the stack is certainly captured. Another one may have been made by an inner
    transform, unseen: inner levels reuse the numbers of levels that were taken off the stack. If its history doesn't
    show that, it is taken to be captured if it is still alive when the run has ended.
    """

    __slots__ = (
        "cuts", "drops", "maps", "plain_too", "queries", "recorded", "region", "seen", "start", "suspects", "unread",
        "wrappers",
    )  # fmt: skip

    def __init__(
        self, region: Any, operands: list[torch.Tensor], inside: Sequence[torch.Tensor], plain_too: bool, recorded: bool
    ) -> None:
        self.region = region
        self.recorded = recorded  # plain autograd, or forward mode, differentiates below all levels
        self.cuts = self.maps = False  # see ``needs_order``
        self.queries = False  # the function queries what autograd follows
        self.drops = False  # it calls dropout on a tensor that isn't contiguous
        self.plain_too = plain_too  # a grad level is above, which does not see plain tensors that require grad
        self.start = private.next_sequence_number()
        self.seen: dict[int, weakref.ref] = {}
        self.made(inside)
        self.suspects: list[weakref.ref] = []  # made inside or captured
        self.unread = False  # the run did not read all tensors that an earlier run took to be captured
        # Wrappers of the operands at the levels above the bottom: read inside the region, they are captured.
        self.wrappers: set[int] = set()
        while operands := list(filter(private.is_wrapped, operands)):
            self.wrappers.update(map(id, operands))
            operands = list(map(private.unwrap_once, operands))

    def made(self, tensors: Sequence[torch.Tensor]) -> None:
        self.seen.update(zip(map(id, tensors), map(weakref.ref, tensors)))

    def calls(self, func: Any, args: Sequence[Any], level: int) -> None:
        """Note that the function calls a torch function at a level."""
        if func is private.custom_function_call:
            self.maps = True
        elif func in _QUERIES:
            self.queries = True
        elif func in _DROPOUT:
            self.drops |= not args[0].is_contiguous()
        elif func in _BY_LEVEL and private.level_of(args[0]) <= level:
            self.cuts |= requires_grad_somewhere(args[0])

    def _is_seen(self, tensor: torch.Tensor) -> bool:
        ref = self.seen.get(id(tensor))
        return ref is not None and ref() is tensor

    def has_lost(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made inside, and is differentiated there."""
        inside = self._is_seen(tensor) and all(suspect() is not tensor for suspect in self.suspects)
        # A dead wrapper may have had a tangent: the kind of its level is unknown.
        dual = private.JVP in self.region.kinds and private.is_dead(tensor)
        return inside and (dual or requires_grad_somewhere(tensor))

    def tells_levels(self) -> bool:
        """Whether the function sees that its ``grad`` level is missing.

        The numbers of dropout are in the order of the elements under a level, and in that of memory without. Or the
        function queries what autograd follows, and sees more than its innermost ``grad`` level follows: below all
        levels there is one graph for all of them and for autograd itself, and each of these may follow another operand.
        Without a region, the function sees only what the innermost follows.
        """
        kinds = self.region.kinds
        if self.drops or not self.queries:
            return self.drops
        top = len(kinds) - kinds[::-1].index(private.GRAD)
        operands = self.region.operands()
        return any(is_followed_below(top, t) or t.requires_grad != is_in_graph(t) for t in operands)

    def needs_order(self) -> bool:
        """Whether the result depends on which ``grad`` level differentiates what, and in which order.

        For regions under such a level. ``detach_`` and the like cut a tensor from the graph of the innermost level
        only, and hooks change the gradient of that level only. With a single graph that makes no difference. There are
        two graphs if a single level was restored, as a tape is below it. And an autograd Function has rules for
        ``vmap`` and for gradients, but the gradient of its ``vmap`` rule may differ from its gradient rule.
        """
        kinds = self.region.kinds
        one_graph = len(kinds) == 1 and not self.recorded and not self.region.known.graded
        cuts = self.cuts and not one_graph
        return cuts or (self.maps and private.VMAP in kinds and private.GRAD in kinds[kinds.index(private.VMAP) :])

    def note_read(self, tensor: torch.Tensor) -> bool:
        if self._is_seen(tensor):
            return False
        if id(tensor) in self.wrappers:
            return True
        if private.is_wrapped(tensor):
            if private.is_dead(tensor):
                return False
            if private.level_of(tensor) > (private.current_level() or 0):
                return True
            if not any(map(self._is_seen, chain := _chain(tensor))) and not self._is_newer(chain[-1]):
                self.suspects.append(weakref.ref(tensor))
        elif self.plain_too and tensor.requires_grad and not self._is_newer(tensor):
            self.suspects.append(weakref.ref(tensor))
        self.made([tensor])
        return False

    def _is_newer(self, tensor: torch.Tensor) -> bool:
        """Whether the history of a plain tensor began in the run: ``vmap`` returns tensors that no function has made.

        That of a view begins with its base; the node of the view itself may be made anew when it is asked for.
        """
        base, node = private.origin(tensor)
        node = node if base is None else base.grad_fn
        return node is not None and private.sequence_number(node) >= self.start

    def remaining(self) -> list[torch.Tensor]:
        """After the run: the tensors that were not known then, and are still alive."""
        if alive := self._alive_suspects():
            wait_for_backward_threads(alive)
            del alive
        return self._alive_suspects()

    def _alive_suspects(self) -> list[torch.Tensor]:
        found = [tensor for suspect in self.suspects if (tensor := suspect()) is not None]
        return [tensor for tensor in found if not private.is_dead(tensor) and not is_left_from_vmap(tensor)]


# Functions that act on the graph of one level only, and one that has a rule for each kind of level.
_BY_LEVEL = {
    torch.detach_,
    torch.Tensor.detach_,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.register_hook,
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    private.custom_function_call,
}
_DROPOUT = {F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_}
# Functions whose results depend on which tensors autograd follows.
_QUERIES = {
    torch.autograd.grad,
    torch.autograd.backward,
    torch.Tensor.backward,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
}


def _chain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor and all tensors that it wraps, down to the plain tensor."""
    chain = [tensor]
    while private.is_wrapped(chain[-1]):
        chain.append(private.unwrap_once(chain[-1]))
    return chain
