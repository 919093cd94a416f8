"""The public transform, and the choice of the lowering at each call."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from . import _autograd, _compile, _func, _torch
from ._determinism import CHECKS
from ._memory import Memory, memory_of
from ._module import wrap_module
from ._policy import as_policy
from ._region import Options
from ._state import state

F = TypeVar("F", bound=Callable)


@overload
def remat(
    fn: F,
    /,
    *,
    policy: Any = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "metadata",
    early_stop: bool = True,
    debug: bool = False,
) -> F: ...


@overload
def remat(
    *,
    policy: Any = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "metadata",
    early_stop: bool = True,
    debug: bool = False,
) -> Callable[[F], F]: ...


def remat(
    fn: Any = None,
    /,
    *,
    policy: Any = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "metadata",
    early_stop: bool = True,
    debug: bool = False,
) -> Any:
    """Make ``fn`` keep only its inputs between forward and backward, and compute the rest again when it is needed.

    The result has the same values and the same derivatives as ``fn``, under plain autograd, under every ``torch.func``
    transform, and under any nesting of them. The call of such a function is a *region*.

    Args:
        fn: a function, method, partial, callable object or ``torch.nn.Module``. Arguments and results are any pytrees;
            leaves that aren't tensors just pass. Of a module it makes a module of a subclass that shares all
            state with it: parameters, hooks and attributes, so that ``state_dict`` keys stay the same.
        policy: what may be kept beyond the inputs: one of :mod:`remat.policies`, a list of operators, or a function
            with the signature of torch's selective checkpoint. What the backward doesn't need is not kept. ``None``
            keeps nothing.
        preserve_rng_state: give the second run the random numbers of the first. Without it, generators are not
            touched, which is right only if the region draws no random numbers.
        determinism_check: what is compared between the runs: ``"metadata"`` (shape, dtype and device of what is saved,
            structure of the result), ``"values"`` (also a checksum of every saved tensor) or ``"none"``.
        early_stop: end the second run as soon as it has what the backward needs.
        debug: also compare the runs operation by operation, and name the user's source line of the first one that
            differs. Slow.

    Returns:
        A callable with the signature, name and documentation of ``fn``; a decorator if ``fn`` is not given. It can be
        pickled and deep-copied where ``fn`` can.

    Raises:
        TypeError: ``fn`` is not callable, or an option has the wrong type.
        ValueError: ``determinism_check`` is not one of the three.
        PolicyError: ``policy`` is not a policy.
        RecomputeMismatchError: in the backward, if the second run does something else than the first.
        MutationError: if an input or a captured tensor was changed in place in between.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> def f(x):
        ...     return x.sin().exp().sin().sum()
        >>> x = torch.linspace(0, 1, 5)
        >>> torch.equal(torch.func.grad(remat(f))(x), torch.func.grad(f)(x))
        True

    After ``jax.checkpoint``; the recompute follows Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    options = _checked_options(policy, preserve_rng_state, determinism_check, early_stop, debug)
    if fn is None:
        return functools.partial(_wrap, options=options)
    return _wrap(fn, options)


def _checked_options(
    policy: Any, preserve_rng_state: Any, determinism_check: Any, early_stop: Any, debug: Any
) -> Options:
    for name, value in (
        ("preserve_rng_state", preserve_rng_state),
        ("early_stop", early_stop),
        ("debug", debug),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")
    if determinism_check not in CHECKS:
        raise ValueError(f"determinism_check must be one of {', '.join(map(repr, CHECKS))}; got {determinism_check!r}.")
    return Options(
        preserve_rng_state, determinism_check, early_stop, debug, None if policy is None else as_policy(policy)
    )


def _wrap(fn: Any, options: Options) -> Any:
    if not callable(fn) and not isinstance(fn, (classmethod, staticmethod)):
        raise TypeError(
            f"remat takes a function or another callable, got {type(fn).__name__}. Options are keywords: "
            f"`remat(fn, early_stop=False)`."
        )
    if isinstance(fn, type):
        raise TypeError(f"remat takes a function, not the class {fn.__name__}: wrap an instance, or its method.")
    if isinstance(fn, (classmethod, staticmethod)):
        return type(fn)(_wrap(fn.__func__, options))
    if isinstance(fn, torch.nn.Module) and not isinstance(fn, torch.jit.ScriptModule):
        if any(map(torch.nn.parameter.is_lazy, fn.parameters())):
            raise TypeError(
                f"remat takes modules that know their shapes: call the lazy {type(fn).__name__} once first."
            )
        return wrap_module(fn, Remat, options)
    return Remat(fn, options, memory_of(fn))


class Remat:
    """A rematerialized function: calls of it are regions."""

    def __init__(self, fn: Callable, options: Options, memory: Memory) -> None:
        for name, value in getattr(fn, "__dict__", {}).items():  # torch 2.11's Dynamo can't trace `__dict__.update`
            setattr(self, name, value)
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options
        self._judge = _compile.judge_of(options.policy)
        self._memory = memory

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _compile.call(self._fn, self._options, self._judge, args, kwargs)
        if state.disabled or _torch.tracing():
            return self._fn(*args, **kwargs)
        if _torch.transforms_active():
            return _func.call(self._fn, self._options, self._memory, args, kwargs)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return _autograd.call(self._fn, self._options, self._memory, args, kwargs)
        return self._fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        bind = getattr(type(self._fn), "__get__", None)
        if instance is None or bind is None:
            return self
        if torch.compiler.is_compiling():  # Dynamo can't make bound methods
            return functools.partial(self, instance)
        return Remat(bind(self._fn, instance, owner), self._options, self._memory)

    def __repr__(self) -> str:
        return f"remat({self._fn!r})"

    def __reduce__(self) -> Any:
        # A decorated function replaces the one of its name, so it is found by that name, as functions are.
        module, name = (
            getattr(self._fn, "__module__", None),
            getattr(self._fn, "__qualname__", None),
        )
        if module and name and "<" not in name and _lookup(module, name) is self:
            return name
        return _rebuild, (self._fn, self._options)

    def __deepcopy__(self, memo: dict) -> Remat:
        fn = copy.deepcopy(self._fn, memo)
        return Remat(fn, self._options, memory_of(fn))


def _lookup(module: str, qualname: str) -> Any:
    try:
        return functools.reduce(getattr, qualname.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _rebuild(fn: Callable, options: Options) -> Remat:
    return Remat(fn, options, memory_of(fn))
