"""Checkpointed regions in models: calls of chosen submodules save only their inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, overload

import torch

from ._core import trees
from ._core.lines import warn
from ._core.signatures import accepts, lists_arguments
from ._measure.program import FROZEN, Program, check_surroundings, default_loss, modules_of
from ._modules.eligible import check_library_is_off, check_module
from ._modules.region_class import change_back, change_in_place
from ._planning.plan import BlockBudget, BlockChoice, Plan, RegionPlan, loaded, options_of
from ._planning.planner import plan_for
from ._policy.policy import Budget, PolicyLike
from ._region.options import DeterminismCheck, Options, checked_options
from .errors import shown

__all__ = ["BlockBudget", "BlockChoice", "Plan", "RegionPlan", "apply", "budget", "every", "load", "undo"]


def __dir__() -> list[str]:
    return __all__


M = TypeVar("M", bound=torch.nn.Module)
F = TypeVar("F", bound=Callable[..., Any])
Types: TypeAlias = type | tuple[type, ...]
Amount: TypeAlias = int | str | float | None
Batch: TypeAlias = tuple[Any, ...] | dict[str, Any]
Where: TypeAlias = "Types | Every | Callable[[str, torch.nn.Module], bool]"


@lists_arguments
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
    run outside of its region. Copies and pickles of the model have the same regions. A module that is a region already
    gets the new options.

    Args:
        model: the model; it can be chosen itself, as the submodule with the name ``""``.
        where: which submodules: a type or a tuple of types, ``every(n, type)``, or a function ``(name, submodule)``.
        policy, preserve_rng_state, determinism_check, early_stop, debug: options of the regions, as in
            :func:`remat.remat`.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: ``where`` chooses none of the submodules.
        TypeError: ``where`` or an option has the wrong type, or a chosen module can't have a region: a container that
            is never called, such as ``ModuleList``, a TorchScript module, or a lazy module without its shapes.
        PolicyError: ``policy`` is not a policy.

    If an error is raised, no module is changed. The class of a chosen module becomes a subclass with the same name.

    Example:
        >>> import torch, remat.nn
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> model = remat.nn.apply(model, remat.nn.every(2, torch.nn.Linear))
        >>> model(torch.randn(3, 8)).sum().backward()
    """
    options = checked_options(policy, preserve_rng_state, determinism_check, early_stop, debug)
    for name, module in chosen_modules(_modules_of(model), where):
        change_in_place(module, replace(options, name=name))
    return model


@overload
def budget(
    model: Callable[..., Any],
    amount: Amount,
    *args: Any,
    where: None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    cost: str | Callable[..., float] = "roofline",
    more_batches: Sequence[Batch] = (),
    **kwargs: Any,
) -> Plan: ...


@overload
def budget(
    model: torch.nn.Module,
    amount: Amount,
    *args: Any,
    where: Where,
    loss: Callable[[Any], torch.Tensor] | None = None,
    cost: str | Callable[..., float] = "roofline",
    **kwargs: Any,
) -> BlockBudget: ...


def budget(
    model: Any,
    amount: Any,
    *args: Any,
    where: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    cost: str | Callable[..., float] = "roofline",
    more_batches: Sequence[Batch] = (),
    **kwargs: Any,
) -> Plan | BlockBudget:
    """Make modules of a model regions, in place, so that a training step fits an amount of memory.

    Without ``where`` any modules may become regions, also inside one another: those, and what each saves, for which the
    recompute costs the least. The model's forward runs twice, each distinct call of a module twice on its own, and a
    few steps are measured; gradients, buffers, generators and the training mode are restored. Regions that the model
    has are undone.

    Args:
        model: the model, on the device and in the mode that it is trained in; or a function that calls modules, which
            it captures or gets. For a function without modules use :func:`remat.policies.budget`.
        amount: the highest allowed peak of memory that is allocated between the start of the forward and the end of the
            backward, with the gradients of parameters, without parameters, inputs, and the model's result if a variable
            holds it: a number of bytes, a string such as ``"2GiB"``, or a float in (0, 1], a fraction of the peak
            predicted without rematerialization, as ``"80%"`` is on a CPU. On an accelerator ``"80%"`` is that part of
            its free memory, less what fragmentation has taken, and None is all of it.
        args, kwargs: arguments for the model, as in training.
        where: which modules are regions, as in :func:`apply`: each saves as much as the amount allows. A chosen module
            inside another one is part of that one.
        loss: computes a scalar from the model's result, by default as in :func:`remat.check`. Give it if the model
            returns none: what it needs counts too.
        cost: the cost of recomputing an operation, as in :func:`remat.policies.budget`.
        more_batches: other arguments for which a step must fit too, each a tuple or a dict of keyword arguments. The
            plan, and a fraction of the peak, are for the batch that needs the most.

    Returns:
        A :class:`Plan`, which can be printed, drawn and saved; with ``where`` a :class:`BlockBudget`.

    Raises:
        RematError: the model needs more memory with any choice; the message names the least amount, and what needs it.
            Or its library's own activation checkpointing is on, FSDP wraps it already, a tensor has no data, or
            :func:`remat.override` or ``disable_remat`` is active. Nothing is changed then.
        RuntimeError: called under a ``torch.func`` transform or ``torch.inference_mode``.
        PolicyError: ``amount`` or ``cost`` is invalid.
        ValueError: ``where`` chooses none of the submodules.
        TypeError: there is no batch, ``model`` has no modules, ``where`` has the wrong type or comes with
            ``more_batches``, or a chosen module can't have a region.

    The plan is for ``.backward()`` and arguments of these shapes: transforms of ``torch.func`` need more memory. With
    other shapes each region saves the results of the same operations, so a longer batch needs more memory. In a
    distributed job call this function in all processes; they use the plan of the first one.

    Example:
        >>> import torch, remat.nn
        >>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(16, 2, 64) for _ in range(4)))
        >>> x, loss = torch.randn(8, 32, 16), lambda out: out.square().mean()
        >>> plan = remat.nn.budget(model, 0.5, x, loss=loss)
        >>> plan.peak <= plan.amount < plan.without
        True
        >>> blocks = remat.nn.budget(model, 0.6, x, where=torch.nn.TransformerEncoderLayer, loss=loss)
        >>> [block.name for block in blocks.blocks]
        ['0', '1', '2', '3']
    """
    if not callable(model) or callable(amount) or isinstance(amount, (tuple, Every, torch.Tensor)):
        raise TypeError(
            "remat.nn.budget takes the model, the amount, and the arguments of the model: "
            "`remat.nn.budget(model, '8GiB', *batch)`. Other options are keywords: `where=Block`."
        )
    policy = Budget("100%" if amount is None else amount, cost)
    if not (args or kwargs) and accepts(getattr(model, "forward", model)) is False:
        raise TypeError(f"{type(model).__name__} needs a batch: `remat.nn.budget(model, '8GiB', *batch)`.")
    check_surroundings("remat.nn.budget", "Call it before, with the arguments of a step.")
    loss = loss or partial(_sum, set())
    program = Program(model, args, kwargs, loss=loss)
    program.check_is_whole("remat.nn.budget")
    for name, module in program.named_modules.items():
        check_library_is_off(module, f"the {type(module).__name__} {name!r}")
    if program.is_frozen and program.is_differentiated():
        warn(FROZEN)
    if where is not None:
        if more_batches:
            raise TypeError("more_batches= takes no where=: give the batch that needs the most memory as arguments.")
        chosen = chosen_modules(program.named_modules, where)
        blocks = BlockBudget(**vars(plan_for(program, amount, cost, only=[module for _, module in chosen])))
        found = options_of(blocks.regions, cost)
        for name, module in chosen:
            change_in_place(module, found.get(name) or Options(policy=policy, name=name))  # it may not have been called
        return blocks
    if not isinstance(more_batches, (list, tuple)) or not all(isinstance(each, (tuple, dict)) for each in more_batches):
        raise TypeError("more_batches is a list of tuples or dicts of arguments: `more_batches=[(x,)]`.")
    more = [((), each) if isinstance(each, dict) else (each, {}) for each in more_batches]
    others = [Program(model, *each, loss=loss) for each in more]
    if not program.named_modules:
        raise TypeError(
            f"{shown(model)} captures and gets no modules that could be regions. For a function use "
            f"`remat.remat(fn, policy=remat.policies.budget(amount))`."
        )
    try:
        plan = plan_for(program, amount, cost, others)
    except (TypeError, AttributeError) as error:
        names = bool(args) and all(isinstance(arg, str) for arg in args)  # the keys of a dict
        if names or (len(args) == 1 and isinstance(args[0], (tuple, list, dict))):
            what = "**batch" if names or isinstance(args[0], dict) else "*batch"
        elif accepts(getattr(model, "forward", model), args, kwargs) is False:
            what = "x, loss=lambda out: criterion(out, y)"
        else:
            raise
        raise TypeError(
            f"The model doesn't take what was given ({error}). Give what its forward takes: "
            f"`remat.nn.budget(model, amount, {what})`."
        ) from error
    plan.apply(program.named_modules)
    return plan


def _sum(warned: set[bool], result: Any) -> torch.Tensor:
    """The loss of a result without one. ``warned`` is empty until the first warning: a set, which no run restores."""
    tensors = [leaf for leaf in trees.flatten(result)[0] if isinstance(leaf, torch.Tensor)]
    if not warned and not hasattr(result, "loss") and any(tensor.numel() > 1 for tensor in tensors):
        warned.add(True)
        warn(
            "The model's result has no `.loss`, so remat.nn.budget takes the sum of the result for the loss. What your "
            "loss needs is not counted: give it, as in `loss=lambda out: criterion(out, y)`."
        )
    if (loss := default_loss(result)) is None:
        raise TypeError(f"There is no tensor in {shown(result)}, the model's result: give `loss=lambda out: ...`.")
    return loss


def load(model: Callable[..., Any], path: str | os.PathLike[str]) -> Plan:
    """Apply a plan that ``plan.save(path)`` has written to the same model, in place, without measuring.

    Args:
        model: the model, or the function that the plan was made for; regions that it has are undone.
        path: the file.

    Returns:
        The :class:`Plan`.

    Raises:
        RematError: the file is no plan, or the model has other modules than that of the plan, or its parameters have
            another number or dtype. Nothing is changed then.
        TypeError: ``model`` has no modules, or one of them can't be a region.

    Example:
        >>> import tempfile, torch, remat.nn
        >>> model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(16, 2, 64) for _ in range(4)))
        >>> plan = remat.nn.budget(model, 0.5, torch.randn(8, 32, 16), loss=torch.sum)
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     plan.save(file.name)
        ...     remat.nn.load(model, file.name).regions == plan.regions
        True
    """
    if isinstance(model, (str, os.PathLike)) or not isinstance(path, (str, os.PathLike)):
        raise TypeError("The model comes first, then the file: `remat.nn.load(model, path)`.")
    named = modules_of(model) or _modules_of(model)
    plan = loaded(path)
    plan.apply(named, same_size=True)
    return plan


def undo(model: F) -> F:
    """Undo :func:`apply` and :func:`budget`: the calls of all modules of a model, or function, are plain again.

    A module that :func:`remat.remat` has returned is another one, and stays a region. What
    :func:`remat.integrations.transformers.enable` has enabled, ``model.gradient_checkpointing_disable()`` disables.
    Returns the model. Raises ``TypeError`` if it has no modules.
    """
    for module in (modules_of(model) or _modules_of(model)).values():
        change_back(module)
    return model


@dataclass(frozen=True, slots=True)
class Every:
    """The result of :func:`every`."""

    n: int
    of: Types


def every(n: int, of: Types) -> Every:
    """For :func:`apply`: choose the first, the (n+1)-th, ... module of a type, in the order of ``named_modules()``.

    ``n`` is at least 1, else a ``ValueError`` is raised; ``of`` is a type or a tuple of types, else a ``TypeError``.
    """
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"every(n, of) takes an integer n, got {shown(n)}.")
    if n < 1:
        raise ValueError(f"every(n, of) takes an n of at least 1, got {n}.")
    if not _is_types(of):
        raise TypeError(f"every(n, of) takes a type or a tuple of types, got {shown(of)}.")
    return Every(n, of)


def _is_types(value: Any) -> bool:
    return isinstance(value, type) or (isinstance(value, tuple) and all(isinstance(t, type) for t in value))


def _modules_of(model: Any) -> dict[str, torch.nn.Module]:
    if isinstance(model, type):
        raise TypeError(f"The model comes first: `remat.nn.apply(model, {model.__name__})`; `undo` takes the model.")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"The model must be a torch.nn.Module, got {shown(model)}. For a function use `remat.remat`.")
    return dict(model.named_modules())


def chosen_modules(named: Mapping[str, torch.nn.Module], where: Any) -> list[tuple[str, torch.nn.Module]]:
    """Return the chosen ones of these modules; raise if there are none or if one can't be a region."""
    if not named:
        raise TypeError("where= chooses modules, but the function captures and gets none: use `remat.remat`.")
    n, kind = (where.n, where.of) if isinstance(where, Every) else (1, where)
    if _is_types(kind):
        chosen = [(name, module) for name, module in named.items() if isinstance(module, kind)][::n]
    elif isinstance(where, torch.nn.Module):
        raise TypeError(f"where= takes a class, got a {type(where).__name__}: pass its class, `type(module)`.")
    elif isinstance(where, str):
        raise TypeError(
            f"where takes no names. For modules by name write `lambda name, _: fnmatch.fnmatch(name, {where!r})`, "
            f"for a class by name `lambda _, m: type(m).__name__ == {where!r}`."
        )
    elif not callable(where):
        raise TypeError(
            f"where must be a type, a tuple of types, every(n, type), or a function of a submodule's name and the "
            f"submodule; got {shown(where)}."
        )
    elif accepts(where, ("name", torch.nn.Module)) is False:
        raise TypeError(f"where is called with a name and a submodule, which {shown(where)} doesn't accept.")
    else:
        chosen = [(name, module) for name, module in named.items() if where(name, module)]
    if not chosen:
        classes = ", ".join(sorted({type(module).__name__ for module in named.values()}))
        raise ValueError(f"where={shown(where)} chooses none of the model's modules. Their classes are {classes}.")
    for name, module in chosen:
        check_module(module, name)
    return chosen
