"""The classes of modules whose calls are regions: ``class Block(_Region, Block)``, whose ``forward`` is a region.

Hooks run outside of the region. The class lists the regions. For ``remat(module)``, a second module, it also has their
options, as the two modules share one ``__dict__``. A module that is changed in place has them in its ``__dict__``.
A ``Sequential`` can have regions around ranges of its modules instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from .._core.known import Known, known_of
from .._function import Remat
from .._region.options import Options
from .eligible import as_library_checkpoints

Range = tuple[int, int]


def is_sequence(module: Any) -> bool:
    """Whether it is a ``Sequential`` that only calls its modules one after another."""
    is_plain = isinstance(module, nn.Sequential) and "forward" not in vars(module)
    return is_plain and unwrap(type(module).forward) is nn.Sequential.forward


def segmented(module: nn.Sequential, options: Options) -> Any:
    """Return a forward with a region around each range of modules that the options name."""
    return partial(modules_in_row, tuple(module), options.segments, (0, len(module)), options)


def modules_in_row(modules: Sequence, segments: Sequence[Range], part: Range, options: Options, input: Any) -> Any:
    """Call a part of the modules, with a region around each segment. Segments may be inside of one another."""
    at, end = part
    while at < end:
        longest = max([each for each in segments if each[0] == at], default=None)
        if longest is None:
            input, at = modules[at](input), at + 1
        else:
            called = partial(modules_in_row, modules, [each for each in segments if each != longest], longest, options)
            input, at = Remat(called, options, Known())(input), longest[1]
    return input


Regions = tuple[Options | None, ...]  # the innermost first; None is the region that was made in place
IN_PLACE = "_remat"  # the module's attribute with the options of the region that was made in place


def _forward(module: Any) -> Any:
    """Return the region, also around a ``forward`` that was set on the module itself."""
    forward, own = module.__dict__.get("forward"), type(module)._remat_own
    in_place = module.__dict__.get(IN_PLACE)
    layers = [each or in_place for each in regions_of(module) if each or in_place]
    if torch.compiler.is_compiling():  # Dynamo of torch 2.11 can't make bound methods, or nest two regions
        forward = forward or (lambda *args, **kwargs: own.forward(module, *args, **kwargs))
        layers = layers[-1:]
    elif forward is None:
        forward = super(_Region, module).forward
    for options in layers:
        forward = segmented(module, options) if options.segments else Remat(forward, options, known_of(module))
    return as_library_checkpoints(module, forward) if layers else forward


def _set_forward(module: Any, value: Callable) -> None:
    module.__dict__["forward"] = value


def _delete_forward(module: Any) -> None:
    if module.__dict__.pop("forward", None) is None:
        raise AttributeError("forward")


class _Forward(property):  # Dynamo's guards take what another descriptor gives the class for the descriptor itself
    """The attribute ``forward`` of these classes: on a module the region, on the class a function that calls it."""

    def __get__(self, module: Any, cls: Any = None) -> Any:
        return cls._remat_forward if module is None else _forward(module)


class _Compiled:
    """What ``module.compile()`` sets: of two modules that share one ``__dict__``, it is for that which was compiled."""

    def __get__(self, module: Any, cls: Any = None) -> Any:
        compiled = None if module is None else module.__dict__.get("_compiled_call_impl")
        return compiled if getattr(getattr(compiled, "__wrapped__", None), "__self__", None) is module else None

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__["_compiled_call_impl"] = value


class _Region:
    """The first base of the classes that are made here. The second base is the module's own class."""

    # No `__slots__`: an instance of the module's own class can become one of the new class only if both have a dict.
    _remat_own: type
    _remat_regions: Regions
    _remat_forward: Callable
    _compiled_call_impl = _Compiled()
    forward = _Forward(_forward, _set_forward, _delete_forward)

    def __init_subclass__(cls) -> None:
        """Don't call the method of the module's own class, which may replace ``forward``."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__bases__[0] is not _Region:  # a wrapper has changed the class since
            return super().__reduce_ex__(protocol)
        # As a module of the own class, which pickle finds by its name.
        reduced = as_one_of(self._remat_own, self).__reduce_ex__(protocol)
        regions = regions_of(self), self.__dict__.get(IN_PLACE)
        return reduced if isinstance(reduced, str) else (_rebuild, (*reduced[:2], *regions), *reduced[2:])


def _region_class(own: Any, regions: Regions) -> Any:
    for known in type.__subclasses__(own):
        if known.__bases__[0] is _Region and known._remat_regions == regions:
            return known
    forward = wraps(own.forward)(lambda self, *args, **kwargs: _forward(self)(*args, **kwargs))
    names: dict[str, Any] = {"_remat_own": own, "_remat_regions": regions, "_remat_forward": forward}
    # For code that looks at the name of the class.
    names.update((name, getattr(own, name)) for name in ("__module__", "__qualname__", "__doc__"))
    names.update((name, _copies(own, name)) for name in ("__copy__", "__deepcopy__") if hasattr(own, name))
    if issubclass(own, torch.fx.GraphModule):  # each instance has a class of its own, with its code
        names["recompile"] = lambda self: as_one_of(own, self).recompile()
    made: Any = type(f"Remat{own.__name__}" if any(regions) else own.__name__, (_Region, own), names)
    if "forward" in vars(made):  # a metaclass has wrapped it once more
        del made.forward
    return made


def _copies(own: Any, name: str) -> Callable:
    """Wrap a copy method of a class, which may return a module without regions."""

    def copied(self: Any, *args: Any) -> Any:
        plain = as_one_of(own, self) if issubclass(own, torch.fx.GraphModule) else super(_Region, self)
        return set_regions(getattr(plain, name)(*args), regions_of(self), self.__dict__.get(IN_PLACE))

    return copied


def class_with(module: Any, regions: Regions, cls: Any = None) -> Any:
    """Return the class of ``module``, or of its base ``cls``, with exactly these regions."""
    cls = cls or type(module)
    if cls.__bases__[0] is _Region:
        return _region_class(cls._remat_own, regions) if regions else cls._remat_own
    # The classes of FSDP2 and of parametrizations stay on top. torch removes the latter with the last parametrization.
    parametrized = is_parametrized(module) and next(iter(module.parametrizations)) in vars(cls)
    if not parametrized and not issubclass(cls, _Region):
        return _region_class(cls, regions)
    below = [base for base in cls.__bases__ if parametrized or issubclass(base, _Region)]
    bases = (class_with(module, regions, base) if base in below else base for base in cls.__bases__)
    return type(cls)(cls.__name__, tuple(bases), dict(vars(cls)))


def regions_of(module: Any) -> Regions:
    """The regions in the class of a module."""
    return getattr(type(module), "_remat_regions", ())


def as_one_of(cls: Any, module: Any) -> Any:
    """Return an object of another class that shares the state of a module."""
    same = object.__new__(cls)
    same.__dict__ = module.__dict__
    return same


def set_regions(module: Any, regions: Regions, in_place: Options | None) -> Any:
    """Give a module a class with these regions, and set the options of the region that is made in place."""
    if regions_of(module) != regions:
        module.__class__ = class_with(module, regions)
    if in_place is not None:
        module.__dict__[IN_PLACE] = in_place
    return module


def _rebuild(build: Callable, args: tuple, *regions: Any) -> Any:
    return set_regions(build(*args), *regions)


def second_module(module: Any, options: Options) -> Any:
    """Return a module that shares all state with ``module``, and whose calls are regions."""
    return as_one_of(class_with(module, (*regions_of(module), options)), module)


def change_in_place(module: Any, options: Options) -> None:
    """Make each later call of ``module`` a region; if it is one already, replace its options."""
    regions = regions_of(module)
    set_regions(module, regions if None in regions else (*regions, None), options)


def change_back(module: Any) -> None:
    """Undo ``change_in_place``, if it was called."""
    if module.__dict__.pop(IN_PLACE, None) is not None:
        module.__class__ = class_with(module, tuple(filter(None, regions_of(module))))


@contextmanager
def restored(modules: Iterable[Any]) -> Iterator[None]:
    """Restore the regions that these modules have, at the end of the context."""
    before = [(module, type(module), module.__dict__.get(IN_PLACE)) for module in modules]
    try:
        yield
    finally:
        for module, cls, own in before:
            module.__class__ = cls
            module.__dict__.pop(IN_PLACE, None)
            if own is not None:
                module.__dict__[IN_PLACE] = own


@contextmanager
def regions(options: Mapping[Any, Options]) -> Iterator[None]:
    """Make these modules regions within the context."""
    with restored(options):
        for module, each in options.items():
            change_in_place(module, each)
        yield
