"""A function with its arguments, to be measured: the tensors that it gets or reads, and their names."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import takewhile
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .._ambient.generators import bytes_of, generator_name, global_generators, with_state
from .._captured.captured import find
from .._captured.variables import bound
from .._core import trees
from .._core.contents import attributes, contents
from .._core.parts import is_differentiable
from .._region.arguments import take_apart
from .origins import ModuleNames
from .preserved import Overwritten, preserved

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
