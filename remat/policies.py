"""Policies: which values a checkpointed region may save in addition to its inputs.

A policy is an object that can be compared, hashed, pickled and printed. ``p | q``, ``p & q`` and ``~p`` combine
policies. A value is saved only if its policy allows it and the backward pass uses it. ``remat.checkpoint_policies`` has
them by the names in JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._policy import operators
from ._policy.names import Names
from ._policy.policy import Budget, If, Offload, Ops, Policy, PolicyLike, as_policy, saving
from ._policy.policy import Preset as _Preset
from ._policy.predicates import checked_predicate
from .errors import PolicyError

__all__ = [
    "budget", "everything_saveable", "nothing_saveable", "offload", "save_any_names_but_these",
    "save_anything_except_these_names", "save_attention", "save_collectives", "save_convolutions", "save_if",
    "save_matmuls", "save_matmuls_without_batch_dims", "save_only_these_names", "save_ops",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        in_jax = sys.modules["remat.checkpoint_policies"]  # it imports this module
        if name in getattr(in_jax, "__all__", ()):  # these were here too
            return getattr(in_jax, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


nothing_saveable: Policy = as_policy(None)
everything_saveable: Policy = _Preset(~nothing_saveable, "everything_saveable", "Saves all that the backward uses.")
save_matmuls: Policy = _Preset(
    Ops(operators.MATMULS),
    "save_matmuls",
    """Saves the results of matrix products and convolutions, as JAX's ``dots_saveable`` does.
    :data:`save_matmuls_without_batch_dims` saves no convolutions: add them by ``| save_convolutions``.""",
)
save_matmuls_without_batch_dims: Policy = _Preset(
    Ops(operators.MATMULS_WITHOUT_BATCH_DIMS) | Ops(operators.named("bmm")) & If(operators.is_unbatched_einsum),
    "save_matmuls_without_batch_dims",
    """Saves the results of products with weights, as in linear layers, but not of batched products such as attention
    scores, and not of convolutions. A ``bmm`` of batch size 1 that ``torch.einsum`` issues for two matrices counts as
    unbatched. Under ``vmap`` the policy judges the operator that torch executes. With a batched weight, or in a
    derivative under ``vmap``, that is usually a batched product.""",
)
save_attention: Policy = _Preset(
    Ops(operators.ATTENTION),
    "save_attention",
    """Saves the results of fused attention kernels: the output, the logsumexp and the state of the dropout. Where torch
    computes attention from matrix products and a softmax, there is no such kernel, and nothing is saved.""",
)
save_convolutions: Policy = _Preset(
    Ops(operators.CONVOLUTIONS), "save_convolutions", "Saves the results of convolutions."
)
save_collectives: Policy = _Preset(
    Ops(operators.COLLECTIVES),
    "save_collectives",
    """Saves the results of functional collectives, so that nothing is communicated again.
    ``torch.distributed.all_reduce`` and other collectives that write into their arguments have no results.""",
)


def save_ops(*ops: Any) -> Policy:
    """Save the results of the given operators. A list of operators, in which views are allowed, means the same policy.

    Args:
        ops: overloads (``torch.ops.aten.mm.default``), packets (``torch.ops.aten.mm``), which mean all their overloads,
            higher-order operators, functions made by ``torch.library.custom_op``, or names such as ``"aten.mm"``.

    Raises:
        PolicyError: there is no such operator; it is a composite such as ``aten.linear``, which decomposes into
            other operators before a policy sees it; or it only returns views, as ``aten.t``, so nothing can be saved.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> policies.save_ops("aten.mm", torch.ops.aten.bmm.default)
        policies.save_ops(torch.ops.aten.bmm.default, torch.ops.aten.mm)
    """
    return saving(ops, operators.makers_of)


def save_only_these_names(*names: str) -> Policy:
    """Save the values that ``checkpoint_name`` gave one of these names.

    In a name ``*`` matches any characters. Raises ``PolicyError`` if one is empty or not a string.

    Example:
        >>> from remat import policies
        >>> policies.save_only_these_names("q", "mlp.*")
        policies.save_only_these_names('q', 'mlp.*')
    """
    return Names("save_only_these_names", names)


def save_any_names_but_these(*names: str) -> Policy:
    """Save the values that have names, except those with one of these names, as in :func:`save_only_these_names`.

    Example: ``policies.save_any_names_but_these("scores")``
    """
    return Names("save_any_names_but_these", names)


def save_anything_except_these_names(*names: str) -> Policy:
    """Save every value, except those with one of these names, as in :func:`save_only_these_names`.

    Example: ``policies.save_anything_except_these_names("scores")``
    """
    return Names("save_anything_except_these_names", names)


def save_if(predicate: Callable[..., Any]) -> Policy:
    """Save the values that a function accepts, as in torch's selective checkpoint.

    It is called as ``predicate(ctx, op, *args, **kwargs)`` and returns a bool or a
    ``torch.utils.checkpoint.CheckpointPolicy``. Raises ``PolicyError`` if it can't be called with these arguments.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> def large_products(ctx, op, *args, **kwargs):
        ...     return op == torch.ops.aten.mm.default and args[0].shape[0] > 1024
        >>> policies.save_if(large_products)
        policies.save_if(large_products)
    """
    return If(checked_predicate(predicate))


def offload(policy: PolicyLike, to: str = "cpu") -> Policy:
    """Save what a policy saves in host memory instead of on the device.

    ``to`` may also be ``"pinned_host"``, JAX's name for ``"cpu"``. Raises ``PolicyError`` if it is something else.

    Example:
        >>> from remat import policies
        >>> policies.offload(policies.save_attention) | policies.save_only_these_names("q")
        policies.offload(policies.save_attention) | policies.save_only_these_names('q')
    """
    if str(to) not in ("cpu", "pinned_host"):
        raise PolicyError(f"Values can be offloaded only to 'cpu' (JAX's name is 'pinned_host'); got {to!r}.")
    return Offload(as_policy(policy))


def budget(amount: int | str | float, *, cost: str | Callable[..., float] = "roofline") -> Policy:
    """Save at most this many bytes of a region, chosen to minimize the cost of the recompute.

    The first call of a region saves nothing; later calls with the same operations and shapes save what was chosen then.
    Regions inside a region with a budget are plain calls. A budget inside a region with a policy has no effect.

    Args:
        amount: bytes, a string such as ``"64MiB"``, or a float in (0, 1], a fraction of what the region saves without
            remat. Inputs, captured tensors and results of the region are not counted.
        cost: what an operation costs: ``"roofline"``, from its FLOPs and the bytes that it moves, ``"flops"``,
            ``"time"``, as measured, or a function ``(op, args, kwargs, result)`` that returns a number.

    Raises:
        PolicyError: ``amount`` or ``cost`` is none of these; or the budget is combined with another policy.

    Example:
        >>> import torch, remat
        >>> from remat import policies
        >>> f = remat.remat(lambda x: torch.tanh(x @ x).sin(), policy=policies.budget("64KiB"))
        >>> f(torch.ones(8, 8, requires_grad=True)).sum().backward()
    """
    return Budget(amount, cost)
