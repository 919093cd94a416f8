"""Which modules can be regions, and adaptations for modules that their library could checkpoint itself."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Any

import torch

from .._core.lines import warn
from .._core.state import is_disabled
from .._region.options import check_returns
from ..errors import RematError


def check_module(module: torch.nn.Module, name: str = "") -> None:
    """Raise an error if calls of a module can't be regions. ``name`` is its path in its model."""
    what = f"the {type(module).__name__} {name!r}" if name else f"a {type(module).__name__}"
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"remat recomputes Python code, but {what} is TorchScript: use the module that calls it.")
    if any(map(torch.nn.parameter.is_lazy, chain(module.parameters(), module.buffers()))):
        raise TypeError(f"remat needs modules that know their shapes, but {what} is lazy: call it once first.")
    if type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__:
        raise TypeError(f"remat needs modules that are called, but {what} has no forward: use the modules in it.")
    called = getattr(inspect.unwrap(type(module).__call__), "__code__", None)
    if called and not {"__call__", "_call_impl", "_wrapped_call", "forward"}.intersection(called.co_names):
        raise TypeError(
            f"A region is around `forward`, but {what} has a `__call__` that doesn't call it: use the modules in it."
        )
    check_returns(module)
    check_library_is_off(module, what)


def check_library_is_off(module: torch.nn.Module, what: str) -> None:
    """Raise an error if transformers or diffusers checkpoint a module, which they switch on by an attribute."""
    if module.training and getattr(module, "gradient_checkpointing", False) is True:
        raise RematError(
            f"The library's own activation checkpointing is on for {what}. If it were a region too, it would be "
            f"recomputed twice. Switch it off, also after `remat.integrations.transformers.enable`: "
            f"`model.gradient_checkpointing_disable()` (`activation_checkpointing_disable()` in transformers 5). Or "
            f"undo the regions of `nn.apply`: `remat.nn.undo(model)`."
        )


def as_library_checkpoints(module: torch.nn.Module, forward: Callable) -> Callable:
    """Return ``forward``, the region of ``module``, with changes that the library makes for checkpointed modules."""
    if not hasattr(module, "gradient_checkpointing"):
        return forward

    @wraps(forward)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_library_is_off(module, f"a {type(module).__name__}")
        if module.training and torch.is_grad_enabled() and not is_disabled():
            args, kwargs = _without_cache(module, args, kwargs)
        return forward(*args, **kwargs)

    return checked


def _is_cache(value: Any) -> bool:
    """Whether it is a cache of keys and values of a transformers model."""
    caches: Any = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _without_cache(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a decoder layer without its key-value cache, which would keep what it is filled with."""
    layers: Any = sys.modules.get("transformers.modeling_layers")
    if layers is None or not isinstance(module, layers.GradientCheckpointingLayer):
        return args, kwargs
    if getattr(module, "_can_checkpoint_with_cache", False):  # it reads the cache and doesn't fill it
        return args, kwargs
    found = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not found and not kwargs.get("use_cache"):
        return args, kwargs
    if not torch.compiler.is_compiling():
        at = next((inner.layer_idx for inner in module.modules() if hasattr(inner, "layer_idx")), 0)
        if any(cache.get_seq_length(at) for cache in found):
            return args, kwargs  # its keys and values are part of the result
        warn(
            f"In training a {type(module).__name__} that is a region runs without a cache (`use_cache=False`), as with "
            f"its library's own checkpointing. Set `model.config.use_cache = False` to avoid this warning."
        )
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return args, {**kwargs, "use_cache": False} if kwargs.get("use_cache") else kwargs
