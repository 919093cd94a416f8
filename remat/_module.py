"""A rematerialized module: a module of a subclass that shares all state with the one that it was made from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._memory import Memory
from ._region import Options


class RematModule:
    """What is put before the module's own class: calls of ``forward`` are regions.

    The two modules have one ``__dict__``: parameters, hooks, ``training`` and every attribute are the same in both.
    Forward hooks run outside of the region.
    """

    __slots__ = ()
    _remat: tuple[Any, Any, Any, Any]  # the module's own class, what makes a region of a function, and with what

    @property
    def forward(self) -> Callable:
        # A property, as it must also come before a ``forward`` that was set on the module itself.
        cls, make, options, memory = self._remat
        own = self.__dict__.get("forward")
        if own is None and torch.compiler.is_compiling():  # Dynamo of torch 2.11 can't make bound methods
            own = lambda *args, **kwargs: cls.forward(self, *args, **kwargs)  # noqa: E731
        return make(cls.forward.__get__(self) if own is None else own, options, memory)

    @forward.setter
    def forward(self, value: Callable) -> None:
        self.__dict__["forward"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls, make, options, _ = self._remat
        get_state = getattr(cls, "__getstate__", None)
        custom = get_state is not None and get_state is not getattr(object, "__getstate__", None)
        state = get_state(self) if custom and get_state is not None else self.__dict__.copy()
        return _rebuild, (cls, make, options), state


def wrap_module(module: torch.nn.Module, make: Callable, options: Options) -> Any:
    """A module with the state of ``module`` whose ``forward`` is what ``make`` makes of that of ``module``."""
    wrapped = _rebuild(type(module), make, options, Memory(module))
    wrapped.__dict__ = module.__dict__
    return wrapped


def _rebuild(cls: type, make: Callable, options: Options, memory: Memory | None = None) -> Any:
    new = _subclass(cls)
    made = new.__new__(new)
    made._remat = cls, make, options, memory or Memory()
    return made


@functools.cache
def _subclass(cls: type) -> Any:
    names = {"__slots__": ("_remat",), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"Remat{cls.__name__}", (RematModule, cls), names)
