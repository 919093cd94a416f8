"""A rematerialized function, and the choice of the lowering at each call of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ._compile import lowering as compiled
from ._core import private
from ._core.known import Known, known_of
from ._core.state import is_disabled, own_work, state, within
from ._engine import lowering as engine
from ._functorch import lowering as functorch
from ._policy.policy import Budget
from ._region.hooks import hooks_are_allowed, in_torch_checkpoint, is_hooks_refusal
from ._region.options import Options


@private.skipped_unless_inlined  # if Dynamo breaks its graph in a region, the whole region runs here
def call(fn: Callable, options: Options, known: Known, args: tuple, kwargs: dict) -> Any:
    """Call ``fn`` as a region, or as a plain function if nothing would be saved."""
    if torch.compiler.is_compiling():
        return compiled.call(fn, options, args, kwargs)
    if state.override or private.checkpoint_switches():
        if is_disabled():
            return fn(*args, **kwargs)
        options = options.overridden()
    if state.policies and in_torch_checkpoint():  # its recompute runs outside of the regions around it
        with within(policies=()):
            return call(fn, options, known, args, kwargs)
    in_budget = state.policies and isinstance(state.policies[-1], Budget)  # it decides for everything in its region
    # Without grad mode `fn` may enable it itself, so its results may have gradients all the same. In inference mode
    # transforms differentiate, but below them nothing can be recorded.
    if in_budget or private.tracing() or not torch.is_grad_enabled() or private.excludes_autograd():
        return fn(*args, **kwargs)
    # Without hooks the engine can't recompute. The other lowering raises an error only if something is differentiated.
    if private.transforms_active() or not hooks_are_allowed():
        return functorch.call(fn, options, known, args, kwargs)
    try:
        with nullcontext() if state.watch is None else own_work():
            return engine.call(fn, options, known, args, kwargs)
    except RuntimeError as error:
        if not is_hooks_refusal(error):
            raise
    return functorch.call(fn, options, known, args, kwargs, uses_func=True)


class Remat:
    """A rematerialized function: each call of it is a region."""

    def __init__(self, fn: Callable, options: Options, known: Known | None = None) -> None:
        if not torch.compiler.is_compiling():
            functools.update_wrapper(self, fn)  # Dynamo can't trace it for all kinds of callables
        self._known = known or known_of(fn)
        self._fn = fn
        self._options = options

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return call(self._fn, self._options, self._known, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        bind = getattr(type(self._fn), "__get__", None)
        if instance is None or bind is None:
            return self
        if torch.compiler.is_compiling():  # Dynamo can't make bound methods
            return functools.partial(self, instance)
        return Remat(bind(self._fn, instance, owner), self._options, self._known)

    @property
    def __code__(self) -> Any:  # torch.export reads that of a module's forward
        return self._fn.__code__

    @property
    def __globals__(self) -> Any:  # torch.jit.script reads those of a module's forward
        raise AttributeError("TorchScript can't have regions. Script the model without them: `remat.nn.undo(model)`.")

    def __repr__(self) -> str:
        policy = self._options.policy
        return f"remat({self._fn!r})" if policy is None else f"remat({self._fn!r}, policy={policy!r})"

    def __reduce__(self) -> Any:
        # A decorated function is pickled by its qualified name, as functions are.
        module: Any = sys.modules.get(getattr(self._fn, "__module__", None) or "")
        name = getattr(self._fn, "__qualname__", "")
        with suppress(AttributeError):
            if functools.reduce(getattr, name.split("."), module) is self:
                return name
        return Remat, (self._fn, self._options)
