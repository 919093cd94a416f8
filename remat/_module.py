"""Modules whose calls are regions: a second module that shares all state with the first, or the module itself.

Both are of a subclass that is made of the module's class: its ``forward`` is a region of that class's ``forward``.
Hooks run outside of the region. The options are an attribute of the module. A second module has a slot for it, as the
two have one ``__dict__``; a module that is changed in place has it in its ``__dict__``, where copies of it find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

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
    """Undo ``change_in_place``. Below a class that was put on top since, the subclass stays, without effect."""
    del module.__dict__[_IN_PLACE]
    if vars(type(module)).get("_remat_option") == _IN_PLACE:
        module.__class__ = type(module).__bases__[0]


def check_module(module: torch.nn.Module, name: str = "") -> None:
    """Whether calls of a module can be regions.

    Raises:
        TypeError: they can't, which says why; ``name`` is where it is in its model.
    """
    what = f"the {type(module).__name__} {name!r}" if name else f"a {type(module).__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"remat runs Python code again, but {what} is TorchScript. Make the region before scripting.")
    if any(map(torch.nn.parameter.is_lazy, module.parameters())):
        raise TypeError(f"remat takes modules that know their shapes, but {what} is lazy: call it once first.")
    if type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__:
        raise TypeError(f"remat takes modules that are called, but {what} has no forward: take the modules in it.")


def _second(module: torch.nn.Module, options: Options) -> Any:
    option = f"_remat_{sum(1 for _ in _layers(type(module)))}"
    made = _subclass(type(module), option)
    new = made.__new__(made)
    new.__dict__ = module.__dict__
    object.__setattr__(new, option, options)
    for _, below in _layers(type(module)):
        if below != _IN_PLACE:
            object.__setattr__(new, below, getattr(module, below))
    return new


# --- the subclass -------------------------------------------------------------------------------------------------


def _subclass(cls: Any, option: str) -> Any:
    """The class of modules of ``cls`` whose calls are regions, with the options in the attribute ``option``."""
    for known in type.__subclasses__(cls):
        if vars(known).get("_remat_option") == option:
            return known

    def get_forward(self: Any) -> Callable:
        options = getattr(self, option, None)
        own = self.__dict__.get("forward")  # set on the module itself
        compiling = torch.compiler.is_compiling()  # then no memory is used
        if own is not None:
            forward = own
        elif compiling:  # Dynamo of torch 2.11 can't make bound methods
            forward = lambda *args, **kwargs: cls.forward(self, *args, **kwargs)  # noqa: E731
        else:
            forward = cls.forward.__get__(self)
        memory: Any = None if compiling else memory_of(self)
        return forward if options is None else Remat(forward, options, memory)

    def set_forward(self: Any, value: Callable) -> None:
        self.__dict__["forward"] = value

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not made:
            return super(made, self).__reduce_ex__(protocol)
        # As a module of its own class would, which pickle finds by its name.
        layers = list(_layers(made))
        base: Any = layers[-1][0].__bases__[0]
        plain = base.__new__(base)
        plain.__dict__ = self.__dict__
        build, args, *state = plain.__reduce_ex__(protocol)
        return _rebuild, (build, args, [(name, getattr(self, name, None)) for _, name in reversed(layers)]), *state

    names: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        # A property, as it must also come before a ``forward`` that was set on the module itself.
        "forward": property(get_forward, set_forward),
        "__reduce_ex__": reduce,
        "_remat_option": option,
    }
    made: Any
    if option != _IN_PLACE:
        names["__slots__"] = (option,)
        made = type(f"Remat{cls.__name__}", (cls,), names)
    else:  # whatever goes by the name of the class must find it
        made = type(cls.__name__, (cls,), {**names, "__qualname__": cls.__qualname__})
    return made


def _layers(cls: type) -> Iterator[tuple[type, str]]:
    """The subclasses that were made here among the bases of a class, the last one first, each with its attribute."""
    return ((base, vars(base)["_remat_option"]) for base in cls.__mro__ if "_remat_option" in vars(base))


def _rebuild(build: Callable, args: tuple, layers: list[tuple[str, Options | None]]) -> Any:
    module = build(*args)
    for option, options in layers:
        if option == _IN_PLACE:
            module.__class__ = _subclass(type(module), option)
        elif options is not None:
            module = _second(module, options)
    return module


def _with_base(cls: type, base: type) -> type:
    """The class with another base; it must have one."""
    return type(cls.__name__, (base,), {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})
