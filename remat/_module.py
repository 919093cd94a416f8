"""Modules whose calls are regions: a second module that shares all state with the first, or the module itself.

Both are of a subclass that is made of the module's class: its ``forward`` is a region of that class's ``forward``.
Hooks run outside of the region. The options are an attribute of the module. A second module has a slot for it, as the
two have one ``__dict__``; a module that is changed in place has it in its ``__dict__``, where copies of it find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from . import _torch
from ._function import Remat
from ._memory import memory_of
from ._options import Options

_IN_PLACE = "_remat"


def second_module(module: torch.nn.Module, options: Options) -> Any:
    """A module that shares all state with ``module``, the calls of which are regions.

    Raises:
        TypeError: see ``check_module``.
    """
    check_module(module)
    return _second(module, options)


def change_in_place(module: torch.nn.Module, options: Options) -> None:
    """Make each later call of ``module`` a region; if it is one already, then with these options.

    See ``check_module`` for which modules can be.
    """
    if all(option != _IN_PLACE for _, option in _layers(type(module))):
        cls = type(module)
        if is_parametrized(module) and next(iter(module.parametrizations)) in vars(cls):  # type: ignore[arg-type]
            # When the parametrization is removed, torch takes the first class away, and that must be its own.
            module.__class__ = _with_base(cls, _subclass(cls.__bases__[0], _IN_PLACE))
        else:
            module.__class__ = _subclass(cls, _IN_PLACE)
    module.__dict__[_IN_PLACE] = options


def is_changed(module: torch.nn.Module) -> bool:
    """Whether calls of ``module`` are regions by ``change_in_place``."""
    return _IN_PLACE in module.__dict__


def change_back(module: torch.nn.Module) -> None:
    """Undo ``change_in_place``. Below the class of a wrapper that came since, the subclass stays, without effect."""
    del module.__dict__[_IN_PLACE]
    cls = type(module)
    if _option_of(cls) == _IN_PLACE:
        module.__class__ = cls.__bases__[0]
    elif is_parametrized(module) and _option_of(cls.__bases__[0]) == _IN_PLACE:
        module.__class__ = _with_base(cls, cls.__bases__[0].__bases__[0])


def check_module(module: torch.nn.Module, name: str = "") -> None:
    """Whether calls of a module can be regions.

    Raises:
        TypeError: they can't, which says why; ``name`` is where it is in its model.
    """
    what = f"the {type(module).__name__} {name!r}" if name else f"a {type(module).__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"remat runs Python code again, but {what} is TorchScript: take the module that calls it.")
    if any(map(torch.nn.parameter.is_lazy, chain(module.parameters(), module.buffers()))):
        raise TypeError(f"remat takes modules that know their shapes, but {what} is lazy: call it once first.")
    if type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__:
        raise TypeError(f"remat takes modules that are called, but {what} has no forward: take the modules in it.")


def _second(module: torch.nn.Module, options: Options) -> Any:
    option = f"_remat_{sum(1 for _ in _layers(type(module)))}"
    new = _as(_subclass(type(module), option), module)
    object.__setattr__(new, option, options)
    for _, below in _layers(type(module)):
        if below != _IN_PLACE:
            object.__setattr__(new, below, getattr(module, below))
    return new


# --- the subclass -------------------------------------------------------------------------------------------------


class _Forward:
    """The attribute ``forward`` of such a class. It also comes before a ``forward`` that was set on the module itself.

    Of a module it is the region; of a class the function: whoever asks the class wants its signature or its code.
    """

    def __init__(self, plain: Any, get: Callable[[Any], Callable]) -> None:
        self.plain, self.get = plain, get

    def __get__(self, module: Any, cls: Any = None) -> Any:
        return self.plain.forward if module is None else self.get(module)

    def __set__(self, module: Any, value: Callable) -> None:
        module.__dict__["forward"] = value

    def __delete__(self, module: Any) -> None:
        if module.__dict__.pop("forward", None) is None:
            raise AttributeError("forward")


def _subclass(cls: Any, option: str) -> Any:
    """The class of modules of ``cls`` whose calls are regions, with the options in the attribute ``option``."""
    for known in type.__subclasses__(cls):
        if _option_of(known) == option:
            return known
    owners = [base for base in cls.__mro__ if "forward" in vars(base)]
    below = vars(owners[0])["forward"].get if _option_of(owners[0]) else None
    plain = next(base for base in owners if not _option_of(base))

    def get_forward(self: Any) -> Callable:
        options = getattr(self, option, None)
        own = self.__dict__.get("forward")  # set on the module itself
        compiling = torch.compiler.is_compiling()
        if below is not None and (options is None or not compiling):  # Dynamo of torch 2.11 can't make two in one
            forward = below(self)
        elif own is not None:
            forward = own
        elif compiling:  # Dynamo of torch 2.11 can't make bound methods
            forward = lambda *args, **kwargs: plain.forward(self, *args, **kwargs)  # noqa: E731
        else:
            forward = super(made, self).forward
        return forward if options is None else Remat(forward, options, memory_of(self))

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not made:
            return super(made, self).__reduce_ex__(protocol)
        layers: list[tuple[str, Options | None]] = []
        known = made
        while name := _option_of(known):
            layers.insert(0, (name, getattr(self, name, None)))
            known = known.__bases__[0]
        # As a module of its own class would, which pickle finds by its name.
        reduced = _as(known, self).__reduce_ex__(protocol)
        return reduced if isinstance(reduced, str) else (_rebuild, (*reduced[:2], layers), *reduced[2:])

    # A class of graphs is that of one module: it has its code, and makes new classes for others and of them.
    own_class = issubclass(cls, torch.fx.GraphModule)

    def copies(name: str) -> Callable:
        def copied(self: Any, *args: Any) -> Any:
            module = _as(cls, self) if own_class else super(made, self)
            return _with_layer(getattr(module, name)(*args), option, getattr(self, option, None))

        return copied

    names: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "forward": _Forward(plain, get_forward),
        "__reduce_ex__": reduce,
        "_remat_option": option,
    }
    names.update((name, copies(name)) for name in ("__copy__", "__deepcopy__", _torch.REPLICATE) if hasattr(cls, name))
    if own_class:
        names["recompile"] = lambda self: _as(cls, self).recompile()
    made: Any
    if option != _IN_PLACE:
        names["__slots__"] = (option,)
        made = type(f"Remat{cls.__name__}", (cls,), names)
    else:  # whatever goes by the name of the class must find it
        made = type(cls.__name__, (cls,), {**names, "__qualname__": cls.__qualname__})
    return made


def _option_of(cls: type) -> str | None:
    """The attribute with the options, if the class was made here."""
    return vars(cls).get("_remat_option")


def _layers(cls: type) -> Iterator[tuple[type, str]]:
    """The subclasses that were made here among the bases of a class, the last one first, each with its attribute."""
    return ((base, option) for base in cls.__mro__ if (option := _option_of(base)))


def _as(cls: Any, module: torch.nn.Module) -> Any:
    """The same module as one of another class."""
    same = object.__new__(cls)
    same.__dict__ = module.__dict__
    return same


def _with_layer(module: Any, option: str, options: Options | None) -> Any:
    """The module with a layer that it may have already, without its options."""
    if options is None:
        return module
    if option == _IN_PLACE:
        change_in_place(module, options)
    elif all(option != known for _, known in _layers(type(module))):
        return _second(module, options)
    else:
        object.__setattr__(module, option, options)
    return module


def _rebuild(build: Callable, args: tuple, layers: list[tuple[str, Options | None]]) -> Any:
    module = build(*args)
    for option, options in layers:
        module = _with_layer(module, option, options)
    return module


def _with_base(cls: type, base: type) -> type:
    """The class with another base; it must have one."""
    return type(cls.__name__, (base,), {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})
