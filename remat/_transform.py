"""The public transform."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from ._function import Remat
from ._modules.eligible import check_module
from ._modules.region_class import second_module
from ._policy.policy import Policy, PolicyLike
from ._region.options import DeterminismCheck, Options, check_returns, checked_options

F = TypeVar("F", bound=Callable)


@overload
def remat(
    fn: F,
    /,
    *,
    policy: PolicyLike = None,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "metadata",
    early_stop: bool = True,
    debug: bool = False,
) -> F: ...


@overload
def remat(
    *,
    policy: PolicyLike = None,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "metadata",
    early_stop: bool = True,
    debug: bool = False,
) -> Callable[[F], F]: ...


def remat(
    fn: Any = None,
    /,
    *args: Any,
    policy: PolicyLike = None,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "metadata",
    early_stop: bool = True,
    debug: bool = False,
    **others: Any,
) -> Any:
    """Save only the inputs of ``fn`` between forward and backward, and recompute the rest in the backward.

    The returned function has the same values and derivatives as ``fn``, under plain autograd and any nesting of
    ``torch.func`` transforms. Each call of it is a *checkpointed region*, or region.

    Args:
        fn: a function, method, partial, callable object or ``torch.nn.Module``, with any pytrees as arguments and
            results. For a module, the result is a module of a subclass sharing its parameters, hooks and attributes.
        policy: what may be saved beyond the inputs: one of :mod:`remat.policies`, a list of operators, or a function
            with the signature of the ``policy_fn`` of torch's selective checkpoint. A value is saved only if the
            backward pass uses it. ``None`` saves only the inputs.
        preserve_rng_state: make the recompute draw the same random numbers as the forward.
        determinism_check: what a recompute must reproduce: ``"metadata"`` (shape, strides, dtype and device of every
            saved tensor, the operation that made it, and the structure of the result), ``"values"`` (also a checksum
            of every saved tensor) or ``"none"``. ``"default"``, torch's name, is ``"metadata"``.
        early_stop: stop a recompute as soon as it has every tensor that the backward needs.
        debug: also compare the runs operation by operation. The error names the line of the first one that differs,
            and its ``logs`` list all operations. Slow.

    Returns:
        A callable with the signature, name and documentation of ``fn``, or a decorator if ``fn`` is not given. It can
        be pickled and deep-copied if ``fn`` can.

    Raises:
        TypeError: ``fn`` is not callable, or is a generator or async function, or an option has the wrong type.
        ValueError: ``determinism_check`` is none of these strings.
        PolicyError: ``policy`` is not a policy.
        RematError: ``fn`` is a module whose library's own activation checkpointing is on.
        RecomputeMismatchError: in the backward, if a recompute differs from the forward.
        MutationError: in the backward, if an input or a captured tensor was changed in place after the forward.

    Example:
        >>> import torch, remat
        >>> def f(x):
        ...     return x.sin().exp().sin().sum()
        >>> x = torch.linspace(0, 1, 5)
        >>> torch.equal(torch.func.grad(remat.remat(f))(x), torch.func.grad(f)(x))
        True

    Modeled on ``jax.checkpoint``. The method is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost",
    2016.
    """
    if args or others:
        raise TypeError(_misuse(others))
    options = checked_options(policy, preserve_rng_state, determinism_check, early_stop, debug)
    if fn is None:
        return functools.partial(_decorated, options)
    return wrapped(fn, options)


def _decorated(options: Options, fn: Any, /, *args: Any, **others: Any) -> Any:
    if args or others:
        raise TypeError(_misuse(others))
    return wrapped(fn, options)


_parameters = inspect.signature(remat).parameters.values()
_accepted = [p for p in _parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # others are for errors
remat.__signature__ = inspect.Signature(_accepted)  # type: ignore[attr-defined]


def _misuse(others: dict[str, Any]) -> str:
    """What to write in place of a call with options or arguments that `remat` doesn't have."""
    if in_jax := [name for name in ("prevent_cse", "static_argnums", "concrete") if name in others]:
        return f"remat doesn't need the option {in_jax[0]} of jax.checkpoint: leave it out."
    if others and "use_reentrant" not in others and "context_fn" not in others:
        return (
            f"remat has no option {next(iter(others))!r}. It has policy, preserve_rng_state, determinism_check, "
            f"early_stop and debug. The arguments of the function follow: `remat(fn)(x)`."
        )
    in_torch = {"context_fn": " In place of context_fn give a policy.", "use_reentrant": " Leave use_reentrant out."}
    return (
        f"remat returns a function, to call with the arguments: `remat(fn)(x)`. Options are keywords: `policy=...`."
        f"{''.join(text for name, text in in_torch.items() if name in others)} For torch's own signature use "
        f"remat.compat.checkpoint: `checkpoint(fn, x, use_reentrant=False)`."
    )


def wrapped(fn: Any, options: Options) -> Any:
    """Return the rematerialized function or module."""
    if isinstance(fn, (Policy, str)):
        raise TypeError("The policy is a keyword argument: `remat(fn, policy=...)`.")
    if not callable(fn) and not isinstance(fn, (classmethod, staticmethod)):
        raise TypeError(
            f"remat takes a function or another callable, got {type(fn).__name__}. Pass the function, not its result: "
            f"`remat(fn)(x)`. Options are keywords: `remat(fn, early_stop=False)`."
        )
    if not torch.compiler.is_compiling():
        check_returns(fn)  # Dynamo can't trace it
    if isinstance(fn, type):
        raise TypeError(f"remat takes a function, not the class {fn.__name__}: wrap an instance, or its method.")
    if isinstance(fn, (classmethod, staticmethod)):
        return type(fn)(wrapped(fn.__func__, options))
    if (
        isinstance(fn, torch.nn.Module)
        and not isinstance(fn, torch.jit.ScriptModule)
        and not torch.compiler.is_compiling()  # Dynamo can't make classes; there the call of the module is a region
    ):
        check_module(fn)
        return second_module(fn, options)
    return Remat(fn, options)
