"""The options of a region, and what its function must be."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal

import torch

from .._core import private
from .._core.signatures import lists_arguments
from .._core.state import overriding, state
from .._policy.policy import Policy, PolicyLike, as_policy
from .._policy.warnings import Warned
from ..errors import shown
from .fingerprints import LOOKS


def check_returns(fn: Any) -> None:
    """Raise TypeError for functions that have no result when they return: generator functions and async functions."""
    fn = getattr(fn, "__func__", fn)  # of a method, a class method or a static method
    called = getattr(fn, "forward", fn) if isinstance(fn, torch.nn.Module) else fn
    method = vars(type(called)).get("__call__")  # for callable objects
    for is_kind, kind in _KINDS:
        if is_kind(called) or is_kind(method):
            raise TypeError(
                f"remat takes functions that have computed their result when they return, but "
                f"{getattr(fn, '__name__', type(fn).__name__)} is {kind}. Apply remat to a function that it calls."
            )


_KINDS: list[tuple[Callable[[Any], bool], str]] = [
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isasyncgenfunction, "an async generator function"),
]
UNFINISHED = types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType  # results of such functions


DeterminismCheck = Literal["metadata", "values", "none", "default"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a region; see :func:`remat.remat`."""

    preserve_rng_state: bool = True
    determinism_check: str = "metadata"
    early_stop: bool = True
    debug: bool = False
    policy: Policy | None = None
    contexts: Any = None  # around the runs: the `Contexts` of `remat.compat`
    offload_inputs: bool = False  # to host memory, in plain autograd
    read_inside: bool = False  # slots own their values while the region runs, for backward passes inside it
    segments: tuple[tuple[int, int], ...] = ()  # of a `Sequential`: the ranges of its modules that are regions instead
    name: str = field(default="", compare=False)  # the path of the module in its model
    warned: Warned = field(default_factory=Warned, compare=False, repr=False)
    override: dict[str, Any] | None = field(default=None, compare=False, repr=False)  # in effect at the call

    @property
    def may_skip(self) -> bool:
        """Whether a recompute may skip values that nothing needs: not if values are compared, those of results too."""
        return self.determinism_check != "values"

    def overridden(self) -> Options:
        """The options of a region that is called now: these, with changes by ``override`` and torch's switches."""
        changes = {**private.checkpoint_switches(), **(state.override or {})}
        return replace(self, **changes, override=changes)


def checked_options(
    policy: Any = None,
    preserve_rng_state: Any = True,
    determinism_check: Any = "metadata",
    early_stop: Any = True,
    debug: Any = False,
) -> Options:
    """Return the options of :func:`remat.remat`, or raise the errors that it documents."""
    switches = {"preserve_rng_state": preserve_rng_state, "early_stop": early_stop, "debug": debug}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {shown(value)}.")
    determinism_check = "metadata" if determinism_check == "default" else determinism_check  # torch's name
    if determinism_check not in LOOKS:
        allowed = ", ".join(map(repr, LOOKS))
        raise ValueError(f"determinism_check must be one of {allowed} or 'default'; got {determinism_check!r}.")
    # Dynamo treats lists and functions as constants and can't trace the conversion: `_compile` does it later.
    is_constant = torch.compiler.is_compiling() and isinstance(policy, (list, FunctionType))
    if policy is not None and not is_constant:
        policy = as_policy(policy)
    # Dynamo can't trace the default factory of a field.
    return Options(preserve_rng_state, determinism_check, early_stop, debug, policy, warned=Warned())


@contextmanager
@lists_arguments
def override(
    *,
    preserve_rng_state: bool | None = None,
    determinism_check: DeterminismCheck | None = None,
    early_stop: bool | None = None,
    debug: bool | None = None,
    policy: PolicyLike | Literal["unchanged"] = "unchanged",
) -> Iterator[None]:
    """Set options of every region that is called under this context, including those made by ``nn.apply``.

    Use it to debug a model without wrapping it again. The context around a region's forward applies, wherever its
    backward runs, and also to the regions that its recompute calls. An inner context takes precedence over an outer
    one, and both over the region's own options and over torch's ``set_checkpoint_debug_enabled`` and
    ``set_checkpoint_early_stop``, which apply to every region too. Affects the current thread, and the device threads
    of backward passes that it starts. Regions that ``torch.compile`` compiles keep their own options.

    Args:
        preserve_rng_state: make the recompute draw the same random numbers as the forward. ``None`` leaves this option
            unchanged, and so for the next three.
        determinism_check: what is compared between the runs, as in :func:`remat.remat`.
        early_stop: end a recompute as soon as it has what the backward needs.
        debug: also compare the runs operation by operation, as in :func:`remat.remat`. Slow.
        policy: what regions may save, as in :func:`remat.remat`.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: ``determinism_check`` is none of these.
        PolicyError: ``policy`` is not a policy.

    Example:
        >>> import torch
        >>> import remat
        >>> model = remat.nn.apply(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.Sequential)
        >>> with remat.override(debug=True, determinism_check="values"):
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()  # compares the operations of both runs, and all values
    """
    names = "preserve_rng_state", "determinism_check", "early_stop", "debug"
    values = preserve_rng_state, determinism_check, early_stop, debug
    given: dict[str, Any] = {name: value for name, value in zip(names, values) if value is not None}
    if policy != "unchanged":
        given["policy"] = policy
    checked = checked_options(**given)
    with overriding(**{name: getattr(checked, name) for name in given}):
        yield
