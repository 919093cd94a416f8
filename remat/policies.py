"""What a rematerialized function may keep beyond its inputs.

Every policy is a value that can be compared, hashed, pickled and printed. They are put together by ``p | q``, ``p & q``
and ``~p``. What may be kept is kept only if the backward needs it. The names are those of ``jax.checkpoint_policies``
where that has one, often beside one that says it in torch's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ._policy.budget import Budget
from ._policy.groups import (
    ATTENTION,
    COLLECTIVES,
    CONVOLUTIONS,
    MATMULS,
    MATMULS_WITHOUT_BATCH_DIMS,
    is_unbatched_einsum,
)
from ._policy.names import Names
from ._policy.operators import makers_of
from ._policy.policy import If, Offload, Ops, Policy, PolicyLike, as_policy, saving
from ._policy.policy import Preset as _Preset
from ._policy.predicates import checked_predicate
from .errors import PolicyError

__all__ = [
    "budget",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "offload",
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_attention",
    "save_collectives",
    "save_convolutions",
    "save_from_both_policies",
    "save_if",
    "save_matmuls",
    "save_matmuls_without_batch_dims",
    "save_only_these_names",
    "save_ops",
]

#: Saves the inputs of a region only, as ``policy=None`` does.
nothing_saveable: Policy = as_policy(None)
#: Saves everything that the backward pass uses, as without rematerialization.
everything_saveable: Policy = _Preset(~nothing_saveable, "everything_saveable")
#: Saves the results of matrix products, linear layers and convolutions, batched or not.
save_matmuls: Policy = _Preset(Ops(MATMULS), "save_matmuls")
dots_saveable: Policy = save_matmuls
checkpoint_dots: Policy = save_matmuls
#: Saves the results of products with weights, as in linear layers, but not of batched products such as attention
#: scores, and not of convolutions. A batch of size 1, by which ``torch.einsum`` multiplies two matrices, is not a batch
#: here. Under ``vmap`` the policy judges the operator that torch executes. With a batched weight, or in a derivative
#: that is mapped itself, this is mostly a batched product.
save_matmuls_without_batch_dims: Policy = _Preset(
    Ops(MATMULS_WITHOUT_BATCH_DIMS) | Ops(frozenset({"aten::bmm"})) & If(is_unbatched_einsum),
    "save_matmuls_without_batch_dims",
)
dots_with_no_batch_dims_saveable: Policy = save_matmuls_without_batch_dims
checkpoint_dots_with_no_batch_dims: Policy = save_matmuls_without_batch_dims
#: Saves the results of fused attention kernels, which are the output, the logsumexp and the state of the dropout. Where
#: torch computes attention from matrix products and a softmax, there is no such kernel, and nothing is saved.
save_attention: Policy = _Preset(Ops(ATTENTION), "save_attention")
#: Saves the results of convolutions.
save_convolutions: Policy = _Preset(Ops(CONVOLUTIONS), "save_convolutions")
#: Saves the results of functional collectives, so that nothing is communicated again. ``torch.distributed.all_reduce``
#: and the others that write into their arguments have no results.
save_collectives: Policy = _Preset(Ops(COLLECTIVES), "save_collectives")


def save_ops(*ops: Any) -> Policy:
    """Keep what some operators make.

    Args:
        ops: overloads (``torch.ops.aten.mm.default``), packets of them (``torch.ops.aten.mm``), which stand for all
            their overloads, higher-order operators, functions made by ``torch.library.custom_op``, or names such as
            ``"aten.mm"``.

    Raises:
        PolicyError: there is no such operator; it is a composite such as ``aten.linear``, which becomes other
            operators before a policy sees it; or it makes views alone, as ``aten.t``, so there is nothing to keep.

    A list, which may stand for this policy, may have such views among its operators, as torch's may.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> policies.save_ops("aten.mm", torch.ops.aten.bmm.default)
        policies.save_ops(torch.ops.aten.bmm.default, torch.ops.aten.mm)
    """
    return saving(ops, makers_of)


def save_only_these_names(*names: str) -> Policy:
    """Keep the values that ``checkpoint_name`` gave one of these names.

    Args:
        names: names, in which ``*`` stands for any characters.

    Raises:
        PolicyError: something else than a string, or an empty one.

    Example:
        >>> from remat import policies
        >>> policies.save_only_these_names("q", "mlp.*")
        policies.save_only_these_names('q', 'mlp.*')
    """
    return Names("save_only_these_names", names)


def save_any_names_but_these(*names: str) -> Policy:
    """Keep the values that have names, except those with one of these.

    Args:
        names: names, in which ``*`` stands for any characters.

    Raises:
        PolicyError: something else than a string, or an empty one.

    Example:
        >>> from remat import policies
        >>> policies.save_any_names_but_these("scores")
        policies.save_any_names_but_these('scores')
    """
    return Names("save_any_names_but_these", names)


def save_anything_except_these_names(*names: str) -> Policy:
    """Keep every value, except those with one of these names.

    Args:
        names: names, in which ``*`` stands for any characters.

    Raises:
        PolicyError: something else than a string, or an empty one.

    Example:
        >>> from remat import policies
        >>> policies.save_anything_except_these_names("scores")
        policies.save_anything_except_these_names('scores')

    In JAX naming makes a second value, and the first one, which has no name, is still kept. Here there is one value.
    """
    return Names("save_anything_except_these_names", names)


def save_if(predicate: Callable[..., Any]) -> Policy:
    """Keep the values for which a function says so, as in torch's selective checkpoint.

    Args:
        predicate: ``(ctx, op, *args, **kwargs)``, the context, the operator and what it was called with, returns a
            bool or a ``torch.utils.checkpoint.CheckpointPolicy``.

    Raises:
        PolicyError: it can't be called so.

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
    """Keep what a policy keeps in host memory instead of on the device.

    Args:
        policy: a policy, or what is taken for one.
        to: ``"cpu"``, or ``"pinned_host"``, which is JAX's word for it.

    Raises:
        PolicyError: another place.

    Example:
        >>> from remat import policies
        >>> policies.offload(policies.save_attention) | policies.save_only_these_names("q")
        policies.offload(policies.save_attention) | policies.save_only_these_names('q')
    """
    if str(to) not in ("cpu", "pinned_host"):
        raise PolicyError(f"Values are offloaded to 'cpu' (in JAX's words 'pinned_host'), not to {to!r}.")
    return Offload(as_policy(policy))


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str] = (),
    names_which_can_be_offloaded: Iterable[str] = (),
    offload_src: str = "device",
    offload_dst: str = "cpu",
) -> Policy:
    """Keep the values with some names on the device, and those with others in host memory.

    It is ``save_only_these_names(...) | offload(save_only_these_names(...))`` with JAX's keywords.

    Args:
        names_which_can_be_saved: names, in which ``*`` stands for any characters.
        names_which_can_be_offloaded: the same.
        offload_src: ``"device"``.
        offload_dst: ``"cpu"``, or ``"pinned_host"``.

    Raises:
        PolicyError: a name is in both, or is not one.

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
            raise PolicyError(f"Names are given in a list: [{names!r}], not {names!r}.")
    saved, offloaded = tuple(names_which_can_be_saved), tuple(names_which_can_be_offloaded)
    if twice := [name for name in saved if name in offloaded]:
        raise PolicyError(f"A value can't be both saved and offloaded: {', '.join(map(repr, twice))}.")
    return save_only_these_names(*saved) | offload(save_only_these_names(*offloaded), to=offload_dst)


def offload_dot_with_no_batch_dims(offload_src: str = "device", offload_dst: str = "cpu") -> Policy:
    """Keep the results of products with weights in host memory: JAX's name for an ``offload``.

    Args:
        offload_src: ``"device"``.
        offload_dst: ``"cpu"``, or ``"pinned_host"``.

    Raises:
        PolicyError: other places.

    Example:
        >>> from remat import policies
        >>> policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        policies.offload(policies.save_matmuls_without_batch_dims)
    """
    _check_source(offload_src)
    return offload(save_matmuls_without_batch_dims, to=offload_dst)


def budget(amount: int | str | float, *, cost: str | Callable[..., float] = "roofline") -> Policy:
    """Keep so many bytes of a region, of what saves the most recomputation.

    What is kept is chosen when a region has run for the first time, for all later calls that do the same operations on
    the same shapes; the first keeps nothing. It is the best choice there is. :func:`remat.pareto` shows them all.

    Args:
        amount: bytes, a text such as ``"64MiB"``, or a float in (0, 1], which is that part of what the region keeps
            without remat. Inputs, captured tensors and results of the region are not counted.
        cost: what an operation costs: ``"roofline"``, by its FLOPs and the bytes that it moves, ``"flops"``,
            ``"time"``, as measured, or a function ``(op, args, kwargs, result)`` that returns a number.

    Raises:
        PolicyError: the amount or the cost is none of these; or a budget is made a part of another policy.

    Regions inside of one with a budget are plain calls. A budget inside of a region with a policy has no effect.

    Example:
        >>> import torch
        >>> from remat import policies, remat
        >>> f = remat(lambda x: torch.tanh(x @ x).sin(), policy=policies.budget("64KiB"))
        >>> f(torch.ones(8, 8, requires_grad=True)).sum().backward()
    """
    return Budget(amount, cost)


def save_from_both_policies(p: PolicyLike, q: PolicyLike, /) -> Policy:
    """Keep what either of two policies keeps: JAX's name for ``p | q``.

    Args:
        p: a policy, or what is taken for one.
        q: the same.

    Raises:
        PolicyError: one saves what the other offloads.

    Example:
        >>> from remat import policies
        >>> policies.save_from_both_policies(policies.save_matmuls, policies.save_only_these_names("q"))
        policies.save_matmuls | policies.save_only_these_names('q')
    """
    return as_policy(p) | q


def _check_source(offload_src: str) -> None:
    if offload_src != "device":
        raise PolicyError(f"Values are offloaded from the 'device', not from {offload_src!r}.")
