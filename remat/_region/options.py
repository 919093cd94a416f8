"""How a region is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal

import torch

from .._core import private
from .._core.state import overriding, state
from .._policy.policy import Policy, as_policy
from .._policy.warnings import Told
from .contexts import Contexts
from .fingerprints import CHECKS

__all__ = ["override"]


DeterminismCheck = Literal["metadata", "values", "none"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a region is run; see :func:`remat.remat`."""

    preserve_rng_state: bool = True
    determinism_check: str = "metadata"
    early_stop: bool = True
    debug: bool = False
    policy: Policy | None = None
    contexts: Contexts | None = None  # the user's own, around the runs of one region
    offload_inputs: bool = False  # to host memory, in plain autograd
    read_inside: bool = False  # slots keep their values as long as the region runs, for backward passes inside of it
    name: str = field(default="", compare=False)  # the path of the module in its model
    told: Told = field(default_factory=Told, compare=False, repr=False)
    override: dict[str, Any] | None = field(default=None, compare=False, repr=False)  # what the call was under

    @property
    def may_leave_out(self) -> bool:
        """Whether a recompute may skip what nothing needs: not where values are compared that nothing else needs."""
        return self.determinism_check != "values"

    def overridden(self) -> Options:
        """The options of a region that is called now."""
        changes = {**private.checkpoint_switches(), **(state.override or {})}
        return replace(self, **changes, override=changes)


def checked_options(
    policy: Any = None,
    preserve_rng_state: Any = True,
    determinism_check: Any = "metadata",
    early_stop: Any = True,
    debug: Any = False,
) -> Options:
    """The options of :func:`remat`, which says what they are and which errors there are."""
    for name, value in (
        ("preserve_rng_state", preserve_rng_state),
        ("early_stop", early_stop),
        ("debug", debug),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")
    if determinism_check not in CHECKS:
        raise ValueError(f"determinism_check must be one of {', '.join(map(repr, CHECKS))}; got {determinism_check!r}.")
    if torch.compiler.is_compiling() and isinstance(policy, (list, FunctionType)):
        pass  # Dynamo takes them for constants, and can't trace what becomes of them: `_compile` asks later
    elif policy is not None:
        policy = as_policy(policy)
    # Dynamo can't trace the factory of a field.
    return Options(preserve_rng_state, determinism_check, early_stop, debug, policy, told=Told())


@contextmanager
def override(
    *,
    preserve_rng_state: bool | None = None,
    determinism_check: DeterminismCheck | None = None,
    early_stop: bool | None = None,
    debug: bool | None = None,
) -> Iterator[None]:
    """Set options of every region that is called under this context, however it was made.

    To debug a model, nothing has to be made anew. The context around a region's forward decides, wherever its backward
    is, also of the regions that its recompute calls. An inner context comes before an outer one, and both before the
    region's own options and torch's ``set_checkpoint_debug_enabled`` and ``set_checkpoint_early_stop``, which act on
    every region too. Affects the current thread, and what a backward pass that it starts runs in the threads of
    devices. What ``torch.compile`` compiles keeps the region's own options.

    Args:
        preserve_rng_state: give a recompute the random numbers of the forward. ``None`` leaves this option, and each of
            those below, as it is.
        determinism_check: what is compared between the runs, as in :func:`remat.remat`.
        early_stop: end a recompute as soon as it has what the backward needs.
        debug: also compare the runs operation by operation, as in :func:`remat.remat`. Slow.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: ``determinism_check`` is not one of the three.

    Example:
        >>> import torch
        >>> import remat
        >>> model = remat.nn.apply(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.Sequential)
        >>> with remat.override(debug=True, determinism_check="values"):
        ...     loss = model(torch.ones(2, 4)).sum()
        >>> loss.backward()  # compares the operations of both runs, and all values
    """
    options = {
        "preserve_rng_state": preserve_rng_state,
        "determinism_check": determinism_check,
        "early_stop": early_stop,
        "debug": debug,
    }
    changes = {name: value for name, value in options.items() if value is not None}
    checked_options(**changes)
    with overriding(**changes):
        yield
