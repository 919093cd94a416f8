"""A user's program, to be measured: what it gets and reads, its runs, and what they change, which is restored."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import takewhile
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._ambient.ambient import Ambient
from .._ambient.generators import generator_name, global_generators, with_state
from .._captured.captured import Captured, find
from .._captured.variables import bound
from .._core import private, trees
from .._core.facts import facts_of
from .._core.tensors import bytes_of, is_dense, is_differentiable, is_plain
from .._core.trees import attributes, contents
from .._region.arguments import take_apart
from .._region.hooks import drop_gradient_hooks
from .observer import PeakMemory, strided
from .origins import ModuleNames

_HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and "hooks" in name]


class Overwritten(PeakMemory):
    """Copies existing storages just before the program overwrites them. Nothing else takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def before(self, func: Any, args: tuple, kwargs: dict) -> None:
        for storage, tensor in strided(facts_of(func).written(args, kwargs)):
            key = id(storage)
            if key not in self._copies and key not in self._refs and not tensor.is_meta:
                self._copies[key] = storage, _as_bytes(storage).clone()

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether the program has overwritten an existing tensor."""
        return any(id(storage) in self._copies for storage, _ in strided(tensor))

    def restore(self) -> None:
        """Restore the old values."""
        with torch.no_grad(), private.without_levels():
            for storage, copy in self._copies.values():
                if storage.nbytes() != copy.nbytes:
                    storage.resize_(copy.nbytes)
                _as_bytes(storage).copy_(copy)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def preserved(found: Captured, arguments: Sequence[torch.Tensor]) -> Iterator[Overwritten]:
    """A context for a program that reads what was ``found`` and gets these arguments. All are restored afterwards."""
    values = [value for _, value in found.tensors]
    tensors = list({id(t): t for t in [*arguments, *values] if isinstance(t, torch.Tensor)}.values())
    generators = [value for value in values if not isinstance(value, torch.Tensor)]
    ambient = Ambient({t.device for t in tensors}, generators, True)
    by_id = {id(tensor): tensor for tensor in tensors}
    with ExitStack() as stack:  # if one can't be restored, the others still are
        stack.enter_context(ambient.restored())
        stack.callback(drop_gradient_hooks, tensors, RemovableHandle.next_id)
        for tensor in tensors:
            stack.callback(_restore, tensor, tensor.detach(), tensor.requires_grad, tensor.is_leaf and tensor.grad)
        stack.callback(bound(found.variables, by_id).put)
        for hooks in _module_hooks(found):
            stack.callback(_refill, hooks, dict(hooks))
        overwritten = Overwritten()
        stack.callback(overwritten.restore)
        with overwritten:
            yield overwritten


def _restore(tensor: torch.Tensor, alias: torch.Tensor, requires_grad: bool, grad: Any) -> None:
    is_elsewhere = is_plain(tensor) and is_dense(tensor) and tensor.data_ptr() != alias.data_ptr()
    if tensor.shape != alias.shape or is_elsewhere:
        tensor.data = alias
    if not tensor.is_leaf:
        return
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    if grad is not False and tensor.grad is not grad:
        tensor.grad = grad


def _module_hooks(found: Captured) -> Iterator[dict]:
    """The hook dicts of all modules that were found."""
    for variables in found.variables:
        for name in _HOOKS:
            if variables.whole and isinstance(hooks := variables.then.get(name), dict):
                yield hooks


def _refill(held: dict, items: dict) -> None:
    if held != items:
        held.clear()
        held.update(items)


NOT_DIFFERENTIATED = "Nothing was differentiated: no argument or captured tensor requires grad or is floating-point."


class Subject:
    """``fn(*args, **kwargs)``, differentiated by the tensors that require grad; if none does, by all that can."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, *others: Any) -> None:
        if not callable(fn):
            raise TypeError(
                f"Give the function or module first and then its arguments, as in `(fn, x)` for `fn(x)`; got "
                f"{type(fn).__name__}."
            )
        self.fn = fn
        self.arguments, self.tensors = take_apart(args, kwargs)
        self._found = find(fn, *self.arguments.searched(), *(other for other in others if other is not None))
        names = _argument_names(fn, trees.paths(self.arguments.spec, ""))
        self.names = [names[i] for i in self.arguments.positions]  # of the tensors
        found = {
            id(t): (_readable(path), t) for path, t in reversed(self._found.tensors) if isinstance(t, torch.Tensor)
        }
        self.captured: list[tuple[str, torch.Tensor]] = [*reversed(found.values())]
        self.modules = ModuleNames([*_roots(fn, self.arguments.leaves)])
        self.every = not any(tensor.requires_grad for tensor in self.inputs())

    def inputs(self) -> list[torch.Tensor]:
        """All arguments and captured tensors."""
        return [*self.tensors, *(tensor for _, tensor in self.captured)]

    def is_differentiated(self) -> bool:
        """Whether it has a tensor by which it is differentiated."""
        return any(t.requires_grad for t in (*self.operands(), *(t for _, t in self.captured)))

    def operands(self) -> list[torch.Tensor]:
        """The arguments, detached from their history: leaves that a run may differentiate."""
        return [
            t.detach().requires_grad_(is_differentiable(t) if self.every else t.requires_grad) for t in self.tensors
        ]

    def call(self, fn: Callable, operands: Sequence[torch.Tensor]) -> Any:
        """Call a function with these operands as its arguments."""
        args, kwargs = self.arguments.filled(operands)
        return fn(*args, **kwargs)

    def preserved(self) -> AbstractContextManager[Overwritten]:
        """A context to run it in, which restores everything that it changes."""
        return preserved(self._found, self.tensors)

    def cut(self) -> tuple[list[tuple[str, torch.Tensor]], AbstractContextManager]:
        """The captured tensors, detached from their history, and a context in which the variables hold these.

        Otherwise a backward pass would run through older graphs and free them.
        """
        cut = [(name, t if t.is_leaf else t.detach().requires_grad_(t.requires_grad)) for name, t in self.captured]
        tensors = {id(t): new for (_, t), (_, new) in zip(self.captured, cut)}
        if all(t is new for (_, t), (_, new) in zip(self.captured, cut)):
            return cut, bound((), {})
        return cut, bound(self._found.variables, tensors, keep_changes=True)

    def read_now(self) -> list[tuple[str, torch.Tensor]]:
        """The captured tensors that the variables hold now."""
        found = find(self.fn, *self.arguments.searched()).tensors
        return [(_readable(path), value) for path, value in found if isinstance(value, torch.Tensor)]

    def generator_states(self) -> dict[str, bytes]:
        """The states of the global generators and of those that it captures."""
        devices = tuple({tensor.device for tensor in self.inputs()})
        named = [(generator_name(each), each) for each in global_generators(devices)]
        named += [
            (_readable(path), with_state(value))
            for path, value in self._found.tensors
            if not isinstance(value, torch.Tensor)
        ]
        states = {name: generator.get_state() for name, generator in named}
        return {n: bytes_of(s) if isinstance(s, torch.Tensor) else pickle.dumps(s) for n, s in states.items()}


def _readable(place: Any) -> str:
    """The path, without the attributes of the wrapper that ``remat`` adds."""
    return str(place).replace("self.__wrapped__.__self__", "self").replace("self.__wrapped__", "self")


def _argument_names(fn: Callable, paths: list[str]) -> list[str]:
    """The name of each leaf of ``(args, kwargs)`` in the function, as ``params['w1']``."""
    try:
        parameters = list(inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values())
    except (TypeError, ValueError):  # a built-in function
        parameters = []
    positional = [each.name for each in takewhile(lambda each: each.kind is not each.VAR_POSITIONAL, parameters)]
    names = []
    for path in paths:
        first, _, rest = path[len("[0][") :].partition("]")
        if path.startswith("[1]"):
            names.append(first.strip("'") + rest)
        else:
            names.append((positional[int(first)] if int(first) < len(positional) else f"args[{first}]") + rest)
    return names


def _roots(fn: Any, leaves: Sequence[Any]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a function is or reads, each with its name in the function."""
    fn = fn if isinstance(fn, nn.Module) else inspect.unwrap(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, MethodType):
        yield from _held_by(fn.__self__)
        fn = fn.__func__
    if isinstance(fn, FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            with suppress(ValueError):  # an empty cell
                yield from _modules({name: cell.cell_contents})
        yield from _modules({name: fn.__globals__.get(name) for name in fn.__code__.co_names})
    else:
        yield from _held_by(fn)
    yield from _modules({f"argument {i}": leaf for i, leaf in enumerate(leaves)})


def _held_by(owner: Any) -> Iterator[tuple[str, nn.Module]]:
    """The object itself, or the modules in its attributes."""
    return _modules({"": owner} if isinstance(owner, nn.Module) else attributes(owner))


def _modules(named: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, value in named.items():
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", each) for i, each in enumerate(contents(value)) if isinstance(each, nn.Module))


Named = list[tuple[str, Any]]


class Program(NamedTuple):
    """A function with its arguments, and how it is differentiated."""

    subject: Subject
    transform: Callable | None
    loss: Callable | None

    def run(self, fn: Callable, at_end_of_forward: Callable[[], object] = lambda: None) -> Named:
        """Run the program with ``fn`` in place of its function. Returns the transform's result, or the gradients."""
        if self.transform is None:
            return self._differentiated(fn, at_end_of_forward)[1]
        transformed = self.transformed(_notifying(fn, at_end_of_forward))
        return _leaves(self.subject.call(transformed, self.subject.tensors))

    def transformed(self, fn: Callable) -> Callable:
        """The transformed function.

        Raises:
            TypeError: the transform makes no function from ``fn``.
        """
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

    def results(self, fn: Callable) -> Named:
        """Like ``run``, with the function's own result, which is then alive during the backward."""
        if self.transform is None:
            values, gradients = self._differentiated(fn, lambda: None, keep=True)
            return values + gradients
        return self.run(fn)

    def _differentiated(self, fn: Callable, at_end: Callable[[], object], keep: bool = False) -> tuple[Named, Named]:
        subject = self.subject
        captured, cut = subject.cut()
        operands = subject.operands()
        with cut, torch.enable_grad():
            result = subject.call(fn, operands)
            values = [(name, _detached(value)) for name, value in _leaves(result)] if keep else []
            value = (self.loss or default_loss)(result)
            del result
            at_end()
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return values, []
            named = [(f"argument {name}", tensor) for name, tensor in zip(subject.names, operands)]
            leaves = {id(t): (name, t) for name, t in (*named, *captured) if t.requires_grad}
            for leaf in _leaves_of_graph(value):
                shape = list(leaf.shape)
                leaves.setdefault(id(leaf), (f"a tensor of shape {shape}", leaf))
            names, tensors = zip(*leaves.values())
            gradients = torch.autograd.grad(value, tensors, allow_unused=True)
        return values, [(f"gradient of {name}", gradient) for name, gradient in zip(names, gradients)]


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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _leaves_of_graph(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves on which a backward pass would accumulate gradients."""
    seen, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
                yield leaf
            stack += [after for after, _ in node.next_functions]


def _notifying(fn: Any, at_end: Callable[[], object]) -> Any:
    """The function or module, which then calls ``at_end`` at the end of each call."""
    if isinstance(fn, nn.Module):
        fn.register_forward_hook(_Hook(at_end))  # `preserved` removes it
        return fn

    @functools.wraps(fn)
    def notifying(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        at_end()
        return result

    return notifying


class _Hook:
    """A forward hook that calls a function."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call()
