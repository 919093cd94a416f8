"""Hugging Face's transformers, and libraries that use its models, such as peft and trl."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.autograd.graph import save_on_cpu

from .._policy.policy import PolicyLike, as_policy
from ..compat import checkpoint
from ..nn import Amount
from ..nn import budget as plan_in_place

__all__ = ["enable"]

M = TypeVar("M", bound=torch.nn.Module)
_POLICY = "_remat_policy"  # the attribute of an enabled model; copies and pickles have it too


def enable(model: M, policy: PolicyLike = None, *, budget: Amount = None, batch: Mapping[str, Any] | None = None) -> M:
    """Enable a model's own activation checkpointing, and make it execute regions.

    Regions stay in use when the ``Trainer`` or you enable checkpointing again, with
    ``model.activation_checkpointing_enable(...)``, whose ``every_n_layers`` and ``offload`` work, or by its older name
    ``gradient_checkpointing_enable``. ``model.activation_checkpointing_disable()`` disables it.

    Args:
        model: a ``transformers.PreTrainedModel``, or a peft model that contains one. Models inside it are enabled too.
        policy: what the regions may save beyond their inputs; see :func:`remat.remat`.
        budget: an amount of memory, as in :func:`remat.nn.budget`, which then chooses the regions, in place of the
            library's own checkpointing. ``Trainer`` must not enable that again.
        batch: keyword arguments for the model, as in training, to plan the budget with.

    Returns:
        ``model`` itself.

    Raises:
        ImportError: transformers is not installed.
        TypeError: ``model`` is not a transformers model and contains none.
        ValueError: the model has no activation checkpointing; use :func:`remat.nn.apply`.
        PolicyError: ``policy`` is not a policy.
        RematError: the model needs more than the budget.

    Example (needs transformers)::

        model = AutoModelForCausalLM.from_pretrained(...)
        remat.integrations.transformers.enable(model, policy=remat.policies.save_matmuls)
        Trainer(model, TrainingArguments(..., gradient_checkpointing=True)).train()
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ImportError("remat.integrations.transformers needs transformers: `pip install transformers`.") from error
    as_policy(policy)
    found = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    if not found:
        raise TypeError(
            f"enable takes a transformers.PreTrainedModel, or a model that contains one; got {type(model).__name__}. "
            f"For other models use `remat.nn.apply`."
        )
    if budget is not None:
        if policy is not None or not isinstance(batch, Mapping):
            raise TypeError("With a budget give a batch, and no policy: `enable(model, budget='8GiB', batch=batch)`.")
        getattr(found[0], "activation_checkpointing_disable", found[0].gradient_checkpointing_disable)()
        plan_in_place(model, budget, **batch)
        return model
    inner = found[0]  # a peft model contains it
    if not inner.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(inner).__name__} has no activation checkpointing of its own. Make its layers regions: "
            f"`remat.nn.apply(model, TheLayerClass)`."
        )
    _patch_setter(PreTrainedModel)
    for each in found:  # a submodel may enable its own checkpointing
        each.__dict__[_POLICY] = policy
    getattr(inner, "activation_checkpointing_enable", inner.gradient_checkpointing_enable)()
    inner.disable_input_require_grads()  # its hooks are for the reentrant variant, and torch.func refuses them
    functions = (getattr(each, "_gradient_checkpointing_func", None) for each in inner.modules())
    if not any(getattr(each, "func", None) in (checkpoint, _offloaded) for each in functions):
        raise ValueError(
            f"{type(inner).__name__} enables its checkpointing in a way of its own. Make its layers regions: "
            f"`remat.nn.apply(model, TheLayerClass)`."
        )
    return model


@functools.cache  # once
def _patch_setter(cls: Any) -> None:
    """Patch the method in which all ways to enable checkpointing end. It would restore torch's checkpoint."""
    set_function = cls._set_gradient_checkpointing

    @functools.wraps(set_function)
    def set_region(self: Any, *args: Any, **settings: Any) -> None:
        set_function(self, *args, **settings)
        function = settings.get("gradient_checkpointing_func")  # None where it is disabled
        for model in self.modules():  # submodels too: an enabled model may be inside a model that isn't
            if function is not None and _POLICY in model.__dict__:
                region = _as_region(function, model.__dict__[_POLICY])
                for each in model.modules():
                    if hasattr(each, "_gradient_checkpointing_func"):
                        each._gradient_checkpointing_func = region

    cls._set_gradient_checkpointing = set_region


def _as_region(function: functools.partial, policy: Any) -> Callable:
    """The region function for the library's partial of torch's checkpoint, or of its offloading variant."""
    settings = {name: value for name, value in function.keywords.items() if name != "use_reentrant"}
    if "context_fn" not in settings:
        settings["policy"] = policy
    offloads = getattr(function.func, "__module__", "").startswith("transformers")
    return functools.partial(_offloaded if offloads else checkpoint, **settings)


def _offloaded(function: Callable, *args: Any, **settings: Any) -> Any:
    accelerator = torch.accelerator.current_accelerator()
    with nullcontext() if accelerator is None else save_on_cpu(pin_memory=True, device_type=accelerator.type):
        return checkpoint(function, *args, **settings)
