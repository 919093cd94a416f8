"""What recomputing an operation costs: by FLOPs and bytes moved, as measured, or by a user's function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from .._core.devices import accelerator, is_capturing
from .._core.facts import Facts, tensors
from .._core.flops import flops
from .._core.state import unseen
from ..errors import PolicyError
from .values import place_of

Cost = Callable[[Any, tuple, dict, Any], float]  # of one call: the operator, its arguments, its result

# Approximate FLOPs and bytes per second of each kind of device. Only the ratio matters.
_ROOFLINES = {"cpu": (50e9, 20e9), "cuda": (100e12, 2e12), "mps": (5e12, 200e9), "xpu": (50e12, 1e12)}
_COLLECTIVES = {"c10d", "_c10d_functional"}  # all processes must run them equally often
_REPEATS = 3
_times: dict[Any, float] = {}  # the measured ones, in microseconds
_MOST_TIMES = 4096


def cost_of(cost: str | Cost, func: Any, facts: Facts, args: tuple, kwargs: dict, result: Any) -> float:
    """Return the cost of this call: FLOPs, microseconds, or the result of the user's function."""
    if callable(cost):
        return _by_function(cost, func, args, kwargs, result)
    if facts.makes_nothing:
        return 0.0
    if cost == "flops":
        return float(flops(func, args, kwargs, result))
    runs_once = facts.writes or facts.foreign or facts.draws(args, kwargs) or func.namespace in _COLLECTIVES
    if cost == "time" and not (runs_once or is_capturing()):
        return _measured(func, args, kwargs)
    return _roofline(func, args, kwargs, result)


def _by_function(cost: Cost, func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """Return what the user's function returns.

    Raises:
        PolicyError: the function returns an invalid cost, or raises a TypeError, which binary operators would hide.
    """
    try:
        with unseen(), torch.no_grad():
            number = float(cost(func, args, kwargs, result))
    except TypeError as error:
        raise PolicyError(f"The cost function of a budget failed for {func}: {error}") from error
    if not 0 <= number < math.inf:
        raise PolicyError(
            f"The cost function of a budget must return a finite number that is not negative; for {func} it returned "
            f"{number}."
        )
    return number


def _roofline(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """Return the microseconds of the computation or of the memory traffic, whichever takes longer."""
    touched = tensors((args, kwargs, result))
    kind = next((tensor.device.type for tensor in touched), "cpu")
    per_second, bandwidth = _ROOFLINES.get(kind, _ROOFLINES["cuda"])
    moved = sum(tensor.numel() * tensor.element_size() for tensor in touched)
    return max(flops(func, args, kwargs, result) / per_second, moved / bandwidth) * 1e6


def _measured(func: Any, args: tuple, kwargs: dict) -> float:
    """Return the shortest of a few runs in microseconds. The caller excludes operations that must not run again.

    An operator is measured once for each form of its arguments. So a function that is called again runs once.
    """
    key = func, _form(args), _form(kwargs)
    if key in _times:
        return _times[key]
    kinds = {device.type for device in accelerator()}  # decompositions of forward mode also run on meta tensors
    devices = {tensor.device for tensor in tensors((args, kwargs)) if tensor.device.type in kinds}
    best = float("inf")
    with unseen(), torch.no_grad():
        for _ in range(_REPEATS):
            for device in devices:
                torch.accelerator.synchronize(device)
            start = time.perf_counter()
            func(*args, **kwargs)
            for device in devices:
                torch.accelerator.synchronize(device)
            best = min(best, time.perf_counter() - start)
    if len(_times) >= _MOST_TIMES:
        _times.clear()
    _times[key] = best * 1e6
    return _times[key]


def _form(argument: Any) -> Any:
    """Return an argument with the forms of tensors in place of tensors."""
    if isinstance(argument, torch.Tensor):
        return place_of(argument)[1] or (argument.shape, argument.layout, argument.dtype, argument.device)
    if isinstance(argument, (tuple, list)):
        return tuple(map(_form, argument))
    if isinstance(argument, dict):
        return tuple((name, _form(item)) for name, item in argument.items())
    return argument
