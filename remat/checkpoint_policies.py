"""The policies by their names in ``jax.checkpoint_policies``. ``remat.policies`` has more.

| | |
|---|---|
| ``dots_saveable``, ``checkpoint_dots`` | ``policies.save_matmuls`` |
| ``dots_with_no_batch_dims_saveable``, ``checkpoint_dots_with_no_batch_dims`` | ``save_matmuls_without_batch_dims`` |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import policies
from ._policy.policy import Policy, PolicyLike, as_policy
from .errors import PolicyError
from .policies import (
    everything_saveable,
    nothing_saveable,
    offload,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_matmuls,
    save_matmuls_without_batch_dims,
    save_only_these_names,
)

__all__ = [
    "checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "dots_saveable", "dots_with_no_batch_dims_saveable",
    "everything_saveable", "nothing_saveable", "offload_dot_with_no_batch_dims", "save_and_offload_only_these_names",
    "save_any_names_but_these", "save_anything_except_these_names", "save_from_both_policies", "save_only_these_names",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in policies.__all__:  # other policies, which were here too
            return getattr(policies, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


dots_saveable: Policy = save_matmuls
checkpoint_dots: Policy = save_matmuls
dots_with_no_batch_dims_saveable: Policy = save_matmuls_without_batch_dims
checkpoint_dots_with_no_batch_dims: Policy = save_matmuls_without_batch_dims


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str] = (),
    names_which_can_be_offloaded: Iterable[str] = (),
    offload_src: str = "device",
    offload_dst: str = "cpu",
) -> Policy:
    """Save values with some names on the device, and values with other names in host memory.

    Names are as in :func:`save_only_these_names`. ``offload_dst`` may also be ``"pinned_host"``. The keywords are
    JAX's. Raises ``PolicyError`` if a name is in both lists, or an argument is invalid.

    Example:
        >>> from remat import policies
        >>> policies.save_and_offload_only_these_names(
        ...     names_which_can_be_saved=["q"], names_which_can_be_offloaded=["k*"]
        ... )
        policies.save_only_these_names('q') | policies.offload(policies.save_only_these_names('k*'))
    """
    _check_source(offload_src)
    for names in (names_which_can_be_saved, names_which_can_be_offloaded):
        if isinstance(names, str):
            raise PolicyError(f"Names must be passed as a list: [{names!r}] instead of {names!r}.")
    offloaded = save_only_these_names(*names_which_can_be_offloaded)
    return save_only_these_names(*names_which_can_be_saved) | offload(offloaded, to=offload_dst)


def offload_dot_with_no_batch_dims(offload_src: str = "device", offload_dst: str = "cpu") -> Policy:
    """Save the results of products with weights in host memory: JAX's name for an :func:`offload` policy.

    Example:
        >>> from remat import checkpoint_policies
        >>> checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        policies.offload(policies.save_matmuls_without_batch_dims)
    """
    _check_source(offload_src)
    return offload(save_matmuls_without_batch_dims, to=offload_dst)


def save_from_both_policies(p: PolicyLike, q: PolicyLike, /) -> Policy:
    """Save what either of two policies saves: JAX's name for ``p | q``.

    Raises ``PolicyError`` if one saves what the other offloads.

    Example: ``policies.save_from_both_policies(policies.save_matmuls, policies.save_only_these_names("q"))``
    """
    return as_policy(p) | q


def _check_source(offload_src: str) -> None:
    if offload_src != "device":
        raise PolicyError(f"Values can be offloaded only from 'device'; got {offload_src!r}.")
