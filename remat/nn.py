"""Regions in models: calls of chosen submodules keep only their inputs.

Example:
    >>> import torch
    >>> import remat.nn
    >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))
    >>> keys = list(model.state_dict())
    >>> _ = remat.nn.apply(model, where=lambda name, module: "." not in name and name != "")
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> list(model.state_dict()) == keys
    True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from ._budget.model import BlockBudget, chosen_by_budget
from ._measure.program import Program
from ._measure.subject import Subject
from ._modules.eligible import check_module
from ._modules.region_class import change_back, change_in_place
from ._policy.budget import Budget
from ._policy.policy import PolicyLike
from ._region.options import DeterminismCheck, checked_options

__all__ = ["BlockBudget", "apply", "budget", "every", "undo"]

M = TypeVar("M", bound=torch.nn.Module)
Types: TypeAlias = type | tuple[type, ...]


Where: TypeAlias = "Types | Every | Callable[[str, torch.nn.Module], bool]"


def apply(
    model: M,
    where: Where,
    *,
    policy: PolicyLike = None,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "metadata",
    early_stop: bool = True,
    debug: bool = False,
) -> M:
    """Make every later call of the chosen submodules a region, in place.

    Parameters, buffers, names, ``state_dict`` keys, hooks and ``isinstance`` stay as they are, and a module's own hooks
    run outside of its region, as often as without it. Copies and pickles of the model have the same regions. A module
    that is used in several places (tied weights) is changed once, for all of them. One that has a region already
    gets the new options.

    Args:
        model: the model; it may be chosen itself, as the submodule of the name ``""``.
        where: which submodules: a type or a tuple of types, :func:`every` n-th of a type, or a function of a
            submodule's name and the submodule that says whether.
        policy: what the regions may save beyond their inputs, as in :func:`remat.remat`.
        preserve_rng_state: give a recompute the random numbers of the forward, as in :func:`remat.remat`.
        determinism_check: what is compared between the runs, as in :func:`remat.remat`.
        early_stop: end a recompute as soon as it has what the backward needs.
        debug: also compare the runs operation by operation, as in :func:`remat.remat`. Slow.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: ``where`` chooses none of the submodules.
        TypeError: ``where`` or an option has the wrong type, or a chosen module can't have a region: a container that
            is never called, such as ``ModuleList``, a TorchScript module, or one that doesn't know its shapes yet.
        PolicyError: ``policy`` is not a policy.

        No module is changed then.

    Note:
        The class of a chosen module becomes a subclass with the same name, so ``type(module) is Linear`` is false then.
        Choose modules before a wrapper that changes their class in its own way (FSDP2) is put on.

    Example:
        >>> import torch
        >>> import remat.nn
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4)]
        >>> model = torch.nn.Sequential(*layers)
        >>> model = remat.nn.apply(model, remat.nn.every(2, torch.nn.TransformerEncoderLayer))
        >>> model(torch.randn(3, 5, 16)).sum().backward()
        >>> model = remat.nn.undo(model)
    """
    options = checked_options(policy, preserve_rng_state, determinism_check, early_stop, debug)
    for name, module in _checked(model, where):
        change_in_place(module, replace(options, name=name))
    return model


def budget(
    model: torch.nn.Module,
    where: Types | Every | Callable[[str, torch.nn.Module], bool],
    amount: int | str | float,
    *args: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    cost: str | Callable[..., float] = "roofline",
    **kwargs: Any,
) -> BlockBudget:
    """Make the chosen submodules regions, in place, that keep as much as a peak for the whole model allows.

    The model runs a few times, forward and backward; gradients, buffers, generators and train mode are put back. What
    each of the submodules keeps is chosen so that the least is recomputed: blocks that are called late may keep more.
    The choice is checked by a run, whose peak is not above the budget. :func:`undo` makes all calls plain again.

    Args:
        model: the model, on the device and in the mode that it is trained in.
        where: which submodules, as in :func:`apply`. Those inside of another one are part of that.
        amount: what may be alive at most between the start of the forward and the end of the backward, gradients
            of parameters included, parameters and inputs not: bytes, a text such as ``"2GiB"``, or a float in (0, 1],
            which is that part of the peak without rematerialization.
        *args: what the model is called with, as in training.
        loss: makes a scalar of the model's result. None: its ``.loss`` where it has one, else the sum of its
            floating-point tensors.
        cost: what an operation costs when it is recomputed, as in :func:`remat.policies.budget`.
        **kwargs: keyword arguments of the model.

    Returns:
        What was chosen, and the peaks; print it.

    Raises:
        RematError: the model needs more where the submodules keep nothing; the message says how much. Nothing is
            changed then.
        PolicyError: the amount or the cost is none.
        ValueError: ``where`` chooses none of the submodules.
        TypeError: ``where`` has the wrong type, or a chosen module can't have a region.

    Note:
        Where a block gets other shapes than here, it chooses anew for what it kept here. In a distributed job call it
        in all processes; they take the choice of the first one.

    Example:
        >>> import torch
        >>> import remat.nn
        >>> layers = [torch.nn.TransformerEncoderLayer(16, 2, 64, batch_first=True) for _ in range(4)]
        >>> model = torch.nn.Sequential(*layers)
        >>> result = remat.nn.budget(model, torch.nn.TransformerEncoderLayer, 0.6, torch.randn(8, 32, 16))
        >>> result.peak <= result.amount < result.without
        True
    """
    chosen = _checked(model, where)
    return chosen_by_budget(Program(Subject(model, args, kwargs, None, loss), None, loss), chosen, Budget(amount, cost))


def undo(model: M) -> M:
    """Make calls of all submodules plain again, where :func:`apply` has made them regions.

    Regions that ran already keep what they need for their backward.

    Returns:
        ``model`` itself.

    Example:
        >>> import torch
        >>> import remat.nn
        >>> model = remat.nn.apply(torch.nn.Linear(2, 2), torch.nn.Linear)
        >>> type(remat.nn.undo(model)) is torch.nn.Linear
        True
    """
    for module in model.modules():
        change_back(module)
    return model


@dataclass(frozen=True, slots=True)
class Every:
    """A choice for :func:`apply`; see :func:`every`."""

    n: int
    of: Types


def every(n: int, of: Types) -> Every:
    """For :func:`apply`: the first, the (n+1)-th, the (2n+1)-th ... of the modules of a type, as the model lists them.

    Args:
        n: at least 1, which chooses them all.
        of: a type, or a tuple of types.

    Raises:
        ValueError: ``n`` is less than 1.
        TypeError: ``n`` is no integer, or ``of`` no type.

    Example:
        >>> import torch
        >>> import remat.nn
        >>> remat.nn.every(2, torch.nn.Linear)
        Every(n=2, of=<class 'torch.nn.modules.linear.Linear'>)
    """
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"every(n, of) takes an integer n, got {n!r}.")
    if n < 1:
        raise ValueError(f"every(n, of) takes n of at least 1, got {n}.")
    if not _is_types(of):
        raise TypeError(f"every(n, of) takes a type or a tuple of types, got {of!r}.")
    return Every(n, of)


def _is_types(value: Any) -> bool:
    return isinstance(value, type) or (isinstance(value, tuple) and all(isinstance(t, type) for t in value))


def _checked(model: torch.nn.Module, where: Any) -> list[tuple[str, torch.nn.Module]]:
    """The modules that are chosen, which can be regions."""
    chosen = _chosen(model, where)
    if not chosen:
        classes = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"where={where!r} chooses none of the model's modules. They are of the classes {classes}.")
    for name, module in chosen:
        check_module(module, name)
    return chosen


def _chosen(model: Any, where: Any) -> list[tuple[str, torch.nn.Module]]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"apply takes a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(where, Every):
        return _chosen(model, where.of)[:: where.n]
    if _is_types(where):
        return [(name, module) for name, module in model.named_modules() if isinstance(module, where)]
    if callable(where):
        return [(name, module) for name, module in list(model.named_modules()) if where(name, module)]
    raise TypeError(
        f"where must be a type, a tuple of types, every(n, type), or a function of a submodule's name and the "
        f"submodule; got {where!r}."
    )
