"""A user's program, to be measured: its inputs, its runs and their times. What the runs change is restored."""

from __future__ import annotations

import functools
import inspect
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._ambient.ambient import Ambient
from .._ambient.generators import generator_name, global_generators, with_state
from .._captured.captured import Captured, is_sharded
from .._captured.variables import bound
from .._core import private, trees
from .._core.devices import accelerators_of
from .._core.facts import facts_of
from .._core.signatures import accepts
from .._core.state import state
from .._core.tensors import as_bytes, bottom, bytes_of, has_data, history, is_differentiable
from .._region.arguments import take_apart
from .._region.guards import COPY_LARGER_BYTES, is_small
from .._region.hooks import drop_gradient_hooks
from ..errors import RematError, shown
from .observer import PeakMemory, gc_disabled, strided

_ROUNDS = 7  # of runs that are timed


class Overwritten(PeakMemory):
    """Copies existing storages just before the program overwrites them. Nothing else takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the bytes of a storage, and their copy

    def before(self, func: Any, args: tuple, kwargs: dict) -> None:
        self.copy(facts_of(func).written(args, kwargs))

    def copy(self, tensors: Any) -> None:
        """Copy the storages of existing tensors that aren't copied yet."""
        for storage, tensor in strided(tensors):
            key = id(storage)
            if key not in self._copies and key not in self._refs and storage.device.type != "meta":
                content = as_bytes(tensor)
                self._copies[key] = content, content.clone()

    def changed(self, tensor: torch.Tensor) -> bool:
        """Whether the program has overwritten an existing tensor with other values."""
        copies = ((part, self._copies.get(id(storage))) for storage, part in strided(tensor))
        return any(found is not None and not torch.equal(as_bytes(part), found[1]) for part, found in copies)

    def restore(self) -> None:
        """Restore the old values."""
        with torch.no_grad(), private.without_levels():
            for content, copy in self._copies.values():
                if content.untyped_storage().nbytes() != copy.nbytes:
                    content.untyped_storage().resize_(copy.nbytes)
                content.copy_(copy)


def _restore(tensor: torch.Tensor, alias: torch.Tensor, requires_grad: bool, grad: Any) -> None:
    with private.without_levels():  # a transform refuses `requires_grad_`
        tensor.data = alias
        if tensor.is_leaf:
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad


NOT_DIFFERENTIATED = (
    "Nothing was differentiated: the result depends on no tensor that requires grad, and on no floating-point argument."
)
CALLS_BACKWARD = "The function calls `backward` itself, which frees what its result needs: let it return the loss only."
FROZEN = "No parameter and no argument requires grad: all floating-point arguments are differentiated."
Named = list[tuple[str, Any]]
T = TypeVar("T")


def check_surroundings(name: str, instead: str, with_policies: bool = True) -> None:
    """Raise an error where a program can't be measured. ``instead`` says what to do under a transform.

    ``with_policies``: it gives regions policies, which a context around it would replace.
    """
    if private.transforms_active():
        raise RuntimeError(f"{name} can't be called under a torch.func transform. {instead}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} differentiates, which torch.inference_mode excludes. Call it outside, or use torch.no_grad."
        )
    if with_policies and {"policy", "disabled"}.intersection(state.override or ()):
        raise RematError(
            f"{name} gives regions policies of its own, which `remat.override` or `remat.disable_remat` replaces here. "
            f"Call it outside."
        )


class Program:
    """``fn(*args, **kwargs)`` and its transform, or its derivative by what requires grad; if nothing does, by all."""

    def __init__(
        self, fn: Callable, args: tuple, kwargs: dict, transform: Callable | None = None, loss: Callable | None = None
    ) -> None:
        if not callable(fn):
            raise TypeError(
                f"Give the function or module first and then its arguments, as in `(fn, x)` for `fn(x)`; got "
                f"{type(fn).__name__}."
            )
        if isinstance(fn, type):
            raise TypeError(f"Give a function or a module, not the class {fn.__name__}: make an instance of it.")
        for option, value in {"transform": transform, "loss": loss}.items():
            if value is not None and not callable(value):
                raise TypeError(
                    f"The option {option} must be a function, got {shown(value)}. If {option} is an argument of fn, "
                    f"wrap fn in a lambda."
                )
        if loss is not None and transform is not None:
            raise TypeError("A transform takes no loss: write `transform=lambda fn: grad(lambda *a: loss(fn(*a)))`.")
        if loss is not None and accepts(getattr(loss, "forward", loss), (None,)) is False:
            raise TypeError("loss is called with the result alone: write `loss=lambda out: criterion(out, y)`.")
        called = fn.forward if isinstance(fn, nn.Module) else fn
        unknown = [name for name in kwargs if accepts(called, kwargs={name: None}, more=True) is False]
        if unknown and not getattr(fn, "_forward_pre_hooks_with_kwargs", None):
            where = getattr(called, "__qualname__", fn)
            raise TypeError(f"{unknown[0]!r} is neither an option nor an argument of {where}.")
        self.fn, self.transform, self.loss = fn, transform, loss
        self.arguments, self.tensors = take_apart(args, kwargs)
        self._roots = [fn, *self.arguments.searched(), *(each for each in (transform, loss) if each is not None)]
        self._found = Captured(*self._roots)
        # Of the tensors: "argument x".
        self.names = [self.arguments.name(called, i) for i in range(len(self.tensors))]
        captured = [(_readable(path), value) for path, value in self._found.tensors]
        given = [(f"argument generator {i}", each) for i, each in enumerate(self.arguments.generators())]
        self._generators = [*given, *((name, value) for name, value in captured if not isinstance(value, torch.Tensor))]
        # An attribute may still have a tensor of a transform that has ended.
        self.captured = [(n, v) for n, v in captured if isinstance(v, torch.Tensor) and not private.is_wrapped(v)]
        self.named_modules = modules_of(fn, self.arguments.leaves, self._found)
        managed = [p for module in self.named_modules.values() for p in module.parameters(recurse=False)]  # by FSDP
        self.every = not any(tensor.requires_grad for tensor in (*self.inputs(), *managed))
        self.has_gradients = False  # whether a run without a transform has computed some

    def inputs(self) -> list[torch.Tensor]:
        """All arguments and captured tensors."""
        return [*self.tensors, *(tensor for _, tensor in self.captured)]

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP manages parameters, which it frees and replaces in each run."""
        return any(is_sharded[type(module)] for module in self.named_modules.values())

    def check_is_whole(self, name: str) -> None:
        """Raise an error if FSDP manages parameters."""
        if self.is_sharded:
            raise RematError(f"{name} can't see the parameters that FSDP manages. Call it before FSDP wraps the model.")

    def check_has_data(self, why: str) -> None:
        """Raise an error if a tensor has no data, or if those that it makes have none."""
        if not all(map(has_data, (*self.inputs(), torch.empty(())))):
            raise RematError(f"{why}, and a tensor here has no data: `remat.report` needs none, without `time=True`.")

    @property
    def is_frozen(self) -> bool:
        """Whether it has parameters, and neither they nor the arguments require grad."""
        return self.every and any([*module.parameters()] for module in self.named_modules.values())

    def is_differentiated(self) -> bool:
        """Whether it has a tensor by which it is differentiated."""
        return not self.every or any(map(is_differentiable, self.tensors))

    def turns_to_arguments(self) -> bool:
        """Differentiate by all arguments from now on, if a run has shown that the result depends on nothing else.

        So it does if ``functional_call`` replaces the parameters of a module, which require grad.
        """
        if self.transform is not None or self.every or self.has_gradients:
            return False
        self.every = any(map(is_differentiable, self.tensors))
        return self.every

    def differentiated(self, forward: Callable[[], T]) -> T:
        """Return what ``forward`` returns, or returns by all arguments if it depends on nothing that requires grad."""
        result = forward()
        if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in trees.flatten(result)[0]):
            result = forward() if self.turns_to_arguments() else result
        return result

    def operands(self) -> list[torch.Tensor]:
        """The arguments, detached from their history: leaves that a run may differentiate."""
        every = self.every
        return [t.detach().requires_grad_(is_differentiable(t) if every else t.requires_grad) for t in self.tensors]

    def call(self, fn: Callable, operands: Sequence[torch.Tensor]) -> Any:
        """Call a function with these operands as its arguments."""
        args, kwargs = self.arguments.filled(operands)
        torch.clear_autocast_cache()  # which ``preserved`` would keep from one run to the next
        return fn(*args, **kwargs)

    def call_and_note(self, fn: Callable, operands: Sequence[torch.Tensor]) -> Any:
        """``call`` the function, and note in ``calls_backward`` whether it has accumulated gradients itself."""
        leaves = [t for t in (*operands, *(t for _, t in self.captured)) if t.is_leaf]
        before = _gradients(leaves)
        result = self.call(fn, operands)
        self.calls_backward = _gradients(leaves) != before
        return result

    @contextmanager
    def preserved(self, before: Overwritten | None = None) -> Iterator[Overwritten]:
        """A context to run it in, which restores everything that it changes.

        ``before`` has the copies of an earlier run. Then no mode slows the program. Small tensors are copied too, as a
        run may write to other statistics than the earlier one if layers are dropped at random.
        """
        tensors = list({id(tensor): tensor for tensor in self.inputs()}.values())
        ambient = Ambient({t.device for t in tensors}, [each for _, each in self._generators], True)
        with ExitStack() as stack:  # if one can't be restored, the others still are
            stack.enter_context(ambient.restored())
            stack.callback(drop_gradient_hooks, tensors, RemovableHandle.next_id)
            for tensor in (t for t in tensors if not private.is_wrapped(t)):
                with private.without_levels():  # an alias that a transform makes is its wrapper
                    alias = tensor.detach()
                stack.callback(_restore, tensor, alias, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)
            stack.callback(bound(self._found.variables, {id(value): value for _, value in self._found.tensors}).put)
            overwritten = before or Overwritten()
            if before is not None:
                before.copy([t for t in tensors if not t.requires_grad and is_small(t, COPY_LARGER_BYTES)])
            stack.callback(overwritten.restore)
            with nullcontext() if before else overwritten:
                yield overwritten

    def cut(self) -> tuple[list[tuple[str, torch.Tensor]], AbstractContextManager]:
        """The captured tensors, detached from their history, and a context in which the variables hold these.

        Otherwise a backward pass would run through older graphs and free them.
        """
        cut = [(name, t if t.is_leaf else t.detach().requires_grad_(t.requires_grad)) for name, t in self.captured]
        tensors = {id(t): new for (_, t), (_, new) in zip(self.captured, cut)}
        return cut, bound(Captured(*self._roots).variables, tensors, keep_changes=True)

    def read_now(self) -> list[tuple[str, torch.Tensor]]:
        """The captured tensors that the variables hold now; of one of a transform that has ended, the plain tensor."""
        found = Captured(*self._roots).tensors
        return [(_readable(path), bottom(value)) for path, value in found if isinstance(value, torch.Tensor)]

    def generator_states(self) -> dict[str, bytes]:
        """The states of the global generators and of those that it captures."""
        devices = tuple({tensor.device for tensor in self.inputs()})
        named = [(generator_name(each), each) for each in global_generators(devices)]
        named += [(name, with_state(each)) for name, each in self._generators]
        states = {name: generator.get_state() for name, generator in named}
        return {n: bytes_of(s) if isinstance(s, torch.Tensor) else pickle.dumps(s) for n, s in states.items()}

    def forward(self, fn: Callable) -> Any:
        """Run its forward and the loss, in the current grad mode. Return the loss."""
        _, cut = self.cut()
        with cut:
            return self._loss_of(self.call(fn, self.operands()))

    def run(self, fn: Callable, at_end: Callable[[], None] = lambda: None, keep: bool = False) -> Named:
        """Run it with ``fn``, and call ``at_end`` after its forward. Return the transform's result, or the gradients.

        With ``keep`` also the function's own result, before the gradients, which is then alive during the backward.
        """
        if self.transform is not None:
            return _leaves(self.call(self.transformed(_notifying(fn, at_end)), self.tensors))
        captured, cut = self.cut()
        operands = self.operands()
        with cut, torch.enable_grad():
            result = self.call(fn, operands)
            kept = _leaves(result) if keep else []
            values = [(name, v.detach() if isinstance(v, torch.Tensor) else v) for name, v in kept]
            value = self._loss_of(result)
            del result, kept
            at_end()
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return values
            leaves = {id(t): (name, t) for name, t in (*zip(self.names, operands), *captured) if t.requires_grad}
            for node in history([value.grad_fn]):  # it has the leaves on which a backward pass accumulates gradients
                if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
                    leaves.setdefault(id(leaf), (shown(leaf), leaf))
            names, tensors = zip(*leaves.values())
            try:
                gradients = torch.autograd.grad(value, tensors, allow_unused=True)
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise RematError(CALLS_BACKWARD) from error
            self.has_gradients = True
        return values + [(f"gradient of {name}", gradient) for name, gradient in zip(names, gradients)]

    def _loss_of(self, result: Any) -> Any:
        value = (self.loss or default_loss)(result)
        if value.numel() != 1 if isinstance(value, torch.Tensor) else self.loss is not None:
            raise ValueError(f"The option loss must return a tensor of one element, got {shown(value)}.")
        return value

    def transformed(self, fn: Callable) -> Callable:
        """The transformed function. Raises ``TypeError`` if the transform makes no function from ``fn``."""
        assert self.transform is not None
        cause = None
        try:
            if callable(made := self.transform(fn)):
                return made
        except Exception as error:
            cause = error
        raise TypeError(
            "transform must be a function that makes a function from fn, such as `torch.func.grad` (not "
            "`torch.func.grad(fn)`), or `lambda fn: vmap(grad(fn))`."
        ) from cause


def _gradients(leaves: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The identities and versions of their accumulated gradients."""
    return [(id(t.grad), private.version(t.grad)) for t in leaves if t.grad is not None]


def _readable(place: Any) -> str:
    """The path, without the attributes of the wrapper that ``remat`` adds."""
    return str(place).replace("self.__wrapped__.__self__", "self").replace("self.__wrapped__", "self")


def modules_of(fn: Any, leaves: Sequence[Any] = (), captured: Captured | None = None) -> dict[str, nn.Module]:
    """The modules that a function is, gets or captures, and all modules in these, by their paths."""
    fn = fn if isinstance(fn, nn.Module) else inspect.unwrap(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    top = fn.__self__ if isinstance(fn, MethodType) else fn
    named = {id(leaf): f"argument {i}" for i, leaf in enumerate(leaves)} | {id(top): ""}
    found, seen = dict[str, nn.Module](), set[nn.Module]()
    for path, module in (captured or Captured(fn)).modules():
        if id(module) in named or not isinstance(top, nn.Module):  # in a module only those that it registers
            name = named.get(id(module), _readable(path).removeprefix("self."))
            while name in found:
                name += "'"
            found.update(module.named_modules(seen, name))
    return found


def default_loss(result: Any) -> Any:
    """The ``.loss`` of a result that has one, else the sum of its floating-point tensors."""
    if isinstance(loss := getattr(result, "loss", None), torch.Tensor):
        return loss
    tensors = [leaf for leaf in trees.flatten(result)[0] if isinstance(leaf, torch.Tensor) and is_differentiable(leaf)]
    parts = [(torch.view_as_real(t) if t.is_complex() else t).sum() for t in tensors]
    return functools.reduce(lambda total, part: total + part.to(total.device), parts) if parts else None


def _leaves(result: Any) -> Named:
    leaves, spec = trees.flatten(result)
    return list(zip(trees.paths(spec, "result"), leaves))


def _notifying(fn: Any, at_end: Callable[[], None]) -> Any:
    """The function or module, which then calls ``at_end`` at the end of each call."""
    if isinstance(fn, nn.Module):
        fn.register_forward_hook(lambda *_: at_end())  # `preserved` removes it
        return fn

    @functools.wraps(fn)
    def notifying(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        at_end()
        return result

    return notifying


class Way(NamedTuple):
    """How a program can run: what it calls in place of its function, and in which context."""

    fn: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]]


def relative_times(program: Program, ways: Sequence[Way]) -> list[float]:
    """The time of a step each way, in parts of the first way's: the median over rounds that run all of them."""
    rounds = []
    with program.preserved() as overwritten:
        program.run(ways[0].fn)
    for _ in range(_ROUNDS + 1):
        with gc_disabled():
            seconds = [_seconds(program, way, overwritten) for way in ways]
        rounds.append([each / seconds[0] for each in seconds])
    return [median(ratios) for ratios in zip(*rounds[1:])]  # the first is a warm-up


def _seconds(program: Program, way: Way, overwritten: Any) -> float:
    devices = accelerators_of(program.inputs()).values()
    with program.preserved(overwritten), way.context():
        for device in devices:
            device.synchronize()
        start = time.perf_counter()
        program.run(way.fn)
        for device in devices:
            device.synchronize()
        return time.perf_counter() - start
