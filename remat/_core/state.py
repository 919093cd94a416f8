"""The state of a thread: whether it recomputes a region, and the options of regions that are called now."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import private
from .private import as_subclass, modes_that_see

__all__ = ["disable_remat", "is_disabled", "is_recomputing"]


def _carry_in_torch_2_11(key: str, value: Any) -> None:
    """Torch 2.11 stores an object without adding a reference to it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    private.carry(key, value)


# Sets a value for this thread, and for the device threads in a backward pass that it starts.
carry = private.carry if torch.__version__ >= "2.12" else _carry_in_torch_2_11


def _carried(key: str, default: Any = False) -> Any:
    """A value that was set for this thread, or for the thread that started its backward pass."""
    is_carried, carried = private.is_carried, private.carried
    return property(lambda _: carried(key) if is_carried(key) else default, lambda _, value: carry(key, value))


class _Guarded(threading.local):
    """State that compiled code reads too. Dynamo can guard attributes that each thread has from the start."""

    def __init__(self) -> None:
        self.checkpointing = False  # a region runs for the first time
        self.recomputing = False  # as in `state`, for compiled functions in an eager region
        self.disabled = False  # as in `state.override`
        self.traced: Any = None  # the policy of the outermost region that Dynamo traces now


guarded = _Guarded()


class _State(threading.local):
    own_work: bool = False  # the package itself calls torch now, not the user's function
    unseen: bool = False  # operations are the package's own
    filling: int = 0  # recorders numbered below this skip what runs now

    reader: Any = None  # the frame that reads a value for a backward now

    # These are also set in the device threads of a backward pass that this thread starts.
    recomputing = _carried("remat.recomputing")
    override = _carried("remat.override")  # options of the regions that are called now: a dict, or nothing
    watch = _carried("remat.watch", None)  # of the innermost region that runs for the first time under torch.func
    policies = _carried("remat.policies", ())  # of the regions that run now and have one, the innermost last
    logs = _carried("remat.logs", ())  # of the operations or random draws of the regions that run now
    recordings = _carried("remat.recordings", ())  # of the regions in their first run, under a policy


state = _State()


def is_recomputing() -> bool:
    """Whether the calling code is in the recompute of a region.

    Use it for effects that must happen once, such as logging or counting:

    Example:
        >>> import torch
        >>> import remat
        >>> from remat import is_recomputing
        >>> runs = []
        >>> @remat.remat
        ... def f(x):
        ...     runs.append(is_recomputing())
        ...     return x.sin().cos()
        >>> f(torch.ones(3, requires_grad=True)).sum().backward()
        >>> runs
        [False, True]
    """
    return guarded.recomputing if torch.compiler.is_compiling() else state.recomputing


@contextmanager
def disable_remat() -> Iterator[None]:
    """Turn every region that is called under this context into a plain call of its function.

    Regions whose forward ran before are not changed. Affects the current thread, and the device threads of a backward
    pass that it starts. Code that ``torch.compile`` compiled outside of this context is compiled once more here.

    Example:
        >>> import torch
        >>> import remat
        >>> from remat import disable_remat
        >>> f = remat.remat(torch.sin)
        >>> x = torch.ones(3, requires_grad=True)
        >>> with disable_remat():
        ...     y = f(x)  # saves what torch.sin saves
    """
    before, guarded.disabled = guarded.disabled, True
    try:
        if torch.compiler.is_compiling():
            yield
        else:
            with overriding(disabled=True):
                yield
    finally:
        guarded.disabled = before


def is_disabled() -> bool:
    """Whether :func:`disable_remat` is active here, so that regions are plain calls.

    Example:
        >>> from remat import disable_remat, is_disabled
        >>> with disable_remat():
        ...     is_disabled()
        True
        >>> is_disabled()
        False
    """
    if torch.compiler.is_compiling():
        return guarded.disabled
    return bool(state.override) and "disabled" in state.override


@contextmanager
def overriding(**changes: Any) -> Iterator[None]:
    """Override options of the regions that are called within. Overrides of other options stay in effect."""
    before = state.override
    state.override = {**(before or {}), **changes}
    try:
        yield
    finally:
        state.override = before


# Each region enters some of these, so they are classes: a context manager made of a generator takes four times as long.


class recomputing:
    """The flags of a recompute. Inner regions act as in the first run, under the same ``override``."""

    __slots__ = ("before", "guarded", "override")

    def __init__(self, override: dict[str, Any] | None) -> None:
        self.override = override

    def __enter__(self) -> None:
        self.before = state.recomputing, state.override, state.watch
        state.recomputing, state.override, state.watch = True, self.override, None
        self.guarded = guarded.recomputing, guarded.checkpointing, guarded.disabled
        guarded.recomputing, guarded.checkpointing, guarded.disabled = True, False, False

    def __exit__(self, *exception: Any) -> None:
        state.recomputing, state.override, state.watch = self.before
        guarded.recomputing, guarded.checkpointing, guarded.disabled = self.guarded


class as_in_forward:
    """The state of a first run, for a recompute, which may start within the bookkeeping of any other run.

    ``policies`` are those of outer regions.
    """

    __slots__ = ("before", "filling", "policies")

    def __init__(self, policies: tuple[Any, ...], filling: bool) -> None:
        self.policies, self.filling = policies, filling

    def __enter__(self) -> None:
        self.before = state.unseen, state.filling, state.policies
        state.unseen, state.policies = False, self.policies
        if self.filling:
            state.filling = len(state.recordings)  # recorders of inner regions don't skip operations

    def __exit__(self, *exception: Any) -> None:
        state.unseen, state.filling, state.policies = self.before


class without_policies:
    """Within, regions are called as if no region with a policy were around them."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before, state.policies = state.policies, ()

    def __exit__(self, *exception: Any) -> None:
        state.policies = self.before


class own_work:
    """Within, calls are the package's own, which no `Watch` sees; with False, the user's again."""

    __slots__ = ("before", "value")

    def __init__(self, value: bool = True) -> None:
        self.value = value

    def __enter__(self) -> None:
        self.before, state.own_work = state.own_work, self.value

    def __exit__(self, *exception: Any) -> None:
        state.own_work = self.before


class first_run:
    """The flags of the first run of a region's function."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before = state.own_work, guarded.checkpointing, state.unseen, state.filling
        state.own_work, guarded.checkpointing = False, True
        if state.unseen:  # hooks around other regions call the function, so their recorders must skip it
            state.unseen, state.filling = False, len(state.recordings)

    def __exit__(self, *exception: Any) -> None:
        state.own_work, guarded.checkpointing, state.unseen, state.filling = self.before


class unseen:
    """Within, operations are the package's own, which no recorder of a region sees; with False, the user's again."""

    __slots__ = ("before", "value")

    def __init__(self, value: bool = True) -> None:
        self.value = value

    def __enter__(self) -> None:
        self.before, state.unseen = state.unseen, self.value

    def __exit__(self, *exception: Any) -> None:
        state.unseen = self.before


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that modes don't see. The user's own is seen, as its result may be read outside of them."""
    if not modes_that_see():
        return tensor.detach()
    if type(tensor) in _PLAIN:
        return as_subclass(torch.Tensor, tensor)
    with unseen():
        return tensor.detach()
