"""The state of a thread: whether it recomputes a region, and the options of regions that are called now."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from . import private
from .private import as_subclass, carried, is_carried, modes_that_see


def _carry_in_torch_2_11(key: str, value: Any) -> None:
    """Torch 2.11 stores an object without adding a reference to it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    private.carry(key, value)


# Sets a value for this thread, and for the device threads in a backward pass that it starts.
carry = private.carry if torch.__version__ >= "2.12" else _carry_in_torch_2_11


def _carried(key: str, default: Any = False) -> Any:
    """A value that was set for this thread, or for the thread that started its backward pass."""
    return property(lambda _: carried(key) if is_carried(key) else default, lambda _, value: carry(key, value))


class _State(threading.local):
    # These are also set in the device threads of a backward pass that this thread starts.
    recomputing = _carried("remat.recomputing")
    override = _carried("remat.override", None)  # options of the regions that are called now
    watch = _carried("remat.watch", None)  # of the innermost region that runs for the first time under torch.func
    policies = _carried("remat.policies", ())  # of the regions that run now and have one, the innermost last
    logs = _carried("remat.logs", ())  # of the operations or random draws of the regions that run now
    recordings = _carried("remat.recordings", ())  # of the regions in their first run, under a policy

    def __init__(self) -> None:
        self.own_work = False  # the package itself calls torch now, not the user's function
        self.unseen = False  # operations are the package's own
        self.filling = 0  # recorders numbered below this skip what runs now
        self.reader: Any = None  # the frame that reads a value for a backward now
        # Compiled code reads these: Dynamo can guard attributes that each thread has from the start.
        self.checkpointing = False  # a region runs for the first time
        self.disabled = False  # as in `override`
        self.recomputing_here = False  # as `recomputing`, for compiled functions in an eager region
        self.traced: Any = None  # the policy of the outermost region that Dynamo traces now


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
    return state.recomputing_here if torch.compiler.is_compiling() else state.recomputing


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
    with within(disabled=True), nullcontext() if torch.compiler.is_compiling() else overriding(disabled=True):
        yield


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
        return state.disabled
    return bool(state.override) and "disabled" in state.override


class within:
    """Within, attributes of ``state`` have other values. A context manager made of a generator takes longer."""

    __slots__ = ("before", "values")

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.before: dict[str, Any] = {}
        for name, value in self.values.items():
            if (now := getattr(state, name)) is not value:
                self.before[name] = now
                setattr(state, name, value)

    def __exit__(self, *exception: Any) -> None:
        for name, value in self.before.items():
            setattr(state, name, value)


def overriding(**changes: Any) -> within:
    """Override options of the regions that are called within. Overrides of other options stay in effect."""
    return within(override={**(state.override or {}), **changes})


def recomputing(override: dict[str, Any] | None, log: Any) -> within:
    """The state of a recompute, with one more log. Inner regions act as in the first run, by this ``override``."""
    return within(
        recomputing=True, recomputing_here=True, checkpointing=False, disabled=False, override=override, watch=None,
        logs=(*state.logs, log),
    )  # fmt: skip


def first_run(log: Any) -> within:
    """The state of the first run of a region's function, with one more log."""
    # If operations are unseen, hooks around other regions call the function, so their recorders must skip it.
    filling = len(state.recordings) if state.unseen else state.filling
    return within(own_work=False, checkpointing=True, unseen=False, filling=filling, logs=(*state.logs, log))


class _flag:
    """``within`` for one attribute, which most operations of a region need to be true."""

    __slots__ = ("before", "name")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.before = getattr(state, self.name)
        setattr(state, self.name, True)

    def __exit__(self, *exception: Any) -> None:
        setattr(state, self.name, self.before)


own_work = partial(_flag, "own_work")  # within, calls are the package's own, which no `Watch` sees
unseen = partial(_flag, "unseen")  # within, operations are the package's own, which no recorder of a region sees
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that modes don't see. The user's own is seen, as its result may be read outside of them."""
    if not modes_that_see():
        return tensor.detach()
    if type(tensor) in _PLAIN:
        return as_subclass(torch.Tensor, tensor)
    with unseen():
        return tensor.detach()
