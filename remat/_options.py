"""How a region is run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ._contexts import Contexts
from ._determinism import CHECKS
from ._policy import Policy, as_policy
from ._warnings import Told


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
    told: Told = field(default_factory=Told, compare=False, repr=False)


def checked_options(
    policy: Any, preserve_rng_state: Any, determinism_check: Any, early_stop: Any, debug: Any
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
    policy = None if policy is None else as_policy(policy)
    # Dynamo can't trace the factory of a field.
    return Options(preserve_rng_state, determinism_check, early_stop, debug, policy, told=Told())
