"""One forward of a model: its operations, the lifetimes of the memory that they make, and the calls of its modules.

Hooks drop what autograd saves, so the forward takes the memory of inference. Times are numbers of events.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .._core import private, trees
from .._core.facts import facts_of, flops
from .._core.tensors import is_differentiable
from .._measure.allocated import Allocated
from .._measure.observer import PeakMemory, strided
from .._modules.region_class import is_sequence
from .._region.arguments import take_apart
from .._region.hooks import is_hooks_refusal
from .._selective.search import cost_of
from ..errors import RematError


class Memory:
    """A storage that the forward makes, with the tensor's shape, and the operation and the call that make it."""

    def __init__(self, storage: torch.UntypedStorage, shape: tuple[int, ...], by: tuple[Any, Call], now: int) -> None:
        self.nbytes, self.shape, self.by = storage.nbytes(), shape, by
        self.made = self.last = self.before_last = now  # and the times of its last two reads
        self.freed = math.inf  # when the forward frees it
        self.returned = 0  # the end of the last call that can be a region and returns it
        self.kept = math.inf  # the end of what keeps it for the backward: an operation, or a call that gets it
        self.has_gradient = False
        self.whole: Memory | None = None  # it was concatenated to this one, whose gradient has its own as a part

    def gradient_at(self, now: float) -> Memory:
        """The memory of its gradient when the backward is at this time."""
        return self.whole if self.whole is not None and self.before_last < now else self


class Operation:
    """An operation with its costs, and what it reads and makes."""

    def __init__(self, func: Any, time: int, flops: int, cost: float) -> None:
        self.func, self.time, self.flops, self.cost = func, time, flops, cost
        self.reads: list[Memory] = []
        self.made: list[Memory] = []
        self.backward_kernel = 0  # the bytes that the kernel of its backward takes for itself


class Call:
    """A call of a module, or without one the whole forward, or what lies between two calls."""

    def __init__(self, module: nn.Module | None, start: int, end: int = 0, number: int = 0) -> None:
        self.module, self.start, self.end = module, start, end
        self.number = number  # of earlier calls of its module
        self.calls: list[Call] = []  # inside of it
        self.given: list[Memory] = []  # its arguments that the forward has made
        self.results: list[Memory] = []
        self.nbytes = 0  # of the arguments that a region would keep
        self.differentiable: tuple[bool, ...] = ()  # which of the distinct tensors in its arguments require grad
        self.container: nn.Module | None = None  # a `Sequential` that calls this and the next modules in its own loop
        self.index = 0  # its place in there
        self.is_differentiated = False
        self.overwrites = False  # an argument: no region can begin with it


class Trace(PeakMemory):
    """What one forward does."""

    def __init__(self, parameters: Iterable[torch.Tensor], cost: Any) -> None:
        super().__init__()
        self._cost = cost
        self._parameters = {id(p.untyped_storage()) for p in parameters}
        self._now = 0
        self._alive: dict[int, Memory] = {}  # by the ids of storages
        self.memory: list[Memory] = []
        self.operations: list[Operation] = []
        self.root = Call(None, 0)
        self._calls = [self.root]
        self._counts = Counter[int]()  # of the calls of each module
        self.differentiated = Counter[int]()  # of the calls of each module, those with gradients
        self._kernels: dict[str, int] = {}  # the bytes that kernels of convolutions' backward take for themselves
        self.saved: list[tuple[int, Memory]] = []  # what autograd saves, with its time
        # Of parameters, by the ids of storages: the last read, after which the backward makes one, and its bytes.
        self.gradients: dict[int, tuple[int, int]] = {}

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def index(self, time: float) -> int:
        """The number of operations before a time."""
        return bisect_left(self.operations, time, key=attrgetter("time"))

    def saved_in(self, call: Call) -> list[tuple[int, Memory]]:
        """What autograd saves in a call, with its times."""
        i, j = (bisect_left(self.saved, time, key=itemgetter(0)) for time in (call.start, call.end))
        return self.saved[i:j]

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """The memory of a tensor, if the forward has made it."""
        return self._alive.get(id(tensor.untyped_storage())) if tensor.layout is torch.strided else None

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        now, cost = self._tick(), cost_of(self._cost, facts_of(func), args, kwargs, result)
        operation, has_gradient = Operation(func, now, flops(func, args, kwargs, result), cost), False
        self.operations.append(operation)
        for storage, tensor in strided((args, kwargs)):
            key = id(storage)
            has_gradient |= tensor.requires_grad
            if key in self._parameters:
                self.gradients[key] = now, storage.nbytes()
            elif (memory := self._alive.get(key)) is not None:
                if memory.last != now:
                    memory.before_last, memory.last = memory.last, now
                operation.reads.append(memory)
        has_gradient &= torch.is_grad_enabled() and not facts_of(func).reads_nothing
        written = {self._alive.get(id(storage)) for storage, _ in strided(facts_of(func).written(args, kwargs))}
        for call in self._calls:
            call.overwrites |= not written.isdisjoint(call.given)
        super().after(func, args, kwargs, result)
        for storage, tensor in strided(result):
            if (memory := self._alive.get(id(storage))) is not None:
                memory.has_gradient |= has_gradient and is_differentiable(tensor)
        if func in _CONCATENATIONS and operation.made:
            for memory in operation.reads:
                memory.whole = operation.made[0]
        if func is _CONVOLUTION and has_gradient:
            operation.backward_kernel = self._kernel_of_convolution(args, result)

    def made(self, storage: torch.UntypedStorage, tensor: torch.Tensor, func: Any) -> None:
        memory = self._alive[id(storage)] = Memory(storage, tuple(tensor.shape), (func, self._calls[-1]), self._now)
        self.memory.append(memory)
        self.operations[-1].made.append(memory)

    def _freed(self, key: int, ref: Any) -> None:
        super()._freed(key, ref)
        self._alive.pop(key).freed = self._now

    def _kernel_of_convolution(self, args: tuple, result: torch.Tensor) -> int:
        """Run the backward of a convolution, and return the bytes that its kernel takes beside the gradients."""
        x, weight, bias, *options = args
        needed = [x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
        tensors = [(t.shape, t.stride(), t.dtype, t.device) for t in (x, weight, result)]
        key = repr((tensors, needed, options))
        if key not in self._kernels:
            gradient, sizes = torch.ones_like(result), None if bias is None else [len(bias)]
            with Allocated([x]) as memory:
                found = torch.ops.aten.convolution_backward(gradient, x, weight, sizes, *options, needed)
            nbytes = sum(t.nbytes for t, is_needed in zip(found, needed) if is_needed)
            self._kernels[key] = max(0, memory.peak - nbytes)
        return self._kernels[key]

    def _drop(self, tensor: torch.Tensor) -> None:
        if (memory := self.memory_of(tensor)) is not None:
            self.saved.append((self._tick(), memory))

    def _starts(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        key = id(module.__dict__)
        call = Call(module, self._tick(), number=self._counts[key])
        self._counts[key] += 1
        _, tensors = take_apart(args, kwargs)
        call.differentiable = tuple([t.requires_grad for t in tensors])
        call.given = list(dict.fromkeys(m for t in tensors if (m := self.memory_of(t)) is not None))
        given = [t for t in tensors if t.layout is torch.strided and is_differentiable(t)]
        call.nbytes = sum(t.numel() * t.element_size() for t in given)
        around = self._calls[-1]
        if is_sequence(around.module):
            call.container, call.index = around.module, len(around.calls)
        around.calls.append(call)
        self._calls.append(call)

    def _ends(self, module: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        call = self._calls.pop()
        call.end = self._tick()
        found = [leaf for leaf in trees.flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        call.results = [memory for t in found if (memory := self.memory_of(t)) is not None]
        call.is_differentiated = any(t.requires_grad for t in found)
        self.differentiated[id(module.__dict__)] += call.is_differentiated

    @contextmanager
    def of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Trace the forward that runs within."""
        try:
            with hooked(modules, self._starts, self._ends), saved_tensors_hooks(self._drop, _unread), self:
                yield
        except RuntimeError as error:
            if is_hooks_refusal(error):
                raise RematError(_DIFFERENTIATES) from error
            raise
        self.root.end = self._tick()


@contextmanager
def hooked(modules: Iterable[nn.Module], starts: Callable, ends: Callable = lambda *_: None) -> Iterator[None]:
    """Call ``starts`` and ``ends`` with each call of the modules. In ``vmap`` it is a part of the one around it."""

    def unless_in_transform(hook: Callable) -> Callable:
        return lambda *call: None if private.transforms_active() else hook(*call)

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(unless_in_transform(starts), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(unless_in_transform(ends), with_kwargs=True).remove)
        yield


_DIFFERENTIATES = (
    "The model's forward differentiates a part of itself, so it can't be planned without its backward. Choose the "
    "regions: `remat.nn.apply(model, Block)`. If it is a training step, give a function that "
    "returns the loss, without `backward`."
)


def _unread(_: None) -> torch.Tensor:
    raise RematError(_DIFFERENTIATES)


_CONVOLUTION = torch.ops.aten.convolution.default
_CONCATENATIONS = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}
