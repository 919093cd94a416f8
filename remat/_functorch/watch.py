"""A first run under torch.func, watched: it is refused what a region can't do there, or shown to need its levels.

Below all levels one graph serves all of them, on operands that were unwrapped. So a region can't read a tensor of a
transform that isn't an operand, act on the graph of one level only, or store a tensor in place of returning it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from itertools import islice
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .._captured.variables import bound
from .._core import private
from .._core.devices import wait_for_backward_threads
from .._core.facts import tensors
from .._core.state import own_work, state
from .._core.tensors import bottom, chain, is_followed_below, is_in_graph, is_left_from_vmap, requires_grad_somewhere
from .._region.guards import BEHIND
from ..errors import CaptureError, RematError
from .derived import reached


class NeedsLevels(BaseException):
    """Ends a first run without its ``grad`` levels at once: a recompute around it would mix up what it hands over."""


class Watch(TorchFunctionMode):
    """Sees each torch function that the region's function calls."""

    def __init__(self, region: Any, plain_too: bool, recorded: bool) -> None:
        """``plain_too``: a ``grad`` level is above. ``recorded``: autograd or forward mode differentiates below."""
        self.region, self.plain_too, self.around = region, plain_too, state.watch
        self.one_graph = len(region.kinds) == 1 and not recorded and not region.graded
        self.differentiates = region.uses_func  # the function takes derivatives itself
        self.maps, self.orders = private.VMAP in region.kinds, 2  # see `orders_below`
        self.given: Sequence[torch.Tensor] = ()  # the operands, as the function gets them
        self.level: int | None = None  # of the transforms, where the function is called
        self.start = private.next_sequence_number()
        self.inside: dict[int, weakref.ref] = {}
        self.suspects: list[weakref.ref] = []  # made inside, or captured
        self.moving: set[int] = set()  # the ids of the stored tensors that have a tangent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or state.own_work or state.watch is not self:
            return func(*args, **kwargs)
        with own_work():  # else it would see its own calls
            self._check(func, args)
            if self.maps:
                self.limit(_orders_below(func, args, kwargs))
            self.reads(args if not kwargs and _TENSOR.issuperset(map(type, args)) else tensors((args, kwargs)))
        result = func(*args, **kwargs)
        self.made([result] if type(result) is torch.Tensor else tensors(result))
        return result

    def gets(self, operands: Sequence[torch.Tensor]) -> None:
        """Note the operands that the function gets, and the level at which it gets them."""
        self.level, self.given = private.current_level(), operands
        self.made(operands)

    def made(self, made: Sequence[torch.Tensor]) -> None:
        """Note tensors that are made inside."""
        self.inside.update(zip(map(id, made), map(weakref.ref, made)))

    def _check(self, func: Any, args: Sequence[Any]) -> None:
        """Refuse a function that acts on one level only; note one that shows whether levels are missing."""
        kinds, level = self.region.kinds, private.current_level() or 0
        if func is private.custom_function_call:
            at_grad = level and level == self.level and private.current_interpreter().key().value == private.GRAD
            if at_grad and not torch.is_grad_enabled():
                raise RematError(_NO_GRAD.format(args[0].__name__))  # torch enables grad mode below this level
        elif func in _ON_ONE_LEVEL and private.level_of(args[0]) <= level and requires_grad_somewhere(args[0]):
            if func in _HOOKS and any(args[0] is each for each in self.given):
                raise RematError(_HOOK.format("an argument or a captured tensor"))
            if private.GRAD in kinds and not self.one_graph:
                raise RematError(_HOOK.format("a tensor") if func in _HOOKS else _CUT)
        if func is torch.autograd.grad:
            self.differentiates = True
            self._check_derivative(tensors(args[:1]), set(map(id, tensors(args[1:2]))))
            # A pullback differentiates results of a level that has ended.
            outs = [private.unwrap_if_dead(t) for t in tensors(args[:1]) if not self._is_inside(t)]
            self.reads([t for t in outs if private.JVP in kinds or requires_grad_somewhere(t)])
        if self.region.graded:
            return
        # Dropout draws in the order of elements at a level, in that of memory below.
        reorders = func in _DROPOUT and not args[0].is_contiguous()
        if reorders or (func in _QUERIES and self._follows_more()):
            raise NeedsLevels

    def _check_derivative(self, outs: Sequence[torch.Tensor], by: Set[int]) -> None:
        """Refuse a derivative by operands which hooks on them need, or which goes on behind operands to others."""
        operands = list(map(private.unwrap_if_dead, self.region.inputs.operands))
        wanted = {i: own for i, (own, given) in enumerate(zip(operands, self.given)) if id(given) in by}
        if not wanted:
            return
        if any(map(private.backward_hooks, operands)):
            raise RematError(_HOOKED)
        top = len(self.region.kinds) or -1  # torch.autograd.grad follows the graph of this level only
        passed = [i for i in reached(outs, dict(enumerate(self.given))) if private.level_of(operands[i]) == top]
        for i in passed:
            if reached([operands[i]], {j: own for j, own in wanted.items() if own is not operands[i]}):
                raise RematError(BEHIND.format(self.region.inputs.name(i)))
            if [*wanted] != [i] and not (self.region.graded or self.given[i].is_leaf):
                raise NeedsLevels  # the one graph of all levels has also the history of those below
        if self.around is not None:
            self.around._check_derivative([operands[i] for i in passed], set(map(id, wanted.values())))

    def limit(self, orders: int) -> None:
        """Note that only so many derivatives may be taken below ``vmap``."""
        self.orders = min(self.orders, orders)

    @property
    def orders_below(self) -> int:
        """How many derivatives of the region autograd may take below a ``vmap`` level; 2 stands for all.

        Of some functions that ``vmap`` has mapped, torch computes another derivative there than above the level.
        """
        return 2 if self.orders == 2 else self.orders - self.differentiates

    def _follows_more(self) -> bool:
        """Whether more than the innermost ``grad`` or ``jvp`` level, which is all that is visible, follows operands."""
        top = max((level for level, kind in enumerate(self.region.kinds, 1) if kind != private.VMAP), default=0)
        operands = self.region.inputs.operands
        return top > 0 and any(is_followed_below(top, t) or t.requires_grad != is_in_graph(t) for t in operands)

    def reads(self, read: Sequence[torch.Tensor]) -> None:
        """Check that no tensor is a captured one that isn't an operand.

        A wrapper of a level that isn't on the stack is captured. Another one may have been made, unseen, by an inner
        transform. If its history doesn't show that, it is captured if it is alive when the run has ended.
        """
        for tensor in read:
            if self._is_inside(tensor) or private.is_dead(tensor):
                continue
            if private.level_of(tensor) > (private.current_level() or 0):
                raise CaptureError(_HIDDEN.format(tuple(tensor.shape)))
            is_followed = private.is_wrapped(tensor) or (self.plain_too and tensor.requires_grad)
            if is_followed and not any(map(self._is_inside, chain(tensor))) and not self._is_newer(bottom(tensor)):
                self.suspects.append(weakref.ref(tensor))
            self.made([tensor])

    def _is_inside(self, tensor: Any) -> bool:
        return (ref := self.inside.get(id(tensor))) is not None and ref() is tensor

    def _is_newer(self, tensor: torch.Tensor) -> bool:
        """Whether the history of a plain tensor, or of its base, whose node isn't made anew, began in the run."""
        base, node = private.origin(tensor)
        node = node if base is None else base.grad_fn
        return node is not None and private.sequence_number(node) >= self.start

    def check_end(self, outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Unwrap and return what the ended run has stored, for a watch around. CaptureError if it is of a transform."""
        self.check_captured()
        self.given, self.around = (), None  # the watch may live longer than the run
        if {*self.region.kinds} == {private.VMAP}:  # a tensor stored there has no use without remat either
            return [] if state.watch is None else [tensor for _, tensor in self.stored]
        returned, ended, kept = set(map(id, outs)), dict[int, torch.Tensor](), list[torch.Tensor]()
        for path, tensor in self.stored:
            lost = id(tensor) not in returned and (id(tensor) in self.moving or requires_grad_somewhere(tensor))
            if lost and isinstance(path, str):
                raise CaptureError(_RETURNED.format(path, tuple(tensor.shape)))
            # A recurrent network makes the list of its parameters anew in each call if they have changed.
            if lost and (path.up is None or path.up.step != "_flat_weights"):
                raise CaptureError(_STORED.format(tuple(tensor.shape), path))
            kept.append(content := private.unwrap_if_dead(tensor))
            if not lost and content is not tensor:
                ended[id(tensor)] = content
        if ended:  # torch unwraps only the outer one of several wrappers
            bound(self.region.inputs.search().variables, ended).put()
        return kept

    @cached_property
    def stored(self) -> list[tuple[Any, torch.Tensor]]:
        """The tensors made inside that the run, which has ended, has left somewhere: paths, or a result's class."""
        region, inputs = self.region, self.region.inputs
        results = [(type(value).__name__, t) for _, value in region.outputs.entries for t in _held(value)]
        found, operands = results + inputs.search().tensors, set(map(id, inputs.operands))
        return [(path, value) for path, value in found if self._is_inside(value) and id(value) not in operands]

    def check_captured(self) -> None:
        """Check that the run, which has ended, has read no captured tensor that isn't an operand."""
        wait_for_backward_threads(self._alive_suspects())
        if alive := self._alive_suspects():
            made = "" if private.is_wrapped(alive[0]) else _MADE
            raise CaptureError(_HIDDEN.format(tuple(alive[0].shape)) + made)

    def _alive_suspects(self) -> list[torch.Tensor]:
        # Dynamo keeps the tensors that it traces with.
        found = [t for each in self.suspects if (t := each()) is not None and type(t) is not private.FakeTensor]
        return [tensor for tensor in found if not private.is_dead(tensor) and not is_left_from_vmap(tensor)]


def _held(result: Any) -> Iterator[torch.Tensor]:
    """The tensors to which a result leads that is no tree, such as an object, an iterator, a set or a function."""
    queue, seen = [result], set()
    for value in islice(queue, 10_000):  # the list grows meanwhile
        cls = type(value)
        if issubclass(cls, torch.Tensor):
            yield value
        elif id(value) not in seen and not issubclass(cls, (type, ModuleType)):
            seen.add(id(value))
            if not (cls is dict and "__builtins__" in value):  # globals lead to everything
                queue += gc.get_referents(value)


_TENSOR = {torch.Tensor}
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
_ON_ONE_LEVEL = _HOOKS | {
    torch.detach_,
    torch.Tensor.detach_,
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}
_DROPOUT = {F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_}
# Functions whose results depend on which tensors autograd follows.
_QUERIES = {
    torch.autograd.grad,
    torch.autograd.backward,
    torch.Tensor.backward,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
}


def _orders_below(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How many derivatives of a function autograd takes rightly below a ``vmap`` level; 2 stands for all."""
    if func in _NORMS:
        return 1
    if func is private.custom_function_call:
        return 2 if args[0].generate_vmap_rule else 0  # the rule may have another derivative
    is_wrong = (
        func in _SCATTERS
        or (func in _REDUCTIONS and len(args) == 1 and not kwargs)  # of the whole tensor, with ties
        or (func in _EMBEDDINGS and (len(args) > 2 or "padding_idx" in kwargs))
    )
    return 0 if is_wrong else 2


_NORMS = {
    F.layer_norm, F.batch_norm, F.instance_norm, torch.layer_norm, torch.batch_norm, torch.instance_norm,
    torch.native_layer_norm, torch.native_batch_norm,
}  # fmt: skip
_SCATTERS = {torch.select_scatter, torch.Tensor.select_scatter}
_REDUCTIONS = {getattr(of, name) for of in (torch, torch.Tensor) for name in ("max", "min", "median", "nanmedian")}
_EMBEDDINGS = {F.embedding, torch.embedding}


_CUT = (
    "A region under torch.func uses `detach_`, `.data` or `requires_grad = ...`, which act on one of the transforms "
    "around it only, but a region has one graph for all of them. Use `.detach()`, which acts on all."
)
_HOOK = (
    "A region under torch.func registers a hook on {}, which would get the gradient of only one transform around "
    "it, or a part of the gradient. Register it outside of the region, or write an autograd Function."
)
_HOOKED = (
    "A region that uses torch.func calls torch.autograd.grad, which would not call the hooks on the region's inputs. "
    "Differentiate by torch.func there, or give the region tensors without hooks."
)
_NO_GRAD = (
    "A region under torch.func calls {}, an autograd Function, within `torch.no_grad()`, which acts on one of the "
    "transforms around it only. Give the Function detached arguments, `.detach()`, in place of `no_grad`."
)
_HIDDEN = (
    "A region under torch.func reads a tensor of shape {} that a transform follows, and that is neither an argument "
    "nor found in what the function captures (closures, globals, modules, objects). Pass it as an argument. If a "
    "pullback of `vjp` reads it, call `vjp` and the pullback in one region, or the pullback outside of regions."
)
_MADE = (
    " If the function itself makes this tensor, as torch.func.linearize does, make it outside of the region, or use "
    "torch.func.jvp."
)
_RETURNED = (
    "A region under torch.func returned a {0} that holds a tensor of shape {1}, which would lose its derivatives. "
    "Return the tensors themselves, in lists, tuples, dicts or dataclasses, and make the {0} outside of the region."
)
_STORED = (
    "A region under torch.func stored a tensor of shape {} in {}, where the tensor would lose its derivatives. Return "
    "it from the function, or store its `.detach()`."
)
